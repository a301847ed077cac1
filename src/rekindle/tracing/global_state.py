"""Settings of the process and the thread that decide which operators a step runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrize

from rekindle.torch_internals import (
    DeviceContext,
    default_saved_tensor_hooks,
    function_modes,
)
from rekindle.tracing.contents import Same

_GLOBAL_HOOKS: list[dict[Any, Any]] = [
    value
    for name, value in vars(module_hooks).items()
    if name.startswith("_global_") and isinstance(value, dict)
]
_cuda, _cudnn, _mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn


def global_state() -> Hashable:
    """All settings; steps captured under equal ones run the same operators.

    Dispatch modes and hooks on optimizers are not among them: they act on captured steps, too.
    """
    hooks = default_saved_tensor_hooks()
    return (
        tuple(
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in ("cpu", "cuda")
        ),
        torch.is_autocast_cache_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.get_deterministic_debug_mode(),
        torch.get_float32_matmul_precision(),
        (_cuda.flash_sdp_enabled(), _cuda.mem_efficient_sdp_enabled(), _cuda.math_sdp_enabled()),
        _cuda.cudnn_sdp_enabled(),
        (_cudnn.enabled, _cudnn.benchmark, _cudnn.deterministic, _cudnn.allow_tf32),
        (_mkldnn.enabled, _mkldnn.deterministic),
        parametrize._cache_enabled,
        tuple(
            Same(hook) for each in _GLOBAL_HOOKS if each for hook in each.values() if _counts(hook)
        ),
        None if hooks is None else tuple(map(Same, hooks)),
        tuple(map(_mode_key, function_modes())),
    )


def code_around_steps() -> Iterator[tuple[str, Any]]:
    """What runs in a step besides its own code: global hooks of modules, and modes."""
    hooks = (hook for each in _GLOBAL_HOOKS for hook in each.values() if _counts(hook))
    yield from (("a global hook of modules", hook) for hook in hooks)
    yield from (("a function mode", mode) for mode in function_modes())
    yield from (("a hook of saved tensors", hook) for hook in default_saved_tensor_hooks() or ())


def _counts(hook: Any) -> bool:
    """False for hooks that only observe: torch's own, and those of captures in other threads."""
    return not (getattr(hook, "__module__", None) or "").startswith(("rekindle.", "torch."))


def _mode_key(mode: Any) -> Hashable:
    device = mode.device if isinstance(mode, DeviceContext) else None
    return type(mode), str(device)
