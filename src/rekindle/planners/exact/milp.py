"""A mixed-integer program, built variable by variable, and the HiGHS process that solves it.

HiGHS: Huangfu and Hall, "Parallelizing the dual revised simplex method", 2018 (https://highs.dev).
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from rekindle.errors import PlanError

log = logging.getLogger("rekindle")

Terms = Iterable[tuple[int, float]]  # pairs of a variable and its factor
Row = tuple[float, list[tuple[int, float]]]  # the limit of the sum of some terms

# HiGHS accepts a row that is violated by an absolute 1e-6: bytes are scaled so that the largest
# number in a row is at most this.
LARGEST_ROW_UNITS = 2**20
TIME_LIMIT_S = 600.0
TIME_LIMIT_WITH_NODE_LIMIT_S = 5.0


class IntegerProgram:
    """Minimise the cost of the decisions, subject to rows, with memory that has a peak."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._decisions: list[int] = []
        self._is_whole: list[bool] = []
        self._at_least: list[float] = []
        self._rows: list[Row] = []
        self._peaks: dict[tuple[tuple[int, float], ...], int] = {}  # by terms: the largest constant

    def decision(self, *, cost: float) -> int:
        """A variable that is 0 or 1."""
        variable = self.share(is_whole=True)
        self._costs[variable] = cost
        self._decisions.append(variable)
        return variable

    def share(self, *, at_least: float = 0.0, is_whole: bool = False) -> int:
        """A variable between 0 and 1 that costs nothing and follows from the decisions.

        The solver may branch on one that is declared `is_whole`.
        """
        self._costs.append(0.0)
        self._is_whole.append(is_whole)
        self._at_least.append(at_least)
        return len(self._costs) - 1

    def at_most(self, limit: float, terms: Terms) -> None:
        """A row: the sum of the terms is at most the limit."""
        self._rows.append((limit, list(terms)))

    def peak_at(self, constant: int, terms: Terms) -> None:
        """A moment at which so many bytes are live, plus those of the terms."""
        sums: dict[int, float] = {}  # the solver takes each variable once per row
        for variable, nbytes in terms:
            sums[variable] = sums.get(variable, 0) + nbytes
        key = tuple((variable, nbytes) for variable, nbytes in sums.items() if nbytes)
        self._peaks[key] = max(constant, self._peaks.get(key, 0))

    def forbid(self, solution: Sequence[bool]) -> None:
        """Exclude one assignment of the decisions."""
        terms = [(v, 1.0 if solution[v] else -1.0) for v in self._decisions]
        self._rows.append((sum(solution[v] for v in self._decisions) - 1.0, terms))

    def cheapest_within(self, budget: int, nodes: int | None = None) -> list[bool] | None:
        """The cheapest solution within a budget; None if there is none.

        One bool per variable, of which only the decisions have a meaning.
        """
        largest = max((sum(f for _, f in terms) for terms in self._peaks), default=0)
        unit = max(1.0, max(budget, largest) / LARGEST_ROW_UNITS)
        rows = [
            ((budget - constant) / unit, [(v, factor / unit) for v, factor in terms])
            for terms, constant in self._peaks.items()
        ]
        if any(limit < 0 and not terms for limit, terms in rows):
            return None
        return self._solve(np.array(self._costs), rows, nodes)

    def least_peak(self, nodes: int | None = None) -> list[bool]:
        """The same for the solution with the least peak, at any cost."""
        largest = max(c + sum(f for _, f in terms) for terms, c in self._peaks.items())
        unit = max(1.0, largest / LARGEST_ROW_UNITS)
        peak = len(self._costs)
        rows = [
            (-constant / unit, [(peak, -1.0), *((v, factor / unit) for v, factor in terms)])
            for terms, constant in self._peaks.items()
        ]
        costs = np.zeros(peak + 1)
        costs[peak] = 1.0
        found = self._solve(costs, rows, nodes)
        if found is None:
            raise PlanError("the integer program has no solution: no schedule was found")
        return found

    def _solve(
        self, costs: NDArray[np.float64], rows: list[Row], nodes: int | None
    ) -> list[bool] | None:
        n_own, n = len(self._costs), len(costs)
        extra = n - n_own
        rows = [*self._rows, *rows]
        starts = np.cumsum([0, *(len(terms) for _, terms in rows)])
        columns = np.array([v for _, terms in rows for v, _ in terms], dtype=np.int64)
        factors = np.array([f for _, terms in rows for _, f in terms], dtype=np.float64)
        matrix = csr_array((factors, columns, starts), shape=(len(rows), n)).tocsc()
        seconds = TIME_LIMIT_S if nodes is None else TIME_LIMIT_WITH_NODE_LIMIT_S
        options = {"output_flag": False, "log_to_console": False, "mip_rel_gap": 0.0}
        options["time_limit"] = seconds
        if nodes is not None:
            options["mip_max_nodes"] = nodes
        size = {"num_col_": n, "num_row_": len(rows)}
        lp = {
            **size,
            "col_cost_": costs,
            "col_lower_": np.array(self._at_least + [0.0] * extra),
            "col_upper_": np.array([1.0] * n_own + [np.inf] * extra),
            "integrality_": self._is_whole + [False] * extra,
            "row_lower_": np.full(len(rows), -np.inf),
            "row_upper_": np.array([limit for limit, _ in rows], dtype=np.float64),
        }
        terms = {"start_": matrix.indptr, "index_": matrix.indices, "value_": matrix.data}
        status, values = _SOLVER.solve(lp, {**size, **terms}, options)
        if status == "Infeasible":
            return None
        if status == "Time limit reached":
            raise PlanError(
                f"the integer program was not solved within {seconds:.0f} s: the step is too "
                "large for the planner ilp. Use the planner auto."
            )
        if status != "Optimal":
            raise PlanError(f"the integer program was not solved: {status}")
        return [value > 0.5 for value in values[:n_own]]


class _SolverProcess:
    """`highs_worker` in a process of its own: started with the first program, kept for the next."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._inherited: list[object] = []
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def solve(self, *program: dict[str, Any]) -> tuple[str, list[float]]:
        """HiGHS's word for how it ended, and the values of the variables."""
        with self._lock:
            try:
                return self._answer(program)
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                self.stop()
                log.warning("planning without HiGHS, whose process ended: %r", error)
                raise PlanError(f"the solver's process ended unexpectedly: {error!r}") from error
            except BaseException:  # an interrupt: its answer would be taken for the next program's
                self.stop()
                raise

    def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _answer(self, program: tuple[dict[str, Any], ...]) -> tuple[str, list[float]]:
        if self._process is None:
            command = [sys.executable or "python", str(Path(__file__).with_name("highs_worker.py"))]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            self._send(sys.path)
        self._send(program)
        assert self._process.stdout is not None
        return cast(tuple[str, list[float]], pickle.load(self._process.stdout))

    def _send(self, message: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()

    def _forget(self) -> None:
        """In a forked process: leave the parent's solver to the parent."""
        self._lock = Lock()
        self._inherited.append(self._process)  # Popen warns when it is deleted while it runs
        self._process = None


_SOLVER = _SolverProcess()
