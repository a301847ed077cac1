"""A profiled step shaped into rows: what terminal, page, figures and tables all show.

Nothing is simulated or planned here: the rows are read off graph, profile and trace, and summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cost.profile import Profile
from rekindle.core.cost.roofline import bytes_moved
from rekindle.core.graph.graph import Op, Phase, Role, StepGraph, Value
from rekindle.core.graph.liveness import Lifetime
from rekindle.core.graph.op_names import op_name
from rekindle.core.graph.simulate import Trace
from rekindle.report.names import pattern_of, source_line
from rekindle.report.palette import LIBRARIES, ORDER

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """So many bytes of the peak, in so many storages, and their share of the whole."""

    label: str
    nbytes: int
    share: float
    count: int = 0


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment with the most bytes: what they are, and the op that runs."""

    nbytes: int
    op: Op | None  # None for a step without ops
    start_us: float
    parts: tuple[Part, ...]  # by role, and what libraries hold; largest first
    activation_kinds: tuple[Part, ...]  # the activations, by the operator that made them
    activation_modules: tuple[Part, ...]  # the activations, by module, repeated blocks together

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
        """FLOPs for each byte moved; None where nothing is counted."""
        return self.flops / self.moved_bytes if self.flops and self.moved_bytes else None


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation: its bytes, and how long they lie idle between forward and backward."""

    storage: int
    name: str
    kind: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    idle_us: float
    last_forward: int | None
    first_backward: int | None

    @property
    def byte_us(self) -> float:
        """Bytes × idle time: what dropping it, or moving it away, could save."""
        return self.nbytes * self.idle_us


@dataclass(frozen=True, slots=True)
class Summary:
    """All rows. `about` says what was profiled: model, batch, precision, where they are known."""

    about: Mapping[str, Any]
    device: str
    method: str
    is_measured: bool
    n_ops: int
    step_us: float
    peak: Peak
    phases: tuple[Work, ...]  # in the step's order
    operators: tuple[Work, ...]  # by kind, most time first
    activations: tuple[Activation, ...]  # most bytes × idle time first
    moved_bytes: Ints  # by op

    @property
    def total(self) -> Work:
        """The whole step as one row."""
        phases = self.phases
        flops, moved = sum(p.flops for p in phases), sum(p.moved_bytes for p in phases)
        return Work("all", self.n_ops, self.step_us, 1.0, flops, moved)

    @property
    def backward_ratio(self) -> float | None:
        """FLOPs of the backward pass for each of the forward pass and loss."""
        flops = {phase.label: phase.flops for phase in self.phases}
        ahead = flops[Phase.FORWARD.value] + flops[Phase.LOSS.value]
        return flops[Phase.BACKWARD.value] / ahead if ahead else None

    @property
    def title(self) -> str:
        """What was profiled, in a few words: ``resnet152, batch 128, bf16``."""
        batch, precision = self.about.get("batch"), self.about.get("precision")
        words = [str(self.about.get("model") or "training step")]
        words += [f"batch {batch}"] if batch is not None else []
        return ", ".join(words + ([str(precision)] if precision else []))


def summarize(
    graph: StepGraph, profile: Profile, trace: Trace, about: Mapping[str, Any] | None = None
) -> Summary:
    """The rows of a profiled step."""
    moved = bytes_moved(graph)
    phases = _group(graph, profile, moved, lambda op: op.phase.value)
    operators = _group(graph, profile, moved, op_name)
    empty = dict.fromkeys(phase.value for phase in Phase)
    return Summary(
        about=dict(about or {}),
        device=profile.device,
        method=profile.method,
        is_measured=any(cost.is_measured for cost in profile.costs),
        n_ops=len(graph.ops),
        step_us=trace.step_us,
        peak=peak_of(graph, trace),
        phases=tuple(phases.get(label, Work(label, 0, 0.0, 0.0, 0, 0)) for label in empty),
        operators=tuple(sorted(operators.values(), key=lambda row: (-row.time_us, row.label))),
        activations=_activations(graph, trace),
        moved_bytes=moved,
    )


def peak_of(graph: StepGraph, trace: Trace) -> Peak:
    """The moment with the most bytes, of a plain step or a planned one."""
    if not graph.ops:
        return Peak(trace.peak_bytes, None, 0.0, (), (), ())
    position, total = trace.peak_position, max(trace.peak_bytes, 1)
    alive = trace.alive_at(position)
    counts: dict[str, int] = defaultdict(int)
    for index in alive:
        counts[graph.storages[index].role.value] += 1
    sizes = {role.value: nbytes for role, nbytes in trace.peak_by_role().items()}
    sizes[LIBRARIES] = trace.overhead_bytes
    parts = [
        Part(label, sizes[label], sizes[label] / total, counts[label])
        for label in ORDER
        if sizes[label]
    ]
    makers = {
        index: graph.ops[int(trace.liveness.birth[index])]
        for index in alive
        if graph.storages[index].role is Role.ACTIVATION
    }

    def grouped(label_of: Callable[[Op], str]) -> tuple[Part, ...]:
        groups: dict[str, list[int]] = defaultdict(list)
        for index, op in makers.items():
            groups[label_of(op)].append(int(trace.sizes_bytes[index]))
        return _largest(Part(k, sum(v), sum(v) / total, len(v)) for k, v in groups.items())

    return Peak(
        nbytes=trace.peak_bytes,
        op=graph.ops[trace.peak_op],
        start_us=float(trace.starts_us[position]),
        parts=_largest(parts),
        activation_kinds=grouped(op_name),
        activation_modules=grouped(lambda op: pattern_of(op.source.module) or "(no module)"),
    )


def _largest(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: (-part.nbytes, part.label)))


def _group(
    graph: StepGraph, profile: Profile, moved: Ints, label_of: Callable[[Op], str]
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
        rows[label] = Work(
            label, len(ops), time_us, time_us / whole, flops, int(moved[indices].sum())
        )
    return rows


def first_values(graph: StepGraph) -> dict[int, Value]:
    """The first value of each storage: what its maker called it."""
    names: dict[int, Value] = {}
    for value in graph.values:
        names.setdefault(value.storage, value)
    return names


def _activations(graph: StepGraph, trace: Trace) -> tuple[Activation, ...]:
    names = first_values(graph)

    def row(lifetime: Lifetime) -> Activation:
        storage = lifetime.storage
        value = names[storage]
        maker = graph.ops[lifetime.birth or 0]
        return Activation(
            storage=storage,
            name=value.name,
            kind=op_name(maker),
            module=maker.source.module,
            source=source_line(maker.source),
            shape=value.shape,
            dtype=value.dtype,
            nbytes=int(trace.sizes_bytes[storage]),
            idle_us=lifetime.inactive_us(trace.starts_us),
            last_forward=lifetime.last_forward_use,
            first_backward=lifetime.first_backward_use,
        )

    rows = [row(lifetime) for lifetime in trace.liveness.activations()]
    return tuple(sorted(rows, key=lambda each: (-each.byte_us, -each.nbytes, each.storage)))
