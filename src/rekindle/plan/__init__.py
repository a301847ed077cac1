"""Planners: pure functions (StepGraph, Profile, budget in bytes) -> Plan, each under its name."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.core.cost import Profile
from rekindle.core.ir import StepGraph
from rekindle.core.schedule import Plan
from rekindle.plan.auto import plan_auto
from rekindle.plan.chen import plan_chen_recursive, plan_chen_selective, plan_chen_sqrt
from rekindle.plan.ilp import plan_ilp
from rekindle.plan.mincut import plan_mincut
from rekindle.plan.mutwo import plan_mutwo
from rekindle.plan.simple import plan_all, plan_none

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
