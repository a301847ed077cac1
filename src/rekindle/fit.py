"""The largest batch that a budget holds, found on paper: nothing runs out of memory on the way.

A step is captured at two batch sizes, on fake tensors; what it is at any other follows, op by op
(`core.scaling`). Costs are measured where the model is, at two sizes that fit with ease; for a GPU
by name they come from FLOPs and bytes. Then batch sizes are tried on paper, plainly and planned,
until the largest is known to half a percent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rekindle.arrange import Captured, measured_profile, plan_within
from rekindle.core.cost import OpCost, Profile
from rekindle.core.devices import Device, find_device
from rekindle.core.fit import Fit, LargestBatch
from rekindle.core.ir import Role, StepGraph
from rekindle.core.roofline import analytic_profile
from rekindle.core.scaling import Growth, Sized, Uneven
from rekindle.core.simulate import simulate
from rekindle.errors import InfeasibleBudget, PlanError, ProfileError
from rekindle.fx import tree
from rekindle.fx.forms import improved, with_early_updates
from rekindle.fx.step import Arrangement, CapturedStep
from rekindle.plan.named import find_planner
from rekindle.units import parse_budget

log = logging.getLogger("rekindle")

Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Any]

_SIZES = (8, 16)  # where a step is looked at first
_EASE = 0.85  # of the budget: what a step may take that is measured
_CLOSE = 0.005  # how close to the largest batch an answer is
_CLOSE_ENOUGH = 0.02  # the same where each try takes a plan
_MOST = 1 << 24


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

    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise PlanError(f"a share of what? {budget!r} has no meaning here: give bytes, as in 16GiB")
    if at_least is not None and not 0 < at_least <= 1:
        raise PlanError(f"at_least is a share of the plain step's speed, in (0, 1], not {at_least}")
    budget_bytes = parse_budget(budget, 0)
    tell = progress or (lambda text: None)
    named = None if device is None else find_device(device)

    def at(batch: int) -> Parts:
        return train_step, model, optimizer, make_batch(batch)

    return _Search(at, budget_bytes, named, planner, tell).run(at_least)


class _Look(NamedTuple):
    """A step at one batch size: captured, and in the forms that are planned."""

    batch: int
    captured: CapturedStep
    forms: list[StepGraph]


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
        looks = [self._look(batch) for batch in _SIZES]
        growth = _growth([(look.batch, look.captured.graph) for look in looks])
        if self.device is None:
            looks, growth = self._measured(looks, growth)
        self.growth = growth
        self.forms = _forms(looks)
        start = looks[-1].batch
        self.tell("looking for the largest batch of the plain step")
        plain = _largest(self._plainly, start)
        self.tell("looking for the largest batch of a planned step")
        planned = self._largest_planned(start)
        if plain is not None and (planned is None or planned.batch < plain.batch):
            planned = plain
        quick = None
        if plain is not None and planned is not None and at_least is not None:
            quick = self._quickest(plain, planned, at_least)
        profile = self._profile(self.growth.at(start), start)
        return LargestBatch(
            self.budget_bytes, profile.device, profile.method, plain, planned, at_least, quick
        )

    def _largest_planned(self, start: int) -> Fit | None:
        """The largest batch that can be planned: where the least peak there is meets the budget.

        That grows nearly evenly, so that few batches need be looked at: each takes seconds.
        """
        graph, looked_at = self.growth.at(start), 4 * start
        roles = (Role.PARAM, Role.BUFFER, Role.OPT_STATE)
        always = sum(storage.nbytes for storage in graph.storages if storage.role in roles)
        points = [(0, always), (looked_at, self._least_peak(looked_at))]
        tried = _meets(points, self.budget_bytes)
        found = self._planned(tried)
        while found is None and tried > 1:
            tried = min(tried - 1, int(tried * (1 - _CLOSE_ENOUGH)))
            found = self._planned(tried)
        return None if found is None else self._further(found)

    def _further(self, best: Fit) -> Fit:
        """The largest batch from one that fits on: planners find more than they have said."""
        stride, high = _CLOSE_ENOUGH, None
        while high is None or high - best.batch > max(1, int(best.batch * _CLOSE_ENOUGH)):
            tried = (best.batch + high) // 2 if high else int(best.batch * (1 + stride)) + 1
            self.tell(f"planning a batch of {tried}")
            found = self._planned(tried)
            if found is None:
                high = tried
            else:
                best, stride = found, 2 * stride
        return best

    def _quickest(self, plain: Fit, planned: Fit, at_least: float) -> Fit:
        """The largest batch that is trained at a share of the plain step's speed."""
        wanted = at_least * plain.samples_per_s
        best, low, high = plain, plain.batch, planned.batch
        if planned.samples_per_s >= wanted:
            return planned
        while high - low > max(1, int(low * _CLOSE_ENOUGH)):
            middle = int(math.sqrt(low * high))
            middle = min(max(middle, low + 1), high - 1)
            self.tell(f"planning a batch of {middle}")
            found = self._planned(middle)
            if found is not None and found.samples_per_s >= wanted:
                best, low = found, middle
            else:
                high = middle
        return best

    def _look(self, batch: int) -> _Look:
        self.tell(f"capturing a step of batch {batch}")
        parts = self.at(batch)
        is_here = any(param.is_cuda for param in parts[1].parameters())
        captured = CapturedStep(*parts, as_on_gpu=self.device is not None and not is_here)
        form = improved(captured.recording, captured.graph)
        early = with_early_updates(captured.recording, form)
        return _Look(batch, captured, [form] if early is None else [form, early])

    def _measured(self, looks: list[_Look], growth: Growth) -> tuple[list[_Look], Growth]:
        """Looks at two sizes that fit with ease, and what their ops cost, measured."""
        self.growth = growth
        batch = _largest(lambda n: self._plainly(n, _EASE), looks[-1].batch)
        large = max(2, batch.batch) if batch else 2
        sizes = (large // 2, large)
        if sizes != tuple(look.batch for look in looks):
            looks = [self._look(size) for size in sizes]
            growth = _growth([(look.batch, look.captured.graph) for look in looks])
        costs = []
        for look in looks:
            self.tell(f"measuring a step of batch {look.batch}")
            made = self.at(look.batch)
            captured = look.captured
            batch_tensors = tree.flatten(made[3]).tensors
            costs.append(
                measured_profile(captured.recording, captured.graph, batch_tensors, captured.device)
            )
            del made, batch_tensors
        self.costs = costs[0], costs[1]
        return looks, growth

    def _profile(self, graph: StepGraph, batch: int) -> Profile:
        if self.costs is not None:
            return self.growth.costs_at(*self.costs, graph, batch)
        if self.device is not None:
            return analytic_profile(graph, self.device)
        on_gpu = any(storage.device.startswith("cuda") for storage in graph.storages)
        costs = (OpCost(0.0),) * len(graph.ops)  # nothing is measured yet: bytes alone matter
        return Profile("", graph.fingerprint, costs, "cuda" if on_gpu else "exact")

    def _plainly(self, batch: int, share: float = 1.0) -> Fit | None:
        graph = self.growth.at(batch)
        trace = simulate(graph, self._profile(graph, batch))
        fits = trace.peak_bytes <= share * self.budget_bytes
        return Fit(batch, trace.peak_bytes, trace.step_us) if fits else None

    def _planned(self, batch: int) -> Fit | None:
        found = self._arranged(batch, self.budget_bytes)
        if isinstance(found, InfeasibleBudget):
            return None
        assert found.profile is not None
        trace = simulate(found.graph, found.profile, found.plan)
        return Fit(batch, found.plan.peak_bytes, trace.step_us)

    def _least_peak(self, batch: int) -> int:
        found = self._arranged(batch, 1)
        assert isinstance(found, InfeasibleBudget)
        return found.least_peak_bytes

    def _arranged(self, batch: int, budget_bytes: int) -> Arrangement | InfeasibleBudget:
        """A plan of the first form of the step that has one, or the closest that comes to it."""
        graph = self.growth.at(batch)
        profile = self._profile(graph, batch)
        inputs = sum(s.nbytes for s in graph.storages if s.role is Role.INPUT)
        extra_bytes = inputs if profile.allocator == "cuda" else 0  # CUDA graphs have a copy
        captured = Captured(graph, profile, budget_bytes, extra_bytes)
        closest: InfeasibleBudget | None = None
        for form in self.forms:
            try:
                return plan_within(self.make, form.at(batch), captured)
            except InfeasibleBudget as error:
                if closest is None or error.least_peak_bytes < closest.least_peak_bytes:
                    closest = error
        assert closest is not None
        return closest


def _growth(looks: Sequence[tuple[int, StepGraph]]) -> Growth:
    (small, a), (large, b) = looks
    try:
        return Growth(Sized(small, a), Sized(large, b))
    except Uneven as error:
        raise ProfileError(
            f"the largest batch cannot be forecast: {error} (looked at {small} and {large})."
        ) from None


def _forms(looks: list[_Look]) -> list[Growth]:
    """The forms of the step that are planned; as it was captured, where they do not grow evenly."""
    pairs = zip(looks[0].forms, looks[1].forms, strict=False)
    found = []
    for small, large in pairs:
        try:
            found.append(Growth(Sized(looks[0].batch, small), Sized(looks[1].batch, large)))
        except Uneven as error:
            log.debug("a form of the step is left out: %s", error)
    return found or [_growth([(look.batch, look.captured.graph) for look in looks])]


def _meets(points: Sequence[tuple[int, int]], budget_bytes: int) -> int:
    """The batch at which a peak that grows evenly meets the budget."""
    (a, low), (b, high) = points
    if high <= low:
        return max(a, b)
    return max(1, min(_MOST, a + (budget_bytes - low) * (b - a) // (high - low)))


def _largest(fits: Callable[[int], Fit | None], start: int) -> Fit | None:
    """The largest batch that fits, to half a percent; None if there is none."""
    best, low, high = fits(1), 1, max(start, 2)
    if best is None:
        return None
    while low < _MOST and (found := fits(high)) is not None:
        best, low, high = found, high, 2 * high
    while high - low > max(1, int(low * _CLOSE)):
        middle = (low + high) // 2
        found = fits(middle)
        if found is None:
            high = middle
        else:
            best, low = found, middle
    return best
