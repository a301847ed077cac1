"""The largest batch that a budget holds, found on paper: nothing runs out of memory on the way.

A step is captured at two batch sizes, on fake tensors; what it is at any other follows, op by op
(`core.scaling`). Costs are measured where the model is, at two sizes that fit with ease; for a GPU
by name they come from FLOPs and bytes. Then batch sizes are tried on paper (`core.fit`), plainly
until the largest is known to half a percent, and planned to two.

A plan of a large step takes seconds, the second plan of the same step less. So the step is planned
at one batch size under budgets that stand for other sizes, and only what is found that way is
planned at its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

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
from rekindle.engines.gc_pause import collected_later
from rekindle.errors import InfeasibleBudget, PlanError, ProfileError
from rekindle.measuring.measure import measured_profile
from rekindle.pipeline import Captured, plan_within
from rekindle.planners.registry import Planner, find_planner
from rekindle.rewriting.step_forms import improved, with_early_updates
from rekindle.tracing import batch_tree
from rekindle.units import parse_bytes

Floats = NDArray[np.float64]
Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Any]

SIZES = (8, 16)  # where a step is looked at first
_LEAST = 4  # samples: what is measured at the least; batch norm takes no single one
_EASE = 0.85  # of the budget: what a step may take that is measured
_CLOSE = 0.005  # how close to the largest batch an answer is
_CLOSE_ENOUGH = 0.02  # the same where each try takes a plan
_ROUGHLY = 0.03  # the same where another batch size stands for it
_GUESSES = 2
_GUESSER = "chen-recursive"  # a planner that takes no time and comes close to the least peak
_SLACK = 0.0025  # by how much one batch size may misjudge another that is near
_NEAR = 1.5  # the factor up to which one batch size stands for another
_LOOKS = 6  # batch sizes that are looked at, at most, to be near enough


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
    """The largest batch that a budget holds, plainly and planned, with the speed at each.

    `make_batch(n)` returns a batch of n samples. `budget` is bytes or text with a unit, as in
    "16GiB". `device="RTX 4090"` asks for a GPU that need not be here; otherwise the step is
    measured where the model is, at batch sizes that fit with ease. The larger a batch, the more has
    to be computed again: `at_least=0.95` asks for the largest, too, that is trained at 95% of the
    plain step's samples a second or more.

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
        raise TypeError("make_batch must be a function that returns a batch of so many samples")
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise PlanError(f"a share of what? {budget!r} has no meaning here: give bytes, as in 16GiB")
    if at_least is not None and not (isinstance(at_least, int | float) and 0 < at_least <= 1):
        raise PlanError(f"at_least is a share of the plain step's speed, in (0, 1], not {at_least}")
    budget_bytes = parse_bytes(budget)
    if budget_bytes <= 0:
        raise PlanError(f"a budget of {budget!r} holds nothing: give bytes, as in 16GiB")
    tell = progress or (lambda text: None)
    named = None if device is None else _named_gpu(device)

    def at(batch: int) -> Parts:
        return train_step, model, optimizer, make_batch(batch)

    return _Search(at, budget_bytes, named, planner, tell).run(at_least)


def _named_gpu(name: Any) -> Device:
    """The GPU of a name; where the model itself lies is not one."""
    if not isinstance(name, str) or name in ("cpu", "cuda"):
        raise ProfileError(
            f"device={name!r}: give the name of a GPU, which need not be here, as in 'RTX 4090'; "
            "without one, the step is measured where the model is."
        )
    return find_device(name)


class _Look(NamedTuple):
    """A step captured at one batch size."""

    batch: int
    captured: CapturedStep


class _Step:
    """The step at one batch size, in one form, planned for one budget after another.

    Planners know a graph and its costs again, and take less time for its second budget. As sizes
    grow nearly evenly with the batch, another budget stands for another batch size.
    """

    def __init__(
        self, sized: Sized, captured: Captured, make: Planner, bytes_per_sample: Floats
    ) -> None:
        """`sized` is the form that is planned; `bytes_per_sample` is of each of its storages."""
        self.batch, self.form = sized
        self.captured = captured
        self._make = make
        self._bytes_per_sample = bytes_per_sample
        self._costs = captured.costs_of(self.form)

    def plan(self, batch: float | None = None) -> Plan | None:
        """A plan within the budget, or one that stands for another batch; None if there is none."""
        budget_bytes = self.captured.budget_bytes
        if batch is not None:
            budget_bytes = self.fixed_bytes + int(self._growing_bytes * self.batch / batch)
        captured = self.captured._replace(budget_bytes=budget_bytes)
        try:
            return plan_within(self._planned, self.form, captured).plan
        except InfeasibleBudget:
            return None

    def reach(self, plan: Plan) -> float:
        """The largest batch that a plan of this one would fit at."""
        return self.batch * self._growing_bytes / max(plan.peak_bytes - self.fixed_bytes, 1)

    def trace(self, plan: Plan) -> Trace:
        """A plan on paper."""
        return simulate(self.form, self._costs, plan)

    @cached_property
    def least(self) -> Plan:
        """The plan of least peak that the planner knows of."""
        try:
            return self._make(self.form, self._costs, 1)
        except InfeasibleBudget as error:
            return self._make(self.form, self._costs, error.least_peak_bytes)

    @cached_property
    def fixed_bytes(self) -> int:
        """What is there at the least peak whatever the batch."""
        trace = self.trace(self.least)
        there = self._bytes_per_sample[trace.alive_at(trace.peak_position)]
        growing = int(self.batch * there.sum()) + self.captured.extra_bytes_of(self.form)
        if self.form.ops[trace.peak_op].phase is not Phase.OPTIMIZER:
            growing += self._costs.costs[trace.peak_op].workspace_bytes
        return trace.peak_bytes - growing

    @property
    def slack(self) -> float:
        """By what share another batch may be misjudged: allocators round up what grows evenly."""
        trace = self.trace(self.least)
        growing = [i for i in trace.alive_at(trace.peak_position) if self._bytes_per_sample[i]]
        exact = sum(self.form.storages[i].nbytes for i in growing)
        rounded = int(trace.sizes_bytes[growing].sum())
        return _SLACK + (rounded - exact) / max(exact, 1)

    @property
    def holds_gradients(self) -> bool:
        """Whether the least peak would be lower without gradients that wait for the optimizer."""
        trace = self.trace(self.least)
        lower = int((trace.live_bytes - trace.by_role[ROLES.index(Role.GRAD)]).max(initial=0))
        return trace.peak_bytes - lower > _CLOSE * (trace.peak_bytes - self.fixed_bytes)

    @property
    def _growing_bytes(self) -> int:
        return max(self.captured.budget_bytes - self.fixed_bytes, 0)

    def _planned(self, form: StepGraph, costs: Profile, budget_bytes: int) -> Plan:
        """The planner, given the very same costs each time: it knows them again by that."""
        return self._make(form, self._costs, budget_bytes)


class _Search:
    def __init__(
        self,
        at: Callable[[int], Parts],
        budget_bytes: int,
        device: Device | None,
        planner: str,
        tell: Callable[[str], None],
    ) -> None:
        self.at = at
        self.budget_bytes = budget_bytes
        self.device = device
        self.make = find_planner(planner)
        self.tell = tell
        self.costs: tuple[Profile, Profile] | None = None

    def run(self, at_least: float | None) -> LargestBatch:
        looks = [self._look(batch) for batch in SIZES]
        self.growth = _growth(looks)
        if self.device is None:
            looks = self._measured(looks)
        self.recording = looks[-1].captured.recording
        self.tell("looking for the largest batch of the plain step")
        plain = self._largest_plain()
        quick = None
        with collected_later():  # planners make many small objects, and hardly any cycles
            self.tell("looking for the largest batch of a planned step")
            planned = self._largest_planned()
            if plain is not None and (planned is None or planned.batch < plain.batch):
                planned = plain
            if plain is not None and planned is not None and at_least is not None:
                quick = self._quickest(plain, planned, at_least)
            least_bytes = self._light_step(1).least.peak_bytes if planned is None else None
        profile = self._captured(looks[-1].batch).profile
        about = self.budget_bytes, profile.device, profile.method
        return LargestBatch(*about, plain, planned, at_least, quick, least_bytes)

    def _largest_plain(self, share: float = 1.0) -> Fit | None:
        """The largest batch of the plain step that takes no more than a share of the budget."""
        traces: dict[int, Trace] = {}

        def peak_bytes(batch: int) -> int:
            traces[batch] = self._plain_trace(batch)
            return traces[batch].peak_bytes

        most = share * self.budget_bytes
        found = largest_within(peak_bytes, most, start=SIZES[-1], close=_CLOSE)
        return Fit(found, traces[found].peak_bytes, traces[found].step_us) if found else None

    def _largest_planned(self) -> Fit | None:
        """The largest batch that can be planned."""
        batch = self._guess()
        for _ in range(_LOOKS):
            self.step = self._light_step(batch)
            between = self._between()
            if batch / _NEAR <= max(1, between.fits) <= batch * _NEAR:
                break
            batch = max(1, min(MOST, int(between.fits)))
        fails = min(between.fails * (1 + self.step.slack), MOST)
        between = Between(min(between.fits, MOST), fails)
        planned = partial(self._planned_as, is_early=self.is_early)
        return close_in(planned, between, _CLOSE_ENOUGH)

    def _guess(self) -> int:
        """About the largest batch that can be planned, by a planner that takes no time.

        Its plan may show, too, that parameters had better be updated as their gradients come.
        """
        batch, make = 4 * SIZES[-1], find_planner(_GUESSER)
        for _ in range(_GUESSES):
            captured = self._captured(batch)
            sized = Sized(batch, captured.graph)
            step = _Step(sized, captured, make, self.growth.bytes_per_sample)
            batch = max(1, min(MOST, int(step.reach(step.least))))
        self.can_be_early = with_early_updates(self.recording, step.form) is not None
        self.is_early = self.can_be_early and step.holds_gradients
        return batch

    def _light_step(self, batch: int) -> _Step:
        """The step at a batch size, its parameters updated early if that lowers the least peak."""
        step = self._step(batch, is_early=self.is_early)
        if self.can_be_early and not self.is_early and step.holds_gradients:
            self.is_early = True
            step = self._step(batch, is_early=True)
        return step

    def _between(self) -> Between:
        """Where the largest batch lies, as far as the step at hand can stand for others."""

        def can_plan(batch: float) -> bool:
            self.tell(f"looking for plans like that of a batch of {batch:.0f}")
            return self.step.plan(batch) is not None

        known = self.step.reach(self.step.least)
        return descend(can_plan, max(known, 0.5))

    def _quickest(self, plain: Fit, planned: Fit, at_least: float) -> Fit:
        """The largest batch that is trained at a share of the plain step's speed."""
        if planned.samples_per_s >= at_least * plain.samples_per_s:
            return planned
        start = Between(min(2 * plain.batch, (plain.batch * planned.batch) ** 0.5), planned.batch)
        about, fails = quickest(self._about, plain, at_least, start, _ROUGHLY)
        is_near = about.batch * _NEAR >= self.step.batch
        beyond = min(fails * (1 + (self.step.slack if is_near else _CLOSE)), planned.batch)
        between = Between(max(about.batch, beyond / (1 + _CLOSE_ENOUGH) + 1), beyond)
        found, fails = quickest(self._planned, plain, at_least, between, _CLOSE_ENOUGH)
        if fails < round(beyond) or fails >= planned.batch:
            return found
        # Nothing that was planned has failed: the batch that stood for it was misleading.
        can = partial(self._quick, at_least * plain.samples_per_s)
        return climb(can, found, planned.batch, _CLOSE_ENOUGH)

    def _quick(self, samples_per_s: float, batch: int) -> Fit | None:
        """A batch that is planned, if it is trained that fast."""
        found = self._planned(batch)
        return found if found is not None and found.samples_per_s >= samples_per_s else None

    def _about(self, batch: int) -> Fit | None:
        """A batch as if it were planned: slowed down as the step at hand is by such a plan."""
        self.tell(f"looking for plans like that of a batch of {batch}")
        plan = self.step.plan(batch)
        if plan is None:
            return None
        slowdown = self.step.trace(plan).step_us / self.step.captured.profile.step_us
        return Fit(batch, self.budget_bytes, slowdown * self._captured(batch).profile.step_us)

    def _planned(self, batch: int) -> Fit | None:
        """A batch planned at its own size, with early updates where nothing else will do."""
        found = self._planned_as(batch, is_early=False)
        return self._planned_as(batch, is_early=True) if found is None and self.is_early else found

    def _planned_as(self, batch: int, *, is_early: bool) -> Fit | None:
        self.tell(f"planning a batch of {batch}")
        step = self._step(batch, is_early=is_early)
        plan = step.plan()
        return None if plan is None else Fit(batch, plan.peak_bytes, step.trace(plan).step_us)

    def _look(self, batch: int) -> _Look:
        self.tell(f"capturing a step of batch {batch}")
        parts = self.at(batch)
        is_here = any(param.is_cuda for param in parts[1].parameters())
        return _Look(batch, CapturedStep(*parts, as_on_gpu=self.device is not None and not is_here))

    def _measured(self, looks: list[_Look]) -> list[_Look]:
        """Looks at two sizes that fit with ease, and what their ops cost, measured."""
        batch = self._largest_plain(_EASE)
        large = max(_LEAST, batch.batch) if batch else _LEAST
        sizes = (large // 2, large)
        if sizes != tuple(look.batch for look in looks):
            looks = [self._look(size) for size in sizes]
            self.growth = _growth(looks)
        costs = []
        for look in looks:
            self.tell(f"measuring a step of batch {look.batch}")
            made = self.at(look.batch)
            captured = look.captured
            batch_tensors = batch_tree.flatten(made[3]).tensors
            costs.append(
                measured_profile(captured.recording, captured.graph, batch_tensors, captured.device)
            )
            del made, batch_tensors
        self.costs = costs[0], costs[1]
        return looks

    def _step(self, batch: int, *, is_early: bool) -> _Step:
        """The step at a batch size, in the form that `optimize` would plan."""
        captured = self._captured(batch)
        form = improved(self.recording, captured.graph)
        if is_early:
            form = with_early_updates(self.recording, form) or form
        return _Step(Sized(batch, form), captured, self.make, self.growth.bytes_per_sample)

    def _captured(self, batch: int) -> Captured:
        graph = self.growth.at(batch)
        profile = self._profile(graph, batch)
        inputs = _batch_bytes(graph)
        extra_bytes = inputs if profile.allocator == "cuda" else 0  # CUDA graphs have a copy
        return Captured(graph, profile, self.budget_bytes, extra_bytes)

    def _profile(self, graph: StepGraph, batch: int) -> Profile:
        if self.costs is not None:
            return self.growth.costs_at(*self.costs, graph, batch)
        if self.device is not None:
            return analytic_profile(graph, self.device)
        on_gpu = any(storage.device.startswith("cuda") for storage in graph.storages)
        costs = (OpCost(0.0),) * len(graph.ops)  # nothing is measured yet: bytes alone matter
        return Profile("", graph.fingerprint, costs, "cuda" if on_gpu else "exact")

    def _plain_trace(self, batch: int) -> Trace:
        captured = self._captured(batch)
        return simulate(captured.graph, captured.profile)


def _batch_bytes(graph: StepGraph) -> int:
    return sum(storage.nbytes for storage in graph.storages if storage.role is Role.INPUT)


def _growth(looks: Sequence[_Look]) -> Growth:
    small, large = (Sized(look.batch, look.captured.graph) for look in looks)
    if _batch_bytes(small.graph) == _batch_bytes(large.graph):
        raise ProfileError(
            f"the batch takes as many bytes for {small.batch} samples as for {large.batch}: does "
            "what makes it look at the number that it is given?"
        )
    try:
        return Growth(small, large)
    except Uneven as error:
        raise ProfileError(
            f"the largest batch cannot be forecast: {error} "
            f"(looked at {small.batch} and {large.batch})."
        ) from None
