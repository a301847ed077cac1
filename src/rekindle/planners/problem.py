"""The planning problem: the step reduced to the storages that could be dropped.

A **cell** is one version of a storage that a forward op writes: the unit that is kept or dropped.
Only the last version of a storage can be kept; an earlier one, which an in-place op overwrites, is
live only while a recomputation passes through it. A cell's **gap** is the time between its last
forward use and its first later read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.dataflow import dataflow
from rekindle.core.graph.graph import Role, StepGraph
from rekindle.core.graph.liveness import analyze
from rekindle.core.graph.simulate import device_sizes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """A step as planners see it. Cells are numbered in the order they are written.

    For each cell: its storage, its `bytes`, the op that writes it (`writer`), the last op that
    touches its storage before the gap (`last_use`), and the ops that read it after the gap
    (`needs`). `must_keep` is True if the cell cannot be recomputed, `can_keep` is False if it is
    overwritten. For each op, when recomputed: the cells it `reads` and `writes`, the storages it
    `also_makes` that are not cells (outputs of the step), and its time in µs (`times`).

    `base[t]`: bytes live during op t under every plan, including t's outputs and workspace;
    `between[t]`: the same just before op t. Neither includes cells.
    """

    graph: StepGraph
    profile: Profile
    storage: list[int]
    bytes: list[int]
    writer: list[int]
    last_use: list[int]
    needs: list[list[int]]
    can_keep: list[bool]
    must_keep: list[bool]
    reads: list[list[int]]
    writes: list[list[int]]
    also_makes: list[list[int]]
    times: list[float]
    workspaces: Ints
    base: Ints
    between: Ints
    sizes: Ints

    @property
    def n_ops(self) -> int:
        """The number of ops."""
        return len(self.base)

    @property
    def n_cells(self) -> int:
        """The number of cells."""
        return len(self.storage)

    @cached_property
    def readers(self) -> list[tuple[int, list[int]]]:
        """The ops that read cells across a gap, in order, with the cells they read."""
        cells: dict[int, list[int]] = {}
        for cell, needs in enumerate(self.needs):
            for op in needs:
                cells.setdefault(op, []).append(cell)
        return sorted(cells.items())

    @cached_property
    def first_need(self) -> list[int]:
        """The first op that reads each cell across its gap; the number of ops if none does."""
        return [needs[0] if needs else self.n_ops for needs in self.needs]

    @cached_property
    def droppable(self) -> list[int]:
        """The cells that may be dropped: activations that can be recomputed."""
        return [cell for cell in self.activations if not self.must_keep[cell]]

    @cached_property
    def activations(self) -> list[int]:
        """The cells that are read across a gap, droppable or not."""
        return [cell for cell in range(self.n_cells) if self.needs[cell]]


def problem_of(graph: StepGraph, profile: Profile) -> Problem:
    """The planning problem of a step."""
    profile.check(graph)
    flow = dataflow(graph)
    sizes = device_sizes(graph, profile.allocator)
    storages = _managed(graph)
    cell_of: dict[tuple[int, int], int] = {}
    writer: list[int] = []
    writes: list[list[int]] = [[] for _ in graph.ops]
    reads: list[list[int]] = [[] for _ in graph.ops]
    for op in graph.ops:
        for s, version in flow.reads[op.index]:
            if s in storages:
                reads[op.index].append(cell_of[s, version])
        for s in (*flow.makes[op.index], *flow.mutates[op.index]):
            if s in storages:
                version = 1 + (dict(flow.reads[op.index]).get(s, 0))
                writes[op.index].append(len(cell_of))
                cell_of[s, version] = len(cell_of)
                writer.append(op.index)
    storage = [s for s, _ in cell_of]
    last_version = dict(cell_of.keys())
    can_keep = [last_version[s] == version for s, version in cell_of]
    last_use, needs = _uses(graph, storage, reads, writer)
    reads = [[cell_of[r] for r in flow.copy_reads[op.index] if r in cell_of] for op in graph.ops]
    writes = [
        [c for c in cells if storage[c] in (*flow.copy_makes[i], *flow.mutates[i])]
        for i, cells in enumerate(writes)
    ]
    must_keep = _must_keep(graph, storages, reads, writes, can_keep)
    also_makes = [[s for s in flow.copy_makes[op.index] if s not in storages] for op in graph.ops]
    base, between = _base(graph, profile, sizes, storages)
    return Problem(
        graph=graph,
        profile=profile,
        storage=storage,
        bytes=[int(sizes[s]) for s in storage],
        writer=writer,
        last_use=last_use,
        needs=needs,
        can_keep=can_keep,
        must_keep=must_keep,
        reads=reads,
        writes=writes,
        also_makes=also_makes,
        times=[float(us) for us in profile.copy_times_us],
        workspaces=profile.workspaces_bytes,
        base=base,
        between=between,
        sizes=sizes,
    )


def _managed(graph: StepGraph) -> set[int]:
    """The storages that planners handle: made and mutated by forward ops only, and not outputs."""
    liveness, flow = analyze(graph), dataflow(graph)
    managed = {
        storage
        for op in graph.ops
        if op.phase.is_forward
        for storage in flow.makes[op.index]
        if not liveness.is_output[storage]
    }
    read: set[int] = set()  # outside the forward pass: excluded if mutated after that
    for op in graph.ops:
        if not op.phase.is_forward:
            read.update(storage for storage, _ in flow.reads[op.index])
            managed.difference_update(flow.mutates[op.index])
        managed.difference_update(read.intersection(flow.mutates[op.index]))
    managed -= {s.index for s in graph.storages if s.role is Role.GRAD}
    return managed


def _uses(
    graph: StepGraph, storage: list[int], reads: list[list[int]], writer: list[int]
) -> tuple[list[int], list[list[int]]]:
    """The last use of each cell's storage before the gap, and the reads after it.

    The gap starts with the first read by an op that is not of the forward pass.
    """
    last_use = dict(zip(storage, writer, strict=True))  # writers ascend
    needs: list[list[int]] = [[] for _ in storage]
    for op in graph.ops:
        for cell in reads[op.index]:
            if needs[cell] or not op.phase.is_forward:
                needs[cell].append(op.index)
            else:
                last_use[storage[cell]] = max(last_use[storage[cell]], op.index)
    return [last_use[s] for s in storage], needs


def _must_keep(
    graph: StepGraph,
    managed: set[int],
    reads: list[list[int]],
    writes: list[list[int]],
    can_keep: list[bool],
) -> list[bool]:
    """True for cells that cannot be recomputed: by their op, or because its inputs are gone."""
    flow, liveness = dataflow(graph), analyze(graph)
    must = [True] * len(can_keep)
    for op in graph.ops:
        if not writes[op.index]:
            continue
        gone = any(must[cell] and not can_keep[cell] for cell in reads[op.index]) or any(
            not (liveness.is_output[s] and flow.last_version[s] == version)
            for s, version in flow.copy_reads[op.index]
            if s not in managed and not liveness.is_resident[s]
        )
        for cell in writes[op.index]:
            must[cell] = gone or flow.refusals[op.index] is not None
    return must


def _base(graph: StepGraph, profile: Profile, sizes: Ints, managed: set[int]) -> tuple[Ints, Ints]:
    """The live bytes at each op, and just before it, that are the same under every plan."""
    birth, death, n_ops = analyze(graph).birth, analyze(graph).death, len(graph.ops)
    others = np.array([s not in managed and death[s] >= 0 for s in range(len(sizes))], dtype=bool)
    starts = np.bincount(birth[others], weights=sizes[others], minlength=n_ops + 1)
    ends = np.bincount(death[others] + 1, weights=sizes[others], minlength=n_ops + 1)
    at = np.cumsum(starts - ends)[:n_ops].astype(np.int64) + profile.overhead_bytes
    before = at - starts[:n_ops].astype(np.int64)
    return at + profile.workspaces_bytes, before
