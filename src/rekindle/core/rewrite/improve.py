"""Rewrites a captured step into one that needs less memory or time and computes the same numbers.

Foreach: small ops of one kind whose results are not needed at once become one multi-tensor call.
In place: an element-wise op of the backward pass writes its result over an input that dies.
Early updates: each parameter is updated right after its gradient is complete, which is freed then.
Storages and names of ops stay the same, so that costs carry over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.graph.graph import Op, OpKind, Phase, Role, StepGraph, Storage
from rekindle.core.graph.liveness import analyze, live_bytes

MAX_UPDATES = 16  # optimizer calls per step: each costs a few launches
_FIXED_WORKSPACE_BYTES = 64  # part of an optimizer's workspace that does not grow with parameters
_MAX_FOREACH_GROUPS = 16  # per kind of op: in smaller groups, results wait for less time
_MIN_FOREACH_BYTES = 1 << 20  # a group may always make this much


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's update of one parameter: the values of parameter and gradient."""

    param: int
    grad: int


def combine(graph: StepGraph, kinds: Iterable[Sequence[int]]) -> StepGraph:
    """The same step with the ops of each kind batched, if that does not raise its peak.

    `kinds` are as in `batch_small_ops`. A group's inputs and outputs are all live at its end.
    """
    for names in [{graph.ops[index].name for index in ops} for ops in kinds]:
        found = batch_small_ops(graph, [[op.index for op in graph.ops if op.name in names]])
        if analyze(found).peak_bytes() <= analyze(graph).peak_bytes():
            graph = found
    return graph


def batch_small_ops(graph: StepGraph, kinds: Iterable[Sequence[int]]) -> StepGraph:
    """The same step with ops of one kind in groups; a foreach op replaces each group's last member.

    `kinds` are lists of ops, in order, that one multi-tensor operator can do. An op joins a group
    if no op reads its result before the group's end, and none mutates its inputs.
    """
    groups = {group[-1]: group for ops in kinds for group in _groups(graph, ops) if len(group) > 1}
    members = {op for group in groups.values() for op in group}
    found: list[Op] = []
    for op in graph.ops:
        if op.index in groups:
            found.append(_foreach(len(found), [graph.ops[i] for i in groups[op.index]]))
        elif op.index not in members:
            found.append(replace(op, index=len(found)))
    producer = {value: op.index for op in found for value in op.outputs}
    values = tuple(replace(v, producer=producer.get(v.index)) for v in graph.values)
    shift = len(found) - len(graph.ops)  # of the optimizer's ops, which come last
    storages = tuple(
        replace(storage, held_until=max(held + shift, -1))
        for storage, held in zip(graph.storages, _held(graph), strict=True)
    )
    return StepGraph(tuple(found), values, storages, graph.outputs)


def _groups(graph: StepGraph, ops: Sequence[int]) -> list[list[int]]:
    """Split ops of one kind into runs, so that the members of each can wait for the last one."""
    sizes = [sum(graph.storage_of(v).nbytes for v in graph.ops[i].outputs) for i in ops]
    most = max(sum(sizes) / _MAX_FOREACH_GROUPS, _MIN_FOREACH_BYTES)
    limit = _waits_until(graph, set(ops))
    groups: list[list[int]] = []
    held, end = 0.0, -1  # of the current group: its bytes, and the last op it can wait for
    for op, size in zip(ops, sizes, strict=True):
        if not groups or op > end or held + size > max(most, size):
            groups.append([])
            held, end = 0.0, len(graph.ops)
        groups[-1].append(op)
        held, end = held + size, min(end, limit[op])
    return groups


def _waits_until(graph: StepGraph, ops: set[int]) -> dict[int, int]:
    """For each of some ops, the last op before which it could run as well."""
    next_use = [len(graph.ops)] * len(graph.storages)
    next_change = [len(graph.ops)] * len(graph.storages)
    limit = {}
    for op in reversed(graph.ops):
        touched = graph.touched(op)
        made = {graph.values[v].storage for v in (*op.outputs, *op.mutates)}
        if op.index in ops:
            ends = [next_use[s] for s in made] + [next_change[s] for s in touched]
            limit[op.index] = min(ends, default=0) - 1
        for storage in touched:
            next_use[storage] = op.index
        for storage in made:
            next_change[storage] = op.index
    return limit


def _foreach(index: int, members: Sequence[Op]) -> Op:
    return replace(
        members[-1],
        index=index,
        name=f"{members[-1].name}_together",
        target=OpKind.FOREACH.value,
        members=tuple(op.name for op in members),
        inputs=tuple(dict.fromkeys(v for op in members for v in op.inputs)),
        outputs=tuple(v for op in members for v in op.outputs),
        mutates=tuple(dict.fromkeys(v for op in members for v in op.mutates)),
        flops=sum(op.flops for op in members),
        may_overwrite=(),
    )


def write_in_place(graph: StepGraph) -> StepGraph:
    """The same step with results written over inputs that die, if the operator allows it.

    Only in the backward pass, and only over its own results. Activations of the forward pass are
    for planners to drop and recompute: sharing storages would leave them fewer choices (BERT-large
    in 48% of its memory: 1% more time), and kept activations do not die anyway.
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
    """The storages of the rewritten step: a shared one takes the role of its last result.

    Unused storages remain, with 0 bytes, so that the others keep their indices.
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
    """`held_until` of each storage: only the user's own optimizer still holds storages."""
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
    """The same step with the optimizer's ops replaced by updates as early as possible.

    An update comes after the last op that needs the old parameter: the backward ops that read it,
    and those that read anything computed from it, which a plan may recompute. Consecutive updates
    are batched into few ops.
    """
    gone = set(optimizer_ops)
    after = _places(graph, updates, gone)
    order = sorted(range(len(updates)), key=lambda i: after[i])
    sizes = [graph.storages[graph.values[u.grad].storage].nbytes for u in updates]
    batch_bytes = sum(sizes) / (max_updates - 1)  # the last batch is the remainder
    groups: dict[int, list[Update]] = {}  # by the op after which they come
    waiting: list[int] = []
    for index in order:
        waiting.append(index)
        if sum(sizes[i] for i in waiting) >= batch_bytes or index == order[-1]:
            groups.setdefault(after[index], []).extend(updates[i] for i in waiting)
            waiting = []
    return _with_updates(graph, groups, gone)


def _places(graph: StepGraph, updates: Sequence[Update], gone: set[int]) -> list[int]:
    """For each update, the op after which it may run."""
    storage_of = [value.storage for value in graph.values]
    last = np.full(len(graph.storages), -1, dtype=np.int64)  # the last op to touch each storage
    for op in graph.ops:
        if op.index not in gone:
            last[graph.touched(op)] = op.index
    # For each storage: the last op to touch it, or anything computed from it in the forward pass.
    latest = last.copy()
    for op in reversed(graph.ops):
        if op.phase.is_forward:
            made = [storage_of[v] for v in (*op.outputs, *op.mutates)]
            until = int(latest[made].max(initial=-1))
            for value in op.inputs:
                latest[storage_of[value]] = max(latest[storage_of[value]], until)
    return [
        int(max(latest[storage_of[update.param]], last[storage_of[update.grad]]))
        for update in updates
    ]


def _with_updates(graph: StepGraph, groups: dict[int, list[Update]], gone: set[int]) -> StepGraph:
    """The graph without some ops, and with updates after others; values and ops are renumbered."""
    lost = {value for op in graph.ops if op.index in gone for value in op.outputs}
    left = [value for value in graph.values if value.index not in lost]
    number = {value.index: new for new, value in enumerate(left)}
    ops: list[Op] = []
    n_updates = 0
    for op in graph.ops:
        if op.index not in gone:
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
    producer = {value: op.index for op in ops for value in op.outputs}
    values = tuple(replace(v, index=new, producer=producer.get(new)) for new, v in enumerate(left))
    outputs = tuple(number[value] for value in graph.outputs)
    storages = tuple(replace(storage, held_until=-1) for storage in graph.storages)
    return StepGraph(tuple(ops), values, storages, outputs)


def _update(index: int, serial: int, updates: Sequence[Update], number: dict[int, int]) -> Op:
    params = tuple(number[update.param] for update in updates)
    return Op(
        index=index,
        name=f"early_update_{serial}",
        target=OpKind.UPDATE.value,
        phase=Phase.OPTIMIZER,
        inputs=(*(number[update.grad] for update in updates), *params),
        outputs=(),
        mutates=params,
    )


def carry_over(profile: Profile, graph: StepGraph, improved: StepGraph) -> Profile:
    """The profile of an improved step, from that of the original.

    Unchanged ops cost the same; a foreach op costs the sum of its members, which is slightly too
    much. An update gets its share of the optimizer's time and workspace.
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
    # If the optimizer takes one parameter after the other, its workspace is that of the largest,
    # while its variables still hold what was computed for another: at most the second largest.
    is_one_by_one = all(len(_grads_of(graph, op)) <= 1 for op in lost)
    needs = _sum_of_two_largest if is_one_by_one else sum
    most = max(1, max((max(each, default=0) for each in grads), default=0))
    whole = most if is_one_by_one else all_bytes
    owner = _owners(graph, improved, lost)

    def workspace(op: Op, part: list[int]) -> int:
        share = -(-extra_bytes * needs(part) // whole)
        params = {improved.values[value].name for value in op.mutates}
        others = {storage for storage, param in owner.items() if param not in params}
        own = _extra_bytes(graph, profile, lost, without=others)
        return max(share, own, min(extra_bytes, _FIXED_WORKSPACE_BYTES))

    found = tuple(
        cost_of[op.name]
        if op.name in cost_of
        else OpCost(time_us * sum(part) / all_bytes, workspace(op, part), is_measured=True)
        for op, part in zip(improved.ops, grads, strict=True)
    )
    return replace(profile, fingerprint=improved.fingerprint, costs=found)


def _sum_of_two_largest(sizes: Sequence[int]) -> int:
    return sum(sorted(sizes)[-2:])


def _grad_bytes(graph: StepGraph, op: Op) -> list[int]:
    """The bytes of each gradient that an update reads; none for any other op."""
    if op.kind is not OpKind.UPDATE:
        return []
    return [graph.storages[storage].nbytes for storage in sorted(_grads_of(graph, op))]


def _grads_of(graph: StepGraph, op: Op) -> set[int]:
    """The weight gradients that an op reads."""
    read = {graph.values[value].storage for value in op.inputs}
    return {storage for storage in read if graph.storages[storage].role is Role.GRAD}


def _owners(graph: StepGraph, improved: StepGraph, ops: Sequence[Op]) -> dict[int, str]:
    """By storage: the parameter that the optimizer's `ops` compute it for, if it is known.

    An op on lists of tensors computes its i-th result from the i-th tensors of its arguments.
    """
    storage_of = {value.name: value.storage for value in graph.values}
    owner: dict[int, str] = {}
    for op in improved.ops:
        if op.kind is OpKind.UPDATE:
            names = [improved.values[value].name for value in op.inputs]
            for grad, param in zip(names, names[len(op.mutates) :], strict=False):
                owner[storage_of[grad]] = owner[storage_of[param]] = param
    for op in ops:
        for results in (op.outputs, op.mutates):
            n = len(results)
            for index, result in enumerate(results):
                sources = op.inputs[index::n] if len(op.inputs) % n == 0 else op.inputs
                found = {owner.get(graph.values[value].storage) for value in sources} - {None}
                storage = graph.values[result].storage
                if len(found) == 1:
                    owner.setdefault(storage, str(found.pop()))
    return owner


def _extra_bytes(
    graph: StepGraph, profile: Profile, ops: Sequence[Op], without: Set[int] = frozenset()
) -> int:
    """The peak of the temporaries, except some, and workspaces of the optimizer's ops."""
    if not ops:
        return 0
    liveness, sizes = analyze(graph), graph.sizes_bytes
    made = {graph.values[value].storage for op in ops for value in op.outputs}
    made -= {*np.flatnonzero(liveness.is_resident).tolist(), *without}
    own = np.array(sorted(made), dtype=np.int64)
    live = live_bytes(liveness.birth[own], liveness.release[own], sizes[own], len(graph.ops))
    return max(int(live[op.index]) + profile.costs[op.index].workspace_bytes for op in ops)
