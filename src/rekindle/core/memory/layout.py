"""A static address for every storage that a step makes, as in register allocation.

**In place**: an op that is the last to read an input may write its result over it, if its operator
can (`Op.may_overwrite`). **Sharing**: storages whose lifetimes do not overlap take the same memory.
Resident storages (parameters, optimizer state, the batch) already have an address.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rekindle.core.graph.dataflow import dataflow
from rekindle.core.graph.graph import Op, Role, StepGraph
from rekindle.core.graph.liveness import Ints, analyze
from rekindle.core.graph.schedule import Free, Plan, ResolvedCompute, resolve, schedule_of
from rekindle.core.memory.packing import least_bytes, pack
from rekindle.core.notebook import html_table, one_line
from rekindle.units import format_bytes

ALIGNMENT = 512


class Piece(NamedTuple):
    """One copy of a storage: copy 0 is the captured one."""

    storage: int
    copy: int


class Reuse(NamedTuple):
    """An op that writes its result over an input; `position` is where it runs in the step."""

    position: int
    op: int
    over: Piece
    result: Piece


@dataclass(frozen=True)
class Layout:
    """The address of every piece: arrays over pieces, in the order in which they are made.

    A piece is live from position `start` to `end`, inclusive, at bytes offset…offset+nbytes-1.
    `refusals` says for an op that makes a storage why it does not write over an input.
    """

    storage: Ints
    copy: Ints
    start: Ints
    end: Ints
    nbytes: Ints
    offset: Ints
    arena_bytes: int
    lower_bound_bytes: int
    reuses: tuple[Reuse, ...]
    refusals: dict[int, str]

    @property
    def ratio(self) -> float:
        """The arena's size as a multiple of the most bytes live at the same time."""
        return self.arena_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0

    def _facts(self) -> dict[str, object]:
        return {
            "arena": format_bytes(self.arena_bytes),
            "lower bound": format_bytes(self.lower_bound_bytes),
            "pieces": f"{len(self.storage):,}",
            "in place": f"{len(self.reuses):,} ops",
        }

    __repr__ = one_line
    _repr_html_ = html_table


def layout(
    graph: StepGraph,
    plan: Plan | None = None,
    *,
    in_place: bool = True,
    sharing: bool = True,
    roles: Collection[Role] = tuple(Role),
) -> Layout:
    """The memory layout of a step, plain or planned.

    Writing in place joins lifetimes, and joined ones can be harder to pack: with sharing, ops write
    in place only if that makes the arena smaller.

    Storages of other `roles` are left out. That is for estimates: `check_layout` accepts only a
    layout of everything.
    """
    found = _laid_out(graph, plan, in_place, sharing, roles)
    if in_place and sharing and found.reuses:
        apart = _laid_out(graph, plan, in_place=False, sharing=True, roles=roles)
        return min(found, apart, key=lambda each: each.arena_bytes)
    return found


def _laid_out(
    graph: StepGraph, plan: Plan | None, in_place: bool, sharing: bool, roles: Collection[Role]
) -> Layout:
    walk = _Walk(graph, plan, in_place, roles)
    start, end, roots = np.array(list(walk.pieces.values()), dtype=np.int64).reshape(-1, 3).T
    storage, copy = np.array(list(walk.pieces), dtype=np.int64).reshape(-1, 2).T
    nbytes = -(-graph.sizes_bytes[storage] // ALIGNMENT) * ALIGNMENT
    _, chain = np.unique(roots, return_inverse=True)
    n_chains = int(chain.max(initial=-1)) + 1
    chain_start = np.full(n_chains, np.iinfo(np.int64).max)
    chain_end = np.zeros(n_chains, dtype=np.int64)
    chain_bytes = np.zeros(n_chains, dtype=np.int64)
    np.minimum.at(chain_start, chain, start)
    np.maximum.at(chain_end, chain, end)
    np.maximum.at(chain_bytes, chain, nbytes)
    if sharing:
        offsets = pack(chain_start, chain_end, chain_bytes)
    else:
        offsets = np.cumsum(chain_bytes) - chain_bytes
    return Layout(
        storage=storage,
        copy=copy,
        start=start,
        end=end,
        nbytes=nbytes,
        offset=offsets[chain],
        arena_bytes=int((offsets + chain_bytes).max(initial=0)),
        lower_bound_bytes=least_bytes(chain_start, chain_end, chain_bytes),
        reuses=tuple(walk.reuses),
        refusals=walk.refusals,
    )


class _Walk:
    """One pass over a schedule: the lifetime of every piece, and which ops write over inputs.

    `pieces` have a start, an end and a chain each; the pieces of a chain share one address.
    """

    def __init__(
        self, graph: StepGraph, plan: Plan | None, in_place: bool, roles: Collection[Role]
    ) -> None:
        self.graph = graph
        self.flow = dataflow(graph)
        self.stays = analyze(graph).is_resident
        self.left_out = {s.index for s in graph.storages if s.role not in roles}
        self.pieces: dict[Piece, list[int]] = {}
        groups = _grouped(resolve(graph, schedule_of(graph, plan)))
        self.last = len(groups) - 1
        self.reuses: list[Reuse] = []
        self.refusals: dict[int, str] = {}
        for position, (run, freed) in enumerate(groups):
            self._make(run, position)
            if in_place:
                self._reuse(run, position, freed)
            for piece in freed:
                if piece.storage not in self.left_out:
                    self.pieces[piece][1] = position

    def _make(self, run: ResolvedCompute, position: int) -> None:
        for storage in self._made(run):
            if storage not in self.left_out:
                self.pieces[Piece(storage, run.copy)] = [position, self.last, len(self.pieces)]

    def _made(self, run: ResolvedCompute) -> list[int]:
        makes = self.flow.copy_makes if run.copy else self.flow.makes
        return [storage for storage in makes[run.op] if not self.stays[storage]]

    def _reuse(self, run: ResolvedCompute, position: int, freed: set[Piece]) -> None:
        """Let an op write over an input that dies with it, or record why it does not."""
        op = self.graph.ops[run.op]
        made = self._made(run)
        if self.left_out.issuperset(made):
            return
        reason = self._obstacle(op, run, made)
        if not reason:
            result = Piece(made[0], run.copy)
            for value in op.may_overwrite:
                over = Piece(self.graph.values[value].storage, run.copies[value])
                if over in freed and over in self.pieces:
                    self.reuses.append(Reuse(position, op.index, over, result))
                    self.pieces[result][2] = self.pieces[over][2]
                    return
                reason = f"{self.graph.values[value].name} {self._why_not(over.storage)}"
        if not run.copy:
            self.refusals[op.index] = reason

    def _why_not(self, storage: int) -> str:
        if self.stays[storage]:
            return "existed before the step"
        return "is not laid out" if storage in self.left_out else "is needed later"

    def _obstacle(self, op: Op, run: ResolvedCompute, made: list[int]) -> str:
        if run.copy and op.copy_target:
            return "its recomputation is another operator"
        if len(made) > 1:
            return "it makes several tensors"
        if not op.inputs:
            return "it has no input"
        if not op.may_overwrite:
            return "its operator is not element-wise, or no input has its result's shape and dtype"
        return ""


def _grouped(
    steps: Iterable[ResolvedCompute | Free],
) -> list[tuple[ResolvedCompute, set[Piece]]]:
    """Each op that runs, with the pieces freed right after it."""
    groups: list[tuple[ResolvedCompute, set[Piece]]] = []
    for step in steps:
        if isinstance(step, Free):  # never before the first op: nothing is live
            groups[-1][1].add(Piece(step.storage, step.copy))
        else:
            groups.append((step, set()))
    return groups
