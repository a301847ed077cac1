"""What a step of the user's own loop really takes, beside the forecast."""

from __future__ import annotations

import logging

import torch

from rekindle.units import format_bytes

log = logging.getLogger("rekindle")

_WATCHED = 2  # the first step compiles, and tries kernels out


class Watch:
    """Notes the peak of one training step on a GPU: from one call of the model to the next."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self._n_steps = 0

    def begin(self, device: torch.device | None) -> int | None:
        """A step begins, and the one before it is over: its peak, if that is the watched one."""
        if device is None or device.type != "cuda" or self.peak_bytes is not None:
            return None
        self._n_steps += 1
        if self._n_steps == _WATCHED:
            torch.cuda.reset_peak_memory_stats(device)
        elif self._n_steps > _WATCHED:
            self.peak_bytes = torch.cuda.max_memory_allocated(device)
        return self.peak_bytes


def compare(peak_bytes: int, forecast_bytes: int, budget_bytes: int) -> None:
    """Say how a step's peak compares with what was planned; a warning if it is too much."""
    tell = log.warning if peak_bytes > budget_bytes else log.info
    tell(
        "a step took %s: the forecast was %s, the budget is %s",
        format_bytes(peak_bytes),
        format_bytes(forecast_bytes),
        format_bytes(budget_bytes),
    )
