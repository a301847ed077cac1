"""Fake results of operators that torch describes wrongly or not at all.

Everything here runs under a `FakeTensorMode`, so nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rekindle.torch_internals import OpOverload


def run(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator on fake tensors."""
    special = _SPECIAL.get(op._schema.name)
    return special(op, *args) if special is not None else op(*args, **kwargs)


def _onednn_backward(op: OpOverload, *args: Any) -> Any:
    """oneDNN returns gradients in float32 whatever it is given; torch says in the input's type."""
    return tuple(torch.empty_like(tensor, dtype=torch.float32) for tensor in op(*args))


def _batch_norm(op: OpOverload, *args: Any) -> Any:
    """Beside weights or statistics in float32, so are mean and deviation; torch says otherwise."""
    result, mean, deviation = op(*args)
    if any(isinstance(arg, torch.Tensor) and arg.dtype is torch.float32 for arg in args[1:5]):
        mean, deviation = (torch.empty_like(t, dtype=torch.float32) for t in (mean, deviation))
    return result, mean, deviation


def _norm(op: OpOverload, *args: Any) -> Any:
    """The same of layer norms and group norms beside weights in float32, on the CPU."""
    result, mean, deviation = op(*args)
    given = [arg for arg in args[1:4] if isinstance(arg, torch.Tensor) and arg.device.type == "cpu"]
    if any(arg.dtype is torch.float32 for arg in given):
        mean, deviation = (torch.empty_like(t, dtype=torch.float32) for t in (mean, deviation))
    return result, mean, deviation


def _group_norm_backward(op: OpOverload, *args: Any) -> Any:
    """The gradient of the input has the input's type."""
    grad, *others = op(*args)
    if args[1].device.type != "cpu":
        return grad, *others
    return (None if grad is None else torch.empty_like(grad, dtype=args[1].dtype), *others)


def _loss(op: OpOverload, *args: Any) -> Any:
    """A mean or sum that keeps the memory of all it was taken over; torch's fake has a scalar's."""
    found: torch.Tensor = op(*args)
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    if found.dim() or not shape:
        return found
    return found.new_empty(shape).resize_(())


def _cudnn_forward(op: OpOverload, *args: Any) -> Any:
    """Given no weight buffer, cuDNN makes one and returns it; torch says it returns none."""
    output, hy, cy, reserve, weight_buffer = op(*args)
    if weight_buffer is None:
        weights: Sequence[torch.Tensor] = args[1]
        weight_buffer = weights[0].new_empty(sum(weight.numel() for weight in weights))
    return output, hy, cy, reserve, weight_buffer


def _cudnn_backward(op: OpOverload, *args: Any) -> Any:
    """The weights' gradients lie in one buffer, like the weights; torch has no fake for it."""
    inputs, weights, _, weight_buffer, hx, cx = args[:6]
    buffer, offset, grads = torch.empty_like(weight_buffer), 0, []
    for weight in weights:
        strides = torch.empty_like(weight, memory_format=torch.contiguous_format).stride()
        grads.append(buffer.as_strided(weight.shape, strides, offset))
        offset += weight.numel()
    grad_cx = None if cx is None else torch.empty_like(cx)
    return torch.empty_like(inputs), torch.empty_like(hx), grad_cx, grads


_SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::mse_loss": _loss,
    "aten::smooth_l1_loss": _loss,
    "aten::soft_margin_loss": _loss,
    "aten::binary_cross_entropy": _loss,
    "aten::native_batch_norm": _batch_norm,
    "aten::native_group_norm": _norm,
    "aten::native_layer_norm": _norm,
    "aten::native_group_norm_backward": _group_norm_backward,
    "aten::mkldnn_rnn_layer_backward": _onednn_backward,
    "aten::_cudnn_rnn": _cudnn_forward,
    "aten::_cudnn_rnn_backward": _cudnn_backward,
}
