"""The state of one call of `rekindle.compile` across the graphs and training steps of a model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from rekindle.core.graph.graph import StepGraph
from rekindle.dynamo.budget_shares import (
    BudgetShare,
    StaticMemory,
    static_of_graph,
    static_of_model,
)
from rekindle.dynamo.planned_graph import Key, PlannedGraph
from rekindle.dynamo.post_grad_passes import PostGradOptions
from rekindle.errors import InfeasibleBudget, PlanError
from rekindle.measuring.timing import PeakMonitor, report_peak
from rekindle.passes.matmul_padding import PaddingOptions
from rekindle.planners.registry import find_planner
from rekindle.units import format_bytes, parse_budget

log = logging.getLogger("rekindle")

LOWERS = ("inductor", "eager")
_ANY_BYTES = 1 << 60  # to check a budget before its graph is known


@dataclass(frozen=True)
class CompileOptions:
    """The tuning constants of `rekindle.compile`.

    `overshoot_factors`: each new plan leaves the measured overshoot times the next factor free,
    since other tensors may be live at another plan's peak; there are as many plans as factors.
    """

    margin_ratio: float = 0.003  # of a budget in bytes, for small unforeseen allocations
    monitored_step: int = 2  # the first one compiles and tunes kernels
    max_overshoot_ratio: float = 0.4  # of the budget; a larger overshoot has other causes
    overshoot_factors: tuple[float, ...] = (1.1, 1.5, 2.0)
    released_outputs_ratio: float = 0.7  # of their bytes below forecast: outputs were released
    min_outputs_ratio: float = 0.03  # of the budget, for outputs worth a new plan
    min_recompute_ratio: float = 0.02  # of a step's time, for recomputation worth a new plan
    padding: PaddingOptions = PaddingOptions()  # noqa: RUF009
    post_grad: PostGradOptions = PostGradOptions()  # noqa: RUF009


@dataclass(eq=False)
class Session:
    """What one call of `compile` was given, what its graphs were planned to, and what to replan.

    The model, if it is known, has the parameters outside the current graph. `options` are
    Inductor's. `spare_bytes` of the budget are left free, if that is possible. `holds_outputs` is
    True if the caller is assumed to hold the forward pass's outputs during the backward pass;
    `tries` is how often the model was replanned, `short_bytes` what a later graph lacks.
    """

    budget: int | str
    planner: str = "auto"
    lower: str = "inductor"
    options: dict[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None
    optimizer: Optimizer | None = None
    tuning: CompileOptions = CompileOptions()
    spare_bytes: int = 0
    holds_outputs: bool = True
    tries: int = 0
    # Of these graphs and steps; a session to recompile with starts afresh.
    plans: list[PlannedGraph] = field(default_factory=list, init=False)
    short_bytes: int = field(default=0, init=False)
    n_steps: int = field(default=0, init=False)
    monitor: PeakMonitor | None = field(default=None, init=False)
    measured_peak_bytes: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        find_planner(self.planner)
        parse_budget(self.budget, _ANY_BYTES)
        if self.lower not in LOWERS:
            raise PlanError(f"lower is {' or '.join(map(repr, LOWERS))}, and not {self.lower!r}.")

    @property
    def cache_key(self) -> str:
        """Everything that plans depend on besides the graphs."""
        static = self.model and static_of_model(self.model, self.optimizer)
        how = f"{self.planner} {self.budget!r} {self.spare_bytes} {self.holds_outputs}"
        return f"rekindle {how} {self.tuning} {static}"

    @property
    def forecast_bytes(self) -> int:
        """The forecast peak of a step, by the plans so far."""
        return max((each.plan.peak_bytes for each in self.plans), default=0)

    @property
    def budget_bytes(self) -> int:
        """What a step may take; known once there are plans."""
        return max((each.budget_bytes for each in self.plans), default=0)

    def static_memory(self, graph: StepGraph) -> StaticMemory:
        """The static memory around a graph."""
        if self.model is None:
            return static_of_graph(graph)
        return static_of_model(self.model, self.optimizer)

    def earlier_graphs(self, key: Key) -> list[PlannedGraph]:
        """The other graphs planned so far; of a recompiled one, the version that keeps the most."""
        most: dict[Key, PlannedGraph] = {}
        for each in self.plans:
            known = most.get(each.key)
            if each.key != key and (known is None or known.kept_bytes < each.kept_bytes):
                most[each.key] = each
        return list(most.values())

    def note_shortfall(self, key: Key, share: BudgetShare, least_bytes: int) -> None:
        """Note that a graph does not fit, if earlier graphs could keep less; otherwise raise."""
        budget_bytes = share.budget_bytes
        can_replan = self.model is not None and self._can_replan
        if not self.earlier_graphs(key) or not (share.is_relative or can_replan):
            raise InfeasibleBudget(
                budget_bytes=budget_bytes, least_peak_bytes=least_bytes
            ) from None
        self.short_bytes = max(self.short_bytes, least_bytes - budget_bytes)
        log.warning(
            "a later graph needs %s, including what earlier graphs hold; the budget is %s",
            format_bytes(least_bytes),
            format_bytes(budget_bytes),
        )

    def begin_step(self, device: torch.device | None) -> Session | None:
        """Count a training step; the session to recompile the model with, if any."""
        peak_bytes = self._monitor_step(device)
        session = self._replan_for_later_graphs()
        if session is None and peak_bytes is not None:
            session = self._replan_after(peak_bytes)
        return session

    def _monitor_step(self, device: torch.device | None) -> int | None:
        """The peak of the monitored step, once, when it is over."""
        monitor = PeakMonitor(device)
        if not monitor.is_active or self.measured_peak_bytes is not None:
            return None
        self.n_steps += 1
        if self.n_steps == self.tuning.monitored_step:
            self.monitor = monitor
            monitor.start()
        elif self.monitor is not None:
            self.measured_peak_bytes = self.monitor.stop()
        return self.measured_peak_bytes

    @property
    def _can_replan(self) -> bool:
        return self.tries < len(self.tuning.overshoot_factors)

    def _replan_for_later_graphs(self) -> Session | None:
        """A session whose earlier graphs leave more to a later one that did not fit."""
        if not self.short_bytes or not self._can_replan:
            return None
        log.info("recompiling, with %s left to later graphs", format_bytes(self.short_bytes))
        more_bytes = int(self.tuning.overshoot_factors[self.tries] * self.short_bytes)
        return self._next(spare_bytes=self.spare_bytes + more_bytes)

    def _replan_after(self, peak_bytes: int) -> Session | None:
        """A session that fits the measured peak better; None if that would not help.

        In a distributed job, where all ranks would have to decide alike, nothing is replanned.
        """
        exceeds = report_peak(peak_bytes, self.forecast_bytes, self.budget_bytes)
        over_bytes = peak_bytes - self.forecast_bytes
        if not self._can_replan or is_distributed():
            return None
        if exceeds:
            if over_bytes > self.tuning.max_overshoot_ratio * self.budget_bytes:
                return None  # memory of something else than this model
            log.info("recompiling, with %s left free", format_bytes(over_bytes))
            factor = self.tuning.overshoot_factors[self.tries]
            return self._next(spare_bytes=int(factor * over_bytes))
        if self._can_use_released_outputs(-over_bytes):
            log.info("recompiling: outputs are released before the backward pass")
            return self._next(holds_outputs=False)
        return None

    def _next(self, **changes: Any) -> Session:
        return replace(self, tries=self.tries + 1, **changes)

    def _can_use_released_outputs(self, under_bytes: int) -> bool:
        """True if the caller releases outputs, and their memory would save much recomputation.

        With several graphs, the outputs of one are held as inputs of the next.
        """
        if not self.holds_outputs or len({each.key for each in self.plans}) != 1:
            return False
        last, tuning = self.plans[-1], self.tuning
        is_large = last.output_bytes > tuning.min_outputs_ratio * self.budget_bytes
        is_slow = last.recompute_ratio > tuning.min_recompute_ratio
        is_released = under_bytes > tuning.released_outputs_ratio * last.output_bytes
        return is_large and is_slow and is_released


def is_distributed() -> bool:
    """True if this process is part of a distributed job."""
    return dist.is_available() and dist.is_initialized()
