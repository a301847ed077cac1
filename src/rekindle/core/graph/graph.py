"""The training step as data: ops, values and storages, with no torch in sight.

A `Storage` is a piece of memory; a `Value` is a tensor, one way of looking at a storage; an `Op`
reads values and makes or changes others. Bytes belong to storages alone, so views and in-place
operators are never counted twice.

A value is a tensor *object*: an in-place op makes no new value, it lists the values it `mutates`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from rekindle.core.notebook import html_table, one_line
from rekindle.units import format_bytes, format_count


class Phase(Enum):
    """The part of the training step an op belongs to."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Role(Enum):
    """What a storage is for. The first four exist before the step and stay after it."""

    PARAM = "parameter"
    BUFFER = "buffer"
    OPT_STATE = "optimizer state"
    INPUT = "input"
    ACTIVATION = "activation"
    GRAD = "weight gradient"
    GRAD_MAP = "activation gradient"
    TEMP = "temporary"
    OUTPUT = "output"

    @property
    def is_resident(self) -> bool:
        """Whether such a storage is there before the step starts."""
        return self in _RESIDENT


_RESIDENT = frozenset({Role.PARAM, Role.BUFFER, Role.OPT_STATE, Role.INPUT})


@dataclass(frozen=True, slots=True)
class Source:
    """Where an op comes from: the module that ran it and the line of the model's or user's code.

    A backward op carries the source of the forward op it differentiates.
    """

    module: str
    filename: str
    lineno: int

    def __str__(self) -> str:
        place = f"{self.filename}:{self.lineno}" if self.filename else ""
        return f"{self.module} ({place})" if self.module and place else self.module or place


UPDATE_TARGET = "rekindle.update"
"""The target of an op that stands for a call of the user's optimizer with some gradients."""

TOGETHER_TARGET = "rekindle.together"
"""The target of an op that does at once what several captured ops of one kind do."""

CAST_TARGET = "rekindle.cast"
"""The target of a captured op that casts several tensors at once."""

FUSED_PREFIX = "rekindle.fused_"
"""How the target of a compiled group of captured ops starts: a function of tensors."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One piece of memory. `index` is its position in `StepGraph.storages`.

    The plain step may hold a storage beyond its last use, in a local variable: until the op
    `held_until` has run, or not at all where that is -1.
    """

    index: int
    nbytes: int
    role: Role
    device: str = "cpu"
    held_until: int = -1


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor. `producer` is the index of the op that makes it; None if it enters the step."""

    index: int
    name: str
    storage: int
    shape: tuple[int, ...]
    dtype: str
    producer: int | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call. `inputs`, `outputs` and `mutates` hold indices of values.

    Where `copy_target` is set, a recomputation runs that operator instead: it makes the first
    output alone, from what the op read and from its other outputs. (Batch norm's result follows
    from the mean and variance it has already found.)

    `may_overwrite` are the inputs over which the operator could write its result, as far as it and
    their forms are concerned: whether somebody still needs them is another question. `members` are
    the names of the captured ops that this one does at once, if it is one of those.
    """

    index: int
    name: str
    target: str
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutates: tuple[int, ...] = ()
    is_random: bool = False
    is_view: bool = False
    flops: int = 0
    source: Source = Source("", "", 0)
    copy_target: str = ""
    may_overwrite: tuple[int, ...] = ()
    members: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)  # compared by identity, or by fingerprint
class StepGraph:
    """One training step: its ops in captured order, and every value and storage they touch.

    `outputs` are the values alive when the step ends, beyond the resident ones: what the user's
    function returns, gradients that are not cleared, tensors that modules hold on to.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    outputs: tuple[int, ...]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the graph but for source lines, so that moving code does not change it.

        `may_overwrite` follows from the rest, and is left out.
        """
        digest = hashlib.sha256()
        for row in self._rows():
            digest.update(json.dumps(row, separators=(",", ":")).encode())
        return digest.hexdigest()[:16]

    def _rows(self) -> Iterator[list[object]]:
        for s in self.storages:
            yield [s.nbytes, s.role.name, s.device, s.held_until]
        for v in self.values:
            yield [v.name, v.storage, v.shape, v.dtype, v.producer]
        for o in self.ops:
            facts = [o.phase.name, o.is_random, o.is_view, o.flops]
            facts += [o.copy_target] if o.copy_target else []
            facts += [o.members] if o.members else []
            yield [o.name, o.target, o.inputs, o.outputs, o.mutates, *facts]
        yield [self.outputs]

    @cached_property
    def early_updates(self) -> tuple[int, ...]:
        """The ops that update parameters as their gradients come; none if all are at the end."""
        return tuple(op.index for op in self.ops if op.target == UPDATE_TARGET)

    def storage_of(self, value: int) -> Storage:
        """The storage behind a value."""
        return self.storages[self.values[value].storage]

    def count_by_phase(self) -> dict[Phase, int]:
        """How many ops each phase has."""
        counts = dict.fromkeys(Phase, 0)
        for op in self.ops:
            counts[op.phase] += 1
        return counts

    def flops_by_phase(self) -> dict[Phase, int]:
        """Floating-point operations of matrix products, convolutions and attention, by phase."""
        flops = dict.fromkeys(Phase, 0)
        for op in self.ops:
            flops[op.phase] += op.flops
        return flops

    def bytes_by_role(self) -> dict[Role, int]:
        """The sum of all storages' bytes by role: what the step touches, not what lives at once."""
        sums = dict.fromkeys(Role, 0)
        for storage in self.storages:
            sums[storage.role] += storage.nbytes
        return sums

    def _facts(self) -> dict[str, object]:
        sizes = {role.value: n for role, n in self.bytes_by_role().items() if n}
        return {
            "ops": f"{len(self.ops):,}",
            "FLOPs": format_count(sum(self.flops_by_phase().values())),
            "graph": self.fingerprint,
            **{role: format_bytes(nbytes) for role, nbytes in sizes.items()},
        }

    __repr__ = one_line
    _repr_html_ = html_table
