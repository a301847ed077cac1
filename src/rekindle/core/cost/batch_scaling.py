"""The step at any batch size, extrapolated linearly from the step at two batch sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.graph.graph import StepGraph


class Uneven(Exception):
    """Two steps differ by more than their sizes, or their sizes do not grow linearly."""


class Sized(NamedTuple):
    """A step at some batch size."""

    batch: int
    graph: StepGraph


class Growth:
    """A step as a linear function of its batch size, given at two sizes.

    Raises Uneven if the two steps differ by more than their sizes.
    """

    def __init__(self, small: Sized, large: Sized) -> None:
        self.small, self.large = small, large
        if _structure(small.graph) != _structure(large.graph):
            raise Uneven("the step runs other ops at another batch size")
        self.at(1)  # raises if a size does not grow linearly

    def at(self, batch: int) -> StepGraph:
        """The step at another batch size."""
        a, b = self.small.graph, self.large.graph
        storages = tuple(
            replace(x, nbytes=self._between(x.nbytes, y.nbytes, batch))
            for x, y in zip(a.storages, b.storages, strict=True)
        )
        values = tuple(
            replace(x, shape=tuple(map(lambda p, q: self._between(p, q, batch), x.shape, y.shape)))
            for x, y in zip(a.values, b.values, strict=True)
        )
        ops = tuple(
            replace(x, flops=self._between(x.flops, y.flops, batch))
            for x, y in zip(a.ops, b.ops, strict=True)
        )
        return StepGraph(ops, values, storages, a.outputs)

    @cached_property
    def bytes_per_sample(self) -> NDArray[np.float64]:
        """The growth of each storage per sample."""
        pairs = zip(self.small.graph.storages, self.large.graph.storages, strict=True)
        grown = np.array([y.nbytes - x.nbytes for x, y in pairs], dtype=np.float64)
        return grown / (self.large.batch - self.small.batch)

    def costs_at(self, small: Profile, large: Profile, graph: StepGraph, batch: int) -> Profile:
        """The profile of the step at another batch size, from profiles measured at both."""
        costs = [
            OpCost(
                time_us=self._line(x.time_us, y.time_us, batch),
                workspace_bytes=round(self._line(x.workspace_bytes, y.workspace_bytes, batch)),
                copy_us=None
                if x.copy_us is None or y.copy_us is None
                else self._line(x.copy_us, y.copy_us, batch),
            )
            for x, y in zip(small.costs, large.costs, strict=True)
        ]
        return replace(
            large,
            fingerprint=graph.fingerprint,
            costs=tuple(costs),
            overhead_bytes=max(small.overhead_bytes, large.overhead_bytes),
            method=f"from batches of {self.small.batch} and {self.large.batch}: {large.method}",
        )

    def _line(self, small: float, large: float, batch: int) -> float:
        step = (large - small) / (self.large.batch - self.small.batch)
        return max(large + step * (batch - self.large.batch), 0.0)

    def _between(self, small: int, large: int, batch: int) -> int:
        """An integer that grows linearly with the batch, at another batch size."""
        grown = (large - small) * (batch - self.small.batch)
        step, rest = divmod(grown, self.large.batch - self.small.batch)
        if rest or small + step < 0:
            raise Uneven(f"{small} and {large} do not grow linearly with the batch")
        return small + step


def _structure(graph: StepGraph) -> list[object]:
    """Everything in a step except its sizes."""
    ops = [
        (op.name, op.target, op.phase, op.inputs, op.outputs, op.mutates, op.members)
        for op in graph.ops
    ]
    values = [(v.name, v.storage, v.dtype, v.producer, len(v.shape)) for v in graph.values]
    storages = [(s.role, s.device, s.held_until) for s in graph.storages]
    return [*ops, *values, *storages, graph.outputs]
