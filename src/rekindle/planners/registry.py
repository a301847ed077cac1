"""The planners by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.errors import PlanError
from rekindle.planners.auto import plan_auto
from rekindle.planners.baselines.chen import recursive_choices, selective_choices, sqrt_choices
from rekindle.planners.baselines.mincut import plan_mincut
from rekindle.planners.baselines.mutwo import plan_mutwo
from rekindle.planners.exact.ilp import plan_ilp
from rekindle.planners.finish import finish
from rekindle.planners.lowering import Choices, drop_all, keep_all
from rekindle.planners.problem import Problem, problem_of

Planner = Callable[[StepGraph, Profile, int], Plan]


def _plan_choices(
    name: str,
    choose: Callable[[Problem], Choices],
    graph: StepGraph,
    profile: Profile,
    budget_bytes: int,
) -> Plan:
    """The plan of a planner that ignores the budget: it is within it or not."""
    problem = problem_of(graph, profile)
    return finish(problem, choose(problem), planner=name, budget_bytes=budget_bytes)


PLANNERS: dict[str, Planner] = {
    "none": partial(_plan_choices, "none", keep_all),
    "all": partial(_plan_choices, "all", drop_all),
    "chen-sqrt": partial(_plan_choices, "chen-sqrt", sqrt_choices),
    "chen-recursive": partial(_plan_choices, "chen-recursive", recursive_choices),
    "chen-selective": partial(_plan_choices, "chen-selective", selective_choices),
    "mutwo": plan_mutwo,
    "mincut": plan_mincut,
    "ilp": plan_ilp,
    "auto": plan_auto,
}


def find_planner(name: str) -> Planner:
    """The planner of that name."""
    found = PLANNERS.get(name) if isinstance(name, str) else None
    if found is None:
        close = get_close_matches(str(name), PLANNERS, n=1)
        hint = f", did you mean {close[0]!r}?" if close else "."
        raise PlanError(f"no planner named {name!r}{hint} There are {', '.join(PLANNERS)}.")
    return found
