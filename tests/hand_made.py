"""Steps written by hand in a few lines: each op is a phase and the values it touches.

A value of `step` is named by its position: those that enter come first, in the order of `entering`,
then each op's results in order. A result is a new storage, or a view of the storage it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rekindle.core.cost import OpCost, Profile
from rekindle.core.ir import Op, Phase, Role, StepGraph, Storage, Value

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
