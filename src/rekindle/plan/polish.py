"""Local search against the exact simulation: make a plan fit, and put room that is left to use."""

from __future__ import annotations

import numpy as np

from rekindle.plan.lower import Choices, Lowered, lower
from rekindle.plan.problem import Floats, Problem

_WORK = 300_000  # ops to lower in all: some hundred tries on a step of some thousand ops
_PATIENCE = 25  # tries in vain before giving up
_BREADTH = 12  # changes tried at a peak, the most promising ones


def polish(problem: Problem, chosen: Choices, budget_bytes: int) -> Choices:
    """Keep dropped cells after all, dearest first, while the peak stays within the budget."""
    best = lower(problem, chosen)
    refused: set[int] = set()
    for _ in range(_tries(problem)):
        room = budget_bytes - _used(problem, best)
        cell = _dearest(problem, chosen, room, refused)
        if cell is None or len(refused) >= _PATIENCE:
            break
        attempt = _changed(chosen, cell, keep=True)
        lowered = lower(problem, attempt)
        if lowered.peak_bytes <= budget_bytes and lowered.recompute_us < best.recompute_us:
            chosen, best = attempt, lowered
            refused.clear()
        else:
            refused.add(cell)
    return chosen


def fit(problem: Problem, chosen: Choices, budget_bytes: int) -> Choices:
    """Let go of what lies at the peak, bit by bit, until the plan fits or nothing helps.

    A kept cell can be dropped; one that was computed again early can be let go and computed once
    more. Of the changes tried, that which takes most off what is over the budget for its time.
    """
    best = lower(problem, chosen)
    tries = _tries(problem)
    while best.peak_bytes > budget_bytes and tries > 0:
        over = _over(best, budget_bytes)
        found: list[tuple[float, Choices, Lowered]] = []
        for attempt in _lighter(problem, chosen, best)[:_BREADTH]:
            tries -= 1
            lowered = lower(problem, attempt)
            gain = over - _over(lowered, budget_bytes)
            if gain > 0:
                price = max(lowered.recompute_us - best.recompute_us, 1e-3)
                found.append((gain / price, attempt, lowered))
        if not found:
            break
        _, chosen, best = max(found, key=lambda entry: entry[0])
    return chosen


def _tries(problem: Problem) -> int:
    return max(10, _WORK // max(problem.n_ops, 1))


def _changed(
    chosen: Choices, cell: int, *, keep: bool | None = None, hold_from: int | None = None
) -> Choices:
    """The same choices but for one cell."""
    kept, held = list(chosen.keep), list(chosen.hold_from)
    if keep is not None:
        kept[cell] = keep
    if hold_from is not None:
        held[cell] = hold_from
    return Choices(kept, held)


def _used(problem: Problem, lowered: Lowered) -> Floats:
    """The bytes at each captured op, the burst before it included."""
    used = np.zeros(problem.n_ops)
    np.maximum.at(used, lowered.anchor, lowered.live)
    return used


def _over(lowered: Lowered, budget_bytes: int) -> float:
    """By how much all positions together are over the budget."""
    return float(np.maximum(lowered.live - budget_bytes, 0).sum(dtype=np.float64))


def _dearest(problem: Problem, chosen: Choices, room: Floats, refused: set[int]) -> int | None:
    """The dropped cell that costs most to compute, of those that fit across their gap."""
    best, best_us = None, 0.0
    for cell in problem.droppable:
        if chosen.keep[cell] or cell in refused or not problem.can_keep[cell]:
            continue
        us = problem.times[problem.writer[cell]]
        if us <= best_us:
            continue
        gap = room[problem.last_use[cell] + 1 : problem.needs[cell][0]]
        if len(gap) == 0 or gap.min() >= problem.bytes[cell]:
            best, best_us = cell, us
    return best


def _lighter(problem: Problem, chosen: Choices, lowered: Lowered) -> list[Choices]:
    """Changes that would take a cell away from the peak, the most bytes for their time first."""
    peak = int(np.argmax(lowered.live))
    op = int(lowered.anchor[peak])
    there = {i.storage: i.copy for i in lowered.instances if i.start <= peak <= i.end}
    found: list[tuple[float, Choices]] = []
    for cell, storage in enumerate(problem.storage):
        if storage not in there or problem.must_keep[cell] or not problem.can_keep[cell]:
            continue
        if op in problem.needs[cell] or problem.last_use[cell] >= op:
            continue  # it is in use just now
        ratio = problem.bytes[cell] / max(problem.times[problem.writer[cell]], 1e-3)
        if chosen.keep[cell]:
            found.append((ratio, _changed(chosen, cell, keep=False)))
        elif chosen.hold_from[cell] <= op:
            found.append((ratio, _changed(chosen, cell, hold_from=op + 1)))
    found.sort(key=lambda entry: -entry[0])
    return [attempt for _, attempt in found]
