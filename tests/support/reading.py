"""Reads what a plan does. Import with `from plan.reading import recomputed`."""

from __future__ import annotations

from rekindle.core.graph.graph import Phase, StepGraph
from rekindle.core.graph.schedule import Compute, Plan


def recomputed(plan: Plan) -> list[int]:
    """The ops that run again, in order."""
    return [i.op for i in plan.schedule if isinstance(i, Compute) and i.copy]


def n_recomputed(graph: StepGraph, plan: Plan) -> list[int]:
    """How often each op of the forward pass runs again."""
    again = recomputed(plan)
    return [again.count(op.index) for op in graph.ops if op.phase is Phase.FORWARD]


def dropped(plan: Plan) -> list[int]:
    """The storages of the activations that are dropped."""
    return [decision.storage for decision in plan.decisions if not decision.is_kept]
