"""Priced min-cut: what to keep and what to recompute, exactly, for given prices.

Min-cut rematerialisation, as in PyTorch's AOTAutograd partitioner, with a price per cell and the
ops' times. Every cell has a node X (it is available in the backward pass), every forward op a node
Y (it is recomputed). Edges: s→X (infinite) if the backward pass reads the cell, X→Y with the price
of keeping it, Y→t with the op's cost, and Y→X (infinite) to the cells the op reads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from rekindle.planners.problem import Floats, Problem

_INFINITE = 2**30
_TOTAL_CAPACITY = 2**26  # of all ops: flows must fit into 32 bits


@dataclass(frozen=True)
class Cut:
    """A min-cut: the kept cells, the recomputed ops, and the value in µs.

    Capacities are rounded down, so the value is never above the true minimum.
    """

    kept: list[int]
    ops: list[int]
    value_us: float


class CutNetwork:
    """The network of a problem; built once, solved for many prices.

    `keepable` are cells that count as kept at their price although they are overwritten.
    """

    def __init__(self, problem: Problem, keepable: Collection[int] = ()) -> None:
        self.problem = problem
        self.ops = sorted(set(problem.writer))
        number = {op: i for i, op in enumerate(self.ops)}
        n_cells, n_ops = problem.n_cells, len(self.ops)
        self.source, self.sink = n_cells + n_ops, n_cells + n_ops + 1
        self.size = n_cells + n_ops + 2
        self.y_of_cell = np.array([n_cells + number[op] for op in problem.writer], dtype=np.int64)
        cells = np.arange(n_cells)
        y = n_cells + np.arange(n_ops)
        needed = np.array(problem.activations, dtype=np.int64)
        pairs = np.array(
            [(n_cells + number[op], cell) for op in self.ops for cell in problem.reads[op]],
            dtype=np.int64,
        ).reshape(-1, 2)
        rows = [np.full(len(needed), self.source), cells, y, pairs[:, 0]]
        must_keep = np.array(problem.must_keep, dtype=bool)
        recomputed = np.where(must_keep, self.sink, self.y_of_cell)  # must_keep: only keeping
        columns = [needed, recomputed, np.full(n_ops, self.sink), pairs[:, 1]]
        self.end_of_keep = recomputed
        self.rows, self.columns = np.concatenate(rows), np.concatenate(columns)
        first = len(needed)
        self.keep_edges = slice(first, first + n_cells)
        self.op_edges = slice(first + n_cells, first + n_cells + n_ops)
        self.capacities = np.full(len(self.rows), _INFINITE, dtype=np.int64)
        self.order = np.lexsort((self.columns, self.rows))
        counts = np.bincount(self.rows, minlength=self.size)
        self.indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.indices = self.columns[self.order].astype(np.int32)
        self.can_keep = np.array(problem.can_keep, dtype=bool)
        self.can_keep[list(keepable)] = True
        self.always_kept = must_keep.copy()  # and read by the backward pass
        self.always_kept &= np.array([bool(needs) for needs in problem.needs], dtype=bool)
        self.costs_us = np.array([problem.times[op] for op in self.ops])

    def solve(self, price_us: Floats) -> Cut:
        """The cut for a price of keeping each cell; ops cost their time."""
        scale = _TOTAL_CAPACITY / max(float(self.costs_us.sum()), 1e-9)
        capacities = self.capacities
        price = np.minimum(np.floor(price_us * scale), _TOTAL_CAPACITY + 1)  # > all ops together
        price[self.always_kept] = 0  # a constant, added below
        capacities[self.keep_edges] = np.where(self.can_keep, price, _INFINITE)
        capacities[self.op_edges] = np.floor(self.costs_us * scale)
        data = capacities[self.order].astype(np.int32)
        graph = csr_array((data, self.indices, self.indptr), shape=(self.size, self.size))
        flow = maximum_flow(graph, self.source, self.sink)
        constant = float(price_us[self.always_kept].sum())
        return self._read(graph, flow.flow, flow.flow_value / scale + constant)

    def _read(self, graph: csr_array, flow: csr_array, value_us: float) -> Cut:
        residual = graph - flow
        residual.eliminate_zeros()
        reached = breadth_first_order(residual, self.source, return_predecessors=False)
        inside = np.zeros(self.size, dtype=bool)
        inside[reached] = True
        n_cells = self.problem.n_cells
        kept = inside[:n_cells] & ~inside[self.end_of_keep]
        again = [op for op, y in zip(self.ops, inside[n_cells:], strict=False) if y]
        return Cut([int(c) for c in np.flatnonzero(kept)], again, value_us)
