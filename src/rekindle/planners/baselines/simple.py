"""The two ends: keep everything, and drop everything that may be dropped."""

from __future__ import annotations

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.planners.finish import finish
from rekindle.planners.lowering import choices, keep_all
from rekindle.planners.problem import problem_of


def plan_none(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
    """Keep every activation, and free what is dead at once."""
    problem = problem_of(graph, profile)
    return finish(problem, keep_all(problem), planner="none", budget_bytes=budget_bytes)


def plan_all(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
    """Drop every activation that may be dropped; compute each again once, when it is first read."""
    problem = problem_of(graph, profile)
    return finish(problem, choices(problem, ()), planner="all", budget_bytes=budget_bytes)
