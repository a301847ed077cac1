"""The baseline `mutwo`: μ-TWO's greedy recomputation (Purandare et al., MLSys 2023).

The candidate that frees the most bytes per µs of recomputation is dropped, and the others are
updated, until the simulated peak is within the budget. The paper's cost model is an estimate; the
real cost of a plan comes from lowering it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.errors import InfeasibleBudget
from rekindle.planners.finish import finish
from rekindle.planners.lowering import Choices, choices, lower
from rekindle.planners.problem import Ints, Problem, problem_of


def plan_mutwo(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
    """Drop the candidate with the largest ratio of bytes to time, until the step fits the budget.

    A drop can also raise the peak, since recomputed cells take memory, too: if no number of drops
    fits, the error carries the least peak of all.
    """
    problem = problem_of(graph, profile)
    drop_order = DropOrder(problem)
    chosen = drop_order.first_within(budget_bytes)
    if chosen is None:
        least = drop_order.least_peak_bytes()
        raise InfeasibleBudget(budget_bytes=budget_bytes, least_peak_bytes=least)
    return finish(problem, chosen, planner="mutwo", budget_bytes=budget_bytes)


class DropOrder:
    """The order in which μ-TWO drops activations, which does not depend on the budget."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.order = list(Greedy(problem).run())
        self.floors = peak_floors(problem, self.order)

    def first_within(self, budget_bytes: int) -> Choices | None:
        """The choices after the fewest drops that fit the budget; None if none do."""
        for n_dropped in np.flatnonzero(self.floors <= budget_bytes).tolist():
            chosen = self._after(n_dropped)
            if lower(self.problem, chosen).peak_bytes <= budget_bytes:
                return chosen
        return None

    def least_peak_bytes(self) -> int:
        """The least peak after any number of drops, the most promising number first."""
        least = lower(self.problem, self._after(0)).peak_bytes
        for n_dropped in np.argsort(self.floors, kind="stable").tolist():
            if self.floors[n_dropped] >= least:
                break
            least = min(least, lower(self.problem, self._after(n_dropped)).peak_bytes)
        return least

    def _after(self, n_dropped: int) -> Choices:
        kept = set(self.problem.droppable).difference(self.order[:n_dropped])
        return choices(self.problem, kept)


@dataclass(slots=True)
class DropCandidate:
    """One activation, with the paper's names; times in µs.

    `recomp_srcs` are cells, without residents. `recomp_cnt` is how often it is recomputed: 1, and
    one more for each dropped candidate that has it as a source.
    """

    nbytes: int
    recomp_srcs: set[int]
    recomp_time: float
    recomp_cnt: int
    total_recomp_time: float
    is_dropped: bool = False

    @property
    def recompute_ratio(self) -> float:
        """The bytes that dropping it frees per added µs."""
        return self.nbytes / self.total_recomp_time if self.total_recomp_time > 0 else np.inf


class Greedy:
    """The state of μ-TWO's loop: every candidate by its cell, dropped or not.

    `users` has, for each cell, the candidates that have it as a source.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.candidates: dict[int, DropCandidate] = {}
        self.users: dict[int, set[int]] = {}
        for cell in problem.droppable:
            if problem.bytes[cell]:
                sources, us = _sources(problem, cell)
                self.candidates[cell] = DropCandidate(problem.bytes[cell], sources, us, 1, us)
                for source in sources:
                    self.users.setdefault(source, set()).add(cell)

    def run(self) -> Iterator[int]:
        """Drop all candidates, the largest ratio first, then the earlier cell."""
        heap = [(-c.recompute_ratio, cell) for cell, c in self.candidates.items()]
        heapq.heapify(heap)
        while heap:
            ratio, cell = heapq.heappop(heap)
            found = self.candidates[cell]
            if found.is_dropped or -ratio != found.recompute_ratio:
                continue  # an entry from before an update
            for changed in self.drop(cell):
                heapq.heappush(heap, (-self.candidates[changed].recompute_ratio, changed))
            yield cell

    def drop(self, cell: int) -> list[int]:
        """Mark a candidate dropped and update the others; returns those whose ratio may change."""
        dropped = self.candidates[cell]
        dropped.is_dropped = True
        dropped.recomp_cnt = 1 + self._dropped_users(cell)
        changed = []
        for user in sorted(self.users.get(cell, ())):
            found = self.candidates[user]
            if found.is_dropped:
                self._replace(cell, user)
            elif not self._is_live_again(cell, user):
                self._replace(cell, user)
                self._count(user, 1 + self._dropped_users(user))
                changed.append(user)
        for source in dropped.recomp_srcs:
            if source in self.candidates and not self.candidates[source].is_dropped:
                self._count(source, dropped.recomp_cnt)
                changed.append(source)
        return changed

    def _count(self, cell: int, recomp_cnt: int) -> None:
        """Set how often a candidate would be recomputed."""
        found = self.candidates[cell]
        found.recomp_cnt = recomp_cnt
        found.total_recomp_time = recomp_cnt * found.recomp_time

    def _replace(self, cell: int, user: int) -> None:
        """Replace a dropped cell by its sources in the sources of a user."""
        dropped, found = self.candidates[cell], self.candidates[user]
        found.recomp_srcs.remove(cell)
        self.users[cell].remove(user)
        found.recomp_srcs |= dropped.recomp_srcs
        for source in dropped.recomp_srcs:
            self.users[source].add(user)
        found.recomp_time += dropped.recomp_time

    def _is_live_again(self, cell: int, user: int) -> bool:
        """True if a candidate's first backward use falls in a dropped one's active interval."""
        needs = self.problem.needs
        return needs[cell][0] <= needs[user][0] <= needs[cell][-1]

    def _dropped_users(self, cell: int) -> int:
        return sum(self.candidates[user].is_dropped for user in self.users.get(cell, ()))


def _sources(problem: Problem, cell: int) -> tuple[set[int], float]:
    """The nearest available cells that a cell can be recomputed from, and the time for that."""
    sources: set[int] = set()
    ops: set[int] = set()
    todo = [problem.writer[cell]]
    while todo:
        op = todo.pop()
        if op in ops:
            continue
        ops.add(op)
        for read in problem.reads[op]:
            if problem.needs[read] or problem.must_keep[read]:
                sources.add(read)
            else:
                todo.append(problem.writer[read])
    return sources, sum(problem.times[op] for op in sorted(ops))


def peak_floors(problem: Problem, order: Sequence[int]) -> Ints:
    """A lower bound on the peak after each number of drops, in this order; cheaper than the peak.

    It counts the live bytes while captured ops run, with recomputed cells live from recomputation
    to last use, but not while recomputations run.
    """
    floors = _Floors(problem)
    bounds = [floors.peak_bytes()]
    for cell in order:
        floors.drop(cell)
        bounds.append(floors.peak_bytes())
    return np.array(bounds, dtype=np.int64)


class _Floors:
    """The live bytes at each captured op, updated as cells are dropped one at a time.

    `runs_at` is the first op before which each forward op is recomputed; more drops can only make
    it earlier. A dropped cell is live again from then on.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        n_ops = len(problem.graph.ops)
        self.kept = choices(problem, problem.droppable).keep
        self.runs_at = [n_ops] * n_ops
        self.back_at = [n_ops] * problem.n_cells
        self.changes = np.zeros(n_ops + 1, dtype=np.int64)
        self.read_by: list[list[int]] = [[] for _ in range(problem.n_cells)]
        for op in range(n_ops):
            for cell in problem.reads[op]:
                self.read_by[cell].append(op)
        made: dict[int, int] = {}
        for cell, storage in enumerate(problem.storage):
            start = made.setdefault(storage, problem.writer[cell])
            if problem.can_keep[cell]:
                end = max([problem.last_use[cell], *problem.needs[cell]])
                self.changes[start] += problem.bytes[cell]
                self.changes[end + 1] -= problem.bytes[cell]

    def peak_bytes(self) -> int:
        """The most bytes at any captured op."""
        live = self.problem.base + np.cumsum(self.changes)[:-1]
        return int(live.max(initial=0))

    def drop(self, cell: int) -> None:
        """Free a cell in its gap, up to where it is first recomputed."""
        problem = self.problem
        self.kept[cell] = False
        self.changes[problem.last_use[cell] + 1] -= problem.bytes[cell]
        writer = problem.writer[cell]
        runs_at = [self.runs_at[op] for op in (writer, *self.read_by[cell])]
        back_at = min(problem.first_need[cell], *runs_at)
        self.back_at[cell] = back_at
        self.changes[back_at] += problem.bytes[cell]
        todo = [(writer, back_at)]
        while todo:
            op, at = todo.pop()
            if at >= self.runs_at[op]:
                continue
            self.runs_at[op] = at
            for made in problem.writes[op]:
                if not self.kept[made] and problem.needs[made] and at < self.back_at[made]:
                    self.changes[self.back_at[made]] -= problem.bytes[made]
                    self.changes[at] += problem.bytes[made]
                    self.back_at[made] = at
            todo += [(problem.writer[c], at) for c in problem.reads[op] if not self.kept[c]]
