"""The last step of every planner: schedule, cost, and a reason for every decision."""

from __future__ import annotations

import numpy as np

from rekindle.core.graph.dataflow import dataflow
from rekindle.core.graph.schedule import Compute, Decision, Plan
from rekindle.errors import InfeasibleBudget
from rekindle.planners.lowering import Choices, Lowered, lower, to_schedule
from rekindle.planners.problem import Problem
from rekindle.units import format_bytes, format_us


def finish(problem: Problem, chosen: Choices, *, planner: str, budget_bytes: int) -> Plan:
    """The plan of these choices; raises InfeasibleBudget if it needs more than the budget."""
    lowered = lower(problem, chosen)
    if lowered.peak_bytes > budget_bytes:
        raise InfeasibleBudget(budget_bytes=budget_bytes, least_peak_bytes=lowered.peak_bytes)
    return write_up(lowered, chosen.keep, planner=planner, budget_bytes=budget_bytes)


def write_up(
    lowered: Lowered,
    keep: list[bool],
    *,
    planner: str,
    budget_bytes: int,
    bound_us: float | None = None,
) -> Plan:
    """A lowered plan with its schedule and decisions; `keep` are the kept cells.

    The added time is that of the schedule, including recomputed views, if they take any.
    """
    problem, schedule = lowered.problem, to_schedule(lowered)
    recomputed = [step.op for step in schedule if isinstance(step, Compute) and step.copy]
    return Plan(
        planner=planner,
        fingerprint=problem.graph.fingerprint,
        budget_bytes=budget_bytes,
        schedule=schedule,
        decisions=tuple(_decisions(problem, keep, lowered)),
        peak_bytes=lowered.peak_bytes,
        recompute_us=float(problem.profile.copy_times_us[recomputed].sum()),
        bound_us=bound_us,
    )


def _decisions(problem: Problem, keep: list[bool], lowered: Lowered) -> list[Decision]:
    added_us = _added_us(problem, keep, lowered)
    before = _computed_before(problem, lowered)
    return [
        _kept(problem, cell)
        if keep[cell]
        else _dropped(problem, cell, added_us.get(cell, 0.0), before[cell])
        for cell in problem.activations
    ]


def _kept(problem: Problem, cell: int) -> Decision:
    op = problem.writer[cell]
    refusal = dataflow(problem.graph).refusals[op]
    if problem.must_keep[cell]:
        why = (
            f"cannot be computed again: {problem.graph.ops[op].name} {refusal}"
            if refusal
            else "cannot be computed again: what it is computed from is gone"
        )
    elif not problem.bytes[cell]:
        why = "takes no memory of the device"
    else:
        us, nbytes = problem.times[op], problem.bytes[cell]
        why = (
            f"its {format_bytes(nbytes)} would take {format_us(us)} or more to compute again, "
            "and the budget has room for it"
        )
    return Decision(problem.storage[cell], True, 0, 0.0, why)


def _dropped(problem: Problem, cell: int, added_us: float, before: list[int]) -> Decision:
    """`before` are the ops right before which the cell is recomputed."""
    earlier = [op for op in problem.needs[cell] if op < before[0]]
    last_use = earlier[-1] if earlier else problem.last_use[cell]
    starts, name = problem.profile.starts_us, problem.graph.ops[before[0]].name
    idle = max(float(starts[before[0]] - starts[last_use + 1]), 0.0)
    why = f"idle for {format_us(idle)}; computed again just before {name}"
    if before[0] in problem.needs[cell]:
        why += " reads it"
    if len(before) > 1:
        why += f", {len(before)} times in all"
    return Decision(problem.storage[cell], False, problem.bytes[cell], added_us, why)


def _computed_before(problem: Problem, lowered: Lowered) -> dict[int, list[int]]:
    """For each recomputed cell: the ops right before which it is recomputed."""
    before: dict[int, list[int]] = {}
    for position in np.flatnonzero(lowered.copies):
        for cell in problem.writes[lowered.ops[position]]:
            before.setdefault(cell, []).append(int(lowered.anchor[position]))
    return before


def _added_us(problem: Problem, keep: list[bool], lowered: Lowered) -> dict[int, float]:
    """The recomputation time by the dropped activation it is spent on.

    An op's time is attributed to the largest dropped activation it computes; if it computes none,
    to the one that its results lead to.
    """
    added: dict[int, float] = {}
    positions = [int(p) for p in (lowered.copies > 0).nonzero()[0]]
    owner_of: dict[int, int] = {}  # by cell: the activation that its next reader leads to
    for position in reversed(positions):
        op = int(lowered.ops[position])
        own = [c for c in problem.writes[op] if problem.needs[c] and not keep[c]]
        passed = [owner_of[c] for c in problem.writes[op] if c in owner_of]
        if not own and not passed:
            continue
        owner = max(own, key=lambda c: problem.bytes[c]) if own else passed[0]
        added[owner] = added.get(owner, 0.0) + problem.times[op]
        owner_of.update(dict.fromkeys(problem.reads[op], owner))
    return added
