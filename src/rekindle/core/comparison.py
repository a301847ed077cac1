"""Two trainings from the same state, side by side: what differs, and how long each took."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from rekindle.core.ir import StepGraph


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plain training and a captured one.

    `compared` counts the tensors by kind ("parameter", "buffer", …); `differences` names what is
    not the same, bit for bit. The samples are the times of single steps, in order.
    """

    graph: StepGraph
    capture_us: float
    plain_samples_us: tuple[float, ...]
    captured_samples_us: tuple[float, ...]
    compared: Mapping[str, int]
    differences: tuple[str, ...]

    @property
    def steps(self) -> int:
        """How many steps each training took."""
        return len(self.plain_samples_us)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def plain_us(self) -> float:
        """The median time of a plain step."""
        return _warm_median(self.plain_samples_us)

    @property
    def captured_us(self) -> float:
        """The median time of a captured step."""
        return _warm_median(self.captured_samples_us)


def _warm_median(samples_us: tuple[float, ...]) -> float:
    """The median without the first step, which creates optimizer state and picks kernels."""
    return statistics.median(samples_us[1:] or samples_us)
