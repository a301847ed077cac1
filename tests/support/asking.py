"""Asks a planner, and takes no for an answer. Import with `from plan.asking import ask`."""

from __future__ import annotations

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.errors import InfeasibleBudget
from rekindle.planners.registry import PLANNERS


def ask(
    planner: str, graph: StepGraph, profile: Profile, budget_bytes: int
) -> Plan | InfeasibleBudget:
    """The plan, or the error that says there is none."""
    try:
        return PLANNERS[planner](graph, profile, budget_bytes)
    except InfeasibleBudget as error:
        return error


def least_peak(planner: str, graph: StepGraph, profile: Profile) -> int:
    """The least peak that the planner says it reaches, when asked for no memory at all."""
    answer = ask(planner, graph, profile, 0)
    assert isinstance(answer, InfeasibleBudget)
    return answer.least_peak_bytes
