"""Steps written by hand in a few lines: each op is a phase and the values it touches.

A value of `step` is named by its position: those that enter come first, in the order of `entering`,
then each op's results in order. A result is a new storage, or a view of the storage it names.

In a `costed_step` every result is a storage of its own, and an op says what it costs as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.graph.graph import Op, Phase, Role, StepGraph, Storage, Value

FORWARD, LOSS, BACKWARD, UPDATE = Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER


@dataclass(frozen=True)
class Call:
    """One op: its phase, the values it reads, the storages its results lie in, what it changes."""

    phase: Phase
    reads: Sequence[int]
    makes: Sequence[int] = ()
    mutates: Sequence[int] = ()


def step(
    storages: Sequence[Storage],
    entering: Sequence[int],
    calls: Sequence[Call],
    outputs: Sequence[int] = (),
) -> StepGraph:
    """The graph of these calls; `entering` are the storages of the values that enter the step."""
    values = [Value(i, f"in{i}", storage, (1,), "float32") for i, storage in enumerate(entering)]
    ops = []
    for index, call in enumerate(calls):
        made = range(len(values), len(values) + len(call.makes))
        values += [
            Value(number, f"v{number}", storage, (1,), "float32", index)
            for number, storage in zip(made, call.makes, strict=True)
        ]
        ops.append(
            Op(
                index,
                f"op{index}",
                "aten.op.default",
                call.phase,
                tuple(call.reads),
                tuple(made),
                tuple(call.mutates),
                is_view={values[v].storage for v in call.reads}.issuperset(call.makes)
                and bool(call.makes),
            )
        )
    return StepGraph(tuple(ops), tuple(values), tuple(storages), tuple(outputs))


def storages(*sizes: tuple[int, Role], **more: Mapping[int, object]) -> list[Storage]:
    """Storages from pairs of bytes and role; `device={2: "cuda:0"}` and the like set the rest."""
    return [
        Storage(
            index, nbytes, role, **{name: by[index] for name, by in more.items() if index in by}
        )  # type: ignore[arg-type]
        for index, (nbytes, role) in enumerate(sizes)
    ]


@dataclass(frozen=True)
class Costed:
    """One op: its phase, what it reads, the bytes of each result, its costs, what it changes."""

    phase: Phase
    reads: Sequence[int]
    sizes: Sequence[int] = ()
    us: float = 1.0
    workspace: int = 0
    mutates: Sequence[int] = ()


def costed_step(*ops: Costed, buffers: Sequence[int] = ()) -> tuple[StepGraph, Profile]:
    """The graph of these ops, where value i lies in storage i, and what they cost.

    A batch of no bytes enters, then buffers of these bytes. The step returns its losses. What the
    forward pass makes is an activation where the backward pass reads it, and else a temporary.
    """
    read_backward = {value for op in ops if op.phase is BACKWARD for value in op.reads}
    memory = [(0, Role.INPUT), *((nbytes, Role.BUFFER) for nbytes in buffers)]
    entering = range(len(memory))
    calls: list[Call] = []
    outputs: list[int] = []
    for op in ops:
        made = range(len(memory), len(memory) + len(op.sizes))
        calls.append(Call(op.phase, op.reads, made, op.mutates))
        if op.phase is LOSS:
            outputs += made
        for value, nbytes in zip(made, op.sizes, strict=True):
            waits = Role.ACTIVATION if value in read_backward else Role.TEMP
            role = {LOSS: Role.OUTPUT, BACKWARD: Role.GRAD_MAP}.get(op.phase, waits)
            memory.append((nbytes, role))
    graph = step(storages(*memory), entering, calls, outputs)
    workspaces = {index: op.workspace for index, op in enumerate(ops)}
    return graph, profile_of(graph, times_us=[op.us for op in ops], workspaces=workspaces)


def profile_of(
    graph: StepGraph,
    *,
    times_us: Sequence[float] | None = None,
    workspaces: Mapping[int, int] | None = None,
    allocator: str = "exact",
    overhead_bytes: int = 0,
) -> Profile:
    """A profile with these costs; an op that is not named takes 1 µs and no workspace."""
    times = times_us or [1.0] * len(graph.ops)
    return Profile(
        device="toy",
        fingerprint=graph.fingerprint,
        costs=tuple(OpCost(us, (workspaces or {}).get(index, 0)) for index, us in enumerate(times)),
        allocator=allocator,
        overhead_bytes=overhead_bytes,
    )


def one_op(
    target: str,
    inputs: list[tuple[tuple[int, ...], str]],
    outputs: list[tuple[tuple[int, ...], str]],
    *,
    nbytes: int = 1 << 40,
    **more: Any,
) -> StepGraph:
    """A step of one op whose values have these shapes and types."""
    forms = [*inputs, *outputs]
    values = tuple(
        Value(i, f"v{i}", i, shape, dtype, None if i < len(inputs) else 0)
        for i, (shape, dtype) in enumerate(forms)
    )
    op = Op(
        0,
        "op",
        target,
        Phase.FORWARD,
        tuple(range(len(inputs))),
        tuple(range(len(inputs), len(forms))),
        **more,
    )
    held = tuple(Storage(i, nbytes, Role.PARAM) for i in range(len(forms)))
    return StepGraph((op,), values, held, ())
