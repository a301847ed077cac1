"""Fake results of operators for which torch's own are wrong or missing, on CUDA.

What can be checked on this machine is: see `kernel_check`. This table is for forecasts, and for
fake CUDA tensors where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rekindle.torch_internals import OpOverload


def call(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator on fake tensors."""
    override = _OVERRIDES.get(op._schema.name)
    if override is None:
        return op(*args, **kwargs)
    rest = op._schema.arguments[len(args) :]
    given = [kwargs.get(argument.name, argument.default_value) for argument in rest]
    return override(op, *args, *given)


def _batch_norm(op: OpOverload, *args: Any) -> Any:
    """Mean and deviation are float32 if weights or statistics are; torch's fakes are not."""
    result, mean, deviation = op(*args)
    if any(isinstance(arg, torch.Tensor) and arg.dtype is torch.float32 for arg in args[1:5]):
        mean, deviation = (torch.empty_like(t, dtype=torch.float32) for t in (mean, deviation))
    return result, mean, deviation


def _loss(op: OpOverload, *args: Any) -> Any:
    """The reduced loss keeps the storage of the unreduced one; torch's fake has a scalar's."""
    loss: torch.Tensor = op(*args)
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    if loss.dim() or not shape:
        return loss
    return loss.new_empty(shape).resize_(())


def _cudnn_forward(op: OpOverload, *args: Any) -> Any:
    """Without a weight buffer, cuDNN creates one and returns it; torch's fake returns none."""
    output, hy, cy, reserve, weight_buffer = op(*args)
    if weight_buffer is None:
        weights: Sequence[torch.Tensor] = args[1]
        weight_buffer = weights[0].new_empty(sum(weight.numel() for weight in weights))
    return output, hy, cy, reserve, weight_buffer


def _cudnn_backward(op: OpOverload, *args: Any) -> Any:
    """The gradients of all weights share one buffer; torch has no fake for this operator."""
    inputs, weights, _, weight_buffer, hx, cx = args[:6]
    buffer, offset, grads = torch.empty_like(weight_buffer), 0, []
    for weight in weights:
        strides = torch.empty_like(weight, memory_format=torch.contiguous_format).stride()
        grads.append(buffer.as_strided(weight.shape, strides, offset))
        offset += weight.numel()
    grad_cx = None if cx is None else torch.empty_like(cx)
    return torch.empty_like(inputs), torch.empty_like(hx), grad_cx, grads


_OVERRIDES: dict[str, Callable[..., Any]] = {
    "aten::mse_loss": _loss,
    "aten::smooth_l1_loss": _loss,
    "aten::soft_margin_loss": _loss,
    "aten::binary_cross_entropy": _loss,
    "aten::native_batch_norm": _batch_norm,
    "aten::_cudnn_rnn": _cudnn_forward,
    "aten::_cudnn_rnn_backward": _cudnn_backward,
}
