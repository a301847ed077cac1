"""The pipeline: from a user's training step to an engine that runs it within a budget.

`prepare_step` has all stages in a row. Each is a call with a typed result; no stage starts another.
The margin below the budget, the choice of the step's form, and replanning after an overshoot are
one function each: `plan_within`, `choose_form` and `replan`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Role, StepGraph
from rekindle.core.graph.liveness import analyze
from rekindle.core.graph.schedule import Plan, schedule_of
from rekindle.core.graph.simulate import ROLES, simulate
from rekindle.core.rewrite.improve import carry_over
from rekindle.core.uncopyable import Uncopyable
from rekindle.engines.engine import Engine
from rekindle.engines.process_settings import expandable_segments_for
from rekindle.engines.program import Program
from rekindle.engines.select_engine import EngineFactory
from rekindle.errors import InfeasibleBudget, PlanError
from rekindle.measuring.measure import repeatable_profile
from rekindle.measuring.timing import report_peak
from rekindle.planners.registry import Planner, find_planner
from rekindle.rewriting.apply_schedule import rewrite
from rekindle.rewriting.step_forms import improved, with_early_updates
from rekindle.rewriting.verify import check_rewritten
from rekindle.tracing import batch_tree
from rekindle.tracing.guard import Guard
from rekindle.tracing.lift import lift
from rekindle.tracing.tape import Recording
from rekindle.tracing.trace import record
from rekindle.tracing.undo import uninterrupted
from rekindle.units import format_bytes, parse_budget

log = logging.getLogger("rekindle")

# Gradients below this share of the peak do not justify further calls of the optimizer.
GRADIENTS_OF_PEAK_RATIO = 0.02
OPTIMIZER_CALL_US = 50.0  # host time of one call of the optimizer, without its kernels
# How far allocations may exceed the forecast, as a share of the budget, by allocator: CUDA's may
# hand out a cached block of up to a mebibyte more than was requested.
MARGIN_RATIOS = {"exact": 0.0005, "cuda": 0.005}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The budget and planner that a user asks for, with a profile or plan made before, if any.

    A profile or plan belongs to the first capture; later ones, for batches of other shapes, are
    measured and planned: see `without_results`.
    """

    budget: int | str
    planner: str = "auto"
    profile: Profile | None = None
    plan: Plan | None = None

    def without_results(self) -> PlanRequest:
        """The same request without profile and plan."""
        return replace(self, profile=None, plan=None)


class CapturedCosts(NamedTuple):
    """A captured step's graph and profile, its budget, and the bytes that its engine holds."""

    graph: StepGraph
    profile: Profile
    budget_bytes: int
    engine_bytes: int

    def costs_of(self, form: StepGraph) -> Profile:
        """The profile of a form of the step, including the bytes that its engine holds."""
        costs = carry_over(self.profile, self.graph, form)
        held_bytes = self.engine_bytes_of(form)
        return replace(costs, overhead_bytes=costs.overhead_bytes + held_bytes)

    def engine_bytes_of(self, form: StepGraph) -> int:
        """The bytes that a form's engine holds: early updates exclude graphs and their copies."""
        return 0 if form.early_updates else self.engine_bytes


class PlannedStep(NamedTuple):
    """A captured step's plan, and the form of the step (`graph`, `profile`) that was planned.

    `captured_profile` is of the graph as captured. A plan from a file may come without profiles.
    """

    plan: Plan
    graph: StepGraph
    profile: Profile | None
    captured_profile: Profile | None
    budget_bytes: int


@dataclass(eq=False)
class Variant(Uncopyable):
    """One capture, ready to run: valid for one batch signature and one state of the user's objects.

    `planned` and `engine` change when the step is replanned.
    """

    recording: Recording
    graph: StepGraph
    device: torch.device
    engine: Engine
    guard: Guard
    planned: PlannedStep | None = None
    is_held: bool = False  # a step was measured, and the plan is final
    is_replanned: bool = False


def prepare_step(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    engines: EngineFactory,
    request: PlanRequest | None = None,
    *,
    improves: bool = False,
    as_on_gpu: bool = False,
    is_first: bool = True,
) -> Variant:
    """All stages, from the user's function to an engine that runs it.

    Without a request nothing is dropped: the step runs as it was captured, or, if it `improves`,
    with small ops batched and results written in place. The first time, the step is traced twice
    and refused if it differs. Raises InfeasibleBudget if no plan stays within the budget.
    """
    device = device_of(model)
    tensors = batch_tree.flatten(batch).tensors

    # tracing/: the user's function runs once on fake tensors, and every op is recorded.
    recording = record(train_step, model, optimizer, batch, as_on_gpu=as_on_gpu, twice=is_first)

    # engines/inductor/, if asked for: groups of small ops become one compiled op each.
    recording = engines.prepare(recording)

    # tracing/lift: the step as data. Nothing from here to the schedule knows torch.
    graph = lift(recording)

    planned = None
    if request is not None and request.plan is not None:
        planned = _given_plan(request, recording, graph, engines.extra_bytes(tensors))
    elif request is not None:
        # measuring/: the time and workspace of every op.
        profile = repeatable_profile(recording, graph, tensors, device, request.profile)
        if device.type == "cuda" and request.profile is None:
            torch.cuda.empty_cache()  # measuring needs more memory than the step will

        # core/rewrite/, planners/: a form of the step, and a checked plan of it.
        budget_bytes = parse_budget(request.budget, simulate(graph, profile).peak_bytes)
        captured = CapturedCosts(graph, profile, budget_bytes, engines.extra_bytes(tensors))
        planner = find_planner(request.planner)
        planned = choose_form(recording, captured, planner, has_graphs=engines.has_graphs)

    # rewriting/, engines/: the plan's schedule written into the recording, proven, and run.
    if planned is not None or improves:
        engine = build_engine(recording, graph, engines, planned, device)
    else:
        optimizer_bytes = analyze(graph).optimizer_bytes()
        engine = engines.build(Program(recording, None, optimizer_bytes), graph)
    return Variant(recording, graph, device, engine, Guard(recording), planned)


def choose_form(
    recording: Recording, captured: CapturedCosts, planner: Planner, *, has_graphs: bool
) -> PlannedStep:
    """Plan the improved form of a step, the one with early updates, or the one as captured.

    Early updates free gradients sooner. They exclude CUDA graphs: where there are graphs, early
    updates are taken only if nothing else fits; elsewhere also if they save time.
    """
    form = improved(recording, captured.graph)
    early = with_early_updates(recording, form)
    try:
        late = plan_within(planner, form, captured)
    except InfeasibleBudget as error:
        others = [captured.graph] if early is None else [early, captured.graph]
        if has_graphs:
            others.reverse()
        for other in others:
            try:
                return plan_within(planner, other, captured)
            except InfeasibleBudget as failed:
                error = min(error, failed, key=lambda each: each.least_peak_bytes)
            except PlanError as failed:  # the planner cannot plan this form
                log.info("a form of the step cannot be planned: %s", failed)
        raise error from None
    if early is None or has_graphs or not _gradients_matter(late):
        return late
    try:
        return min(late, plan_within(planner, early, captured), key=_added_us)
    except PlanError:  # planners are heuristics: one form may be planned, the other not
        return late


def plan_within(planner: Planner, form: StepGraph, captured: CapturedCosts) -> PlannedStep:
    """Plan one form of a step with a margin below the budget; without, if only that fits."""
    profile, budget_bytes = captured.profile, captured.budget_bytes
    costs = captured.costs_of(form)
    margin_bytes = int(budget_bytes * MARGIN_RATIOS.get(profile.allocator, 0.0))
    try:
        plan = planner(form, costs, budget_bytes - margin_bytes)
    except PlanError as error:
        least = getattr(error, "least_peak_bytes", 0)
        if least > budget_bytes:
            raise InfeasibleBudget(budget_bytes=budget_bytes, least_peak_bytes=least) from None
        plan = planner(form, costs, budget_bytes)
    plan.check(form)
    n_updates = len(form.early_updates)
    log.info(
        "planned for %s: a peak of %s, %.1f ms of recomputation%s",
        format_bytes(budget_bytes),
        format_bytes(plan.peak_bytes),
        plan.recompute_us / 1e3,
        f", {n_updates} early calls of the optimizer" if n_updates else "",
    )
    return PlannedStep(plan, form, costs, profile, budget_bytes)


def replan(variant: Variant, peak_bytes: int, engines: EngineFactory, request: PlanRequest) -> bool:
    """Plan a variant once more after a step exceeded its budget; True if there is a new plan.

    The bytes beyond the forecast are assumed to be allocated throughout the step.
    """
    planned = variant.planned
    assert planned is not None
    over_bytes = peak_bytes - planned.budget_bytes
    if over_bytes <= 0:
        return False
    report_peak(peak_bytes, planned.plan.peak_bytes, planned.budget_bytes)
    if planned.profile is None or variant.is_replanned:
        return False
    unknown_bytes = peak_bytes - planned.plan.peak_bytes
    overhead_bytes = planned.profile.overhead_bytes + unknown_bytes
    profile = replace(planned.profile, overhead_bytes=overhead_bytes)
    try:
        plan = find_planner(request.planner)(planned.graph, profile, planned.budget_bytes)
    except PlanError as error:
        log.warning("no plan leaves room for that: %s", error)
        return False
    plan.check(planned.graph)
    log.warning("planned again, with %s left free", format_bytes(unknown_bytes))
    new = planned._replace(plan=plan, profile=profile)
    engine = build_engine(variant.recording, variant.graph, engines, new, variant.device)
    with uninterrupted():  # the plan is the one that runs
        variant.planned, variant.engine, variant.is_replanned = new, engine, True
    return True


def build_engine(
    recording: Recording,
    graph: StepGraph,
    engines: EngineFactory,
    planned: PlannedStep | None,
    device: torch.device,
) -> Engine:
    """Write a schedule into the recording, check the result, and build the engine that runs it.

    `graph` is as captured. Without a plan, the schedule is the one of its improved form.
    """
    plan, profile = (planned.plan, planned.profile) if planned else (None, None)
    form = planned.graph if planned else improved(recording, graph)
    schedule = plan.schedule if plan else tuple(schedule_of(form, None))
    rewritten = rewrite(recording, form, schedule)
    check_rewritten(recording, form, rewritten, schedule)
    if planned and plan:
        segments = expandable_segments_for(plan.peak_bytes, device)
        program = Program(recording, rewritten, _optimizer_bytes(planned), segments)
    else:
        program = Program(recording, rewritten, analyze(graph).optimizer_bytes())
    return engines.build(program, form, plan, profile)


def _given_plan(
    request: PlanRequest, recording: Recording, graph: StepGraph, engine_bytes: int
) -> PlannedStep:
    """A plan made before, of the step as it was captured or of one of its forms."""
    plan, profile = request.plan, request.profile
    assert plan is not None
    form = form_of(plan, recording, graph) or graph
    plan.check(form)
    costs = None
    if profile is not None:
        costs = CapturedCosts(graph, profile, plan.budget_bytes, engine_bytes).costs_of(form)
    return PlannedStep(plan, form, costs, profile, plan.budget_bytes)


def form_of(plan: Plan, recording: Recording, graph: StepGraph) -> StepGraph | None:
    """The form of a captured step that a plan was made for; None if it is of another step."""
    if plan.fingerprint == graph.fingerprint:
        return graph
    form = improved(recording, graph)
    if plan.fingerprint == form.fingerprint:
        return form
    early = with_early_updates(recording, form)
    return early if early is not None and plan.fingerprint == early.fingerprint else None


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters."""
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def _gradients_matter(planned: PlannedStep) -> bool:
    """True if weight gradients are a notable part of the peak, so that early updates may help."""
    assert planned.profile is not None
    trace = simulate(planned.graph, planned.profile, planned.plan)
    near_peak = trace.live_bytes >= (1 - GRADIENTS_OF_PEAK_RATIO) * trace.peak_bytes
    gradient_bytes = trace.by_role[ROLES.index(Role.GRAD)][near_peak].max(initial=0)
    return bool(gradient_bytes > GRADIENTS_OF_PEAK_RATIO * trace.peak_bytes)


def _added_us(planned: PlannedStep) -> float:
    """The time that a plan adds: recomputation, and further calls of the optimizer."""
    return planned.plan.recompute_us + len(planned.graph.early_updates) * OPTIMIZER_CALL_US


def _optimizer_bytes(planned: PlannedStep) -> list[int]:
    """The sizes of what a planned step allocates from its first update on."""
    plan, form, profile, *_ = planned
    updates = form.early_updates
    if profile is None or not updates:
        return analyze(form).optimizer_bytes()
    trace = simulate(form, profile, plan)
    first = int(np.argmax(trace.ops == updates[0]))
    more = trace.live_bytes[first:].max() - trace.live_bytes[first]
    return [int(more) + int(profile.workspaces_bytes[updates[0]])]
