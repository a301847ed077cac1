"""Asks a planner for a plan, or for the error that says there is none."""

from __future__ import annotations

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.errors import InfeasibleBudget
from rekindle.planners.registry import PLANNERS, Planner


def ask(
    planner: str | Planner, graph: StepGraph, profile: Profile, budget_bytes: int
) -> Plan | InfeasibleBudget:
    """The plan, or the error that says there is none."""
    make = PLANNERS[planner] if isinstance(planner, str) else planner
    try:
        return make(graph, profile, budget_bytes)
    except InfeasibleBudget as error:
        return error


def least_peak(planner: str | Planner, graph: StepGraph, profile: Profile) -> int:
    """The least peak that the planner says it reaches, when asked for a budget of 0."""
    answer = ask(planner, graph, profile, 0)
    assert isinstance(answer, InfeasibleBudget)
    return answer.least_peak_bytes
