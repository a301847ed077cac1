"""The planners by name."""

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
from rekindle.planners.baselines.simple import plan_all, plan_none
from rekindle.planners.exact.ilp import plan_ilp

Planner = Callable[[StepGraph, Profile, int], Plan]

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
