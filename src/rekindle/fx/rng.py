"""Reading and setting random generators: a device's default one by name, or the user's own.

A step that saves and restores random state itself, as `torch.utils.checkpoint` does, has
`get_state` and `set_state` in its graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def get_state(device: str) -> torch.Tensor:
    """The state of a device's default generator."""
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def set_state(device: str, state: torch.Tensor) -> None:
    """Set the state of a device's default generator."""
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def read(source: torch.Generator | str) -> torch.Tensor:
    """The state of a generator, or of a device's default one."""
    return get_state(source) if isinstance(source, str) else source.get_state()


def write(source: torch.Generator | str, state: torch.Tensor) -> None:
    """Set the state of a generator, or of a device's default one."""
    if isinstance(source, str):
        set_state(source, state)
    else:
        source.set_state(state)


def replay(
    source: torch.Generator | str,
    state: torch.Tensor,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a function with the generator in an earlier state; it then goes on where it was."""
    now = read(source)
    write(source, state)
    try:
        return function(*args, **kwargs)
    finally:
        write(source, now)
