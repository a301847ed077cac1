"""The best just-in-time schedule of a small step by trying everything: the judge of `ilp`.

The state at a moment is the set of live cells; every reachable set is followed, with its least cost
so far. Before an op that reads cells across their gap, each forward op may be recomputed once, in
captured order. Every cell that an op used may be freed right after it, so all lifetimes that end at
a use are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations

from rekindle.planners.problem import Problem

Cells = frozenset[int]
Then = Callable[[float, float, int], float | None]  # value, time and bytes of an op: the next value


def least_added_us(problem: Problem, budget_bytes: int) -> float | None:
    """The least time that must be added to stay within a budget; None if nothing does."""

    def then(us: float, op_us: float, nbytes: int) -> float | None:
        return us + op_us if nbytes <= budget_bytes else None

    return _walk(problem, then)


def least_peak_bytes(problem: Problem) -> int:
    """The least peak that can be reached, at any cost in time."""

    def then(peak: float, op_us: float, nbytes: int) -> float:
        return max(peak, nbytes)

    found = _walk(problem, then)
    assert found is not None
    return int(found)


def _walk(problem: Problem, then: Then) -> float | None:
    needed = dict(problem.readers)
    states: dict[Cells, float] = {frozenset(): 0.0}
    for op in range(problem.n_ops):
        if op in needed:
            serving = _serving(problem, op)
            for again in range(op):
                if serving.intersection(_computed(problem, again)):
                    for there, value in _run_again(problem, then, states, again, op):
                        states[there] = min(value, states.get(there, value))
        states = _run_captured(problem, then, states, op, needed.get(op, []))
    return min(states.values(), default=None)


def _run_again(
    problem: Problem, then: Then, states: dict[Cells, float], op: int, reader: int
) -> list[tuple[Cells, float]]:
    reads, writes = problem.reads[op], problem.writes[op]
    changed = _earlier_versions(problem, reads, writes)
    new_storages = {problem.storage[c] for c in writes} - {problem.storage[c] for c in changed}
    new_storages.update(problem.also_makes[op])
    beside = problem.between[reader] + problem.workspaces[op]
    beside += sum(problem.sizes[s] for s in new_storages)
    in_use, serving = _in_use(problem, reader - 1), _serving(problem, reader)
    found = []
    for there, value in states.items():
        if there.issuperset(reads):
            new = then(value, problem.times[op], int(beside) + _bytes(problem, there))
            if new is not None:
                after = (there - changed).union(writes) & (serving | in_use)
                rests = _some_let_go(after, {*reads, *writes} - in_use)
                found += [(rest, new) for rest in rests]
    return found


def _run_captured(
    problem: Problem, then: Then, states: dict[Cells, float], op: int, reads: list[int]
) -> dict[Cells, float]:
    before, in_use = _in_use(problem, op - 1), _in_use(problem, op)
    writes = [c for c in range(problem.n_cells) if problem.writer[c] == op]
    changed = _earlier_versions(problem, before, writes)
    new_storages = {problem.storage[c] for c in writes} - {problem.storage[c] for c in changed}
    beside = int(problem.base[op]) + sum(int(problem.sizes[s]) for s in new_storages)
    used = {*reads, *(c for c in range(problem.n_cells) if problem.last_use[c] == op)}
    # A version that is overwritten later exists within a burst only.
    stays = before | {c for c in range(problem.n_cells) if problem.can_keep[c]}
    serving = _serving(problem, op + 1)
    found: dict[Cells, float] = {}
    for there, value in states.items():
        there &= stays
        if there.issuperset(reads):
            new = then(value, 0.0, beside + _bytes(problem, there))
            if new is not None:
                after = (there - changed).union(writes) & (serving | in_use)
                for rest in _some_let_go(after, used - in_use):
                    found[rest] = min(new, found.get(rest, new))
    return found


def _some_let_go(there: Cells, used: Iterable[int]) -> Iterator[Cells]:
    """The possible sets of live cells after an op: any cell that it used may be freed."""
    could = sorted(there.intersection(used))
    for count in range(len(could) + 1):
        for gone in combinations(could, count):
            yield there.difference(gone)


def _in_use(problem: Problem, done: int) -> Cells:
    """The cells that the forward pass, done up to an op, holds because it will use them later."""
    held = {}
    for cell, storage in enumerate(problem.storage):
        if problem.writer[cell] <= done < problem.last_use[cell]:
            held[storage] = cell
    return frozenset(held.values())


def _serving(problem: Problem, start: int) -> Cells:
    """The cells that ops from one on read across a gap, and those these are computed from."""
    serving: set[int] = set()
    todo = [c for c in range(problem.n_cells) if any(op >= start for op in problem.needs[c])]
    while todo:
        cell = todo.pop()
        if cell not in serving:
            serving.add(cell)
            if not problem.must_keep[cell]:
                todo += problem.reads[problem.writer[cell]]
    return frozenset(serving)


def _computed(problem: Problem, op: int) -> list[int]:
    """The cells that an op computes when it runs again."""
    return [cell for cell in problem.writes[op] if not problem.must_keep[cell]]


def _earlier_versions(problem: Problem, cells: Iterable[int], writes: list[int]) -> set[int]:
    """Those of the cells that an op changes in place when it writes others."""
    storages = {problem.storage[c] for c in writes}
    return {c for c in cells if problem.storage[c] in storages}


def _bytes(problem: Problem, cells: Iterable[int]) -> int:
    return sum(problem.bytes[c] for c in cells)
