"""A static address for everything a step makes, as a compiler gives registers.

Three ideas, of which the last two can be left out to see what they bring. **Counters**: each use of
a storage that is yet to come counts, and at zero the storage is dead. **In place**: an op that is
the last to read an input may write its result over it, if its operator can (`Op.may_overwrite`).
**Sharing**: storages whose lives do not overlap take the same memory.

What was there before the step (parameters, optimizer state, the batch) has its address already and
is not laid out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rekindle.core.graph.dataflow import dataflow
from rekindle.core.graph.graph import Op, Role, StepGraph
from rekindle.core.graph.liveness import analyze
from rekindle.core.graph.schedule import Compute, Free, Instruction, Plan, ResolvedCompute, resolve
from rekindle.core.memory.packing import Ints, least_bytes, pack
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
    """Where everything lies: arrays over pieces, in the order in which they are made.

    A piece is there from position `start` to `end`, inclusive, at the bytes offset…offset+nbytes-1.
    `refusals` says of ops that make something why it does not lie over an input.
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
        """The arena, as a multiple of the most bytes that are there at once."""
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
    """Lay a step out, plain or as planned.

    Writing in place ties lives together, and now and then what is tied is harder to place: where
    memory is shared, ops write in place only if that makes the arena smaller.

    Storages of other `roles` than those asked for are left out, as if they lay elsewhere. That is
    for estimates: `check_layout` accepts a layout of everything only.
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
    start, end, nbytes, chain = walk.arrays()
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
        storage=np.array([piece.storage for piece in walk.pieces], dtype=np.int64),
        copy=np.array([piece.copy for piece in walk.pieces], dtype=np.int64),
        start=start,
        end=end,
        nbytes=nbytes,
        offset=offsets[chain],
        arena_bytes=int((offsets + chain_bytes).max(initial=0)),
        lower_bound_bytes=least_bytes(chain_start, chain_end, chain_bytes),
        reuses=tuple(walk.reuses),
        refusals=walk.refusals,
    )


def schedule_of(graph: StepGraph, plan: Plan | None) -> Iterator[Instruction]:
    """What runs and what is freed: the plan's schedule, or the captured step by its counters.

    A counter holds the uses of a storage that are yet to come; at zero it is freed. A gradient is
    used once more when the optimizer has finished.
    """
    if plan is not None:
        yield from plan.schedule
        return
    liveness = analyze(graph)
    stays = liveness.is_resident | liveness.is_output
    touched = [_touched(graph, op) for op in graph.ops]
    uses: list[list[int]] = [list(storages) for storages in touched]
    for late in np.flatnonzero(liveness.death > _last_touch(touched, len(stays))):
        uses[liveness.death[late]].append(int(late))
    counters = Counter(storage for storages in uses for storage in storages)
    for op, storages in zip(graph.ops, uses, strict=True):
        yield Compute(op.index)
        for storage in storages:
            counters[storage] -= 1
            if counters[storage] == 0 and not stays[storage]:
                yield Free(storage)


def _touched(graph: StepGraph, op: Op) -> list[int]:
    values = (*op.inputs, *op.outputs, *op.mutates)
    return list(dict.fromkeys(graph.values[value].storage for value in values))


def _last_touch(touched: list[list[int]], n_storages: int) -> Ints:
    last = np.full(n_storages, -1, dtype=np.int64)
    for index, storages in enumerate(touched):
        last[storages] = index
    return last


class _Walk:
    """Goes through a schedule once: the life of every piece, and who writes over whom."""

    def __init__(
        self, graph: StepGraph, plan: Plan | None, in_place: bool, roles: Collection[Role]
    ) -> None:
        self.graph = graph
        self.flow = dataflow(graph)
        self.stays = analyze(graph).is_resident
        self.left_out = {s.index for s in graph.storages if s.role not in roles}
        self.pieces: list[Piece] = []
        self.reuses: list[Reuse] = []
        self.refusals: dict[int, str] = {}
        self._index: dict[Piece, int] = {}
        self._start: list[int] = []
        self._end: list[int] = []
        self._chain: list[int] = []
        position = -1
        for run, freed in _grouped(resolve(graph, schedule_of(graph, plan))):
            position += 1
            self._make(run, position)
            if in_place:
                self._reuse(run, position, freed)
            for piece in freed:
                if piece.storage not in self.left_out:
                    self._end[self._index[piece]] = position
        self._end = [position if end < 0 else end for end in self._end]

    def arrays(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Start, end, bytes and chain of each piece; pieces of a chain lie over one another."""
        sizes = [self.graph.storages[piece.storage].nbytes for piece in self.pieces]
        nbytes = -(-np.array(sizes, dtype=np.int64) // ALIGNMENT) * ALIGNMENT
        roots = np.array(self._chain, dtype=np.int64)
        _, chain = np.unique(roots, return_inverse=True)
        return np.array(self._start, np.int64), np.array(self._end, np.int64), nbytes, chain

    def _make(self, run: ResolvedCompute, position: int) -> None:
        for storage in self._made(run):
            if storage in self.left_out:
                continue
            piece = Piece(storage, run.copy)
            self._index[piece] = len(self.pieces)
            self._chain.append(len(self.pieces))
            self.pieces.append(piece)
            self._start.append(position)
            self._end.append(-1)

    def _made(self, run: ResolvedCompute) -> list[int]:
        makes = self.flow.copy_makes if run.copy else self.flow.makes
        return [storage for storage in makes[run.op] if not self.stays[storage]]

    def _reuse(self, run: ResolvedCompute, position: int, freed: set[Piece]) -> None:
        """Let an op write over an input that dies with it, or note why it does not."""
        op = self.graph.ops[run.op]
        made = self._made(run)
        if self.left_out.issuperset(made):
            return
        reason = self._obstacle(op, run, made)
        if not reason:
            result = Piece(made[0], run.copy)
            for value in op.may_overwrite:
                over = Piece(self.graph.values[value].storage, run.copies[value])
                if over in freed and over in self._index:
                    self.reuses.append(Reuse(position, op.index, over, result))
                    self._chain[self._index[result]] = self._chain[self._index[over]]
                    return
                reason = f"{self.graph.values[value].name} {self._why_not(over.storage)}"
        if not run.copy:
            self.refusals[op.index] = reason

    def _why_not(self, storage: int) -> str:
        if self.stays[storage]:
            return "was there before the step"
        return "is not laid out" if storage in self.left_out else "is needed later"

    def _obstacle(self, op: Op, run: ResolvedCompute, made: list[int]) -> str:
        if run.copy and op.copy_target:
            return "its copy is another operator"
        if len(made) > 1:
            return "it makes several tensors"
        if not op.inputs:
            return "it has no input"
        if not op.may_overwrite:
            return "its operator is not element-wise, or no input has its result's form"
        return ""


def _grouped(
    steps: Iterator[ResolvedCompute | Free],
) -> Iterator[tuple[ResolvedCompute, set[Piece]]]:
    """Each op that runs, with what is freed right after it."""
    run: ResolvedCompute | None = None
    freed: set[Piece] = set()
    for step in steps:
        if isinstance(step, Free):
            freed.add(Piece(step.storage, step.copy))
            continue
        if run is not None:
            yield run, freed
        run, freed = step, set()
    if run is not None:
        yield run, freed
