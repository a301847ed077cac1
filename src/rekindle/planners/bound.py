"""The Lagrangian bound: a proven lower bound on the time that any plan within a budget must add.

L(μ) = cut(μ) + Σ_t μ_t · (bytes live at op t under every plan − budget) is at most the time added
by any plan within the budget, for all prices μ_t ≥ 0 per byte at op t; cut(μ) is a priced min-cut.
The best prices are found by cutting planes (Kelley, 1960): a small linear program proposes prices,
the cut answers with a plan, and the plan becomes a constraint of the program.

The price of keeping a cell: an activation is held until its last read. A cell that no backward op
reads is kept so that others can be recomputed from it. Say op o computes activation d from it. The
cell is held up to the last run of o before d is first read, since the cell's own op is never
recomputed; from then on d is held. So at least the smaller of the two is held all the time, also
along a longer path from the cell to d (`_hold_paths`). Several cells that lead to one activation
share its bytes. Recomputed copies are not counted otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from rekindle.planners.min_cut import CutNetwork
from rekindle.planners.problem import Floats, Ints, Problem

_MAX_ROUNDS = 80  # of cutting planes
_CONVERGED_RATIO = 1e-3  # stop if the linear program promises at most this much more than proven
_MAX_PATHS_PER_CELL = 6  # from a cell that no backward op reads to activations


class HoldPath(NamedTuple):
    """A path from a cell to an activation: its first read, and the bytes held until then."""

    until: int
    nbytes: float


class Holdings(NamedTuple):
    """Bytes held at ops start…stop-1 if a cell is kept: one row per path, the cheapest counts."""

    cell: Ints
    start: Ints
    stop: Ints
    nbytes: Floats


class Bound:
    """The lower bound of a problem; made once, asked for many budgets."""

    def __init__(self, problem: Problem, network: CutNetwork | None = None) -> None:
        self.problem = problem
        lingering = _lingering(problem)
        self.network = network if network and not lingering else CutNetwork(problem, lingering)
        self.most_us = max(float(self.network.costs_us.sum()), 1e-3)  # every forward op once
        self.reads_at = dict(problem.readers)
        self.unavoidable = _unavoidable(problem)
        self.holdings = _holdings(problem)
        self.row_of = {int(cell): row for row, cell in enumerate(self.holdings.cell)}
        activations = np.isin(self.holdings.cell, problem.activations)
        self.all_kept = self.unavoidable + self._held_at(np.flatnonzero(activations))
        self.known: dict[int, float] = {}

    def added_us(self, budget_bytes: int) -> float:
        """A lower bound on the time that any plan within the budget adds.

        Infinite if the bytes that are live under every plan do not fit.
        """
        if budget_bytes not in self.known:
            self.known[budget_bytes] = self._prove(budget_bytes)
        return self.known[budget_bytes]

    def _prove(self, budget_bytes: int) -> float:
        if self.unavoidable.max(initial=0) > budget_bytes:
            return float("inf")
        if self.all_kept.max(initial=0) <= budget_bytes:
            return 0.0
        positions = [int(np.argmax(self.all_kept))]
        plans = [(0.0, self.all_kept - budget_bytes)]  # time added, bytes over budget at each op
        best = 0.0
        for _ in range(_MAX_ROUNDS):
            ceiling, prices = _propose(plans, positions, self.most_us)
            if ceiling <= best * (1 + _CONVERGED_RATIO) + 1e-6:
                break
            value_us, added_us, held = self._cut(positions, prices)
            over = self.unavoidable + held - budget_bytes
            fixed = self.unavoidable[positions] - budget_bytes
            best = max(best, value_us + float((prices * fixed).sum()))
            plans.append((added_us, over))
            worst = int(np.argmax(over))
            if worst not in positions:
                positions.append(worst)
        return best

    def _cut(self, positions: list[int], prices: Floats) -> tuple[float, float, Floats]:
        """The cut at these prices: its value, the time it adds, the bytes it holds at each op."""
        problem, rows = self.problem, self.holdings
        per_op = np.zeros(problem.n_ops)
        per_op[positions] = prices
        total = np.concatenate([[0.0], np.cumsum(per_op)])
        row_price = rows.nbytes * (total[rows.stop] - total[rows.start])
        for position, price in zip(positions, prices, strict=True):
            for cell in self.reads_at.get(position, ()):
                row_price[self.row_of[cell]] -= problem.bytes[cell] * price
        order = np.lexsort((row_price, rows.cell))
        first = order[np.unique(rows.cell[order], return_index=True)[1]]  # the cheapest of each
        cell_price = np.zeros(problem.n_cells)
        cell_price[rows.cell[first]] = np.maximum(row_price[first], 0.0)
        cut = self.network.solve(cell_price)
        kept = first[np.isin(rows.cell[first], cut.kept)]
        added_us = sum(problem.times[op] for op in cut.ops)
        return cut.value_us, added_us, self._held_at(kept)

    def _held_at(self, kept: NDArray[np.intp]) -> Floats:
        """The bytes of these rows of holdings at each op, except where the cell is read anyway."""
        problem, rows = self.problem, self.holdings
        n, nbytes = problem.n_ops, rows.nbytes[kept]
        changes = np.bincount(rows.start[kept], weights=nbytes, minlength=n + 1)
        changes -= np.bincount(rows.stop[kept], weights=nbytes, minlength=n + 1)
        at = np.cumsum(changes)[:n]
        for cell in rows.cell[kept]:
            at[problem.needs[cell]] -= problem.bytes[cell]
        return np.asarray(at, dtype=np.float64)


def _propose(
    plans: list[tuple[float, Floats]], positions: list[int], most_us: float
) -> tuple[float, Floats]:
    """The best prices as far as the plans found so far tell, and the value they promise."""
    rows = np.array([over[positions] for _, over in plans])
    times = np.array([added for added, _ in plans])
    scale = max(float(np.abs(rows).max()), 1.0)
    # maximise θ with θ − Σ μ_t · over_t ≤ added, for every plan
    a = np.hstack([np.ones((len(plans), 1)), -rows / scale])
    objective = np.concatenate([[-1.0], np.zeros(len(positions))])
    bounds = [(None, most_us)] + [(0.0, 1e3 * most_us)] * len(positions)
    found = linprog(objective, A_ub=a, b_ub=times, bounds=bounds, method="highs")
    return float(found.x[0]), np.asarray(found.x[1:]) / scale


def _unavoidable(problem: Problem) -> Floats:
    """The bytes live at each op under every plan.

    A cell is live while forward ops use it, and when an op reads it.
    """
    changes = np.zeros(problem.n_ops + 1)
    first_writer: dict[int, int] = {}
    for cell, storage in enumerate(problem.storage):
        first_writer.setdefault(storage, problem.writer[cell])
        if problem.can_keep[cell]:
            changes[first_writer[storage]] += problem.bytes[cell]
            changes[problem.last_use[cell] + 1] -= problem.bytes[cell]
    live = problem.base + np.cumsum(changes)[: problem.n_ops]
    for op, cells in problem.readers:
        live[op] += sum(problem.bytes[cell] for cell in cells)
    return np.asarray(live, dtype=np.float64)


def _lingering(problem: Problem) -> list[int]:
    """Cells that a later forward pass overwrites: until then they are live at no price."""
    first_reader = problem.readers[0][0] if problem.readers else problem.n_ops
    overwriter: dict[int, int] = {}  # by storage
    found = []
    for cell in reversed(range(problem.n_cells)):
        storage = problem.storage[cell]
        if overwriter.get(storage, -1) > first_reader:
            found.append(cell)
        overwriter[storage] = problem.writer[cell]
    return found


def _holdings(problem: Problem) -> Holdings:
    """The bytes held by keeping each cell: see the module's docstring."""
    paths = _hold_paths(problem)
    rows: list[tuple[int, int, int, float]] = []
    for cell, needs in enumerate(problem.needs):
        idle, size = problem.last_use[cell] + 1, float(problem.bytes[cell])
        if needs:
            rows.append((cell, idle, needs[-1] + 1, size))
        else:
            rows += [(cell, idle, max(p.until, idle), min(size, p.nbytes)) for p in paths[cell]]
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    whole = table[:, :3].astype(np.int64)
    return Holdings(whole[:, 0], whole[:, 1], whole[:, 2], table[:, 3])


def _hold_paths(problem: Problem) -> list[list[HoldPath]]:
    """The paths from each cell to activations."""
    paths: list[list[HoldPath]] = [
        [HoldPath(needs[0], float(problem.bytes[cell]))] if needs else []
        for cell, needs in enumerate(problem.needs)
    ]
    for op in sorted(set(problem.writer), reverse=True):
        inner = [cell for cell in problem.reads[op] if not problem.needs[cell]]
        onward = [
            HoldPath(path.until, min(path.nbytes, problem.bytes[cell]) / max(len(inner), 1))
            for cell in problem.writes[op]
            for path in paths[cell]
        ]
        for cell in inner:
            paths[cell] = _undominated_paths(paths[cell] + onward)
    return paths


def _undominated_paths(paths: list[HoldPath]) -> list[HoldPath]:
    """The undominated paths; a long list is replaced by one path that is below them all."""
    front: list[HoldPath] = []
    for path in sorted(set(paths)):
        if not front or path.nbytes < front[-1].nbytes:
            front.append(path)
    if len(front) <= _MAX_PATHS_PER_CELL:
        return front
    return [HoldPath(front[0].until, front[-1].nbytes)]
