"""Local search against the exact simulation: make a plan fit, and use up the rest of the budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rekindle.planners.lowering import Choices, Lowered, lower
from rekindle.planners.problem import Floats, Problem


@dataclass(frozen=True)
class SearchOptions:
    """How long local search goes on.

    Lowering a plan of n ops places n ops; the default allows hundreds of attempts on a step of a
    thousand ops.
    """

    max_ops_placed: int = 300_000
    max_ops_placed_for_exchange: int = 500_000
    max_failures: int = 25  # attempts in a row without success
    n_changes_per_peak: int = 12  # the most promising ones


DEFAULT_SEARCH = SearchOptions()


class _Search:
    """Lowers choices, and counts how many more ops it may place."""

    def __init__(self, problem: Problem, options: SearchOptions, max_ops_placed: int) -> None:
        self.problem = problem
        self.options = options
        self.left = max(10 * problem.n_ops, max_ops_placed)

    def lower(self, chosen: Choices) -> Lowered:
        lowered = lower(self.problem, chosen)
        self.left -= len(lowered.ops)
        return lowered


def polish(
    problem: Problem, chosen: Choices, budget_bytes: int, options: SearchOptions = DEFAULT_SEARCH
) -> Choices:
    """Keep dropped cells after all, most expensive first, while the peak is within the budget."""
    search = _Search(problem, options, options.max_ops_placed)
    return _polish(search, chosen, search.lower(chosen), budget_bytes)[0]


def fit(
    problem: Problem, chosen: Choices, budget_bytes: int, options: SearchOptions = DEFAULT_SEARCH
) -> Choices:
    """Free cells that are live at the peak, one by one, until the plan fits or nothing helps.

    A kept cell can be dropped; one that was recomputed early can be freed and recomputed later. The
    change that reduces the excess over the budget most per added µs is taken.
    """
    search = _Search(problem, options, options.max_ops_placed)
    return _fit(search, chosen, search.lower(chosen), budget_bytes)[0]


def exchange(
    problem: Problem, chosen: Choices, budget_bytes: int, options: SearchOptions = DEFAULT_SEARCH
) -> Choices:
    """Flip one cell between kept and dropped, adapt the others, and accept what is cheaper."""
    search = _Search(problem, options, options.max_ops_placed_for_exchange)
    best = search.lower(chosen)
    cells = sorted(problem.droppable, key=lambda c: -problem.times[problem.writer[c]])
    is_better = True
    while is_better and search.left > 0:
        is_better = False
        for cell in cells:
            if search.left <= 0:
                break
            attempt = _changed(chosen, cell, keep=not chosen.keep[cell])
            lowered = search.lower(attempt)
            attempt, lowered = _fit(search, attempt, lowered, budget_bytes)
            if lowered.peak_bytes > budget_bytes:
                continue
            attempt, lowered = _polish(search, attempt, lowered, budget_bytes)
            if lowered.recompute_us < best.recompute_us - 1e-6:
                chosen, best, is_better = attempt, lowered, True
    return chosen


def _polish(
    search: _Search, chosen: Choices, best: Lowered, budget_bytes: int
) -> tuple[Choices, Lowered]:
    problem = search.problem
    refused: set[int] = set()
    while search.left > 0 and len(refused) < search.options.max_failures:
        room = budget_bytes - _used(problem, best)
        cell = _most_expensive(problem, chosen, room, _copies(best), refused)
        if cell is None:
            break
        attempt = _changed(chosen, cell, keep=True)
        lowered = search.lower(attempt)
        if lowered.peak_bytes <= budget_bytes and lowered.recompute_us < best.recompute_us:
            chosen, best = attempt, lowered
            refused.clear()
        else:
            refused.add(cell)
    return chosen, best


def _fit(
    search: _Search, chosen: Choices, best: Lowered, budget_bytes: int
) -> tuple[Choices, Lowered]:
    while best.peak_bytes > budget_bytes and search.left > 0:
        over = _over(best, budget_bytes)
        found: list[tuple[float, Choices, Lowered]] = []
        changes = _lighter(search.problem, chosen, best)
        for attempt in changes[: search.options.n_changes_per_peak]:
            lowered = search.lower(attempt)
            gain = over - _over(lowered, budget_bytes)
            if gain > 0:
                price = max(lowered.recompute_us - best.recompute_us, 1e-3)
                found.append((gain / price, attempt, lowered))
        if not found:
            break
        _, chosen, best = max(found, key=lambda entry: entry[0])
    return chosen, best


def _changed(
    chosen: Choices, cell: int, *, keep: bool | None = None, hold_from: int | None = None
) -> Choices:
    """The same choices, except for one cell."""
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
    """The excess over the budget, summed over all positions."""
    return float(np.maximum(lowered.live - budget_bytes, 0).sum(dtype=np.float64))


def _copies(lowered: Lowered) -> dict[int, list[tuple[int, int]]]:
    """By storage: the captured ops between which each of its copies is live."""
    found: dict[int, list[tuple[int, int]]] = {}
    for i in lowered.instances:
        if i.copy:
            span = int(lowered.anchor[i.start]), int(lowered.anchor[i.end])
            found.setdefault(i.storage, []).append(span)
    return found


def _most_expensive(
    problem: Problem,
    chosen: Choices,
    room: Floats,
    copies: dict[int, list[tuple[int, int]]],
    refused: set[int],
) -> int | None:
    """The dropped cell that takes longest to recompute, of those that fit across their gap.

    Where a copy of it is live already, it needs no further bytes.
    """
    best, best_us = None, 0.0
    for cell in problem.droppable:
        if chosen.keep[cell] or cell in refused or not problem.can_keep[cell]:
            continue
        us = problem.times[problem.writer[cell]]
        if us <= best_us:
            continue
        start, nbytes = problem.last_use[cell] + 1, problem.bytes[cell]
        gap = room[start : problem.needs[cell][0]].copy()
        for first, last in copies.get(problem.storage[cell], ()):
            gap[max(first - start, 0) : max(last + 1 - start, 0)] += nbytes
        if gap.min(initial=nbytes) >= nbytes:
            best, best_us = cell, us
    return best


def _lighter(problem: Problem, chosen: Choices, lowered: Lowered) -> list[Choices]:
    """Changes that free a cell at the peak, most bytes per µs first."""
    peak = int(np.argmax(lowered.live))
    op = int(lowered.anchor[peak])
    live = {i.storage for i in lowered.instances if i.start <= peak <= i.end}
    found: list[tuple[float, Choices]] = []
    for cell, storage in enumerate(problem.storage):
        if storage not in live or problem.must_keep[cell] or not problem.can_keep[cell]:
            continue
        if op in problem.needs[cell] or problem.last_use[cell] >= op:
            continue  # it is in use
        ratio = problem.bytes[cell] / max(problem.times[problem.writer[cell]], 1e-3)
        if chosen.keep[cell]:
            found.append((ratio, _changed(chosen, cell, keep=False)))
        elif chosen.hold_from[cell] <= op:
            found.append((ratio, _changed(chosen, cell, hold_from=op + 1)))
    found.sort(key=lambda entry: -entry[0])
    return [attempt for _, attempt in found]
