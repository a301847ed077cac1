"""The storage versions that each op reads and writes, and which ops may be recomputed.

An in-place op gives its storage a new version. What enters the step has version 0; the op that
makes a storage writes version 1; every op that mutates it writes the next. A recomputation reads
the versions that the captured op read, so in-place changes cannot alter its result.
"""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.core.graph.graph import Op, OpKind, Phase, StepGraph

Pairs = tuple[tuple[int, int], ...]  # of a storage and its version

# Batch norms in training mode normalise by the batch's own mean and variance: their results do not
# depend on the running statistics they update, and a recomputation does not update them.
STATE_FREE = frozenset(
    {
        "_batch_norm_with_update",
        "_native_batch_norm_legit",
        "batch_norm_with_update",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "native_batch_norm",
    }
)


@dataclass(frozen=True)
class Dataflow:
    """For each op: the (storage, version) pairs it reads; the storages it makes, and mutates.

    `copy_inputs`, `copy_reads` and `copy_makes` are the values and pairs that a recomputation of
    the op reads and the storages it makes; it changes no state. `refusals` says why an op must not
    be recomputed; None if it may. `last_version` is each storage's version at the step's end.
    """

    reads: tuple[Pairs, ...]
    makes: tuple[tuple[int, ...], ...]
    mutates: tuple[tuple[int, ...], ...]
    copy_inputs: tuple[tuple[int, ...], ...]
    copy_reads: tuple[Pairs, ...]
    copy_makes: tuple[tuple[int, ...], ...]
    refusals: tuple[str | None, ...]
    last_version: tuple[int, ...]


def dataflow(graph: StepGraph) -> Dataflow:
    """The versions that ops read and write; computed once per graph."""
    found: Dataflow | None = graph.__dict__.get("_dataflow")  # as cached_property does
    if found is None:
        found = graph.__dict__["_dataflow"] = _dataflow(graph)
    return found


def is_state_free(op: Op) -> bool:
    """True if an op's results do not depend on the state it changes."""
    parts = op.target.split(".")
    return len(parts) > 1 and parts[1] in STATE_FREE


def _dataflow(graph: StepGraph) -> Dataflow:
    storage_of = [value.storage for value in graph.values]
    entered = {value.storage for value in graph.values if value.producer is None}
    version = [0] * len(graph.storages)
    settled = dict.fromkeys(entered, 0)  # what entered the step: its version before the optimizer
    reads, makes, mutates = [], [], []
    copy_inputs, copy_reads, copy_makes = [], [], []
    for op in graph.ops:
        touched = dict.fromkeys(storage_of[v] for v in (*op.inputs, *op.mutates))
        reads.append(tuple((s, version[s]) for s in touched))
        made = [
            s
            for s in dict.fromkeys(storage_of[v] for v in op.outputs)
            if version[s] == 0 and s not in entered
        ]
        changed = [s for s in dict.fromkeys(storage_of[v] for v in op.mutates) if s not in made]
        for s in (*made, *changed):
            version[s] += 1
            if s in settled and op.phase is not Phase.OPTIMIZER:
                settled[s] += 1
        makes.append(tuple(made))
        mutates.append(tuple(changed))
        copy_inputs.append(_copy_inputs(graph, op, entered))
        touched = dict.fromkeys(storage_of[v] for v in copy_inputs[-1])
        before = dict(reads[-1])
        copy_reads.append(tuple((s, before.get(s, version[s])) for s in touched))
        copy_makes.append(tuple(made if not op.copy_target else [storage_of[op.outputs[0]]]))
    refusals = [
        _refusal(graph, op, reads[op.index], mutates[op.index], settled) for op in graph.ops
    ]
    return Dataflow(
        reads=tuple(reads),
        makes=tuple(makes),
        mutates=tuple(mutates),
        copy_inputs=tuple(copy_inputs),
        copy_reads=tuple(copy_reads),
        copy_makes=tuple(copy_makes),
        refusals=tuple(refusals),
        last_version=tuple(version),
    )


def _copy_inputs(graph: StepGraph, op: Op, entered: set[int]) -> tuple[int, ...]:
    """The values that a recomputation reads: without the state that the op itself changes."""
    state = entered.intersection(graph.values[v].storage for v in op.mutates)
    touched = dict.fromkeys((*op.inputs, *op.mutates))
    inputs = [v for v in touched if graph.values[v].storage not in state]
    return (*inputs, *op.outputs[1:]) if op.copy_target else tuple(inputs)


def _refusal(
    graph: StepGraph, op: Op, reads: Pairs, mutates: tuple[int, ...], settled: dict[int, int]
) -> str | None:
    if op.is_view:
        return None
    if op.kind in (OpKind.FOREACH, OpKind.CAST):
        return "does what several ops do"
    if op.kind in (OpKind.HELPER, OpKind.UPDATE):
        return "reads or sets a random generator's state"
    if not op.phase.is_forward:
        return f"is an op of the {op.phase.value} pass"
    state = settled.keys() & mutates
    if state and not (is_state_free(op) and op.outputs):
        return f"changes state ({graph.storage_name(min(state))})"
    for storage, version in reads:
        if storage in settled and storage not in state and version != settled[storage]:
            return f"reads state that changes later ({graph.storage_name(storage)})"
    return None
