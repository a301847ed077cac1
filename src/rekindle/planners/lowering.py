"""Lowering: from a planner's choices to the order of ops, lifetimes, and the schedule.

A planner chooses the cells to keep. All others are freed after their last forward use and
recomputed just in time: right before the first op that reads them, from the live cells, in captured
order. One such run of ops is a **burst**.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rekindle.core.graph.dataflow import dataflow
from rekindle.core.graph.liveness import analyze, live_bytes
from rekindle.core.graph.schedule import Compute, Free, Instruction, LivingCopy, Schedule
from rekindle.planners.problem import Ints, Problem

# The ops that are recomputed, in captured order, right before an op; sorted by that op.
Bursts = Sequence[tuple[int, Sequence[int]]]


@dataclass(frozen=True)
class Choices:
    """A planner's decisions, cell by cell.

    `keep`: True if the cell stays from the forward pass. `hold_from`: a cell that is recomputed
    before the op of this index is freed right after the burst's reader, and recomputed once more
    later; from that op on it is held until its last use. 0, the usual value, always holds.
    """

    keep: list[bool]
    hold_from: list[int]


@dataclass(slots=True)
class Instance:
    """One copy of a storage, and the positions that bound its lifetime."""

    storage: int
    copy: int
    start: int
    end: int


@dataclass(frozen=True)
class Lowered:
    """A lowered plan: the ops in the order they run, and the lifetime of every copy of a cell.

    `ops` and `copies` are what runs at each position; `anchor` is the captured op that a position
    belongs to: the op itself, or the reader of a burst.
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
        problem = self.problem
        rows = [(i.start, i.end, i.storage) for i in self.instances]
        start, end, storage = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        cells = live_bytes(start, end, problem.sizes[storage], len(self.ops))
        during_copies = problem.between[self.anchor] + problem.workspaces[self.ops]
        return cells + np.where(self.copies > 0, during_copies, problem.base[self.ops])

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes allocated at any position."""
        return int(self.live.max(initial=0))


def keep_all(problem: Problem) -> Choices:
    """Keep every activation: the plain step, with dead storages freed at once."""
    return Choices([True] * problem.n_cells, [0] * problem.n_cells)


def drop_all(problem: Problem) -> Choices:
    """Drop every activation that may be dropped; recompute each once, when it is first read."""
    return choices(problem, ())


def choices(problem: Problem, kept: Iterable[int]) -> Choices:
    """Keep these cells and those that must be kept; drop the others, and hold recomputed ones."""
    keep = list(problem.must_keep)
    for cell, nbytes in enumerate(problem.bytes):
        if not nbytes and problem.can_keep[cell]:
            keep[cell] = True
    for cell in kept:
        keep[cell] = problem.can_keep[cell] or keep[cell]
    return Choices(keep, [0] * problem.n_cells)


def lower(problem: Problem, chosen: Choices) -> Lowered:
    """Place every recomputation just in time, and free every copy at its last use."""
    return _Lowering(problem, chosen).run()


class _Lowering:
    def __init__(self, problem: Problem, chosen: Choices) -> None:
        self.problem = problem
        # An overwritten cell is live only while a recomputation passes through it.
        self.keep = [k and can for k, can in zip(chosen.keep, problem.can_keep, strict=True)]
        self.hold_from = chosen.hold_from
        self.available: dict[int, Instance] = {}  # by cell: recomputed copies that are held
        self.original: dict[int, Instance] = {}  # by storage
        self.instances: list[Instance] = []
        self.bursts: list[tuple[int, list[int]]] = []
        self.extra = 0
        self.recompute_us = 0.0

    def run(self) -> Lowered:
        problem = self.problem
        for cell, storage in enumerate(problem.storage):
            self.original.setdefault(storage, Instance(storage, 0, problem.writer[cell], -1))
        for reader, cells in problem.readers:
            fleeting = self.provide(reader, cells)
            position = reader + self.extra
            for cell in cells:
                self._instance(cell).end = position
            for cell in fleeting:
                self.available.pop(cell, None)
        return self._finished()

    def provide(self, reader: int, cells: list[int]) -> list[int]:
        """Recompute the cells an op reads that are not live; returns those to free after it."""
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
                    continue  # a by-product that is live already
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
        """The ops that compute these cells from the live ones, in captured order."""
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


def lower_bursts(problem: Problem, bursts: Bursts) -> Lowered:
    """The lowered plan with exactly these recomputations.

    They determine all lifetimes: an op reads the newest copy, and a copy is freed after the last op
    that reads it. No other lifetimes need less memory.
    """
    return _Replay(problem, bursts).run()


class _Replay:
    """One pass over the captured ops and the bursts before them."""

    def __init__(self, problem: Problem, bursts: Bursts) -> None:
        self.problem = problem
        self.bursts = sorted(bursts)
        self.needed = dict(problem.readers)
        self.written: dict[int, list[int]] = {}  # by op: the cells that the captured op writes
        self.last_used: dict[int, list[int]] = {}  # by op: the cells it is the last to use
        for cell in range(problem.n_cells):
            self.written.setdefault(problem.writer[cell], []).append(cell)
            self.last_used.setdefault(problem.last_use[cell], []).append(cell)
        self.current: dict[int, Instance] = {}  # by cell: the newest copy
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
        """Recompute an op; `made` are the copies of this burst, which it makes or mutates."""
        problem, position = self.problem, self._place(op, copy, reader)
        for cell in problem.reads[op]:
            self.current[cell].end = position
        for cell in problem.writes[op]:
            storage = problem.storage[cell]
            if storage not in made:
                made[storage] = self._make(storage, copy, position)
            made[storage].end = position
            in_use = problem.last_use[cell] >= reader and self.holds[storage] == cell
            if not in_use:  # otherwise the original stays live and serves as well
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


def to_schedule(lowered: Lowered) -> Schedule:
    """The instructions of a lowered plan. Views of recomputed storages are made where read."""
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
        """The (storage, copy) pairs freed after each position, cells or not."""
        ends: dict[int, list[tuple[int, int]]] = {}
        for instance in self.lowered.instances:
            ends.setdefault(instance.end, []).append((instance.storage, instance.copy))
        liveness = analyze(self.graph)
        place = np.flatnonzero(self.lowered.copies == 0)
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
        """The newest copy that holds a value; the view is taken if the copy lacks it."""
        copies = self.living.get(self.graph.values[value].storage, ())
        fitting = [copy for copy in copies if copy.version == version]
        for copy in reversed(fitting):
            if value in copy.values:
                return copy
        self.look(value, fitting[-1])
        return fitting[-1]

    def look(self, value: int, copy: LivingCopy) -> None:
        """Take a view of a copy; its producer may precede the storage's last mutation."""
        producer = self.graph.values[value].producer
        assert producer is not None  # managed storages are made in the step
        op = self.graph.ops[producer]
        for base in op.inputs:
            same = self.graph.values[base].storage == self.graph.values[value].storage
            if same and base not in copy.values:
                self.look(base, copy)
        self.made.append(Compute(producer, copy.number))
        copy.values.update(op.outputs)
