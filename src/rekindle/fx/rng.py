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


def read(source: torch.Generator | str) -> torch.Tensor | torch.Generator:
    """What brings a generator, or a device's default one, back to where it is now.

    On the CPU this is a twin of the generator: it is no tensor, whose memory would count as the
    step's.
    """
    generator = generator_of(source)
    return generator.clone_state() if generator.device.type == "cpu" else generator.get_state()


def write(source: torch.Generator | str, state: torch.Tensor | torch.Generator) -> None:
    """Bring a generator back to where it was read."""
    generator_of(source).set_state(state if isinstance(state, torch.Tensor) else state.get_state())


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
    state: torch.Tensor | torch.Generator,
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
