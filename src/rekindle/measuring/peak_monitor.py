"""The measured peak of one training step, compared with its forecast and its budget."""

from __future__ import annotations

import logging

import torch

from rekindle.units import format_bytes

log = logging.getLogger("rekindle")


class PeakMonitor:
    """The most memory allocated on a GPU between `start` and `stop`; nothing on other devices."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device

    @property
    def is_active(self) -> bool:
        """True if the device counts its allocations."""
        return self._device is not None and self._device.type == "cuda"

    def start(self) -> None:
        """Begin watching: forget earlier peaks."""
        if self.is_active:
            torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> int | None:
        """The peak since `start`; None where nothing is counted."""
        return torch.cuda.max_memory_allocated(self._device) if self.is_active else None


def report_peak(peak_bytes: int, forecast_bytes: int, budget_bytes: int) -> bool:
    """Log a step's measured peak, as a warning if it exceeds the budget; True if it does."""
    exceeds = peak_bytes > budget_bytes
    (log.warning if exceeds else log.info)(
        "the step took %s, and the budget is %s (%s was forecast)",
        format_bytes(peak_bytes),
        format_bytes(budget_bytes),
        format_bytes(forecast_bytes),
    )
    return exceeds
