"""The baseline `mincut`: one price per byte for the whole step, bisected to meet the budget.

The cut prices bytes at the boundary between the passes only. It does not see that a recomputed
value is live from its recomputation to its last use, so a higher price can raise the peak again.
"""

from __future__ import annotations

import numpy as np

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.errors import InfeasibleBudget
from rekindle.planners.finish import finish
from rekindle.planners.lowering import Choices, choices, lower
from rekindle.planners.min_cut import CutNetwork
from rekindle.planners.problem import Problem, problem_of

_N_PRICES = 49  # in the grid, from 1/1000 to 1000 times the step's µs per byte
_BISECTIONS = 24


def plan_mincut(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
    """The cheapest priced cut that fits the budget."""
    problem = problem_of(graph, profile)
    best, least = cheapest_cut(problem, budget_bytes)
    if best is None:
        raise InfeasibleBudget(budget_bytes=budget_bytes, least_peak_bytes=least)
    return finish(problem, best, planner="mincut", budget_bytes=budget_bytes)


def cheapest_cut(
    problem: Problem, budget_bytes: int, network: CutNetwork | None = None
) -> tuple[Choices | None, int]:
    """The cheapest cut within the budget, if any, and the least peak of all cuts tried.

    The peak falls with the price, and rises again if long chains are recomputed at once. A coarse
    grid of prices is tried first; then the interval below the first fitting price is bisected, or,
    if none fits, the one below the price of the least peak.
    """
    network = network or CutNetwork(problem)
    nbytes = np.array(problem.bytes, dtype=np.float64)
    typical = network.costs_us.sum() / max(nbytes.sum(), 1.0)
    found: list[tuple[float, int, Choices]] = []

    def peak(price: float) -> int:
        chosen = choices(problem, network.solve(price * nbytes).kept)
        lowered = lower(problem, chosen)
        found.append((lowered.recompute_us, lowered.peak_bytes, chosen))
        return lowered.peak_bytes

    grid = [0.0, *(typical * np.geomspace(1e-3, 1e3, _N_PRICES)).tolist()]
    peaks: list[int] = []
    while len(peaks) < len(grid) and (not peaks or peaks[-1] > budget_bytes):
        peaks.append(peak(grid[len(peaks)]))
    least = max(budget_bytes, min(peaks))
    first = next(place for place, each in enumerate(peaks) if each <= least)
    if first > 0:
        low, high = grid[first - 1], grid[first]
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if peak(middle) <= least else (middle, high)
    fitting = [entry for entry in found if entry[1] <= budget_bytes]
    best = min(fitting, key=lambda entry: entry[:2])[2] if fitting else None
    return best, min(entry[1] for entry in found)
