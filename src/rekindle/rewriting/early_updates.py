"""Finds out whether a step's optimizer may update each parameter as soon as its gradient is there.

It may if what happens to one parameter does not depend on any other, and nobody could tell: no hook
watches the optimizer, and nothing but the optimizer reads the gradients, which are gone when the
step ends. The user's own optimizer still does the updates, called several times in a step with some
of the gradients each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rekindle.core.graph.graph import StepGraph
from rekindle.core.rewrite.improve import Update
from rekindle.torch_internals import global_optimizer_post_hooks, global_optimizer_pre_hooks
from rekindle.tracing.tape import EntryKind, Recording

# Their step is a loop over parameters, each with a state and a step count of its own.
_ONE_BY_ONE = (
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


class Updates(NamedTuple):
    """The updates of a step, one a parameter, and the ops that stand for them in its graph."""

    each: list[Update]
    ops: list[int]


def find_updates(recording: Recording, graph: StepGraph) -> Updates | None:
    """The updates that may come early; None where they must all wait for the step's end."""
    tape = recording.tape
    if len(tape.optimizer_calls) != 1 or tape.optimizer_calls[0].is_opaque:
        return None
    if not is_one_by_one(recording.state.optimizer):
        return None
    if any(entry.kind is EntryKind.GRAD for entry in tape.entries):
        return None  # a gradient from before the step would be found by every call
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
    if not _are_private(graph, ops, params, grads):
        return None
    return Updates([Update(*pair) for pair in zip(params, grads, strict=True)], ops)


def is_one_by_one(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer treats each parameter for itself, and nobody watches its steps."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any((*hooks, global_optimizer_pre_hooks, global_optimizer_post_hooks)):
        return False
    step = vars(optimizer).get("step")  # learning-rate schedulers put one there that only counts
    is_own = step is None or hasattr(step, "_wrapped_by_lr_sched")
    return type(optimizer) in _ONE_BY_ONE and is_own


def _are_private(
    graph: StepGraph, optimizer_ops: list[int], params: list[int], grads: list[int]
) -> bool:
    """Whether nobody could tell: when parameters change, what the state is, that gradients go.

    Nobody else looks at the optimizer's state; nobody looks at parameters or gradients after the
    optimizer's first op.
    """
    own, storage_of = set(optimizer_ops), [value.storage for value in graph.values]
    later = [op for op in graph.ops[min(own, default=0) :] if op.index not in own]
    seen = {storage_of[value] for op in later for value in (*op.inputs, *op.mutates)}
    updated = {storage_of[value] for value in params}
    freed = {storage_of[value] for value in grads}
    is_each_its_own = len(updated) == len(params) and len(freed) == len(grads)
    kept = {storage_of[value] for value in graph.outputs}
    changed = {storage_of[value] for index in own for value in graph.ops[index].mutates}
    others = [op for op in graph.ops if op.index not in own]
    read = {storage_of[value] for op in others for value in (*op.inputs, *op.mutates)}
    if not read.isdisjoint(changed - updated - freed):
        return False
    return is_each_its_own and seen.isdisjoint(updated | freed) and kept.isdisjoint(freed)
