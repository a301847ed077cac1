"""How little time any plan could add: a proven lower bound, from prices per position.

At every op t, what is there whatever is decided, and the cells that are kept across t, must fit the
budget. Give every such constraint a price μ_t ≥ 0 per byte and relax it: what remains is one priced
minimum cut, and

    L(μ) = cut(μ) + Σ_t μ_t · (bytes there whatever is decided − budget)

is at most the added time of any plan within the budget. The best prices are found by cutting
planes: a small linear program proposes prices, the cut answers with a plan, the plan becomes a
constraint of the program.

What must a plan that keeps a cell pay for? An activation it holds until its last read. A cell that
no backward op reads is kept for the sake of ops that compute others from it. Say op o computes the
activation d from it. Up to the last run of o before d is first read, the cell is held, since its
own op never runs again; from then on d is held. So the smaller of the two is held all along, and
so it is where the way from the cell to d is longer (`_ways`). Several cells that lead to one
activation share its bytes. Recomputed copies count for nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from rekindle.planners.min_cut import CutNetwork
from rekindle.planners.problem import Floats, Ints, Problem

_ROUNDS = 80
_CLOSE = 1e-3  # stop when the program promises at most this part more than what is proven
_MOST_WAYS = 6  # by which a cell that no backward op reads leads to activations


class HoldPath(NamedTuple):
    """From a cell to an activation: when that is first read, and what is held until then."""

    until: int
    nbytes: float


class Holdings(NamedTuple):
    """What keeping a cell may come to, one row a way: of the rows of a cell, the cheapest counts.

    So many bytes are held at the ops start…stop-1.
    """

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
        """The least time that any plan within the budget must add, as far as can be proven.

        Infinite where even what is there whatever is decided does not fit.
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
        for _ in range(_ROUNDS):
            ceiling, prices = _propose(plans, positions, self.most_us)
            if ceiling <= best * (1 + _CLOSE) + 1e-6:
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
        """The bytes that these rows of holdings take at each op, but where they are read anyway."""
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
    """The prices that the plans found so far make look best, and the value they promise."""
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
    """What is there at each op whatever is decided.

    A cell is there while the forward pass uses it, and when an op reads it.
    """
    changes = np.zeros(problem.n_ops + 1)
    first_writer: dict[int, int] = {}
    for cell, storage in enumerate(problem.storage):
        first_writer.setdefault(storage, problem.writer[cell])
        if problem.can_keep[cell]:
            changes[first_writer[storage]] += problem.bytes[cell]
            changes[problem.last_use[cell] + 1] -= problem.bytes[cell]
    there = problem.base + np.cumsum(changes)[: problem.n_ops]
    for op, cells in problem.readers:
        there[op] += sum(problem.bytes[cell] for cell in cells)
    return np.asarray(there, dtype=np.float64)


def _lingering(problem: Problem) -> list[int]:
    """Cells that a later forward pass overwrites: until then they are there, and cost nothing."""
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
    """What keeping each cell comes to: see the module's docstring."""
    ways = _ways(problem)
    rows: list[tuple[int, int, int, float]] = []
    for cell, needs in enumerate(problem.needs):
        idle, size = problem.last_use[cell] + 1, float(problem.bytes[cell])
        if needs:
            rows.append((cell, idle, needs[-1] + 1, size))
        else:
            rows += [(cell, idle, max(w.until, idle), min(size, w.nbytes)) for w in ways[cell]]
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    whole = table[:, :3].astype(np.int64)
    return Holdings(whole[:, 0], whole[:, 1], whole[:, 2], table[:, 3])


def _ways(problem: Problem) -> list[list[HoldPath]]:
    """The ways from each cell to activations."""
    ways: list[list[HoldPath]] = [
        [HoldPath(needs[0], float(problem.bytes[cell]))] if needs else []
        for cell, needs in enumerate(problem.needs)
    ]
    for op in sorted(set(problem.writer), reverse=True):
        inner = [cell for cell in problem.reads[op] if not problem.needs[cell]]
        onward = [
            HoldPath(way.until, min(way.nbytes, problem.bytes[cell]) / max(len(inner), 1))
            for cell in problem.writes[op]
            for way in ways[cell]
        ]
        for cell in inner:
            ways[cell] = _cheapest(ways[cell] + onward)
    return ways


def _cheapest(ways: list[HoldPath]) -> list[HoldPath]:
    """The ways that may be the cheapest; a long list is cut short to one that is below them all."""
    front: list[HoldPath] = []
    for way in sorted(set(ways)):
        if not front or way.nbytes < front[-1].nbytes:
            front.append(way)
    if len(front) <= _MOST_WAYS:
        return front
    return [HoldPath(front[0].until, front[-1].nbytes)]
