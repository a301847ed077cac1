"""Reorders the backward pass: ops that free memory come first.

Autograd computes the gradient of a layer's input before that of its weight. The weight's gradient
is small and its op is the last to read the layer's activation; the input's gradient is large. In
the other order, activation and input gradient are not live at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rekindle.core.graph.graph import Op, OpKind, Phase, StepGraph
from rekindle.core.graph.liveness import analyze, live_bytes


def free_first(graph: StepGraph) -> StepGraph:
    """The same step with backward ops that free more than they allocate as early as possible.

    An op moves up only if that raises no peak, since its outputs are then live for longer. If the
    peak of the whole step does not fall, the captured order stays: most models have their peak at
    the loss, which this cannot lower.
    """
    order = _Order(graph)
    before = int(order.live.max(initial=0))
    for index in range(len(graph.ops)):
        order.move_up(index)
    if order.live.max(initial=0) >= before:
        return graph
    return _in_order(graph, [graph.ops[i] for i in order.order])


class _Order:
    """The order of a step's ops so far; `live` has the live bytes at each place in it."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.order: list[int] = []
        liveness = analyze(graph)
        self.sizes = [storage.nbytes for storage in graph.storages]
        self.stays = liveness.is_resident | liveness.is_output
        self.birth, self.death = liveness.birth, liveness.death
        own = np.flatnonzero(~self.stays & (liveness.death >= 0))
        birth, death, sizes = self.birth[own], self.death[own], graph.sizes_bytes[own]
        self.live = live_bytes(birth, death, sizes, len(graph.ops))
        self.touched = [-1] * len(graph.storages)  # the last place at which each is touched
        self.changed = [-1] * len(graph.storages)  # and at which it is made or mutated
        self.place_of: dict[int, int] = {}  # by value: the place of its producer
        self.moves_from = 0  # no op moves before this place

    def move_up(self, index: int) -> None:
        """Place the next op in captured order."""
        op, place = self.graph.ops[index], len(self.order)
        target = place
        if op.phase is not Phase.BACKWARD or op.is_random or op.kind is not OpKind.OPERATOR:
            self.moves_from = place + 1
        else:
            target = self._target(op, place)
        self.order.insert(target, index)
        if target < place:
            self._shift(op, target, place)
        for storage in self.graph.touched(op):
            self.touched[storage] = max(self.touched[storage], target)
        for storage in self._written(op):
            self.changed[storage] = max(self.changed[storage], target)
        for value in op.outputs:
            self.place_of[value] = target

    def _target(self, op: Op, place: int) -> int:
        """The first place allowed by dependencies if it is worth moving there, else `place`."""
        first = max(
            [self.moves_from]
            + [self.place_of.get(value, -1) + 1 for value in (*op.inputs, *op.mutates)]
            + [self.changed[s] + 1 for s in self._storages(op.inputs)]
            + [self.touched[s] + 1 for s in self._written(op)]
        )
        if first >= place or op.is_view:  # views neither allocate nor free
            return min(first, place)
        made, freed = self._made(op), self._freed(op)
        freed_bytes = sum(self.sizes[s] for s in freed if self.touched[s] < first)
        made_bytes = sum(self.sizes[s] for s in made)
        peak = int(self.live[first : place + 1].max())
        fits = int(self.live[first - 1 if first else 0]) + made_bytes <= peak
        return first if freed_bytes > made_bytes and fits else place

    def _shift(self, op: Op, target: int, place: int) -> None:
        """Update places and live bytes for an op that has moved up."""
        made = sum(self.sizes[s] for s in self._made(op))
        freed = [s for s in self._freed(op) if self.touched[s] < target]
        own = int(self.live[target - 1 if target else 0]) + made
        gain = sum(self.sizes[s] for s in freed) - made
        self.live[target + 1 : place + 1] = self.live[target:place] - gain
        self.live[target] = own
        for places in (self.touched, self.changed):
            for storage, at in enumerate(places):
                if at >= target:
                    places[storage] = at + 1
        for value, at in self.place_of.items():
            if at >= target:
                self.place_of[value] = at + 1

    def _storages(self, values: Sequence[int]) -> set[int]:
        return {self.graph.values[value].storage for value in values}

    def _written(self, op: Op) -> set[int]:
        return self._storages(op.mutates).union(self._made(op))

    def _made(self, op: Op) -> list[int]:
        return [s for s in self._storages(op.outputs) if self.birth[s] == op.index]

    def _freed(self, op: Op) -> list[int]:
        """The storages that die with this op in captured order, without its own outputs."""
        return [
            s
            for s in self._storages((*op.inputs, *op.mutates))
            if self.death[s] == op.index and not self.stays[s] and self.birth[s] != op.index
        ]


def _in_order(graph: StepGraph, ops: Sequence[Op]) -> StepGraph:
    """The same graph with its ops in another order."""
    producer = {value: index for index, op in enumerate(ops) for value in op.outputs}
    return StepGraph(
        ops=tuple(replace(op, index=index) for index, op in enumerate(ops)),
        values=tuple(replace(v, producer=producer.get(v.index)) for v in graph.values),
        storages=graph.storages,
        outputs=graph.outputs,
    )
