"""Reads and sets random generators: a device's default one by name, or the user's own.

`get_state` and `set_state` are calls in the graph of a step that saves and restores random state
itself, as `torch.utils.checkpoint` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators


def get_state(device: str) -> torch.Tensor:
    """The state of a device's default generator."""
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def set_state(device: str, state: torch.Tensor) -> None:
    """Set the state of a device's default generator."""
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def read(source: torch.Generator | str) -> torch.Generator | torch.Tensor:
    """The state of a generator, or of a device's default one; on the CPU as a clone of it.

    A clone's state is not in memory of torch's allocator, which the budget counts (decision 29).
    """
    generator = generator_of(source)
    return generator.clone_state() if generator.device.type == "cpu" else generator.get_state()


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
    state: torch.Generator | torch.Tensor,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a function with the generator in an earlier state, then put back its present state."""
    generator, now = generator_of(source), read(source)
    generator.set_state(_as_tensor(state))
    try:
        return function(*args, **kwargs)
    finally:
        generator.set_state(_as_tensor(now))


def redraw(state: torch.Generator, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator that takes a generator with a clone of this one."""
    return function(*args, **kwargs, generator=state.clone_state())


def redrawn(source: torch.Generator | str, function: Any) -> OpOverload | None:
    """The operator with which `redraw` recomputes a call; None if only `replay` can.

    `redraw` takes no memory of torch's allocator; on the CPU, `replay` does.
    """
    if not isinstance(function, OpOverload) or generator_of(source).device.type != "cpu":
        return None
    return operators.seedable(function)


def _as_tensor(state: torch.Generator | torch.Tensor) -> torch.Tensor:
    return state if isinstance(state, torch.Tensor) else state.get_state()
