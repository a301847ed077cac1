"""A plain and a captured training from the same state: differences, times and peaks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import Trace
from rekindle.core.notebook import html_table, one_line
from rekindle.units import format_bytes, format_us


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plain training and a captured one.

    `compared` counts the tensors by kind ("parameter", "buffer", …); `differences` names those that
    are not bitwise equal. The samples are the times of single steps, in order; the peaks are of the
    last step. With a budget, `graph`, `profile`, `plan` and `trace` are of the step that ran,
    `plain_trace` and `plain_profile` of the plain one; without one they are None. If the plain step
    does not fit into the device's memory, nothing was compared.

    A step that `is_compiled` may round differently from the plain one. It is compared with another
    compiled step that drops nothing; `rounding` is the largest relative difference between the
    results of that step and of the plain one, None if there is no plain step.

    Where something differs, the plain training is run once more: `plain_differences` names what
    differs between two plain trainings, which then cannot be compared with anything bit for bit.
    """

    graph: StepGraph
    capture_us: float
    plain_samples_us: tuple[float, ...]
    captured_samples_us: tuple[float, ...]
    plain_peak_bytes: int
    captured_peak_bytes: int
    compared: Mapping[str, int]
    differences: tuple[str, ...]
    plain_fits: bool = True
    budget_bytes: int | None = None
    profile: Profile | None = None
    plan: Plan | None = None
    trace: Trace | None = None
    plain_trace: Trace | None = None
    plain_profile: Profile | None = None
    is_compiled: bool = False
    rounding: float | None = None
    plain_differences: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """The number of steps of each training."""
        return len(self.captured_samples_us)

    @property
    def equal(self) -> bool:
        """True if everything was compared and nothing differs."""
        return bool(self.compared) and not self.differences

    @property
    def is_deterministic(self) -> bool:
        """False if two plain trainings from the same state were found to differ."""
        return not self.plain_differences

    @property
    def is_within_budget(self) -> bool:
        """True if the captured training stayed within its budget, or has none."""
        return self.budget_bytes is None or self.captured_peak_bytes <= self.budget_bytes

    @property
    def plain_us(self) -> float:
        """The median time of a plain step."""
        return _warm_median(self.plain_samples_us)

    @property
    def captured_us(self) -> float:
        """The median time of a captured step."""
        return _warm_median(self.captured_samples_us)

    def _facts(self) -> dict[str, object]:
        verdict = "not compared" if not self.compared else "equal" if self.equal else "different"
        if not self.is_deterministic:
            verdict = "the plain step is not deterministic: different"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        facts: dict[str, object] = {"result": f"{verdict} after {steps}"}
        if self.plain_fits:
            facts["plain"] = f"{format_bytes(self.plain_peak_bytes)} in {format_us(self.plain_us)}"
        peak, time = format_bytes(self.captured_peak_bytes), format_us(self.captured_us)
        facts["captured"] = f"{peak} in {time}"
        if self.budget_bytes is not None:
            facts["budget"] = format_bytes(self.budget_bytes)
        if self.differences:
            facts["differences"] = f"{len(self.differences)}: {', '.join(self.differences[:3])}"
        return facts

    __repr__ = one_line
    _repr_html_ = html_table


def _warm_median(samples_us: tuple[float, ...]) -> float:
    """The median without the first step, which selects kernels, and the last, which is traced."""
    return statistics.median(samples_us[1:-1] or samples_us) if samples_us else float("nan")
