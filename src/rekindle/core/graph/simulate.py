"""Simulates a step: the bytes that are live at every moment, by role, and the time it takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cost.allocator import allocated_bytes
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.dataflow import dataflow
from rekindle.core.graph.graph import Role, StepGraph
from rekindle.core.graph.liveness import Ints, Liveness, analyze
from rekindle.core.graph.schedule import Compute, Plan
from rekindle.core.notebook import html_table, one_line
from rekindle.errors import InvalidSchedule
from rekindle.units import format_bytes, format_us

ROLES = tuple(Role)


@dataclass(frozen=True, slots=True)
class Lives:
    """The lifetime of every copy of every storage, as arrays over copies.

    `start` and `end` are positions, inclusive. A plain step has one copy of each storage.
    """

    storage: Ints
    start: Ints
    end: Ints


@dataclass(frozen=True)
class Trace:
    """Bytes and microseconds at every position of a step.

    A position is one op that runs, while its inputs and outputs exist. `ops` and `copies` say
    which: the captured op (copy 0) or a recomputation; in a plain step, position i is op i.
    `live_bytes[i]` is what is allocated there, workspace included; `by_role` splits it, one row per
    role in the order of `ROLES`, workspace counted as temporary. `starts_us` is when each position
    starts, and the step's end after the last.
    """

    graph: StepGraph
    ops: Ints
    copies: Ints
    live_bytes: Ints
    by_role: Ints
    starts_us: NDArray[np.float64]
    recompute_us: float
    overhead_bytes: int
    sizes_bytes: Ints
    lives: Lives
    liveness: Liveness

    @property
    def peak_position(self) -> int:
        """The position at which the most bytes are allocated; the first of several."""
        return int(np.argmax(self.live_bytes))

    @property
    def peak_op(self) -> int:
        """The index of the op during which the most bytes are allocated."""
        return int(self.ops[self.peak_position])

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated at any moment."""
        return int(self.live_bytes.max(initial=0))

    @property
    def step_us(self) -> float:
        """The time of the whole step, recomputation included."""
        return float(self.starts_us[-1])

    def peak_by_role(self) -> dict[Role, int]:
        """The bytes of the peak by role."""
        column = self.by_role[:, self.peak_position]
        return {role: int(count) for role, count in zip(ROLES, column, strict=True)}

    def alive_at(self, position: int) -> list[int]:
        """The storages that are live while an op runs, largest first; one entry per copy."""
        lives = self.lives
        is_live = (lives.start <= position) & (position <= lives.end)
        indices = np.sort(lives.storage[is_live & (self.sizes_bytes[lives.storage] > 0)])
        return [int(i) for i in indices[np.argsort(-self.sizes_bytes[indices], kind="stable")]]

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = {"peak": format_bytes(self.peak_bytes)}
        if len(self.ops):
            facts["at"] = self.graph.ops[self.peak_op].name
        facts |= {"step": format_us(self.step_us), "positions": f"{len(self.ops):,}"}
        if self.recompute_us:
            facts["recomputation"] = format_us(self.recompute_us)
        return facts

    __repr__ = one_line
    _repr_html_ = html_table


def simulate(graph: StepGraph, profile: Profile, plan: Plan | None = None) -> Trace:
    """The memory and time of a step, as the device's caching allocator would count it.

    A storage's bytes are rounded up as the allocator does; an op's outputs exist before its inputs
    are freed; its workspace exists while it runs. Without a plan this is the plain step, which may
    hold a storage beyond its last use; with one, its schedule is followed exactly.
    """
    profile.check(graph)
    liveness = analyze(graph)
    if plan is None:
        ops = np.arange(len(graph.ops), dtype=np.int64)
        copies = np.zeros_like(ops)
        touched = np.flatnonzero(liveness.release >= 0)
        lives = Lives(touched, liveness.birth[touched], liveness.release[touched])
    else:
        ops, copies, lives = _replay(graph, plan, liveness)
    sizes = device_sizes(graph, profile.allocator)
    times = np.where(copies > 0, profile.copy_times_us[ops], profile.times_us[ops])
    by_role = _by_role(graph, lives, sizes, len(ops))
    by_role[ROLES.index(Role.TEMP)] += profile.workspaces_bytes[ops]
    return Trace(
        graph=graph,
        ops=ops,
        copies=copies,
        live_bytes=by_role.sum(axis=0) + profile.overhead_bytes,
        by_role=by_role,
        starts_us=np.concatenate([[0.0], np.cumsum(times)]),
        recompute_us=float(times[copies > 0].sum()),
        overhead_bytes=profile.overhead_bytes,
        sizes_bytes=sizes,
        lives=lives,
        liveness=liveness,
    )


def _replay(graph: StepGraph, plan: Plan, liveness: Liveness) -> tuple[Ints, Ints, Lives]:
    """The op and copy at each position of a plan's schedule, and the lifetimes of all copies."""
    if plan.fingerprint != graph.fingerprint:
        plan.check(graph)  # raises
    flow, n_ops = dataflow(graph), len(graph.ops)
    ops: list[int] = []
    copies: list[int] = []
    resident = np.flatnonzero(liveness.is_resident & (liveness.death >= 0)).tolist()
    lives = [[storage, 0, -1] for storage in resident]  # storage, start, end; -1: the step's end
    living: dict[tuple[int, int], list[int]] = {}
    for instruction in plan.schedule:
        copy = instruction.copy
        if isinstance(instruction, Compute):
            op = instruction.op
            if not 0 <= op < n_ops:
                raise InvalidSchedule(f"op {op}", f"does not exist: there are {n_ops}")
            for storage in flow.copy_makes[op] if copy else flow.makes[op]:
                living[storage, copy] = [storage, len(ops), -1]
                lives.append(living[storage, copy])
            ops.append(op)
            copies.append(copy)
        else:
            found = living.pop((instruction.storage, copy), None)
            if found is None:
                name = f"storage {instruction.storage} (copy {copy})"
                raise InvalidSchedule(name, "is freed, but is not live")
            found[2] = len(ops) - 1
    storages, starts, ends = np.array(lives, dtype=np.int64).reshape(-1, 3).T
    all_lives = Lives(storages, starts, np.where(ends < 0, len(ops) - 1, ends))
    return np.array(ops, dtype=np.int64), np.array(copies, dtype=np.int64), all_lives


def _by_role(graph: StepGraph, lives: Lives, sizes: Ints, n_positions: int) -> Ints:
    """The live bytes at each position, one row per role."""
    row_of = {role: row for row, role in enumerate(ROLES)}
    rows = np.array([row_of[storage.role] for storage in graph.storages], dtype=np.int64)
    changes = np.zeros((len(ROLES), n_positions + 1), dtype=np.int64)
    held_rows, held_bytes = rows[lives.storage], sizes[lives.storage]
    np.add.at(changes, (held_rows, lives.start), held_bytes)
    np.subtract.at(changes, (held_rows, lives.end + 1), held_bytes)
    return np.cumsum(changes[:, :n_positions], axis=1)


def device_sizes(graph: StepGraph, allocator: str) -> Ints:
    """Each storage's bytes on the main device, as its allocator counts; 0 on other devices.

    An arena holds what the step makes; resident storages come from CUDA's caching allocator.
    """
    device = main_device(graph)
    sizes = graph.sizes_bytes
    elsewhere = np.array([storage.device != device for storage in graph.storages], dtype=bool)
    counted = allocated_bytes(sizes, allocator)
    if allocator == "arena":
        counted = np.where(analyze(graph).is_resident, allocated_bytes(sizes, "cuda"), counted)
    return np.where(elsewhere, 0, counted)


def main_device(graph: StepGraph) -> str:
    """The device that holds the parameters."""
    for storage in graph.storages:
        if storage.role is Role.PARAM:
            return storage.device
    return graph.storages[0].device if graph.storages else "cpu"
