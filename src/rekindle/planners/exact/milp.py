"""An integer program that grows by variables and rows, solved by the HiGHS that SciPy carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from rekindle.errors import PlanError
from rekindle.planners.exact.quiet import quiet

Terms = Iterable[tuple[int, float]]  # pairs of a variable and its factor

# Bytes are counted in units of which a budget has at most so many: the solver's tolerance for a row
# is an absolute one, of a millionth.
MOST_UNITS = 2**20
MOST_SECONDS = 600.0
MOST_SECONDS_OF_A_TRY = 5.0  # where a limit of nodes is given, too


class Program:
    """Minimise the cost of the decisions, subject to rows, with memory that has a peak.

    >>> program = Program()
    >>> drop_small, drop_large = program.decision(cost=1.0), program.decision(cost=3.0)
    >>> program.peak_at(12, [(drop_small, -2), (drop_large, -5)])
    >>> program.cheapest_within(10)
    [True, False]
    >>> program.cheapest_within(8)
    [False, True]
    >>> program.cheapest_within(4) is None
    True
    >>> program.least_peak()
    [True, True]
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._is_decision: list[bool] = []
        self._is_whole: list[bool] = []
        self._at_least: list[float] = []
        self._rows: list[tuple[float, list[tuple[int, float]]]] = []
        self._peaks: dict[tuple[tuple[int, float], ...], int] = {}  # by terms: the largest constant

    def decision(self, *, cost: float) -> int:
        """A variable that is 0 or 1."""
        return self._variable(cost, 0.0, is_decision=True, is_whole=True)

    def share(self, *, at_least: float = 0.0, is_whole: bool = False) -> int:
        """A variable between 0 and 1 that costs nothing and follows from the decisions.

        The solver may branch on one that is declared whole.
        """
        return self._variable(0.0, at_least, is_decision=False, is_whole=is_whole)

    def at_most(self, limit: float, terms: Terms) -> None:
        """A row: the sum of the terms is at most the limit."""
        self._rows.append((limit, list(terms)))

    def peak_at(self, constant: int, terms: Terms) -> None:
        """A moment at which so many bytes are there, and those of the terms."""
        sums: dict[int, float] = {}  # the solver takes each variable once a row
        for variable, nbytes in terms:
            sums[variable] = sums.get(variable, 0) + nbytes
        key = tuple((variable, nbytes) for variable, nbytes in sums.items() if nbytes)
        self._peaks[key] = max(constant, self._peaks.get(key, 0))

    def forbid(self, solution: Sequence[bool]) -> None:
        """Exclude one assignment of the decisions."""
        chosen = [v for v, is_decision in enumerate(self._is_decision) if is_decision]
        terms = [(v, 1.0 if solution[v] else -1.0) for v in chosen]
        self._rows.append((sum(solution[v] for v in chosen) - 1.0, terms))

    def cheapest_within(self, budget: int, nodes: int | None = None) -> list[bool] | None:
        """The variables, as true or false, of the cheapest solution in a budget; None if none is.

        What is no decision has no meaning in it.
        """
        largest = max((sum(f for _, f in terms) for terms in self._peaks), default=0)
        unit = max(1.0, max(budget, largest) / MOST_UNITS)
        rows = [
            ((budget - constant) / unit, [(v, factor / unit) for v, factor in terms])
            for terms, constant in self._peaks.items()
        ]
        if any(limit < 0 and not terms for limit, terms in rows):
            return None
        return self._solve(np.array(self._costs), rows, nodes)

    def least_peak(self, nodes: int | None = None) -> list[bool]:
        """The same for the solution with the least peak, whatever it costs."""
        largest = max(c + sum(f for _, f in terms) for terms, c in self._peaks.items())
        unit = max(1.0, largest / MOST_UNITS)
        peak = len(self._costs)
        rows = [
            (-constant / unit, [(peak, -1.0), *((v, factor / unit) for v, factor in terms)])
            for terms, constant in self._peaks.items()
        ]
        costs = np.zeros(peak + 1)
        costs[peak] = 1.0
        found = self._solve(costs, rows, nodes)
        if found is None:
            raise PlanError("the integer program has no solution: no way to run the step was found")
        return found

    def _variable(self, cost: float, at_least: float, *, is_decision: bool, is_whole: bool) -> int:
        self._costs.append(cost)
        self._is_decision.append(is_decision)
        self._is_whole.append(is_whole)
        self._at_least.append(at_least)
        return len(self._costs) - 1

    def _solve(
        self,
        costs: NDArray[np.float64],
        rows: list[tuple[float, list[tuple[int, float]]]],
        nodes: int | None,
    ) -> list[bool] | None:
        n_own, n = len(self._costs), len(costs)
        rows = [*self._rows, *rows]
        starts = np.cumsum([0, *(len(terms) for _, terms in rows)])
        columns = np.array([v for _, terms in rows for v, _ in terms], dtype=np.int64)
        factors = np.array([f for _, terms in rows for _, f in terms], dtype=np.float64)
        matrix = csr_array((factors, columns, starts), shape=(len(rows), n))
        low, high = np.zeros(n), np.ones(n)
        low[:n_own] = self._at_least
        high[n_own:] = np.inf
        integrality = np.zeros(n)
        integrality[:n_own] = self._is_whole
        seconds = MOST_SECONDS if nodes is None else MOST_SECONDS_OF_A_TRY
        options = {"mip_rel_gap": 0.0, "time_limit": seconds}
        if nodes is not None:
            options["node_limit"] = nodes
        with quiet():
            result = milp(
                costs,
                integrality=integrality,
                bounds=Bounds(low, high),
                constraints=LinearConstraint(matrix, -np.inf, [limit for limit, _ in rows]),
                options=options,
            )
        if result.status == 2:
            return None
        if result.status == 1:
            raise PlanError(
                f"the integer program was not solved within {seconds:.0f} s: the step is too "
                "large for the planner ilp. Use the planner auto."
            )
        if result.status != 0:
            raise PlanError(f"the integer program was not solved: {result.message}")
        return [bool(value > 0.5) for value in result.x[:n_own]]
