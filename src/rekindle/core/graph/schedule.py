"""A step as a sequence of instructions, and the checker that proves it computes the same numbers.

A schedule, not a keep-or-recompute set, is the contract between planners, simulator, rewriter and
report: every recomputation and every free is written down.

Copy 0 of an op is the captured one; a recomputation has its own copy number. `Compute(op, k)` makes
copy k of the op's new storages; an in-place op mutates the copy of its own number. An input is read
from the newest live copy of its storage that holds the version the captured op read. A view belongs
to one copy of its storage; the view of copy k > 0 may be taken at any version, since it also sees
later in-place changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rekindle.core.graph.dataflow import Dataflow, dataflow
from rekindle.core.graph.graph import Op, StepGraph
from rekindle.core.graph.liveness import analyze
from rekindle.core.notebook import html_table, one_line
from rekindle.errors import InvalidSchedule, PlanError
from rekindle.units import format_bytes, format_us


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an op: the captured one (copy 0), or a recomputation."""

    op: int
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """Free one copy of a storage."""

    storage: int
    copy: int = 0


Instruction = Compute | Free
Schedule = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision to keep or drop one activation, with its reason.

    For a dropped one, `freed_bytes` is its size, and `added_us` the time spent recomputing it; both
    are 0 for one that is kept.
    """

    storage: int
    is_kept: bool
    freed_bytes: int
    added_us: float
    reason: str


@dataclass(frozen=True)
class Plan:
    """How a step is to run: the schedule, its cost, and a decision for every activation.

    `bound_us` is a proven lower bound on the time that any plan of this kind must add to stay
    within the budget; None if the planner gives none. A plan belongs to the graph whose
    fingerprint it carries.
    """

    planner: str
    fingerprint: str
    budget_bytes: int
    schedule: Schedule
    decisions: tuple[Decision, ...]
    peak_bytes: int
    recompute_us: float
    bound_us: float | None = None

    def check(self, graph: StepGraph) -> None:
        """Raise unless this plan is for that graph and its schedule is valid."""
        if self.fingerprint != graph.fingerprint:
            raise PlanError(
                f"this plan is for another step (graph {self.fingerprint}) than the one given "
                f"({graph.fingerprint}): plan again with rekindle.plan(graph, profile, budget=…)."
            )
        check(graph, self.schedule)
        for decision in self.decisions:
            if not 0 <= decision.storage < len(graph.storages):
                raise PlanError(f"the plan has a decision about storage {decision.storage}: none.")

    def _facts(self) -> dict[str, object]:
        dropped = sum(not decision.is_kept for decision in self.decisions)
        facts: dict[str, object] = {
            "planner": self.planner,
            "budget": format_bytes(self.budget_bytes),
            "peak": format_bytes(self.peak_bytes),
            "dropped": f"{dropped:,} of {len(self.decisions):,} activations",
            "added time": format_us(self.recompute_us),
        }
        if self.bound_us is not None:
            facts["lower bound"] = format_us(self.bound_us)
        return facts | {"graph": self.fingerprint}

    __repr__ = one_line
    _repr_html_ = html_table


def schedule_of(graph: StepGraph, plan: Plan | None) -> Iterator[Instruction]:
    """The plan's schedule; without a plan, the captured order with storages freed when dead.

    Reference counting: each storage counts its remaining uses and is freed at zero. A gradient has
    one use more, at the end of the optimizer call that reads it.
    """
    if plan is not None:
        yield from plan.schedule
        return
    liveness = analyze(graph)
    stays = liveness.is_resident | liveness.is_output
    uses = [graph.touched(op) for op in graph.ops]
    last_touch = np.full(len(stays), -1, dtype=np.int64)
    for index, storages in enumerate(uses):
        last_touch[storages] = index
    for late in np.flatnonzero(liveness.death > last_touch):
        uses[liveness.death[late]].append(int(late))
    remaining = Counter(storage for storages in uses for storage in storages)
    for op, storages in zip(graph.ops, uses, strict=True):
        yield Compute(op.index)
        for storage in storages:
            remaining[storage] -= 1
            if remaining[storage] == 0 and not stays[storage]:
                yield Free(storage)


@dataclass(slots=True)
class LivingCopy:
    """One live copy of a storage: the version it holds, and the tensors that view it."""

    number: int
    version: int
    values: set[int] = field(default_factory=set)


class ResolvedCompute(NamedTuple):
    """A Compute with its copies resolved: for each value it touches, the copy of its storage."""

    op: int
    copy: int
    copies: dict[int, int]


def check(graph: StepGraph, schedule: Iterable[Instruction]) -> None:
    """Raise InvalidSchedule unless a schedule computes exactly what the captured step computes.

    Every captured op runs once and reads the same versions; random ops keep their order; only ops
    that may be recomputed are; state changes once; everything but the outputs is freed once.
    """
    for _ in resolve(graph, schedule):
        pass


def resolve(graph: StepGraph, schedule: Iterable[Instruction]) -> Iterator[ResolvedCompute | Free]:
    """The same instructions, each with the copies it reads and makes; checked in passing."""
    checker = _Checker(graph)
    for instruction in schedule:
        if isinstance(instruction, Compute):
            yield checker.compute(instruction.op, instruction.copy)
        else:
            checker.free(instruction.storage, instruction.copy)
            yield instruction
    checker.finish()


class _Checker:
    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.flow: Dataflow = dataflow(graph)
        self._name = graph.storage_name
        self.entered = {value.storage for value in graph.values if value.producer is None}
        self.living: dict[int, list[LivingCopy]] = {s: [LivingCopy(0, 0)] for s in self.entered}
        for value in graph.values:
            if value.producer is None:
                self.living[value.storage][0].values.add(value.index)
        self.done: set[tuple[int, int]] = set()
        self.last_random = -1

    def compute(self, index: int, copy: int) -> ResolvedCompute:
        if not 0 <= index < len(self.graph.ops):
            raise InvalidSchedule(f"op {index}", f"does not exist: there are {len(self.graph.ops)}")
        op = self.graph.ops[index]
        if (op.index, copy) in self.done:
            raise InvalidSchedule(op.name, "runs twice as the same copy")
        self.done.add((op.index, copy))
        refusal = self.flow.refusals[op.index]
        if copy and refusal:
            raise InvalidSchedule(op.name, f"must not be recomputed: it {refusal}")
        if copy < 0:
            raise InvalidSchedule(op.name, f"has no copy {copy}: they count from 0")
        if op.is_random and copy and (index, 0) not in self.done:
            raise InvalidSchedule(op.name, "is recomputed before it has drawn its random numbers")
        if op.is_random and not copy:
            if op.index < self.last_random:
                raise InvalidSchedule(op.name, "draws random numbers out of their captured order")
            self.last_random = op.index
        flow = self.flow
        inputs = flow.copy_inputs[op.index] if copy else dict.fromkeys((*op.inputs, *op.mutates))
        versions = dict(flow.copy_reads[op.index] if copy else flow.reads[op.index])
        makes = flow.copy_makes[op.index] if copy else flow.makes[op.index]
        mutated = set(flow.mutates[op.index]) - (self.entered if copy else set())
        seen: dict[int, LivingCopy] = {}
        for value in inputs:
            storage = self.graph.values[value].storage
            own = copy if storage in mutated or (copy and op.is_view) else None
            version = None if copy and op.is_view else versions[storage]
            seen[storage] = self._find(op, value, version, own)
        for storage in mutated:
            seen[storage].version += 1
        for storage in makes:
            copies = self.living.setdefault(storage, [])
            if any(found.number == copy for found in copies):
                raise InvalidSchedule(op.name, f"makes {self._name(storage, copy)} a second time")
            copies.append(LivingCopy(copy, 1))
            seen[storage] = copies[-1]
        for value in op.outputs if not (copy and op.copy_target) else op.outputs[:1]:
            storage = self.graph.values[value].storage
            if storage in seen:
                seen[storage].values.add(value)
        touched = (*inputs, *op.outputs)
        storages = ((value, self.graph.values[value].storage) for value in touched)
        return ResolvedCompute(index, copy, {v: seen[s].number for v, s in storages if s in seen})

    def free(self, storage: int, copy: int) -> None:
        if storage in self.entered:
            name = self._name(storage, copy)
            raise InvalidSchedule(name, "is freed, but existed before the step")
        copies = self.living.get(storage, [])
        found = next((c for c in copies if c.number == copy), None)
        if found is None:
            raise InvalidSchedule(self._name(storage, copy), "is freed, but is not live")
        copies.remove(found)

    def finish(self) -> None:
        for op in self.graph.ops:
            if (op.index, 0) not in self.done:
                raise InvalidSchedule(op.name, "never runs")
        outputs = {self.graph.values[value].storage for value in self.graph.outputs}
        for value in self.graph.outputs:
            storage = self.graph.values[value].storage
            last = self.flow.last_version[storage]
            copies = self.living.get(storage, [])
            if not any(c.version == last and value in c.values for c in copies):
                raise InvalidSchedule(
                    self.graph.values[value].name, "is an output, but is not live at the end"
                )
        for storage, copies in self.living.items():
            extra = [c for c in copies if storage not in outputs or c.number]
            if storage not in self.entered and extra:
                raise InvalidSchedule(self._name(storage, extra[0].number), "is never freed")

    def _find(self, op: Op, value: int, version: int | None, own: int | None) -> LivingCopy:
        """The newest live copy that holds what an op reads; of any version if that is None."""
        storage = self.graph.values[value].storage
        for found in reversed(self.living.get(storage, [])):
            fits = own is None or found.number == own
            fits = fits and version in (None, found.version)
            if fits and value in found.values:
                return found
        raise InvalidSchedule(op.name, f"reads {self.graph.values[value].name}, which is not live")
