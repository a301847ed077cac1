"""From a captured step to a planned one: profile, decide, and decide again where that failed."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

import torch

from rekindle.captured_step import PlannedStep
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Role, StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import ROLES, simulate
from rekindle.core.rewrite.improve import carry_over
from rekindle.engines.select_engine import EngineMaker
from rekindle.errors import InfeasibleBudget, PlanError
from rekindle.measuring.measure import measured_profile
from rekindle.planners.registry import Planner, find_planner
from rekindle.rewriting.step_forms import improved, with_early_updates
from rekindle.tracing.tape import Recording
from rekindle.units import format_bytes, parse_budget

log = logging.getLogger("rekindle")

_MATTERS = 0.02  # of the peak: gradients that are less are not worth calling the optimizer for
_CALL_US = 50.0  # what a call of the optimizer costs beside its kernels
# How far the allocator may be above the forecast, as a share of the budget. CUDA's hands out blocks
# of up to a mebibyte more than was asked for, as it happens to have them.
_MARGINS = {"exact": 0.0005, "cuda": 0.005}


class Captured(NamedTuple):
    """A captured step that is to be planned: what it costs, and what it and its engine may take.

    `extra_bytes` are what its engine holds beside it.
    """

    graph: StepGraph
    profile: Profile
    budget_bytes: int
    extra_bytes: int

    def costs_of(self, running: StepGraph) -> Profile:
        """What a form of it costs, with what is held beside it."""
        costs = carry_over(self.profile, self.graph, running)
        more = self.extra_bytes_of(running)
        return replace(costs, overhead_bytes=costs.overhead_bytes + more)

    def extra_bytes_of(self, running: StepGraph) -> int:
        """What is held beside a form of it: nothing where updates come early, without graphs."""
        return 0 if running.early_updates else self.extra_bytes


class Arranger:
    """Plans every capture of a step for one budget.

    A profile or a plan that the user gives is of the step captured first; what comes later, a batch
    of another shape for one, is measured and planned anew.
    """

    def __init__(
        self,
        budget: int | str,
        planner: str,
        profile: Profile | None = None,
        plan: Plan | None = None,
    ) -> None:
        self._budget = budget
        self._make = find_planner(planner)
        self._given = profile, plan

    def arrange(
        self,
        recording: Recording,
        graph: StepGraph,
        batch: list[torch.Tensor],
        device: torch.device,
        engines: EngineMaker,
    ) -> PlannedStep:
        """Decide how a captured step is to run, on what these engines make of it.

        Raises InfeasibleBudget where no plan stays within the budget. Parameters are updated as
        their gradients come where that is needed, or saves time; it costs CUDA graphs, so that
        where there are any it has to be needed.
        """
        (profile, plan), self._given = self._given, (None, None)
        if plan is not None:
            return _as_planned(recording, graph, plan, profile, engines.extra_bytes(batch))
        if profile is None:
            profile = measured_profile(recording, graph, batch, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # measuring needs more memory than the step will
        budget_bytes = parse_budget(self._budget, simulate(graph, profile).peak_bytes)
        captured = Captured(graph, profile, budget_bytes, engines.extra_bytes(batch))
        form = improved(recording, graph)
        early = with_early_updates(recording, form)
        try:
            at_end = plan_within(self._make, form, captured)
        except InfeasibleBudget as error:
            others = [graph] if early is None else [early, graph]
            if engines.has_graphs:  # which early updates would cost
                others.reverse()
            return self._first_within(others, captured, error)
        if early is None or engines.has_graphs or not _holds_gradients(at_end):
            return at_end
        try:
            return min(at_end, plan_within(self._make, early, captured), key=_added_us)
        except InfeasibleBudget:  # not every planner finds a plan wherever there is one
            return at_end

    def again(self, before: PlannedStep, peak_bytes: int) -> PlannedStep | None:
        """Another plan where a step was found to need more than its budget; None if there is none.

        What the step took beyond the forecast is taken to be there all the time.
        """
        if before.profile is None:
            return None
        more = peak_bytes - before.plan.peak_bytes
        profile = replace(before.profile, overhead_bytes=before.profile.overhead_bytes + more)
        try:
            plan = self._make(before.graph, profile, before.budget_bytes)
        except InfeasibleBudget as error:
            log.warning("there is no other plan with room for that: %s", error)
            return None
        plan.check(before.graph)
        return before._replace(plan=plan, profile=profile)

    def _first_within(
        self, forms: list[StepGraph], captured: Captured, error: InfeasibleBudget
    ) -> PlannedStep:
        """A plan of the first form of a step that has one; else the error that came closest."""
        for form in forms:
            try:
                return plan_within(self._make, form, captured)
            except InfeasibleBudget as other:
                error = min(error, other, key=lambda each: each.least_peak_bytes)
        raise error


def plan_within(make: Planner, running: StepGraph, captured: Captured) -> PlannedStep:
    """A plan that leaves a margin below the budget, unless only the whole budget will do.

    `running` is the form of the captured step that is planned.
    """
    profile, budget_bytes = captured.profile, captured.budget_bytes
    costs = captured.costs_of(running)
    margin = int(budget_bytes * _MARGINS.get(profile.allocator, 0.0))
    try:
        plan = make(running, costs, budget_bytes - margin)
    except PlanError as error:
        least = getattr(error, "least_peak_bytes", 0)
        if least > budget_bytes:
            raise InfeasibleBudget(budget_bytes=budget_bytes, least_peak_bytes=least) from None
        plan = make(running, costs, budget_bytes)
    plan.check(running)
    n_updates = len(running.early_updates)
    log.info(
        "planned for %s: a peak of %s, %.1f ms of recomputation%s",
        format_bytes(budget_bytes),
        format_bytes(plan.peak_bytes),
        plan.recompute_us / 1e3,
        f", updates as gradients come, in {n_updates} calls" if n_updates else "",
    )
    return PlannedStep(plan, running, costs, profile, budget_bytes)


def _as_planned(
    recording: Recording,
    graph: StepGraph,
    plan: Plan,
    profile: Profile | None,
    extra_bytes: int,
) -> PlannedStep:
    """A plan made before: of the step as it was captured, or as it was improved then."""
    running = graph_of(plan, recording, graph) or graph
    plan.check(running)
    costs = None
    if profile is not None:
        costs = Captured(graph, profile, plan.budget_bytes, extra_bytes).costs_of(running)
    return PlannedStep(plan, running, costs, profile, plan.budget_bytes)


def graph_of(plan: Plan, recording: Recording, graph: StepGraph) -> StepGraph | None:
    """The form of a captured step that a plan is of; None if it is of another step."""
    if plan.fingerprint == graph.fingerprint:
        return graph
    form = improved(recording, graph)
    if plan.fingerprint == form.fingerprint:
        return form
    early = with_early_updates(recording, form)
    return early if early is not None and plan.fingerprint == early.fingerprint else None


def _holds_gradients(arranged: PlannedStep) -> bool:
    """Whether weights' gradients matter for the peak, so that updating early could help."""
    assert arranged.profile is not None
    trace = simulate(arranged.graph, arranged.profile, arranged.plan)
    is_high = trace.live_bytes >= (1 - _MATTERS) * trace.peak_bytes
    grads = trace.by_role[ROLES.index(Role.GRAD)]
    return bool(grads[is_high].max(initial=0) > _MATTERS * trace.peak_bytes)


def _added_us(arranged: PlannedStep) -> float:
    """The time that a plan adds, by recomputation and by calls of the optimizer."""
    n_calls = len(arranged.graph.early_updates)
    return arranged.plan.recompute_us + n_calls * _CALL_US
