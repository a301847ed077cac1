"""What a step of the user's own loop really takes, beside the forecast."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from rekindle.core.schedule import Plan
from rekindle.units import format_bytes

log = logging.getLogger("rekindle")

_WATCHED = 2  # the first step compiles, and tries kernels out


class Watch:
    """Notes the peak of one training step on a GPU: from one call of the model to the next."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self._n_steps = 0

    def begin(self, device: torch.device | None, plans: Sequence[Plan]) -> int:
        """A step begins, and the one before it is over; returns what `compare` does.

        That is 0 for all steps but the one that was watched.
        """
        if device is None or device.type != "cuda" or self._n_steps > _WATCHED:
            return 0
        self._n_steps += 1
        if self._n_steps == _WATCHED:
            torch.cuda.reset_peak_memory_stats(device)
        elif self._n_steps > _WATCHED:
            self.peak_bytes = torch.cuda.max_memory_allocated(device)
            return self.compare(self.peak_bytes, plans)
        return 0

    def compare(self, peak_bytes: int, plans: Sequence[Plan]) -> int:
        """Say how a step's peak compares with what was planned; a warning if it is too much.

        Returns the bytes over the forecast if they were over the budget, and 0 if not.
        """
        if not plans:
            return 0
        forecast = max(plan.peak_bytes for plan in plans)
        budget_bytes = max(plan.budget_bytes for plan in plans)
        tell = log.warning if peak_bytes > budget_bytes else log.info
        tell(
            "a step took %s: the forecast was %s, the budget is %s",
            format_bytes(peak_bytes),
            format_bytes(forecast),
            format_bytes(budget_bytes),
        )
        return peak_bytes - forecast if peak_bytes > budget_bytes else 0
