"""Batches that fit into a budget, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class Fit(NamedTuple):
    """A batch that fits: its peak and the time of a step, as forecast."""

    batch: int
    peak_bytes: int
    step_us: float

    @property
    def samples_per_s(self) -> float:
        """How many samples a second are trained on."""
        return self.batch / self.step_us * 1e6 if self.step_us > 0 else math.nan


@dataclass(frozen=True)
class LargestBatch:
    """The largest batches that a budget holds; None where not even one sample fits.

    `planned` is the largest of all, whatever it costs in time. `quick` is the largest that keeps
    the share `at_least` of the speed that `plain` has; None where nobody asked for one.
    """

    budget_bytes: int
    device: str
    method: str
    plain: Fit | None
    planned: Fit | None
    at_least: float | None = None
    quick: Fit | None = None
