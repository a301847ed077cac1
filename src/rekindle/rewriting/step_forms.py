"""The forms of a captured step that compute the same numbers with less memory or time.

The improved form batches small ops, writes results in place and reorders the backward pass. The
early form also updates each parameter as soon as its gradient is complete, if that is unobservable
and the optimizer treats parameters independently (docs/decisions/024).
"""

from __future__ import annotations

import torch

from rekindle.core.graph.graph import StepGraph
from rekindle.core.rewrite.backward_order import free_first
from rekindle.core.rewrite.improve import MAX_UPDATES, Update, combine, update_early, write_in_place
from rekindle.rewriting import multi_tensor
from rekindle.torch_internals import global_optimizer_post_hooks, global_optimizer_pre_hooks
from rekindle.tracing.intercept import is_own_hook
from rekindle.tracing.tape import EntryKind, Recording

# Their step is a loop over parameters, each with its own state and step count.
_INDEPENDENT_UPDATES = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.ASGD,
)


def improved(recording: Recording, graph: StepGraph) -> StepGraph:
    """The improved form of a step, whose captured form is `graph`."""
    small_ops = multi_tensor.batchable_ops(recording, graph)
    return free_first(write_in_place(combine(graph, small_ops)))


def with_early_updates(
    recording: Recording, form: StepGraph, *, max_updates: int = MAX_UPDATES
) -> StepGraph | None:
    """The early form of an improved step; None if early updates could be observed."""
    found = _find_updates(recording, form)
    return None if found is None else update_early(form, *found, max_updates=max_updates)


def updates_independently(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer updates each parameter independently, and no hook sees its steps."""
    step = vars(optimizer).get("step")  # learning-rate schedulers put one there that only counts
    is_own = step is None or hasattr(step, "_wrapped_by_lr_sched")
    return type(optimizer) in _INDEPENDENT_UPDATES and is_own and not has_step_hooks(optimizer)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if a hook, local or global, runs before or after the optimizer's step."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    before = list(global_optimizer_pre_hooks.values())  # a capture in another thread has one
    return any((*hooks, global_optimizer_post_hooks)) or not all(map(is_own_hook, before))


def _find_updates(recording: Recording, graph: StepGraph) -> tuple[list[Update], list[int]] | None:
    """The early updates and the optimizer's ops that they replace; None if all must wait."""
    tape = recording.tape
    if len(tape.optimizer_calls) != 1 or tape.optimizer_calls[0].is_opaque:
        return None
    if not updates_independently(recording.state.optimizer):
        return None
    if any(entry.kind is EntryKind.GRAD for entry in tape.entries):
        return None  # every call of the optimizer would use a gradient from before the step
    call = tape.optimizer_calls[0]
    value_of = {value.name: value.index for value in graph.values}
    entered = {(e.kind, e.name): value_of[e.node.name] for e in tape.entries}
    names = [recording.state.slots[index].name for index in call.params]
    if any((EntryKind.PARAM, name) not in entered for name in names):
        return None
    params = [entered[EntryKind.PARAM, name] for name in names]
    grads = [value_of[node.name] for node in call.grads]
    own = {each.node.name for each in tape.calls if each.in_optimizer}
    ops = [op.index for op in graph.ops if op.name in own]
    if not _is_unobservable(graph, ops, params, grads):
        return None
    return [Update(*pair) for pair in zip(params, grads, strict=True)], ops


def _is_unobservable(
    graph: StepGraph, optimizer_ops: list[int], params: list[int], grads: list[int]
) -> bool:
    """True if early updates are unobservable.

    No other op reads optimizer state, nor parameters or gradients after the first update; the step
    returns no gradient; and no two parameters or gradients share a storage.
    """
    own, storage_of = set(optimizer_ops), [value.storage for value in graph.values]
    later = [op for op in graph.ops[min(own, default=0) :] if op.index not in own]
    read_later = {storage_of[value] for op in later for value in (*op.inputs, *op.mutates)}
    updated = {storage_of[value] for value in params}
    freed = {storage_of[value] for value in grads}
    are_distinct = len(updated) == len(params) and len(freed) == len(grads)
    kept = {storage_of[value] for value in graph.outputs}
    changed = {storage_of[value] for index in own for value in graph.ops[index].mutates}
    others = [op for op in graph.ops if op.index not in own]
    read = {storage_of[value] for op in others for value in (*op.inputs, *op.mutates)}
    if not read.isdisjoint(changed - updated - freed):
        return False
    return are_distinct and read_later.isdisjoint(updated | freed) and kept.isdisjoint(freed)
