"""The forward pass as a chain of blocks, cut where few bytes cross.

A **segment** is a run of blocks, planned independently: its inputs are kept by earlier segments,
and it keeps the cells that later segments read (its exports). So the plans of segments can be
combined freely, and only the bytes they keep add up.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rekindle.planners.problem import Ints, Problem

MAX_BLOCKS = 96
_EXPORT_BLOCKS = 2  # a cell is exported to so many blocks; ops farther away are not recomputed


@dataclass(frozen=True)
class Segment:
    """A run of blocks as a problem of its own.

    `cells` and `ops` map its own numbers to the whole problem's; `exports` are the cells it must
    keep for later segments, `borders` those that one of its blocks exports to another, both in its
    own numbers. `block_of_cell` counts its blocks from 0. The first `n_forward` ops are of the
    forward pass; the others are readers. Before the first reader and after each, one more op
    stands for all ops that run there.
    """

    problem: Problem
    cells: list[int]
    ops: list[int]
    exports: list[int]
    borders: list[int]
    block_of_cell: list[int]
    signature: tuple[object, ...]
    n_forward: int

    @property
    def from_ops(self) -> list[int]:
        """The first op, in the whole problem, that each of its own ops stands for."""
        n = self.n_forward
        is_behind = [i > n and (i - n) % 2 == 0 for i in range(len(self.ops))]
        found = [op + behind for op, behind in zip(self.ops, is_behind, strict=True)]
        return [0, *found[1:]]


class BlockPartition:
    """A problem's forward pass, cut into blocks."""

    def __init__(self, problem: Problem, most: int = MAX_BLOCKS) -> None:
        self.problem = problem
        self.ops = sorted(set(problem.writer))
        self.number = {op: i for i, op in enumerate(self.ops)}
        self.readers: list[list[int]] = [[] for _ in range(problem.n_cells)]  # forward ops
        for i, op in enumerate(self.ops):
            for cell in problem.reads[op]:
                self.readers[cell].append(i)
        self._all_readers = [op for op, _ in problem.readers]
        self.ends = _cuts(self._crossing(), most, sum(problem.bytes) + 1)
        self.block_of_op = np.searchsorted(self.ends, np.arange(len(self.ops)), side="right")
        self.block_of_cell = [int(self.block_of_op[self.number[op]]) for op in problem.writer]
        self.pinned, self.global_cells = self._far()

    @property
    def n_blocks(self) -> int:
        """The number of blocks."""
        return len(self.ends)

    def _crossing(self) -> Ints:
        """The bytes crossing from each op to the next; cells other than activations weigh more."""
        problem = self.problem
        changes = np.zeros(len(self.ops) + 1)
        total = sum(problem.bytes) + 1
        for cell, readers in enumerate(self.readers):
            if readers:
                weight = problem.bytes[cell] * (1.0 if problem.needs[cell] else 1.5)
                if not problem.can_keep[cell]:
                    weight = total  # never between the ops that write one storage
                changes[self.number[problem.writer[cell]]] += weight
                changes[readers[-1]] -= weight
        return np.cumsum(changes)[:-1].astype(np.int64)

    def _far(self) -> tuple[set[int], set[int]]:
        """Ops that are not recomputed because they read a cell of a far block, and cells kept for
        such ops.

        A large cell is not kept for the sake of small ones: rather, their ops are not recomputed.
        """
        problem = self.problem
        share: dict[int, float] = {}  # by op: its part of the cells that would be kept for it
        far_cells: dict[int, list[int]] = {}
        for cell, readers in enumerate(self.readers):
            block = self.block_of_cell[cell]
            far = [self.ops[i] for i in readers if self.block_of_op[i] > block + _EXPORT_BLOCKS]
            if problem.needs[cell]:
                continue  # exported anyway
            for op in far:
                share[op] = share.get(op, 0.0) + problem.bytes[cell] / len(far)
                far_cells.setdefault(op, []).append(cell)
        pinned = {
            op
            for op, nbytes in share.items()
            if 2 * nbytes > sum(problem.bytes[cell] for cell in problem.writes[op])
        }
        kept = {cell for op, cells in far_cells.items() if op not in pinned for cell in cells}
        return pinned, kept

    def exports(self, cell: int, last: int) -> bool:
        """True if a segment that ends before block `last` exports a cell to later ones."""
        blocks = [int(self.block_of_op[i]) for i in self.readers[cell]]
        later = [b for b in blocks if b >= last]
        if not later:
            return False
        near = min(later) < last + _EXPORT_BLOCKS
        return near or bool(self.problem.needs[cell]) or cell in self.global_cells

    @cached_property
    def _cells_by_block(self) -> list[list[int]]:
        cells: list[list[int]] = [[] for _ in self.ends]
        for cell, block in enumerate(self.block_of_cell):
            cells[block].append(cell)
        return cells

    def segment(self, first: int, last: int) -> Segment:
        """The blocks first…last-1 as a problem of their own."""
        problem = self.problem
        cells = [c for block in range(first, last) for c in self._cells_by_block[block]]
        local = {cell: i for i, cell in enumerate(cells)}
        start = int(self.ends[first - 1]) if first else 0
        forward = self.ops[start : int(self.ends[last - 1])]
        readers = sorted({op for c in cells for op in problem.needs[c]}.difference(forward))
        ops = [*forward, *(op for reader in readers for op in (reader, reader))]
        if readers:
            ops.insert(len(forward), readers[0])
        place = {op: i for i, op in enumerate(forward)}
        place.update({op: len(forward) + 1 + 2 * i for i, op in enumerate(readers)})
        inside = set(forward)
        needs = [[place[op] for op in problem.needs[c] if op not in inside] for c in cells]
        exports = [local[c] for c in cells if self.exports(c, last)]
        blocks = [self.block_of_cell[c] - first for c in cells]
        borders = [
            local[c]
            for c, block in zip(cells, blocks, strict=True)
            if block < last - first - 1 and self.exports(c, first + block + 1)
        ]
        final = len(forward) - 1
        sub = replace(
            problem,
            storage=[problem.storage[c] for c in cells],
            bytes=[problem.bytes[c] for c in cells],
            writer=[place[problem.writer[c]] for c in cells],
            last_use=[place.get(problem.last_use[c], final) for c in cells],
            needs=needs,
            can_keep=[problem.can_keep[c] for c in cells],
            must_keep=[problem.must_keep[c] or problem.writer[c] in self.pinned for c in cells],
            reads=[[local[c] for c in problem.reads[op] if c in local] for op in ops],
            writes=[[local[c] for c in problem.writes[op]] for op in forward]
            + [[] for _ in ops[len(forward) :]],
            also_makes=[[] for _ in ops],
            times=[problem.times[op] for op in ops],
            workspaces=problem.workspaces[ops],
            base=self._base(forward, readers),
            between=problem.between[ops],
        )
        signature = (
            tuple(sub.bytes),
            tuple(sub.writer),
            tuple(sub.can_keep),
            tuple(sub.must_keep),
            tuple(map(tuple, sub.needs)),
            tuple(map(tuple, sub.reads)),
            tuple(exports),
            tuple(borders),
            tuple(sub.last_use),
            tuple(int(nbytes) for nbytes in sub.workspaces[: len(forward)]),
        )
        return Segment(sub, cells, ops, exports, borders, blocks, signature, len(forward))

    def _base(self, forward: list[int], readers: list[int]) -> Ints:
        """The base at each op of a segment; between two readers, the maximum in between.

        Before the first reader, the maximum since the last reader of any segment.
        """
        base, rest = self.problem.base, []
        if readers:
            place = bisect_left(self._all_readers, readers[0])
            before = self._all_readers[place - 1] if place else self.ops[-1]
            rest.append(int(base[before + 1 : readers[0]].max(initial=0)))
        for reader in readers:
            rest += [int(base[reader]), self._after[reader]]
        return np.array([*base[forward], *rest], dtype=np.int64)

    @cached_property
    def _after(self) -> dict[int, int]:
        """The maximum of the base between each reader and the next one of any segment."""
        base, ends = self.problem.base, [*self._all_readers[1:], self.problem.n_ops]
        return {
            reader: int(base[reader + 1 : end].max(initial=0))
            for reader, end in zip(self._all_readers, ends, strict=False)
        }


def _cuts(crossing: Ints, most: int, never: int) -> Ints:
    """The ends of the blocks: after ops with the fewest bytes crossing nearby, spaced out.

    There is no cut where `never` bytes or more cross.
    """
    n = len(crossing)
    radius = max(1, n // most)
    ends: list[int] = []
    for i in range(n - 1):
        near = crossing[max(0, i - radius) : min(n - 1, i + radius + 1)]
        is_least = crossing[i] < never and crossing[i] <= near.min()
        if is_least and (not ends or i + 1 >= ends[-1] + radius):
            ends.append(i + 1)
    return np.array([*ends, n], dtype=np.int64)
