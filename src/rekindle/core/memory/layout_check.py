"""Checks a layout by replaying the step: no op overwrites memory that is still needed.

It shares no code with `layout`: the schedule says when each piece is live, the layout where it is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import takewhile

from rekindle.core.graph.dataflow import dataflow
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Free, Plan, ResolvedCompute, resolve, schedule_of
from rekindle.core.memory.layout import Layout, Piece
from rekindle.errors import InvalidLayout


def check_layout(graph: StepGraph, layout: Layout, plan: Plan | None = None) -> None:
    """Raise InvalidLayout unless no two pieces overlap while they are live.

    An op may write its result over all of an input if its operator can do so and the input is freed
    right after.
    """
    memory = _Memory(graph, layout)
    steps = list(resolve(graph, schedule_of(graph, plan)))
    for place, step in enumerate(steps):
        if isinstance(step, Free):
            memory.free(Piece(step.storage, step.copy))
            continue
        dying: set[Piece] = set()
        for later in steps[place + 1 :]:
            if not isinstance(later, Free):
                break
            dying.add(Piece(later.storage, later.copy))
        memory.run(step, dying)


class _Memory:
    """The live pieces and their addresses, at one moment."""

    def __init__(self, graph: StepGraph, layout: Layout) -> None:
        self.graph = graph
        self.flow = dataflow(graph)
        self.arena_bytes = layout.arena_bytes
        rows = zip(layout.storage, layout.copy, layout.offset, layout.nbytes, strict=True)
        self.where = {Piece(int(s), int(c)): (int(at), int(size)) for s, c, at, size in rows}
        self.entered = {value.storage for value in graph.values if value.producer is None}
        self.live: list[tuple[int, int, Piece]] = []  # start, end, sorted

    def run(self, run: ResolvedCompute, dying: set[Piece]) -> None:
        op = self.graph.ops[run.op]
        for storage in self.flow.copy_makes[run.op] if run.copy else self.flow.makes[run.op]:
            if storage in self.entered:
                continue
            piece = Piece(storage, run.copy)
            if piece not in self.where:
                raise InvalidLayout(op.name, "its result has no address")
            start, nbytes = self.where[piece]
            if nbytes < self.graph.storages[storage].nbytes:
                raise InvalidLayout(op.name, f"its result gets {nbytes} bytes, which is too few")
            if start < 0 or start + nbytes > self.arena_bytes:
                raise InvalidLayout(op.name, "its result is outside of the arena")
            for other in self._within(start, start + nbytes):
                if other not in dying or not self._may_overwrite(run, piece, other):
                    name = self.graph.storage_name(*other)
                    raise InvalidLayout(
                        op.name, f"its result lies over {name}, which is needed later"
                    )
                self.free(other)
                dying.discard(other)
                self.where[other] = (-1, 0)  # already removed when the schedule frees it
            if nbytes:
                insort(self.live, (start, start + nbytes, piece))

    def free(self, piece: Piece) -> None:
        start, nbytes = self.where[piece]
        if nbytes:
            self.live.remove((start, start + nbytes, piece))

    def _within(self, start: int, end: int) -> list[Piece]:
        """The live pieces in a range of bytes."""
        first = bisect_left(self.live, (start,))
        if first and self.live[first - 1][1] > start:
            first -= 1
        within = takewhile(lambda live: live[0] < end, self.live[first:])
        return [piece for _, _, piece in within]

    def _may_overwrite(self, run: ResolvedCompute, piece: Piece, other: Piece) -> bool:
        op = self.graph.ops[run.op]
        if self.where[piece] != self.where[other] or (run.copy and op.copy_target):
            return False
        return any(
            Piece(self.graph.values[value].storage, run.copies[value]) == other
            for value in op.may_overwrite
        )
