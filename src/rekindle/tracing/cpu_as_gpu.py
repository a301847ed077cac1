"""Makes a step on the CPU call the operators that a GPU would run, for forecasts (decision 13)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from rekindle.tracing.capture_thread import ThreadPatches

aten = torch.ops.aten
_ATTENTION, _DROPOUT = F.scaled_dot_product_attention, F.dropout
_CROSS_ENTROPY = F.cross_entropy
_HALF = (torch.bfloat16, torch.float16)

# Functions that CUDA's autocast runs in float32, and the CPU's does not.
_FLOAT32_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.softplus, F.softmin),
        *(torch.layer_norm, torch.group_norm, torch.softmax, torch.log_softmax, torch.cumsum),
        *(torch.exp, torch.log, torch.pow, torch.rsqrt, torch.norm, torch.prod, torch.cumprod),
        *(torch.Tensor.softmax, torch.Tensor.log_softmax, torch.Tensor.exp, torch.Tensor.log),
        *(torch.Tensor.pow, torch.Tensor.rsqrt, torch.Tensor.norm, torch.Tensor.cumsum),
    }
)


def gpu_operators(patches: ThreadPatches) -> AbstractContextManager[Any]:
    """The context in which this thread calls the GPU's operators."""
    choose = "_default_to_fused_or_foreach"
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, choose):
            patches.replace(module, choose, lambda *_, **__: (False, True))
    # Both: for callers that imported the functions, and for torch's own modules.
    patches.replace(F, "scaled_dot_product_attention", _attention)
    patches.replace(F, "dropout", _dropout)
    return _GpuOperators()


class _GpuOperators(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            return _attention(*args, **kwargs)
        if func is _DROPOUT:
            return _dropout(*args, **kwargs)
        if func is _CROSS_ENTROPY and torch.is_autocast_enabled("cpu"):
            return _cross_entropy(*args, **kwargs)
        if func in _FLOAT32_FUNCTIONS and torch.is_autocast_enabled("cpu"):
            args = tuple(_to_float32(arg) for arg in args)
            kwargs = {key: _to_float32(arg) for key, arg in kwargs.items()}
        return func(*args, **kwargs)


def _cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """CUDA's autocast runs the log-softmax in half precision and casts for the loss."""
    rest = (weight, size_average, ignore_index, reduce, reduction)
    if label_smoothing or logits.dtype not in _HALF or target.is_floating_point():
        return _CROSS_ENTROPY(logits, target, *rest, label_smoothing)
    with torch.autocast("cpu", enabled=False):
        scores = torch.log_softmax(logits, 1 if logits.dim() > 1 else 0)
    return F.nll_loss(scores.float(), target, *rest)


def _to_float32(arg: Any) -> Any:
    is_half = isinstance(arg, torch.Tensor) and arg.dtype in _HALF
    return arg.float() if is_half else arg


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if training and p > 0 and not inplace:
        return aten.native_dropout(input, p, True)[0]
    return _DROPOUT(input, p, training, inplace)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Fused attention: flash in half precision without a mask, else memory-efficient."""
    if query.dim() != 4:  # not fused on a GPU, either
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) for t in (query, key, value))
    if enable_gqa and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    if attn_mask is None and query.dtype in _HALF:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
