"""From choices to a schedule: the one lowering that all planners share.

A planner says what is kept. Everything else is freed after its last forward use and computed again
just in time: right before the first op that reads it, by the ops between what is available then and
what is wanted, in captured order. One such run of ops is a **burst**.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rekindle.core.graph.dataflow import dataflow
from rekindle.core.graph.liveness import analyze
from rekindle.core.graph.schedule import Compute, Free, Instruction, LivingCopy, Schedule
from rekindle.planners.problem import Ints, Problem


@dataclass(frozen=True)
class Choices:
    """What a planner decides, cell by cell.

    `keep`: whether the cell stays from the forward pass. `hold_from`: a cell that a burst computes
    before the op of this index is let go when the burst is over, and computed again later; from
    that op on it is held until its last use. 0, the usual, always holds.
    """

    keep: list[bool]
    hold_from: list[int]


@dataclass(slots=True)
class Instance:
    """One copy of a storage: which one, and the positions that bound its life."""

    storage: int
    copy: int
    start: int
    end: int


@dataclass(frozen=True)
class Lowered:
    """A lowered plan: the ops in the order they run, and the life of every copy of a cell.

    `ops` and `copies` say what runs at each position; `anchor` is the captured op that a position
    belongs to: the op itself, or the one a burst is for. `live` is what is allocated there.
    """

    problem: Problem
    ops: Ints
    copies: Ints
    anchor: Ints
    instances: list[Instance]
    recompute_us: float

    @cached_property
    def live(self) -> Ints:
        """The bytes allocated at each position."""
        problem, n = self.problem, len(self.ops)
        table = np.array([(i.start, i.end, i.storage) for i in self.instances], dtype=np.int64)
        sizes = problem.sizes
        changes = np.zeros(n + 1)
        if len(table):
            nbytes = sizes[table[:, 2]]
            changes += np.bincount(table[:, 0], weights=nbytes, minlength=n + 1)
            changes -= np.bincount(table[:, 1] + 1, weights=nbytes, minlength=n + 1)
        cells = np.cumsum(changes)[:n].astype(np.int64)
        is_copy = self.copies > 0
        workspaces = problem.workspaces[self.ops]
        rest = np.where(is_copy, problem.between[self.anchor] + workspaces, problem.base[self.ops])
        return cells + rest

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes allocated at any position."""
        return int(self.live.max(initial=0))


def keep_all(problem: Problem) -> Choices:
    """Keep every activation: the plain step, but that what is dead is freed at once."""
    return Choices([True] * problem.n_cells, [0] * problem.n_cells)


def choices(problem: Problem, kept: Iterable[int]) -> Choices:
    """Keep these cells and those that must be kept; drop the others, and hold what is computed."""
    keep = list(problem.must_keep)
    for cell, nbytes in enumerate(problem.bytes):
        if not nbytes and problem.can_keep[cell]:
            keep[cell] = True
    for cell in kept:
        keep[cell] = problem.can_keep[cell] or keep[cell]
    return Choices(keep, [0] * problem.n_cells)


def lower(problem: Problem, chosen: Choices) -> Lowered:
    """Place every recomputation just in time, and end every life at its last use."""
    return _Lowering(problem, chosen).run()


class _Lowering:
    def __init__(self, problem: Problem, chosen: Choices) -> None:
        self.problem = problem
        self.keep = chosen.keep
        self.hold_from = chosen.hold_from
        self.available: dict[int, Instance] = {}  # by cell: what bursts have computed and held
        self.original: dict[int, Instance] = {}  # by storage
        self.instances: list[Instance] = []
        self.bursts: list[tuple[int, list[int]]] = []
        self.extra = 0
        self.recompute_us = 0.0

    def run(self) -> Lowered:
        problem = self.problem
        for cell, storage in enumerate(problem.storage):
            if storage not in self.original:
                start = problem.writer[cell]
                self.original[storage] = Instance(storage, 0, start, -1)
        for reader, cells in problem.readers:
            fleeting = self.provide(reader, cells)
            position = reader + self.extra
            for cell in cells:
                self._instance(cell).end = position
            for cell in fleeting:
                self.available.pop(cell, None)
        return self._finished()

    def provide(self, reader: int, cells: list[int]) -> list[int]:
        """Compute what an op reads and is not there; returns what is let go after the op."""
        available, keep = self.available, self.keep
        wanted = [c for c in cells if not keep[c] and c not in available]
        if not wanted:
            return [c for c in cells if not keep[c] and self.hold_from[c] > reader]
        problem = self.problem
        ops = self.burst_for(wanted)
        copy = len(self.bursts) + 1
        start = reader + self.extra
        made: dict[int, Instance] = {}  # by storage
        written: set[int] = set()
        fleeting = []
        for position, op in enumerate(ops, start):
            for cell in problem.reads[op]:
                own = cell in written
                instance = made[problem.storage[cell]] if own else self._instance(cell)
                instance.end = position
            written.update(problem.writes[op])
            for cell in problem.writes[op]:
                storage = problem.storage[cell]
                if storage not in made:
                    made[storage] = Instance(storage, copy, position, position)
                    self.instances.append(made[storage])
                made[storage].end = position
                if keep[cell] or cell in available:
                    continue  # a by-product that is there already
                if problem.can_keep[cell]:
                    available[cell] = made[storage]
                    if self.hold_from[cell] > reader:
                        fleeting.append(cell)
            for storage in problem.also_makes[op]:
                self.instances.append(Instance(storage, copy, position, position))
            self.recompute_us += problem.times[op]
        self.bursts.append((reader, ops))
        self.extra += len(ops)
        return fleeting

    def burst_for(self, wanted: list[int]) -> list[int]:
        """The ops that compute these cells from what is available, in captured order."""
        problem, keep, available = self.problem, self.keep, self.available
        writer, reads = problem.writer, problem.reads
        ops: set[int] = set()
        todo = list(wanted)
        while todo:
            op = writer[todo.pop()]
            if op not in ops:
                ops.add(op)
                todo += [c for c in reads[op] if not keep[c] and c not in available]
        return sorted(ops)

    def _instance(self, cell: int) -> Instance:
        return self.available.get(cell) or self.original[self.problem.storage[cell]]

    def _finished(self) -> Lowered:
        n_ops = self.problem.n_ops
        inserted = np.zeros(n_ops, dtype=np.int64)
        for reader, ops in self.bursts:
            inserted[reader] = len(ops)
        place = np.arange(n_ops) + np.cumsum(inserted)  # of each captured op
        sequence = np.empty(n_ops + self.extra, dtype=np.int64)
        sequence[place] = np.arange(n_ops)
        anchor, copies = sequence.copy(), np.zeros_like(sequence)
        for number, (reader, ops) in enumerate(self.bursts, 1):
            burst = slice(place[reader] - len(ops), place[reader])
            sequence[burst], anchor[burst], copies[burst] = ops, reader, number
        for cell, storage in enumerate(self.problem.storage):
            instance = self.original[storage]
            if self.problem.can_keep[cell]:
                instance.start = int(place[instance.start])
                instance.end = max(instance.end, int(place[self.problem.last_use[cell]]))
        instances = [*self.original.values(), *self.instances]
        return Lowered(self.problem, sequence, copies, anchor, instances, self.recompute_us)


def to_schedule(lowered: Lowered) -> Schedule:
    """The instructions of a lowered plan. Views of what is computed again are made where read."""
    return tuple(_Emitter(lowered).run())


class _Emitter:
    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.graph = lowered.problem.graph
        self.flow = dataflow(self.graph)
        self.managed = set(lowered.problem.storage)
        self.living: dict[int, list[LivingCopy]] = {}  # copies of managed storages
        self.made: list[Instruction] = []

    def run(self) -> list[Instruction]:
        ends = self._ends()
        lowered = self.lowered
        for position, (op, copy) in enumerate(zip(lowered.ops, lowered.copies, strict=True)):
            self.compute(int(op), int(copy))
            for storage, number in ends.get(position, ()):
                self.made.append(Free(storage, number))
                copies = self.living.get(storage, [])
                self.living[storage] = [c for c in copies if c.number != number]
        return self.made

    def _ends(self) -> dict[int, list[tuple[int, int]]]:
        """What is freed after each position: copies of cells, and every other storage that dies."""
        ends: dict[int, list[tuple[int, int]]] = {}
        for instance in self.lowered.instances:
            ends.setdefault(instance.end, []).append((instance.storage, instance.copy))
        liveness = analyze(self.graph)
        is_captured = self.lowered.copies == 0
        place = np.flatnonzero(is_captured)
        for storage, death in enumerate(liveness.death):
            stays = liveness.is_resident[storage] or liveness.is_output[storage]
            if storage not in self.managed and death >= 0 and not stays:
                ends.setdefault(int(place[death]), []).append((storage, 0))
        return ends

    def compute(self, index: int, copy: int) -> None:
        op, flow = self.graph.ops[index], self.flow
        inputs = flow.copy_inputs[index] if copy else dict.fromkeys((*op.inputs, *op.mutates))
        versions = dict(flow.copy_reads[index] if copy else flow.reads[index])
        seen: dict[int, LivingCopy] = {}
        for value in inputs:
            storage = self.graph.values[value].storage
            if storage in self.managed:
                seen[storage] = self.provide(value, versions[storage])
        self.made.append(Compute(index, copy))
        for storage in flow.mutates[index]:
            if storage in seen:
                seen[storage].version += 1
        for storage in flow.copy_makes[index] if copy else flow.makes[index]:
            if storage in self.managed:
                seen[storage] = LivingCopy(copy, 1)
                self.living.setdefault(storage, []).append(seen[storage])
        for value in op.outputs if not (copy and op.copy_target) else op.outputs[:1]:
            if (storage := self.graph.values[value].storage) in seen:
                seen[storage].values.add(value)

    def provide(self, value: int, version: int) -> LivingCopy:
        """The newest copy that holds a value; the view is taken where the copy lacks it."""
        fitting = [
            copy
            for copy in self.living.get(self.graph.values[value].storage, ())
            if copy.version == version
        ]
        for copy in reversed(fitting):
            if value in copy.values:
                return copy
        self.look(value, fitting[-1])
        return fitting[-1]

    def look(self, value: int, copy: LivingCopy) -> None:
        """Take a view of a copy; it may have been taken before the storage was last changed."""
        producer = self.graph.values[value].producer
        assert producer is not None  # managed storages are made in the step
        op = self.graph.ops[producer]
        for base in op.inputs:
            same = self.graph.values[base].storage == self.graph.values[value].storage
            if same and base not in copy.values:
                self.look(base, copy)
        self.made.append(Compute(producer, copy.number))
        copy.values.update(op.outputs)
