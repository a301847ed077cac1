"""Reads and sets random generators: a device's default one by name, or the user's own.

`get_state` and `set_state` are calls in the graph of a step that saves and restores random state
itself, as `torch.utils.checkpoint` does.
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
    """The state of a generator, or of a device's default one, in numpy's memory (decision 29)."""
    return torch.from_numpy(generator_of(source).get_state().numpy().copy())


def generator_of(source: torch.Generator | str) -> torch.Generator:
    """The generator itself, or a device's default one."""
    if isinstance(source, torch.Generator):
        return source
    device = torch.device(source)
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def replay(
    source: torch.Generator | str,
    state: torch.Tensor,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a function with the generator in an earlier state, then put back its present state."""
    generator, now = generator_of(source), read(source)
    generator.set_state(state)
    try:
        return function(*args, **kwargs)
    finally:
        generator.set_state(now)
