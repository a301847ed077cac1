"""Turns a captured step into one that needs less memory or time and computes the same numbers.

Three things a plain step does not do. Small ops that do the same to many tensors, and that nobody
waits for, can be one. An element-wise op may write its result over an input that nobody needs any
more, in place of taking new memory. And where each parameter is updated for itself, its update may
stand right behind its gradient, which is gone then, instead of at the end of the step, when all
gradients are there at once.

What comes out is a graph like any other, for planners and simulator alike. Storages and the names
of ops stay what they were, so that costs carry over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.graph.graph import (
    TOGETHER_TARGET,
    UPDATE_TARGET,
    Op,
    Phase,
    Role,
    StepGraph,
    Storage,
)
from rekindle.core.graph.liveness import analyze

_FORWARD = (Phase.FORWARD, Phase.LOSS)
MAX_UPDATES = 16  # calls of the optimizer in one step: each costs a few launches
_FIXED_BYTES = 64  # of what an optimizer needs beside: so much does not depend on the size
_MOST_GROUPS = 16  # of ops of one kind that are done together: more of them wait less
_SMALL_BYTES = 1 << 20  # what these may make at once, however little all of them make


@dataclass(frozen=True, slots=True)
class Update:
    """What the optimizer does to one parameter: the values that it changes, and the gradient."""

    param: int
    grad: int


def combine(graph: StepGraph, kinds: Iterable[Sequence[int]]) -> StepGraph:
    """The same step with ops of each kind done together, where that does not raise its peak.

    `kinds` are as in `batch_small_ops`. What a group makes is all there at once, and so is what it
    reads.
    """
    for names in [{graph.ops[index].name for index in ops} for ops in kinds]:
        found = batch_small_ops(graph, [[op.index for op in graph.ops if op.name in names]])
        if analyze(found).peak_bytes() <= analyze(graph).peak_bytes():
            graph = found
    return graph


def batch_small_ops(graph: StepGraph, kinds: Iterable[Sequence[int]]) -> StepGraph:
    """The same step with ops of one kind in groups, each group one op in place of its last member.

    `kinds` are ops, in order, that one operator can do at once. An op joins a group if nobody
    misses its result until the group's end, and nobody changes what it reads.
    """
    groups = {group[-1]: group for ops in kinds for group in _groups(graph, ops) if len(group) > 1}
    members = {op for group in groups.values() for op in group}
    found: list[Op] = []
    for op in graph.ops:
        if op.index in groups:
            found.append(_together(len(found), [graph.ops[i] for i in groups[op.index]]))
        elif op.index not in members:
            found.append(replace(op, index=len(found)))
    producer = {value: op.index for op in found for value in op.outputs}
    values = tuple(
        replace(v, producer=None if v.producer is None else producer[v.index]) for v in graph.values
    )
    shift = len(found) - len(graph.ops)  # of the optimizer's ops, which come last
    storages = tuple(
        replace(storage, held_until=max(held + shift, -1))
        for storage, held in zip(graph.storages, _held(graph), strict=True)
    )
    return StepGraph(tuple(found), values, storages, graph.outputs)


def _groups(graph: StepGraph, ops: Sequence[int]) -> list[list[int]]:
    """Cut ops of one kind into runs, so that the members of each can wait for the last one."""
    storage_of = [value.storage for value in graph.values]
    sizes = [sum(graph.storage_of(v).nbytes for v in graph.ops[i].outputs) for i in ops]
    most = max(sum(sizes) / _MOST_GROUPS, _SMALL_BYTES)
    limit = _waits_until(graph, set(ops), storage_of)
    groups: list[list[int]] = []
    held, end = 0.0, -1  # of the group in the making: its bytes, and how long all of it can wait
    for op, size in zip(ops, sizes, strict=True):
        if not groups or op > end or held + size > max(most, size):
            groups.append([])
            held, end = 0.0, len(graph.ops)
        groups[-1].append(op)
        held, end = held + size, min(end, limit[op])
    return groups


def _waits_until(graph: StepGraph, ops: set[int], storage_of: list[int]) -> dict[int, int]:
    """The last op before which each of some ops could run as well."""
    next_use = [len(graph.ops)] * len(graph.storages)
    next_change = [len(graph.ops)] * len(graph.storages)
    limit = {}
    for op in reversed(graph.ops):
        touched = {storage_of[v] for v in (*op.inputs, *op.outputs, *op.mutates)}
        made = {storage_of[v] for v in (*op.outputs, *op.mutates)}
        if op.index in ops:
            ends = [next_use[s] for s in made] + [next_change[s] for s in touched]
            limit[op.index] = min(ends, default=0) - 1
        for storage in touched:
            next_use[storage] = op.index
        for storage in made:
            next_change[storage] = op.index
    return limit


def _together(index: int, members: Sequence[Op]) -> Op:
    return replace(
        members[-1],
        index=index,
        name=f"{members[-1].name}_together",
        target=TOGETHER_TARGET,
        members=tuple(op.name for op in members),
        inputs=tuple(dict.fromkeys(v for op in members for v in op.inputs)),
        outputs=tuple(v for op in members for v in op.outputs),
        mutates=tuple(dict.fromkeys(v for op in members for v in op.mutates)),
        flops=sum(op.flops for op in members),
        may_overwrite=(),
    )


def write_in_place(graph: StepGraph) -> StepGraph:
    """The same step with results written over inputs that die, where the operator allows it.

    In the backward pass alone, and over what it has made itself. What the forward pass makes is for
    plans to drop and compute again, and a result that shares the storage of an earlier one leaves
    them less to choose from (BERT-large in 48% of its memory: 1% more time); it is there to be kept
    anyway, so that nothing is gained.
    """
    liveness = analyze(graph)
    stays = liveness.is_resident | liveness.is_output
    in_backward = [op.phase is Phase.BACKWARD for op in graph.ops]
    moved: dict[int, int] = {}  # a result's storage -> the one it is written to instead
    ops = list(graph.ops)
    for op in graph.ops:
        if not op.may_overwrite or op.is_random or not in_backward[op.index]:
            continue
        result = graph.values[op.outputs[0]].storage
        for value in op.may_overwrite:
            storage = graph.values[value].storage
            if (
                liveness.death[storage] == op.index
                and not stays[[storage, result]].any()
                and graph.storages[storage].role is not Role.GRAD
                and graph.storages[storage].device == graph.storages[result].device
                and in_backward[liveness.birth[storage]]
            ):
                moved[result] = moved.get(storage, storage)
                ops[op.index] = replace(op, mutates=(value,), may_overwrite=())
                break
    values = tuple(replace(v, storage=moved.get(v.storage, v.storage)) for v in graph.values)
    return StepGraph(tuple(ops), values, _freshened(graph, moved), graph.outputs)


def _freshened(graph: StepGraph, moved: dict[int, int]) -> tuple[Storage, ...]:
    """The storages as a rewritten step holds them: one that is shared is what it is in the end.

    Those that nobody uses any more are left, empty, so that the others keep their numbers.
    """
    roles = {storage: graph.storages[result].role for result, storage in moved.items()}
    roles.update(dict.fromkeys(moved, Role.TEMP))
    return tuple(
        replace(
            storage,
            nbytes=0 if storage.index in moved else storage.nbytes,
            role=roles.get(storage.index, storage.role),
            held_until=held,
        )
        for storage, held in zip(graph.storages, _held(graph), strict=True)
    )


def _held(graph: StepGraph) -> list[int]:
    """Until which op each storage is held by what we do not run: the user's own optimizer."""
    birth = analyze(graph).birth.tolist()
    in_update = [op.phase is Phase.OPTIMIZER for op in graph.ops] + [False]
    return [s.held_until if in_update[birth[s.index]] else -1 for s in graph.storages]


def update_early(
    graph: StepGraph,
    updates: Sequence[Update],
    optimizer_ops: Collection[int],
    *,
    max_updates: int = MAX_UPDATES,
) -> StepGraph:
    """The same step with the optimizer's ops replaced by updates, each where it first can be.

    An update comes after the last op that needs the parameter as it was: the backward ops that read
    it, and those that read anything computed from it, which a plan may compute again. Updates that
    come close to each other are one op, so that there are few.
    """
    gone = set(optimizer_ops)
    after = _places(graph, updates, gone)
    order = sorted(range(len(updates)), key=lambda i: after[i])
    sizes = [graph.storages[graph.values[u.grad].storage].nbytes for u in updates]
    at_once = sum(sizes) / (max_updates - 1)  # the last one is what is left over
    groups: dict[int, list[Update]] = {}  # by the op after which they come
    waiting: list[int] = []
    for index in order:
        waiting.append(index)
        if sum(sizes[i] for i in waiting) >= at_once or index == order[-1]:
            groups.setdefault(after[index], []).extend(updates[i] for i in waiting)
            waiting = []
    return _with_updates(graph, groups, gone)


def _places(graph: StepGraph, updates: Sequence[Update], gone: set[int]) -> list[int]:
    """For each update, the op after which it may come."""
    storage_of = [value.storage for value in graph.values]
    last = np.full(len(graph.storages), -1, dtype=np.int64)  # the last op to touch each storage
    for op in graph.ops:
        if op.index not in gone:
            last[[storage_of[v] for v in (*op.inputs, *op.outputs, *op.mutates)]] = op.index
    # For each storage: the last op to touch it, or anything computed from it in the forward pass.
    latest = last.copy()
    for op in reversed(graph.ops):
        if op.phase in _FORWARD:
            made = [storage_of[v] for v in (*op.outputs, *op.mutates)]
            until = int(latest[made].max(initial=-1))
            for value in op.inputs:
                latest[storage_of[value]] = max(latest[storage_of[value]], until)
    return [
        int(max(latest[storage_of[update.param]], last[storage_of[update.grad]]))
        for update in updates
    ]


def _with_updates(graph: StepGraph, groups: dict[int, list[Update]], gone: set[int]) -> StepGraph:
    """The graph without some ops, with updates after others; values and ops numbered anew."""
    lost = {value for op in graph.ops if op.index in gone for value in op.outputs}
    number = {
        old: new for new, old in enumerate(v.index for v in graph.values if v.index not in lost)
    }
    ops: list[Op] = []
    place: dict[int, int] = {}  # an op's old index -> its new one
    n_updates = 0
    for op in graph.ops:
        if op.index not in gone:
            place[op.index] = len(ops)
            ops.append(
                replace(
                    op,
                    index=len(ops),
                    inputs=tuple(number[v] for v in op.inputs),
                    outputs=tuple(number[v] for v in op.outputs),
                    mutates=tuple(number[v] for v in op.mutates),
                    may_overwrite=tuple(number[v] for v in op.may_overwrite),
                )
            )
        if op.index in groups:
            ops.append(_update(len(ops), n_updates, groups[op.index], number))
            n_updates += 1
    values = tuple(
        replace(
            value,
            index=number[value.index],
            producer=None if value.producer is None else place[value.producer],
        )
        for value in graph.values
        if value.index not in lost
    )
    outputs = tuple(number[value] for value in graph.outputs)
    storages = tuple(replace(storage, held_until=-1) for storage in graph.storages)
    return StepGraph(tuple(ops), values, storages, outputs)


def _update(index: int, serial: int, updates: Sequence[Update], number: dict[int, int]) -> Op:
    params = tuple(number[update.param] for update in updates)
    return Op(
        index=index,
        name=f"early_update_{serial}",
        target=UPDATE_TARGET,
        phase=Phase.OPTIMIZER,
        inputs=(*(number[update.grad] for update in updates), *params),
        outputs=(),
        mutates=params,
    )


def carry_over(profile: Profile, graph: StepGraph, improved: StepGraph) -> Profile:
    """The costs of an improved step, from those of the step it comes from.

    Ops cost what they did; what is done together, as much as each for itself, which is a little too
    much. An update has its share of the time that the optimizer takes, and of the memory that it
    needs beside parameters, gradients and state.
    """
    profile.check(graph)
    cost_of = {op.name: cost for op, cost in zip(graph.ops, profile.costs, strict=True)}
    kept = {op.name for op in improved.ops}
    for op in improved.ops:
        if op.members:
            costs = [cost_of[member] for member in op.members]
            workspace_bytes = sum(cost.workspace_bytes for cost in costs)
            time_us = sum(cost.time_us for cost in costs)
            cost_of[op.name] = replace(costs[0], time_us=time_us, workspace_bytes=workspace_bytes)
            kept.update(op.members)
    lost = [op for op in graph.ops if op.name not in kept]
    time_us = sum(cost_of[op.name].time_us for op in lost)
    extra_bytes = _extra_bytes(graph, profile, lost)
    grads = [_grad_bytes(improved, op) for op in improved.ops]
    all_bytes = max(1, sum(map(sum, grads)))
    # Of an optimizer that takes one parameter after the other, the largest decides.
    is_one_by_one = all(len(_grads_of(graph, op)) <= 1 for op in lost)
    needs = max if is_one_by_one else sum
    most = max(1, max((max(each, default=0) for each in grads), default=0))
    whole = most if is_one_by_one else all_bytes
    found = tuple(
        cost_of[op.name]
        if op.name in cost_of
        else OpCost(
            time_us * sum(part) / all_bytes,
            max(-(-extra_bytes * needs(part) // whole), min(extra_bytes, _FIXED_BYTES)),
            is_measured=True,
        )
        for op, part in zip(improved.ops, grads, strict=True)
    )
    return replace(profile, fingerprint=improved.fingerprint, costs=found)


def _grad_bytes(graph: StepGraph, op: Op) -> list[int]:
    """The bytes of each gradient that an update reads; none for any other op."""
    if op.target != UPDATE_TARGET:
        return []
    return [graph.storages[storage].nbytes for storage in sorted(_grads_of(graph, op))]


def _grads_of(graph: StepGraph, op: Op) -> set[int]:
    """The weights' gradients that an op reads."""
    read = {graph.values[value].storage for value in op.inputs}
    return {storage for storage in read if graph.storages[storage].role is Role.GRAD}


def _extra_bytes(graph: StepGraph, profile: Profile, ops: Sequence[Op]) -> int:
    """The most that an optimizer's ops hold at once of what they make, workspace included."""
    if not ops:
        return 0
    liveness, sizes = analyze(graph), np.array([s.nbytes for s in graph.storages], dtype=np.int64)
    made = {graph.values[value].storage for op in ops for value in op.outputs}
    own = np.array(sorted(made - set(np.flatnonzero(liveness.is_resident))), dtype=np.int64)
    return max(
        int(
            sizes[
                own[(liveness.birth[own] <= op.index) & (op.index <= liveness.release[own])]
            ].sum()
        )
        + profile.costs[op.index].workspace_bytes
        for op in ops
    )
