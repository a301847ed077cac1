"""Keeps the backward formulas of a plain step where torch has others for fake tensors.

Some formulas read values to take a shorter way, or write in place, unless they meet a tensor
subclass or a dispatch mode. A capture always does, and would record other operators, with other
bits. The gradients of such nodes are replaced by those of `rekindle::plain_backward`, which runs
the forward operator again and differentiates it, below the captured step (decision 40). The
operators of the other formula are then dead, and dropped.

All nodes were found by comparing both ways over torch's own samples; `tests/tracing/
test_backward_formulas.py` does so again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rekindle.torch_internals import (
    AUTOGRAD_KEYS,
    ForceDispatchKeyGuard,
    excluded_dispatch_keys,
    included_dispatch_keys,
)

Refuse = Callable[[str, str], None]


class Formula(NamedTuple):
    """A node's forward operator, as a function of its saved tensors and numbers.

    The first tensor is the one that is differentiated; "" stands for one that is not saved, whose
    value does not matter.
    """

    forward: Callable[..., torch.Tensor]
    tensors: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    reads_values: bool = False  # on any device; the others do on the CPU only, or nowhere
    has_dtype: bool = False  # `forward` takes the result's dtype
    for_mixed_dtypes: bool = False  # in one dtype, both formulas have the same bits


def _cumulative_product(tensor: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.cumprod(tensor, dim, dtype=dtype)


def _product_of_all(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.prod(tensor, dtype=dtype)


def _product(tensor: torch.Tensor, dim: int, keepdim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.prod(tensor, dim, bool(keepdim), dtype=dtype)


def _masked_fill(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(mask, dtype=value.dtype).masked_fill(mask, value)


def _cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    pos_weight: torch.Tensor | None,
    reduction: int,
) -> torch.Tensor:
    how = ("none", "mean", "sum")[reduction]
    return F.binary_cross_entropy_with_logits(
        logits, target, weight, reduction=how, pos_weight=pos_weight
    )


FORMULAS: dict[str, Formula] = {
    "CumprodBackward0": Formula(
        _cumulative_product, ("self",), ("dim",), reads_values=True, has_dtype=True
    ),
    "ProdBackward0": Formula(_product_of_all, ("self",), reads_values=True, has_dtype=True),
    "ProdBackward1": Formula(
        _product, ("self",), ("dim", "keepdim"), reads_values=True, has_dtype=True
    ),
    "MaskedFillBackward1": Formula(_masked_fill, ("", "mask"), reads_values=True),
    "MaxBackward1": Formula(torch.max, ("self",)),
    "MinBackward1": Formula(torch.min, ("self",)),
    "MedianBackward0": Formula(torch.median, ("self",)),
    "NanmedianBackward0": Formula(torch.nanmedian, ("self",)),
    "BinaryCrossEntropyWithLogitsBackward0": Formula(
        _cross_entropy,
        ("self", "target", "weight", "pos_weight"),
        ("reduction",),
        for_mixed_dtypes=True,
    ),
}


@torch.library.custom_op("rekindle::plain_backward", mutates_args=())
def plain_backward(
    node: str,
    grad: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    given: Sequence[bool],
    numbers: Sequence[int],
) -> torch.Tensor:
    """The gradient of a node's first tensor, by the formula that a plain step uses.

    `given` says which of the formula's tensors there are.
    """
    present = iter(tensors)
    excluded = excluded_dispatch_keys()
    for key in AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    with ForceDispatchKeyGuard(included_dispatch_keys(), excluded), torch.enable_grad():
        args = [next(present).detach() if is_given else None for is_given in given]
        assert args[0] is not None
        args[0].requires_grad_()
        formula = FORMULAS[node]
        options = {"dtype": grad.dtype} if formula.has_dtype else {}
        result = formula.forward(*args, *numbers, **options)
        (found,) = torch.autograd.grad(result, args[0], grad.to(result.dtype))
    is_grad = found.untyped_storage()._cdata == grad.untyped_storage()._cdata
    return found.clone() if is_grad else found  # an operator's result is no argument


@plain_backward.register_fake
def _(
    node: str,
    grad: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    given: Sequence[bool],
    numbers: Sequence[int],
) -> torch.Tensor:
    return torch.empty_like(tensors[0])


def use_plain_formulas(roots: Iterable[Any], refuse: Refuse) -> None:
    """Have every node behind these tensors that needs it compute its gradient as a plain step."""
    waiting: list[Any] = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        if node.name() in FORMULAS and "rekindle" not in node.metadata:
            node.metadata["rekindle"] = True
            node.register_hook(partial(_replaced, node, refuse))


def is_left_to_torch(node: Any) -> bool:
    """True for a node whose recorded operators would be others than those of a plain step."""
    return node.name() in FORMULAS and "rekindle" not in node.metadata


def _replaced(node: Any, refuse: Refuse, grads: Any, grad_outputs: Any) -> Any:
    """The gradients of a node's inputs; None leaves them as they are."""
    formula = FORMULAS[node.name()]
    index = 1 if node.name() == "MaskedFillBackward1" else 0
    if index >= len(grads) or grads[index] is None or grad_outputs[0] is None:
        return None
    (grad,) = grad_outputs
    tensors = [
        getattr(node, f"_saved_{name}") if name else grads[index] for name in formula.tensors
    ]
    dtypes = {tensor.dtype for tensor in (*tensors, grad) if tensor is not None}
    if formula.for_mixed_dtypes and len(dtypes) == 1:
        return None
    on_gpu = grad.device.type != "cpu"
    if on_gpu and not formula.reads_values and not formula.for_mixed_dtypes:
        return None  # one formula for all
    if torch.is_grad_enabled() or (on_gpu and formula.reads_values):
        refuse(
            f"differentiates an operator whose gradient depends on values ({node.name()})"
            if on_gpu
            else f"differentiates the gradient of an operator that reads values ({node.name()})",
            "Compute it from other operators: a product is torch.exp(torch.log(x).sum()).",
        )
    numbers = [_signed(int(getattr(node, f"_saved_{name}"))) for name in formula.numbers]
    present = [tensor for tensor in tensors if tensor is not None]
    given = [tensor is not None for tensor in tensors]
    made = plain_backward(node.name(), grad, present, given, numbers)
    return tuple(made if i == index else each for i, each in enumerate(grads))


def _signed(number: int) -> int:
    """A saved number: nodes show negative dimensions as unsigned."""
    return number - (1 << 64) if number >= 1 << 63 else number
