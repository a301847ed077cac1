"""Functions that replace operators in a decomposed step.

Each is plain torch code, which the compiler traces into. Results are those of the operators except
for rounding. Masks are functions of seeds, so that they can be recomputed anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.torch_internals import inductor_prims  # noqa: F401  (registers inductor_random)

_SEED_WORDS = 2  # 16 bytes: the alignment that compiled code expects


def draw_seeds(count: int, device: str) -> Tensor:
    """A seed for each mask of a step, from the device's generator."""
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (count, _SEED_WORDS), device=device)


def uniform(seed: Tensor, shape: list[int]) -> Tensor:
    """Uniform numbers from 0 to 1; only compiled code uses the seed."""
    return torch.ops.prims.inductor_random.default(shape, seed, "rand")


def draw_mask(seed: Tensor, shape: list[int], p: float) -> Tensor:
    """The mask of a dropout with probability `p`, as a function of the seed."""
    return uniform(seed, shape) >= p


def keep_masked(tensor: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The result of dropout."""
    return tensor * mask * scale


def batch_statistics(
    tensor: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation per channel; updates the running statistics."""
    var, mean = torch.var_mean(_wide(tensor), _all_but_channels(tensor), correction=0)
    if running_mean is not None:
        running_mean.copy_(momentum * mean + (1 - momentum) * running_mean)
    if running_var is not None:
        count = tensor.numel() / tensor.shape[1]
        unbiased = var * (count / max(count - 1, 1))
        running_var.copy_(momentum * unbiased + (1 - momentum) * running_var)
    return mean, torch.rsqrt(var + eps)


def normalized(
    tensor: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor
) -> Tensor:
    """The result of batch norm, from its statistics."""
    shape = [1, -1] + [1] * (tensor.dim() - 2)
    scale = invstd if weight is None else invstd * _wide(weight)
    result = (_wide(tensor) - mean.view(shape)) * scale.view(shape)
    if bias is not None:
        result = result + _wide(bias).view(shape)
    return result.to(tensor.dtype)


def normalized_backward(
    grad: Tensor,
    tensor: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a batch norm's input, weight and bias."""
    shape = [1, -1] + [1] * (tensor.dim() - 2)
    dims = _all_but_channels(tensor)
    wide, centered = _wide(grad), _wide(tensor) - mean.view(shape)
    total, product = wide.sum(dims), (wide * centered).sum(dims)
    share = tensor.shape[1] / tensor.numel()
    slope = product * share * invstd * invstd
    scale = invstd if weight is None else invstd * _wide(weight)
    inner = wide - centered * slope.view(shape) - (total * share).view(shape)
    of_weight = product * invstd
    kind = tensor.dtype if weight is None else weight.dtype
    return (
        (inner * scale.view(shape)).to(tensor.dtype) if wanted[0] else None,
        of_weight.to(kind) if wanted[1] else None,
        total.to(kind) if wanted[2] else None,
    )


def log_sum_exp(tensor: Tensor, dim: int) -> Tensor:
    """The log-sum-exp of each row, computed stably."""
    wide = _wide(tensor)
    largest = wide.amax(dim, keepdim=True)
    return largest + (wide - largest).exp().sum(dim, keepdim=True).log()


def minus(tensor: Tensor, subtracted: Tensor, dtype: torch.dtype) -> Tensor:
    """The result of log-softmax, from the log-sum-exp."""
    return (tensor.to(subtracted.dtype) - subtracted).to(dtype)


def class_gradient(
    grad: Tensor, target: Tensor, shape: list[int], ignored: int, total: Tensor, reduction: int
) -> Tensor:
    """The gradient of a negative log-likelihood: zero except at the target classes.

    `reduction` is 0 for none, 1 for the mean over `total`, 2 for the sum.
    """
    each = _gradient_of_each(grad, total, reduction)
    classes = torch.arange(shape[1], device=target.device)
    is_meant = (classes == target.unsqueeze(1)) & (target != ignored).unsqueeze(1)
    return torch.where(is_meant, each, torch.zeros_like(each))


def scores_gradient(
    scores: Tensor,
    grad: Tensor,
    target: Tensor,
    ignored: int,
    total: Tensor,
    reduction: int,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of log-softmax's input for a class gradient, given its result (`scores`)."""
    # Only one class of each row has a gradient, so that no sum over classes is needed.
    each = _gradient_of_each(grad, total, reduction)
    counts = ((target != ignored) & (target >= 0) & (target < scores.shape[1])).unsqueeze(1)
    row = torch.where(counts, each, torch.zeros_like(each))
    gradient = class_gradient(grad, target, list(scores.shape), ignored, total, reduction)
    return (gradient - scores.exp() * row).to(dtype)


def _gradient_of_each(grad: Tensor, total: Tensor, reduction: int) -> Tensor:
    """The gradient at the target class: one for all rows, or one for each."""
    each = -grad / total if reduction == 1 else -grad
    return each.unsqueeze(1) if reduction == 0 else each


def in_order(tensor: Tensor, stride: list[int]) -> Tensor:
    """A copy of a tensor with these strides."""
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _wide(tensor: Tensor) -> Tensor:
    """A tensor in at least single precision."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]
