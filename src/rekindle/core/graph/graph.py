"""The training step as data: ops, values and storages, without torch.

A `Storage` is an allocation; a `Value` is a tensor, a view of a storage; an `Op` reads values and
makes or mutates others. Bytes belong to storages alone, so views and in-place operators are never
counted twice. An in-place op makes no new value: it lists the values it `mutates`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rekindle.core.notebook import html_table, one_line
from rekindle.units import format_bytes, format_count

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}


class Phase(Enum):
    """The part of the training step an op belongs to."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"

    @property
    def is_forward(self) -> bool:
        """True for the forward pass and the loss."""
        return self is Phase.FORWARD or self is Phase.LOSS


class Role(Enum):
    """The purpose of a storage. The first four exist before the step and remain after it."""

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
        """True if such a storage exists before the step starts."""
        return self in (Role.PARAM, Role.BUFFER, Role.OPT_STATE, Role.INPUT)


@dataclass(frozen=True, slots=True)
class Source:
    """The module that ran an op, and the line of the model's or user's code.

    A backward op carries the source of the forward op it differentiates.
    """

    module: str
    filename: str
    lineno: int

    def __str__(self) -> str:
        place = f"{self.filename}:{self.lineno}" if self.filename else ""
        return f"{self.module} ({place})" if self.module and place else self.module or place


class OpKind(Enum):
    """What an op calls. The value is how the targets of that kind start in graphs and files."""

    OPERATOR = ""  # an operator of torch
    HELPER = "rekindle."  # another function of ours, e.g. to set a random generator's state
    UPDATE = "rekindle.update"  # the user's optimizer, with some of the gradients
    FOREACH = "rekindle.together"  # one multi-tensor call for several captured ops (`members`)
    CAST = "rekindle.cast"  # one multi-tensor cast that was captured as such
    FUSED = "rekindle.fused_"  # a compiled group of captured ops: a function of tensors


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation. `index` is its position in `StepGraph.storages`.

    In the plain step a local variable may keep a storage alive beyond its last use, until the op
    `held_until` has run; -1 if none does.
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

    If `copy_target` is set, a recomputation runs that operator instead: it computes the first
    output alone, from the op's inputs and its other outputs. (Batch norm reuses the mean and
    variance of the first run.)

    `may_overwrite` are the inputs whose shape, dtype and operator allow writing the result over
    them, if they are dead by then. `members` are the captured ops that a foreach op stands for.
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

    @property
    def kind(self) -> OpKind:
        """What the op calls, from its target."""
        if not self.target.startswith(OpKind.HELPER.value):
            return OpKind.OPERATOR
        if self.target.startswith(OpKind.FUSED.value):
            return OpKind.FUSED
        return _WHOLE_TARGETS.get(self.target, OpKind.HELPER)


_WHOLE_TARGETS = {kind.value: kind for kind in (OpKind.UPDATE, OpKind.FOREACH, OpKind.CAST)}


@dataclass(frozen=True, eq=False)  # compared by identity, or by fingerprint
class StepGraph:
    """One training step: its ops in captured order, and every value and storage they touch.

    `outputs` are the values alive when the step ends, beyond the resident ones: what the user's
    function returns, gradients that are not cleared, tensors that modules keep.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    outputs: tuple[int, ...]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the graph without source lines, so that moving code does not change it.

        `may_overwrite` follows from the rest and is not part of it.
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
    def sizes_bytes(self) -> NDArray[np.int64]:
        """The size of each storage."""
        return np.array([storage.nbytes for storage in self.storages], dtype=np.int64)

    @cached_property
    def early_updates(self) -> tuple[int, ...]:
        """The ops that update parameters during the backward pass, as soon as gradients exist."""
        return tuple(op.index for op in self.ops if op.kind is OpKind.UPDATE)

    def storage_of(self, value: int) -> Storage:
        """The storage behind a value."""
        return self.storages[self.values[value].storage]

    def storage_name(self, storage: int, copy: int = 0) -> str:
        """The name of a storage's first value, and the copy unless it is the captured one."""
        names = (value.name for value in self.values if value.storage == storage)
        name = next(names, f"storage {storage}")
        return f"{name} (copy {copy})" if copy else name

    def touched(self, op: Op) -> list[int]:
        """The storages that an op reads, makes or mutates, each once."""
        values = (*op.inputs, *op.outputs, *op.mutates)
        return list(dict.fromkeys(self.values[value].storage for value in values))

    def count_by_phase(self) -> dict[Phase, int]:
        """How many ops each phase has."""
        return {phase: sum(op.phase is phase for op in self.ops) for phase in Phase}

    def flops_by_phase(self) -> dict[Phase, int]:
        """FLOPs of matmuls, convolutions and attention, by phase."""
        return {phase: sum(op.flops for op in self.ops if op.phase is phase) for phase in Phase}

    def bytes_by_role(self) -> dict[Role, int]:
        """The sum of all storages' bytes by role, even if they are not live at the same time."""
        return {role: sum(s.nbytes for s in self.storages if s.role is role) for role in Role}

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


def op_name(op: Op) -> str:
    """An operator's name without its library and overload: "mm" for "aten.mm.default"."""
    parts = op.target.split(".")
    return parts[1] if len(parts) > 1 else op.target


def nbytes_of(value: Value) -> int:
    """The bytes of a tensor's elements."""
    return math.prod(value.shape) * ITEM_BYTES.get(value.dtype, 4)


def assign_roles(
    n_storages: int,
    ops: Sequence[Op],
    values: Sequence[Value],
    *,
    known: Mapping[int, Role],
    grads: Collection[int],
    outputs: Collection[int],
) -> list[Role]:
    """The role of each storage; `known`, `grads` and `outputs` are storages the capture can name.

    An *activation* is made in the forward pass and read in the backward pass: Rekindle may drop it.
    The backward pass makes weight gradients and the activation gradients that lead to them.
    """
    made_in: dict[int, Phase] = {}
    read_in_backward: set[int] = set()
    for op in ops:
        for value in (*op.outputs, *op.mutates):
            made_in.setdefault(values[value].storage, op.phase)
        if op.phase is Phase.BACKWARD:
            read_in_backward.update(values[v].storage for v in op.inputs)

    def role(storage: int) -> Role:
        if storage in known:
            return known[storage]
        if storage in grads:
            return Role.GRAD
        if storage in outputs:
            return Role.OUTPUT
        phase = made_in.get(storage)
        if phase and phase.is_forward and storage in read_in_backward:
            return Role.ACTIVATION
        return Role.GRAD_MAP if phase is Phase.BACKWARD else Role.TEMP

    return [role(storage) for storage in range(n_storages)]
