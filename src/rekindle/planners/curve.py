"""The trade-off curve: the time that a planner adds at each budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import simulate
from rekindle.errors import InfeasibleBudget, PlanError
from rekindle.planners.registry import Planner, find_planner


@dataclass(frozen=True, slots=True)
class Curve:
    """A planner's plans, from the largest budget to the smallest, and how long they all took."""

    planner: str
    plans: tuple[Plan, ...]
    seconds: float

    def at(self, budget_bytes: int) -> Plan | None:
        """The cheapest of the plans within a budget; None if there is none."""
        fitting = [plan for plan in self.plans if plan.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda plan: plan.recompute_us, default=None)


def bound_at(curves: Iterable[Curve], budget_bytes: int) -> float | None:
    """The best known bound on the added time at a budget: of plans for as much or more."""
    bounds = [
        plan.bound_us
        for curve in curves
        for plan in curve.plans
        if plan.bound_us is not None and plan.budget_bytes >= budget_bytes
    ]
    return max(bounds, default=None)


def trade_offs(
    graph: StepGraph,
    profile: Profile,
    planners: Sequence[str],
    points: int = 20,
    tell: Callable[[str], None] = lambda planner: None,
) -> list[Curve]:
    """The curves of several planners, at the same budgets and at the least peak of each.

    The budgets are evenly spaced, from the plain step's peak down to the least peak that any of the
    planners reaches. More memory never costs more time: if a smaller budget has led a planner to a
    cheaper plan, that one is used at the larger budget, too. A planner that ignores the budget has
    one point. `tell` is called with the name of the planner that is about to run.
    """
    if points < 2:
        raise PlanError(f"a trade-off curve has at least 2 points, and {points} was asked for.")
    makers = {name: find_planner(name) for name in planners}
    most = simulate(graph, profile).peak_bytes
    least: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for name, make in makers.items():
        tell(name)
        started = perf_counter()
        least[name] = _least_peak(make, graph, profile)
        seconds[name] = perf_counter() - started
    budgets = [int(budget) for budget in np.linspace(min(least.values()), most, points)]
    curves = []
    for name, make in makers.items():
        tell(name)
        started = perf_counter()
        own = [budget for budget in budgets if budget > least[name]]
        plans = _curve(make, graph, profile, [least[name], *own])
        curves.append(Curve(name, plans, seconds[name] + perf_counter() - started))
    return curves


def _curve(
    make: Planner, graph: StepGraph, profile: Profile, budgets: list[int]
) -> tuple[Plan, ...]:
    """The best plans at these ascending budgets, largest first; the smallest is feasible."""
    lowest = make(graph, profile, budgets[0])
    highest = _within(make, graph, profile, budgets[-1])
    if highest is not None and _cost(lowest) == _cost(highest):
        plans = [lowest]
    else:
        between = [(budget, _within(make, graph, profile, budget)) for budget in budgets[1:-1]]
        plans = _monotone([(budgets[0], lowest), *between, (budgets[-1], highest)])
    for plan in plans:
        plan.check(graph)
    return tuple(reversed(plans))


def _least_peak(make: Planner, graph: StepGraph, profile: Profile) -> int:
    """The least peak a planner reaches, as its error says for an infeasible budget."""
    try:
        return make(graph, profile, 1).peak_bytes
    except InfeasibleBudget as error:
        return error.least_peak_bytes


def _within(make: Planner, graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan | None:
    try:
        return make(graph, profile, budget_bytes)
    except InfeasibleBudget:
        return None


def _cost(plan: Plan) -> tuple[int, float]:
    return plan.peak_bytes, plan.recompute_us


def _monotone(found: list[tuple[int, Plan | None]]) -> list[Plan]:
    """The best plan known at each budget; budgets ascend, and the first has a plan.

    A plan for a smaller budget is also one for a larger budget, and a bound for a larger budget
    also holds for a smaller one.
    """
    plans: list[Plan] = []
    for budget_bytes, plan in found:
        known = plans[-1] if plans else plan
        assert known is not None
        if plan is None or plan.recompute_us > known.recompute_us:
            bound_us = None if plan is None else plan.bound_us
            plan = replace(known, budget_bytes=budget_bytes, bound_us=bound_us)
        plans.append(plan)
    bound_us = None
    for index in reversed(range(len(plans))):
        bounds = [bound for bound in (bound_us, plans[index].bound_us) if bound is not None]
        bound_us = max(bounds, default=None)
        plans[index] = replace(plans[index], bound_us=bound_us)
    return plans
