"""The lifetime of every storage: static analysis of a step in its captured order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from rekindle.core.graph.graph import Op, Phase, Role, StepGraph

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The ops, by index, that bound a storage's lifetime; None if there is no such op.

    `birth` is None if it exists before the step, `death` if it exists after it.
    """

    storage: int
    birth: int | None
    last_forward_use: int | None
    first_backward_use: int | None
    last_backward_use: int | None
    death: int | None

    def inactive_us(self, starts_us: NDArray[np.float64]) -> float:
        """How long the storage is idle between its last forward and first backward use.

        `starts_us` has the time at which each op starts, and the step's end after the last.
        """
        if self.last_forward_use is None or self.first_backward_use is None:
            return 0.0
        end_of_forward = starts_us[self.last_forward_use + 1]
        return max(0.0, float(starts_us[self.first_backward_use] - end_of_forward))


@dataclass(frozen=True)
class Liveness:
    """The lifetimes of all storages of a graph, as arrays over storages.

    `birth` and `death` are op indices, inclusive: a storage is live while ops birth…death run.
    Resident storages have birth 0; residents and outputs have death n_ops - 1. `release` is when
    the plain step frees a storage: at its death, or later if a local variable or autograd still
    holds a reference.
    """

    graph: StepGraph
    birth: Ints
    death: Ints
    release: Ints
    is_resident: NDArray[np.bool_]
    is_output: NDArray[np.bool_]

    @cached_property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """The lifetime of every storage, by its index."""
        uses: list[list[Op]] = [[] for _ in self.graph.storages]
        for op in self.graph.ops:
            for storage in self.graph.touched(op):
                uses[storage].append(op)
        return tuple(self._lifetime(index, ops) for index, ops in enumerate(uses))

    def _lifetime(self, storage: int, uses: list[Op]) -> Lifetime:
        forward = [op.index for op in uses if op.phase.is_forward]
        backward = [op.index for op in uses if op.phase is Phase.BACKWARD]
        first_backward = next((i for i in backward if not forward or i > forward[0]), None)
        before = [i for i in forward if first_backward is None or i < first_backward]
        return Lifetime(
            storage=storage,
            birth=None if self.is_resident[storage] else int(self.birth[storage]),
            last_forward_use=before[-1] if before else None,
            first_backward_use=first_backward,
            last_backward_use=backward[-1] if backward else None,
            death=None
            if self.is_resident[storage] or self.is_output[storage]
            else int(self.death[storage]),
        )

    def peak_bytes(self) -> int:
        """The most bytes live at the same time, with every storage freed at its death."""
        used, sizes, n_ops = self.death >= 0, self.graph.sizes_bytes, len(self.graph.ops)
        live = live_bytes(self.birth[used], self.death[used], sizes[used], n_ops)
        return int(live.max(initial=0))

    def optimizer_bytes(self) -> list[int]:
        """The sizes of the optimizer's own temporaries, at the moment they take the most bytes."""
        ops = [op.index for op in self.graph.ops if op.phase is Phase.OPTIMIZER]
        if not ops:
            return []
        sizes = self.graph.sizes_bytes
        own = np.flatnonzero((self.birth >= ops[0]) & ~self.is_resident & (sizes > 0))
        moments = [own[(self.birth[own] <= op) & (op <= self.death[own])] for op in ops]
        most = max(moments, key=lambda live: int(sizes[live].sum()))
        return [int(size) for size in sizes[most]]

    def activations(self) -> list[Lifetime]:
        """The lifetimes of the activations, which could be dropped and recomputed."""
        return [
            lifetime
            for lifetime, storage in zip(self.lifetimes, self.graph.storages, strict=True)
            if storage.role is Role.ACTIVATION
        ]


def live_bytes(start: Ints, end: Ints, nbytes: Ints, n_positions: int) -> Ints:
    """The bytes live at each position, of blocks that are live from start to end, inclusive."""
    changes = np.bincount(start, weights=nbytes, minlength=n_positions + 1)
    changes -= np.bincount(end + 1, weights=nbytes, minlength=n_positions + 1)
    return np.cumsum(changes)[:n_positions].astype(np.int64)


def analyze(graph: StepGraph) -> Liveness:
    """The lifetimes of all storages; computed once per graph.

    A storage dies after the last use of any of its aliases. A weight's gradient dies when the
    optimizer call that reads it has finished; the optimizer's own temporaries when its code drops
    them. A gradient that exists before the step is resident; one that exists after it, an output.
    """
    found: Liveness | None = graph.__dict__.get("_liveness")  # as cached_property does
    if found is None:
        found = graph.__dict__["_liveness"] = _analyze(graph)
    return found


def _analyze(graph: StepGraph) -> Liveness:
    n_storages, n_ops = len(graph.storages), len(graph.ops)
    birth = np.full(n_storages, n_ops, dtype=np.int64)
    death = np.full(n_storages, -1, dtype=np.int64)
    storage_of = [value.storage for value in graph.values]
    for op in graph.ops:
        touched = graph.touched(op)
        birth[touched] = np.minimum(birth[touched], op.index)
        death[touched] = op.index
    update_end = _update_ends(graph)
    for each in graph.storages:
        if each.role is Role.GRAD and death[each.index] >= 0:
            death[each.index] = update_end[death[each.index]]
    is_resident = np.zeros(n_storages, dtype=bool)
    is_output = np.zeros(n_storages, dtype=bool)
    is_resident[[value.storage for value in graph.values if value.producer is None]] = True
    is_output[[storage_of[value] for value in graph.outputs]] = True
    birth[is_resident] = 0
    death[is_resident | is_output] = n_ops - 1
    held = np.array([storage.held_until for storage in graph.storages], dtype=np.int64)
    in_update = np.array([op.phase is Phase.OPTIMIZER for op in graph.ops] + [False], dtype=bool)
    own = in_update[birth] & (death >= 0)  # the user's optimizer runs as it is under every plan
    death[own] = np.maximum(death, held)[own]
    release = np.where(death >= 0, np.maximum(death, held), -1)
    return Liveness(graph, birth, death, release, is_resident, is_output)


def _update_ends(graph: StepGraph) -> list[int]:
    """For each op that is the last to use a gradient: the op after which the gradient is freed.

    For an optimizer op, the last of its run of optimizer ops; otherwise the step's last one.
    """
    last = max((op.index for op in graph.ops if op.phase is Phase.OPTIMIZER), default=-1)
    ends: list[int] = []
    for is_update, run in groupby(graph.ops, key=lambda op: op.phase is Phase.OPTIMIZER):
        indices = [op.index for op in run]
        ends += [indices[-1] if is_update else max(index, last) for index in indices]
    return ends
