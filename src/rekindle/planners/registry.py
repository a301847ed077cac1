"""The planners by name, and the two trivial ones: keep everything, drop everything."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.errors import PlanError
from rekindle.planners.auto import plan_auto
from rekindle.planners.baselines.chen import (
    plan_chen_recursive,
    plan_chen_selective,
    plan_chen_sqrt,
)
from rekindle.planners.baselines.mincut import plan_mincut
from rekindle.planners.baselines.mutwo import plan_mutwo
from rekindle.planners.exact.ilp import plan_ilp
from rekindle.planners.finish import finish
from rekindle.planners.lowering import choices, keep_all
from rekindle.planners.problem import problem_of

Planner = Callable[[StepGraph, Profile, int], Plan]


def plan_none(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
    """Keep every activation, and free dead storages at once."""
    problem = problem_of(graph, profile)
    return finish(problem, keep_all(problem), planner="none", budget_bytes=budget_bytes)


def plan_all(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
    """Drop every activation that may be dropped; recompute each once, when it is first read."""
    problem = problem_of(graph, profile)
    return finish(problem, choices(problem, ()), planner="all", budget_bytes=budget_bytes)


PLANNERS: dict[str, Planner] = {
    "none": plan_none,
    "all": plan_all,
    "chen-sqrt": plan_chen_sqrt,
    "chen-recursive": plan_chen_recursive,
    "chen-selective": plan_chen_selective,
    "mutwo": plan_mutwo,
    "mincut": plan_mincut,
    "ilp": plan_ilp,
    "auto": plan_auto,
}


def find_planner(name: str) -> Planner:
    """The planner of that name.

    >>> find_planner("nine")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rekindle.errors.PlanError: no planner named 'nine', did you mean 'none'? There are none, all...
    """
    found = PLANNERS.get(name) if isinstance(name, str) else None
    if found is None:
        close = get_close_matches(str(name), PLANNERS, n=1)
        hint = f", did you mean {close[0]!r}?" if close else "."
        raise PlanError(f"no planner named {name!r}{hint} There are {', '.join(PLANNERS)}.")
    return found
