"""From bursts to a lowered plan: which ops run again before which reader, and nothing else said.

That alone fixes every life. An op reads the newest copy of what it reads, and a copy is let go
after the last op that reads it: nothing else needs less memory for the same work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rekindle.planners.lowering import Instance, Lowered
from rekindle.planners.problem import Problem

# The ops that run again, in captured order, right before an op; in the order of those ops.
Bursts = Sequence[tuple[int, Sequence[int]]]


def lower_bursts(problem: Problem, bursts: Bursts) -> Lowered:
    """The lowered plan whose recomputations are exactly these."""
    return _Replay(problem, bursts).run()


class _Replay:
    def __init__(self, problem: Problem, bursts: Bursts) -> None:
        self.problem = problem
        self.bursts = sorted(bursts)
        self.needed = dict(problem.readers)
        self.written: dict[int, list[int]] = {}  # by op: the cells that the captured op writes
        self.last_used: dict[int, list[int]] = {}  # and those that it is the last to use
        for cell, (writer, last_use) in enumerate(
            zip(problem.writer, problem.last_use, strict=True)
        ):
            self.written.setdefault(writer, []).append(cell)
            self.last_used.setdefault(last_use, []).append(cell)
        self.current: dict[int, Instance] = {}  # by cell: the copy that is read
        self.originals: dict[int, Instance] = {}  # by storage
        self.holds: dict[int, int] = {}  # by storage: the cell that its original holds now
        self.instances: list[Instance] = []
        self.ops: list[int] = []
        self.copies: list[int] = []
        self.anchor: list[int] = []

    def run(self) -> Lowered:
        done, end = 0, (self.problem.n_ops, ())
        for number, (reader, ops) in enumerate((*self.bursts, end), 1):
            for op in range(done, reader):
                self.run_captured(op)
            done = reader
            made: dict[int, Instance] = {}  # by storage
            for op in ops:
                self.run_again(op, number, reader, made)
        times = self.problem.times
        return Lowered(
            self.problem,
            np.array(self.ops, dtype=np.int64),
            np.array(self.copies, dtype=np.int64),
            np.array(self.anchor, dtype=np.int64),
            self.instances,
            sum((times[op] for _, ops in self.bursts for op in ops), 0.0),
        )

    def run_captured(self, op: int) -> None:
        position = self._place(op, 0, op)
        for cell in self.needed.get(op, ()):
            self.current[cell].end = position
        for cell in self.written.get(op, ()):
            storage = self.problem.storage[cell]
            if storage not in self.originals:
                self.originals[storage] = self._make(storage, 0, position)
            self.current[cell] = self.originals[storage]
            self.holds[storage] = cell
        for cell in self.last_used.get(op, ()):
            self.originals[self.problem.storage[cell]].end = position

    def run_again(self, op: int, copy: int, reader: int, made: dict[int, Instance]) -> None:
        """Run an op again; `made` are the copies of this burst, which it makes or changes."""
        problem, position = self.problem, self._place(op, copy, reader)
        for cell in problem.reads[op]:
            self.current[cell].end = position
        for cell in problem.writes[op]:
            storage = problem.storage[cell]
            if storage not in made:
                made[storage] = self._make(storage, copy, position)
            made[storage].end = position
            in_use = problem.last_use[cell] >= reader and self.holds[storage] == cell
            if not in_use:  # else the original has to stay, and serves as well
                self.current[cell] = made[storage]
        for storage in problem.also_makes[op]:
            self._make(storage, copy, position)

    def _make(self, storage: int, copy: int, position: int) -> Instance:
        self.instances.append(Instance(storage, copy, position, position))
        return self.instances[-1]

    def _place(self, op: int, copy: int, anchor: int) -> int:
        self.ops.append(op)
        self.copies.append(copy)
        self.anchor.append(anchor)
        return len(self.ops) - 1
