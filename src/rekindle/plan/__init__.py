"""Planners: pure functions (StepGraph, Profile, budget in bytes) -> Plan, each under its name."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.core.cost import Profile
from rekindle.core.ir import StepGraph
from rekindle.core.schedule import Plan
from rekindle.plan.simple import plan_all, plan_none

Planner = Callable[[StepGraph, Profile, int], Plan]

PLANNERS: dict[str, Planner] = {
    "none": plan_none,
    "all": plan_all,
}
