"""Reading and setting the default generators, by the name of their device.

A step that saves and restores random state itself, as `torch.utils.checkpoint` does, has these two
in its graph.
"""

from __future__ import annotations

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
