"""The largest batch that fits into a budget, found by simulation: nothing runs out of memory.

The step's graph at any size follows from two that are traced and measured. As planners cache their
work on a graph, the step is planned at one reference batch size, under budgets that correspond to
other sizes, since bytes grow nearly linearly; only the result is planned at its own size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rekindle.captured_step import CapturedStep, check_types
from rekindle.core.cost.batch_scaling import Growth, Sized, Uneven
from rekindle.core.cost.batch_search import (
    MOST,
    Between,
    Fit,
    LargestBatch,
    climb,
    close_in,
    descend,
    largest_within,
    quickest,
)
from rekindle.core.cost.devices import Device, find_device
from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.cost.roofline import analytic_profile
from rekindle.core.graph.graph import Phase, Role, StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import ROLES, Trace, simulate
from rekindle.engines.process_settings import gc_paused
from rekindle.errors import InfeasibleBudget, PlanError, ProfileError
from rekindle.measuring.measure import measured_profile
from rekindle.pipeline import CapturedCosts, plan_within
from rekindle.planners.registry import Planner, find_planner
from rekindle.rewriting.step_forms import improved, with_early_updates
from rekindle.tracing import batch_tree
from rekindle.units import parse_bytes

Floats = NDArray[np.float64]
Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Any]

SIZES = (8, 16)  # the batch sizes that are traced first
MIN_MEASURED_SAMPLES = 4  # batch norm in training needs more than one sample
MEASURED_BUDGET_RATIO = 0.85  # a measured step may take this share of the budget
PLAIN_TOLERANCE_RATIO = 0.005  # how far the answer may be below the largest batch: plain,
PLANNED_TOLERANCE_RATIO = 0.02  # planned,
ESTIMATE_TOLERANCE_RATIO = 0.03  # and estimated from the reference batch size
N_GUESSES = 2
GUESS_PLANNER = "chen-recursive"  # takes no time and comes close to the least peak
REFERENCE_ERROR_RATIO = 0.0025  # error of a peak that is extrapolated to a near batch size
NEAR_RATIO = 1.5  # batch sizes are near up to this factor
MAX_REFERENCES = 6  # reference batch sizes that are tried until one is near the answer


def max_batch(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    make_batch: Callable[[int], Any],
    *,
    budget: int | str,
    device: str | None = None,
    planner: str = "auto",
    at_least: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> LargestBatch:
    """The largest batch that fits into a budget, plain and planned, with the throughput of each.

    `make_batch(n)` returns a batch of n samples. `budget` is bytes or text with a unit, as in
    "16GiB". `device="RTX 4090"` forecasts for a GPU that need not be in this machine; otherwise the
    step is measured on the model's device, at batch sizes that fit easily. Larger batches need more
    recomputation: `at_least=0.95` also asks for the largest batch that is trained at 95% or more of
    the plain step's samples per second.

    >>> model = nn.Linear(64, 64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(model, optimizer, batch):
    ...     model(batch).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> found = max_batch(
    ...     train_step, model, optimizer, lambda n: torch.ones(n, 64), budget="1GB", device="H100"
    ... )
    >>> found.plain.batch <= found.planned.batch
    True
    """
    check_types(train_step, model, optimizer)
    if not callable(make_batch):
        raise TypeError("make_batch must be a function: make_batch(n) returns a batch of n samples")
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise PlanError(
            f"a share has no meaning here, as batches vary: give bytes, as in 16GiB, not {budget!r}"
        )
    if at_least is not None and not (isinstance(at_least, int | float) and 0 < at_least <= 1):
        raise PlanError(f"at_least is a share of the plain step's speed, in (0, 1], not {at_least}")
    budget_bytes = parse_bytes(budget)
    if budget_bytes <= 0:
        raise PlanError(f"the budget must be positive, as in 16GiB, and is {budget!r}")
    tell = progress or (lambda text: None)
    named = None if device is None else _named_gpu(device)

    def at(batch: int) -> Parts:
        return train_step, model, optimizer, make_batch(batch)

    return _Search(at, budget_bytes, named, find_planner(planner), tell).run(at_least)


def _named_gpu(name: Any) -> Device:
    """A GPU by its model name; "cpu" and "cuda" are not names of one."""
    if not isinstance(name, str) or name in ("cpu", "cuda"):
        raise ProfileError(
            f"device={name!r}: give the name of a GPU, as in 'RTX 4090', which need not be in this "
            "machine; without device, the step is measured on the model's device."
        )
    return find_device(name)


class _Step:
    """The step at one reference batch size, in one form, planned for several budgets."""

    def __init__(
        self, sized: Sized, captured: CapturedCosts, make: Planner, bytes_per_sample: Floats
    ) -> None:
        """`sized` is the form that is planned, `bytes_per_sample` the growth of each storage."""
        self.batch, self.form = sized
        self.captured = captured
        self._make = make
        self._bytes_per_sample = bytes_per_sample
        self._costs = captured.costs_of(self.form)

    def plan(self, batch: float | None = None) -> Plan | None:
        """A plan within the budget, or within that of another batch size; None if infeasible."""
        budget_bytes = self.captured.budget_bytes
        if batch is not None:
            budget_bytes = self.fixed_bytes + int(self._growing_bytes * self.batch / batch)
        captured = self.captured._replace(budget_bytes=budget_bytes)
        try:
            return plan_within(self._planned, self.form, captured).plan
        except InfeasibleBudget:
            return None

    def reach(self, plan: Plan) -> float:
        """The largest batch at which this plan would fit into the budget."""
        return self.batch * self._growing_bytes / max(plan.peak_bytes - self.fixed_bytes, 1)

    def trace(self, plan: Plan) -> Trace:
        """The simulation of a plan."""
        return simulate(self.form, self._costs, plan)

    @cached_property
    def least(self) -> Plan:
        """The plan with the least peak that the planner finds."""
        try:
            return self._make(self.form, self._costs, 1)
        except InfeasibleBudget as error:
            return self._make(self.form, self._costs, error.least_peak_bytes)

    @cached_property
    def fixed_bytes(self) -> int:
        """The bytes at the least peak that do not depend on the batch size."""
        trace = self.trace(self.least)
        live = self._bytes_per_sample[trace.alive_at(trace.peak_position)]
        growing = int(self.batch * live.sum()) + self.captured.engine_bytes_of(self.form)
        if self.form.ops[trace.peak_op].phase is not Phase.OPTIMIZER:
            growing += self._costs.costs[trace.peak_op].workspace_bytes
        return trace.peak_bytes - growing

    @property
    def slack(self) -> float:
        """The error of extrapolated peaks, as a share: allocators round sizes up."""
        trace = self.trace(self.least)
        growing = [i for i in trace.alive_at(trace.peak_position) if self._bytes_per_sample[i]]
        exact = sum(self.form.storages[i].nbytes for i in growing)
        rounded = int(trace.sizes_bytes[growing].sum())
        return REFERENCE_ERROR_RATIO + (rounded - exact) / max(exact, 1)

    @property
    def holds_gradients(self) -> bool:
        """True if early updates would lower the least peak: gradients are live at it."""
        trace = self.trace(self.least)
        lower = int((trace.live_bytes - trace.by_role[ROLES.index(Role.GRAD)]).max(initial=0))
        return trace.peak_bytes - lower > PLAIN_TOLERANCE_RATIO * (
            trace.peak_bytes - self.fixed_bytes
        )

    @property
    def _growing_bytes(self) -> int:
        return max(self.captured.budget_bytes - self.fixed_bytes, 0)

    def _planned(self, form: StepGraph, costs: Profile, budget_bytes: int) -> Plan:
        """The planner with the same `Profile` object in each call, by which it finds its cache."""
        return self._make(form, self._costs, budget_bytes)


@dataclass
class _Search:
    """The search for the largest batch: plain, planned, and planned with a given throughput."""

    at: Callable[[int], Parts]
    budget_bytes: int
    device: Device | None
    make: Planner
    tell: Callable[[str], None]
    costs: tuple[Profile, Profile] | None = None

    def run(self, at_least: float | None) -> LargestBatch:
        traced = {batch: self._trace(batch) for batch in SIZES}
        self.growth = _growth(traced)
        if self.device is None:
            traced = self._measured(traced)
        largest = max(traced)
        self.recording = traced[largest].recording
        self.tell("searching the largest batch of the plain step")
        plain = self._largest_plain()
        quick = None
        with gc_paused():  # planners allocate many objects and few cycles
            self.tell("searching the largest batch of a planned step")
            planned = self._largest_planned()
            if plain is not None and (planned is None or planned.batch < plain.batch):
                planned = plain
            if plain is not None and planned is not None and at_least is not None:
                quick = self._quickest(plain, planned, at_least)
            least_bytes = self._light_step(1).least.peak_bytes if planned is None else None
        profile = self._captured(largest).profile
        about = self.budget_bytes, profile.device, profile.method
        return LargestBatch(*about, plain, planned, at_least, quick, least_bytes)

    def _largest_plain(self, share: float = 1.0) -> Fit | None:
        """The largest batch of the plain step within a share of the budget."""
        traces: dict[int, Trace] = {}

        def peak_bytes(batch: int) -> int:
            captured = self._captured(batch)
            traces[batch] = simulate(captured.graph, captured.profile)
            return traces[batch].peak_bytes

        most = share * self.budget_bytes
        found = largest_within(peak_bytes, most, start=SIZES[-1], close=PLAIN_TOLERANCE_RATIO)
        return Fit(found, traces[found].peak_bytes, traces[found].step_us) if found else None

    def _largest_planned(self) -> Fit | None:
        """The largest batch for which there is a plan."""
        batch = self._guess()
        for _ in range(MAX_REFERENCES):
            self.step = self._light_step(batch)
            between = self._between()
            if batch / NEAR_RATIO <= max(1, between.fits) <= batch * NEAR_RATIO:
                break
            batch = max(1, min(MOST, int(between.fits)))
        fails = min(between.fails * (1 + self.step.slack), MOST)
        between = Between(min(between.fits, MOST), fails)
        planned = partial(self._planned_as, is_early=self.is_early)
        return close_in(planned, between, PLANNED_TOLERANCE_RATIO)

    def _guess(self) -> int:
        """A rough largest batch, by a fast planner; also decides whether to update early."""
        batch, make = 4 * SIZES[-1], find_planner(GUESS_PLANNER)
        for _ in range(N_GUESSES):
            captured = self._captured(batch)
            sized = Sized(batch, captured.graph)
            step = _Step(sized, captured, make, self.growth.bytes_per_sample)
            batch = max(1, min(MOST, int(step.reach(step.least))))
        self.can_be_early = with_early_updates(self.recording, step.form) is not None
        self.is_early = self.can_be_early and step.holds_gradients
        return batch

    def _light_step(self, batch: int) -> _Step:
        """The step at a batch size, with early updates if they lower the least peak."""
        step = self._step(batch, is_early=self.is_early)
        if self.can_be_early and not self.is_early and step.holds_gradients:
            self.is_early = True
            step = self._step(batch, is_early=True)
        return step

    def _between(self) -> Between:
        """The interval of the largest batch, estimated from the reference batch size."""

        def can_plan(batch: float) -> bool:
            self.tell(f"estimating a batch of {batch:.0f}")
            return self.step.plan(batch) is not None

        return descend(can_plan, max(self.step.reach(self.step.least), 0.5))

    def _quickest(self, plain: Fit, planned: Fit, at_least: float) -> Fit:
        """The largest batch that is trained at a share of the plain step's throughput."""
        if planned.samples_per_s >= at_least * plain.samples_per_s:
            return planned
        start = Between(min(2 * plain.batch, (plain.batch * planned.batch) ** 0.5), planned.batch)
        about, fails = quickest(self._about, plain, at_least, start, ESTIMATE_TOLERANCE_RATIO)
        is_near = about.batch * NEAR_RATIO >= self.step.batch
        beyond = min(
            fails * (1 + (self.step.slack if is_near else PLAIN_TOLERANCE_RATIO)), planned.batch
        )
        between = Between(max(about.batch, beyond / (1 + PLANNED_TOLERANCE_RATIO) + 1), beyond)
        found, fails = quickest(self._planned, plain, at_least, between, PLANNED_TOLERANCE_RATIO)
        if fails < round(beyond) or fails >= planned.batch:
            return found
        # Every planned batch is fast enough: the estimate was too low.
        can = partial(self._quick, at_least * plain.samples_per_s)
        return climb(can, found, planned.batch, PLANNED_TOLERANCE_RATIO)

    def _quick(self, samples_per_s: float, batch: int) -> Fit | None:
        """A planned batch, if its throughput is high enough; else None."""
        found = self._planned(batch)
        return found if found is not None and found.samples_per_s >= samples_per_s else None

    def _about(self, batch: int) -> Fit | None:
        """A batch with the slowdown of the reference batch size under the corresponding budget."""
        self.tell(f"estimating a batch of {batch}")
        plan = self.step.plan(batch)
        if plan is None:
            return None
        slowdown = self.step.trace(plan).step_us / self.step.captured.profile.step_us
        return Fit(batch, self.budget_bytes, slowdown * self._captured(batch).profile.step_us)

    def _planned(self, batch: int) -> Fit | None:
        """A batch planned at its own size, with early updates if nothing else fits."""
        found = self._planned_as(batch, is_early=False)
        return self._planned_as(batch, is_early=True) if found is None and self.is_early else found

    def _planned_as(self, batch: int, *, is_early: bool) -> Fit | None:
        self.tell(f"planning a batch of {batch}")
        step = self._step(batch, is_early=is_early)
        plan = step.plan()
        return None if plan is None else Fit(batch, plan.peak_bytes, step.trace(plan).step_us)

    def _trace(self, batch: int) -> CapturedStep:
        self.tell(f"tracing a step of batch {batch}")
        parts = self.at(batch)
        is_here = any(param.is_cuda for param in parts[1].parameters())
        return CapturedStep(*parts, as_on_gpu=self.device is not None and not is_here)

    def _measured(self, traced: dict[int, CapturedStep]) -> dict[int, CapturedStep]:
        """Measure the step at two batch sizes that fit easily."""
        batch = self._largest_plain(MEASURED_BUDGET_RATIO)
        large = max(MIN_MEASURED_SAMPLES, batch.batch) if batch else MIN_MEASURED_SAMPLES
        sizes = (large // 2, large)
        if sizes != tuple(traced):
            traced = {size: self._trace(size) for size in sizes}
            self.growth = _growth(traced)
        costs = []
        for size, captured in traced.items():
            self.tell(f"measuring a step of batch {size}")
            made = self.at(size)
            batch_tensors = batch_tree.flatten(made[3]).tensors
            costs.append(
                measured_profile(captured.recording, captured.graph, batch_tensors, captured.device)
            )
            del made, batch_tensors
        self.costs = costs[0], costs[1]
        return traced

    def _step(self, batch: int, *, is_early: bool) -> _Step:
        """The step at a batch size, in the form that `optimize` plans."""
        captured = self._captured(batch)
        form = improved(self.recording, captured.graph)
        if is_early:
            form = with_early_updates(self.recording, form) or form
        return _Step(Sized(batch, form), captured, self.make, self.growth.bytes_per_sample)

    def _captured(self, batch: int) -> CapturedCosts:
        graph = self.growth.at(batch)
        profile = self._profile(graph, batch)
        extra_bytes = _batch_bytes(graph) if profile.allocator == "cuda" else 0  # graphs copy it
        return CapturedCosts(graph, profile, self.budget_bytes, extra_bytes)

    def _profile(self, graph: StepGraph, batch: int) -> Profile:
        if self.costs is not None:
            return self.growth.costs_at(*self.costs, graph, batch)
        if self.device is not None:
            return analytic_profile(graph, self.device)
        on_gpu = any(storage.device.startswith("cuda") for storage in graph.storages)
        costs = (OpCost(0.0),) * len(graph.ops)  # not measured yet: only bytes matter
        return Profile("", graph.fingerprint, costs, "cuda" if on_gpu else "exact")


def _batch_bytes(graph: StepGraph) -> int:
    return sum(storage.nbytes for storage in graph.storages if storage.role is Role.INPUT)


def _growth(traced: dict[int, CapturedStep]) -> Growth:
    small, large = (Sized(batch, captured.graph) for batch, captured in traced.items())
    if _batch_bytes(small.graph) == _batch_bytes(large.graph):
        raise ProfileError(
            f"the batch has as many bytes for {small.batch} samples as for {large.batch}: does "
            "make_batch use its argument?"
        )
    try:
        return Growth(small, large)
    except Uneven as error:
        raise ProfileError(
            f"the largest batch cannot be forecast: {error} "
            f"(traced at {small.batch} and {large.batch})."
        ) from None
