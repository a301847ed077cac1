"""The numbers that every report shows, as rows: terminal, page, figures and JSON all read these.

A profile is reported as a plan that drops nothing: one `Summary` describes both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cost.profile import Profile
from rekindle.core.cost.roofline import bytes_moved
from rekindle.core.graph.graph import Op, Phase, Role, StepGraph, Value, op_name
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import ROLES, Trace, simulate
from rekindle.report.names import pattern_of, source_line
from rekindle.report.palette import LIBRARIES, ORDER

_MOST_BANDS = 24


@dataclass(frozen=True, slots=True)
class PeakPart:
    """A part of the peak: its bytes, their share of the peak and the number of storages."""

    label: str
    nbytes: int
    share: float
    count: int = 0


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment with the most live bytes: what they are, and the op that runs."""

    nbytes: int
    op: Op | None  # None for a step without ops
    start_us: float
    is_recomputing: bool  # True if the op that runs is a recomputation
    parts: tuple[PeakPart, ...]  # by role, and what libraries allocate; largest first
    activation_kinds: tuple[PeakPart, ...]  # the activations, by the operator that made them
    activation_modules: tuple[PeakPart, ...]  # the activations, by module, repeated blocks together

    @property
    def activation_share(self) -> float:
        """The share of activations in the peak."""
        return next((p.share for p in self.parts if p.label == Role.ACTIVATION.value), 0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """Time, FLOPs and bytes moved of a group of ops: a phase, or a kind of operator."""

    label: str
    ops: int
    time_us: float
    share: float
    flops: int
    moved_bytes: int

    @property
    def mean_us(self) -> float:
        """The average time of one op."""
        return self.time_us / self.ops if self.ops else 0.0

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte moved; None where either is zero."""
        return self.flops / self.moved_bytes if self.flops and self.moved_bytes else None


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor: its storage, and the operator, module and source line that made it."""

    storage: int
    name: str
    kind: str
    module: str
    source: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Activation(TensorRow):
    """An activation, and how long it is idle between forward and backward use."""

    shape: tuple[int, ...]
    dtype: str
    idle_us: float
    last_forward: int | None
    first_backward: int | None

    @property
    def byte_us(self) -> float:
        """Bytes × idle time: what dropping or offloading it could save."""
        return self.nbytes * self.idle_us


@dataclass(frozen=True, slots=True)
class DecisionRow(TensorRow):
    """An activation, whether it is kept or dropped, and why."""

    is_kept: bool
    freed_bytes: int
    added_us: float
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group of activations, some of which are dropped."""

    label: str
    dropped: int
    activations: int
    freed_bytes: int
    added_us: float


Group = TypeVar("Group", PeakPart, Dropped)


def with_rest(groups: Sequence[Group], most: int) -> list[Group]:
    """The first groups; if there are more, with one group of all the others."""
    shown, rest = list(groups[:most]), groups[most:]
    if rest:
        numbers = [field.name for field in fields(rest[0]) if field.name != "label"]
        sums = {name: sum(getattr(group, name) for group in rest) for name in numbers}
        shown.append(replace(rest[0], label=f"{len(rest)} more", **sums))
    return shown


class PlainStep(NamedTuple):
    """The step as the user wrote it, which drops nothing."""

    peak: Peak
    step_us: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A step under a plan, next to the plain step; a profile has no plan, and is the plain step.

    `graph`, `profile` and `trace` are of the step that is reported; `unplanned` is the trace of the
    same graph when nothing is dropped. `phases`, `operators`, `activations` and `moved_bytes` are
    of the plain step. `about` has its model, batch and precision, where they are known.
    """

    graph: StepGraph
    profile: Profile
    trace: Trace
    unplanned: Trace
    about: Mapping[str, Any]
    device: str
    method: str
    is_measured: bool
    n_ops: int
    plain: PlainStep
    peak: Peak
    phases: tuple[Work, ...]  # in the step's order
    operators: tuple[Work, ...]  # by kind, most time first
    activations: tuple[Activation, ...]  # most bytes × idle time first
    moved_bytes: NDArray[np.int64]  # by op
    plan: Plan | None = None
    plan_seconds: float | None = None
    decisions: tuple[DecisionRow, ...] = ()  # most bytes first

    @property
    def step_us(self) -> float:
        """The time of the step, recomputation included."""
        return self.trace.step_us

    @property
    def total(self) -> Work:
        """The whole plain step as one row."""
        phases = self.phases
        flops, moved = sum(p.flops for p in phases), sum(p.moved_bytes for p in phases)
        return Work("all", self.n_ops, self.plain.step_us, 1.0, flops, moved)

    @property
    def backward_ratio(self) -> float | None:
        """FLOPs of the backward pass, divided by those of the forward pass and the loss."""
        flops = {phase.label: phase.flops for phase in self.phases}
        ahead = flops[Phase.FORWARD.value] + flops[Phase.LOSS.value]
        return flops[Phase.BACKWARD.value] / ahead if ahead else None

    @property
    def title(self) -> str:
        """What is reported, in a few words: ``resnet152, batch 128, bf16``."""
        batch, precision = self.about.get("batch"), self.about.get("precision")
        words = [str(self.about.get("model") or "training step")]
        words += [f"batch {batch}"] if batch is not None else []
        return ", ".join(words + ([str(precision)] if precision else []))

    @property
    def recomputed_ops(self) -> int:
        """The number of ops that run again, views not counted."""
        trace = self.trace
        return sum(not self.graph.ops[op].is_view for op in trace.ops[trace.copies > 0])

    @property
    def dropped(self) -> Dropped:
        """All activations as one group."""
        return _group("all", self.decisions)

    @property
    def dropped_kinds(self) -> tuple[Dropped, ...]:
        """The dropped activations by the operator that made them, most bytes freed first."""
        return _groups(self.decisions, lambda row: row.kind)

    @property
    def dropped_modules(self) -> tuple[Dropped, ...]:
        """The dropped activations by module, repeated blocks together."""
        return _groups(self.decisions, lambda row: pattern_of(row.module) or "(no module)")

    @property
    def added_share(self) -> float:
        """The time that recomputation adds, as a share of the plain step's."""
        return self.trace.recompute_us / (self.plain.step_us or 1.0)

    @property
    def bound_share(self) -> float | None:
        """The lower bound on `added_share`; None where the planner gives none."""
        if self.plan is None or self.plan.bound_us is None:
            return None
        return self.plan.bound_us / (self.plain.step_us or 1.0)

    @property
    def peak_share(self) -> float:
        """The peak as a share of the plain step's."""
        return self.peak.nbytes / max(self.plain.peak.nbytes, 1)


def summarize(
    graph: StepGraph,
    profile: Profile,
    trace: Trace,
    about: Mapping[str, Any] | None = None,
    *,
    plan: Plan | None = None,
    plan_seconds: float | None = None,
    plain: Trace | None = None,
    plain_profile: Profile | None = None,
) -> Summary:
    """The rows of a step: profiled, or under a plan, which `trace` is then of.

    `plain` is the plain step: `trace` itself without a plan, and by default the same graph without
    the plan. If it is another graph (the step before it was improved), `plain_profile` has its
    costs.
    """
    if plan is None:
        plain = unplanned = trace
    elif plain is None or plain_profile is not None:
        unplanned = simulate(graph, profile)
    else:
        unplanned = plain
    plain, costs = plain or unplanned, plain_profile or profile
    moved = bytes_moved(plain.graph)
    phases = _work(plain.graph, costs, moved, lambda op: op.phase.value)
    operators = _work(plain.graph, costs, moved, op_name)
    empty = dict.fromkeys(phase.value for phase in Phase)
    plain_peak = peak_of(plain)
    return Summary(
        graph=graph,
        profile=profile,
        trace=trace,
        unplanned=unplanned,
        about=dict(about or {}),
        device=costs.device,
        method=costs.method,
        is_measured=any(cost.is_measured for cost in costs.costs),
        n_ops=len(plain.graph.ops),
        plain=PlainStep(plain_peak, plain.step_us),
        peak=plain_peak if trace is plain else peak_of(trace),
        phases=tuple(phases.get(label, Work(label, 0, 0.0, 0.0, 0, 0)) for label in empty),
        operators=tuple(sorted(operators.values(), key=lambda row: (-row.time_us, row.label))),
        activations=activations_of(plain),
        moved_bytes=moved,
        plan=plan,
        plan_seconds=plan_seconds,
        decisions=_decisions(trace, plan) if plan is not None else (),
    )


def peak_of(trace: Trace) -> Peak:
    """The moment with the most live bytes, of a plain step or a planned one."""
    graph = trace.graph
    if not graph.ops:
        return Peak(trace.peak_bytes, None, 0.0, False, (), (), ())
    position, total = trace.peak_position, max(trace.peak_bytes, 1)
    alive = trace.alive_at(position)
    counts = Counter(graph.storages[index].role.value for index in alive)
    sizes = {role.value: nbytes for role, nbytes in trace.peak_by_role().items()}
    sizes[LIBRARIES] = trace.overhead_bytes
    present = [label for label in ORDER if sizes[label]]
    parts = [PeakPart(each, sizes[each], sizes[each] / total, counts[each]) for each in present]
    makers = {
        index: graph.ops[int(trace.liveness.birth[index])]
        for index in alive
        if graph.storages[index].role is Role.ACTIVATION
    }

    def grouped(label_of: Callable[[Op], str]) -> tuple[PeakPart, ...]:
        groups: dict[str, list[int]] = defaultdict(list)
        for index, op in makers.items():
            groups[label_of(op)].append(int(trace.sizes_bytes[index]))
        return _largest(PeakPart(k, sum(v), sum(v) / total, len(v)) for k, v in groups.items())

    return Peak(
        nbytes=trace.peak_bytes,
        op=graph.ops[trace.peak_op],
        start_us=float(trace.starts_us[position]),
        is_recomputing=bool(trace.copies[position]),
        parts=_largest(parts),
        activation_kinds=grouped(op_name),
        activation_modules=grouped(lambda op: pattern_of(op.source.module) or "(no module)"),
    )


def _largest(parts: Iterable[PeakPart]) -> tuple[PeakPart, ...]:
    return tuple(sorted(parts, key=lambda part: (-part.nbytes, part.label)))


def _work(
    graph: StepGraph, profile: Profile, moved: NDArray[np.int64], label_of: Callable[[Op], str]
) -> dict[str, Work]:
    members: dict[str, list[Op]] = defaultdict(list)
    for op in graph.ops:
        members[label_of(op)].append(op)
    whole = profile.step_us or 1.0
    rows = {}
    for label, ops in members.items():
        indices = [op.index for op in ops]
        time_us = float(profile.times_us[indices].sum())
        flops = sum(op.flops for op in ops)
        nbytes = int(moved[indices].sum())
        rows[label] = Work(label, len(ops), time_us, time_us / whole, flops, nbytes)
    return rows


def first_values(graph: StepGraph) -> dict[int, Value]:
    """The first value of each storage, which has the name that its op gave it."""
    names: dict[int, Value] = {}
    for value in graph.values:
        names.setdefault(value.storage, value)
    return names


def _tensor_row(trace: Trace, names: Mapping[int, Value], storage: int) -> dict[str, Any]:
    """The fields of a `TensorRow`."""
    maker = trace.graph.ops[int(trace.liveness.birth[storage])]
    return {
        "storage": storage,
        "name": names[storage].name,
        "kind": op_name(maker),
        "module": maker.source.module,
        "source": source_line(maker.source),
        "nbytes": int(trace.sizes_bytes[storage]),
    }


def activations_of(trace: Trace) -> tuple[Activation, ...]:
    """The activations of a plain step, most bytes × idle time first."""
    names = first_values(trace.graph)
    rows = [
        Activation(
            **_tensor_row(trace, names, lifetime.storage),
            shape=names[lifetime.storage].shape,
            dtype=names[lifetime.storage].dtype,
            idle_us=lifetime.inactive_us(trace.starts_us),
            last_forward=lifetime.last_forward_use,
            first_backward=lifetime.first_backward_use,
        )
        for lifetime in trace.liveness.activations()
    ]
    return tuple(sorted(rows, key=lambda each: (-each.byte_us, -each.nbytes, each.storage)))


def _decisions(trace: Trace, plan: Plan) -> tuple[DecisionRow, ...]:
    names = first_values(trace.graph)
    rows = [
        DecisionRow(
            **_tensor_row(trace, names, decision.storage),
            is_kept=decision.is_kept,
            freed_bytes=decision.freed_bytes,
            added_us=decision.added_us,
            reason=decision.reason,
        )
        for decision in plan.decisions
    ]
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _groups(
    decisions: Iterable[DecisionRow], label_of: Callable[[DecisionRow], str]
) -> tuple[Dropped, ...]:
    """The groups in which something is dropped."""
    members: dict[str, list[DecisionRow]] = defaultdict(list)
    for row in decisions:
        members[label_of(row)].append(row)
    groups = [_group(label, rows) for label, rows in members.items()]
    found = [group for group in groups if group.dropped]
    return tuple(sorted(found, key=lambda group: (-group.freed_bytes, group.label)))


def _group(label: str, rows: Iterable[DecisionRow]) -> Dropped:
    rows = list(rows)
    return Dropped(
        label=label,
        dropped=sum(not row.is_kept for row in rows),
        activations=len(rows),
        freed_bytes=sum(row.freed_bytes for row in rows),
        added_us=sum(row.added_us for row in rows),
    )


def phase_bands(trace: Trace) -> list[tuple[str, int, int]]:
    """Stretches of one phase: phase, first and last position; the longest if there are many.

    A recomputation belongs to the phase that it is for.
    """
    phases = [trace.graph.ops[op].phase for op in _served(trace)]
    runs, first = [], 0
    for phase, run in groupby(phases):
        last = first + len(list(run)) - 1
        runs.append((phase.value, first, last))
        first = last + 1
    if len(runs) <= _MOST_BANDS:
        return runs
    longest = sorted(runs, key=lambda run: run[1] - run[2])[:_MOST_BANDS]
    return sorted(longest, key=lambda run: run[1])


def _served(trace: Trace) -> list[int]:
    """For each position, the op that it serves: its own, or the next that is no recomputation."""
    served, following = [], int(trace.ops[-1]) if len(trace.ops) else 0
    for op, copy in zip(trace.ops[::-1].tolist(), trace.copies[::-1].tolist(), strict=True):
        following = following if copy else op
        served.append(following)
    return served[::-1]


def stacked(trace: Trace) -> list[tuple[str, NDArray[np.int64]]]:
    """Bytes by role at every position, from the bottom of the stack to its top.

    Roles without bytes are left out. What libraries allocate is constant, and has a row of its own.
    """
    by_label = {role.value: trace.by_role[row] for row, role in enumerate(ROLES)}
    by_label[LIBRARIES] = np.full_like(trace.live_bytes, trace.overhead_bytes)
    return [(label, by_label[label]) for label in ORDER if by_label[label].any()]
