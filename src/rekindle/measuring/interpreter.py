"""Runs a recorded step op by op, the optimizer's operators included, and lets others watch.

This is for measuring: it may run on the user's own tensors, so `preserved` puts their values back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from rekindle.torch_internals import AutoDispatchBelowAutograd, set_grad_enabled
from rekindle.tracing import undo
from rekindle.tracing.defer_sigint import uninterrupted
from rekindle.tracing.tape import EntryKind, Recording

# (an op's index, the operator, its arguments) -> its result
Around = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]


def inputs(recording: Recording, batch: list[torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    """A tensor for all that enters the step; optimizer state that is not there yet is all zeros.

    That is how optimizers start. Whatever else would make numbers of the parameters that are none
    (the root of a negative average), and kernels may take another time for those.
    """
    slots = {(slot.kind, slot.name): slot for slot in recording.state.slots}
    made = dict(zip(recording.batch_nodes, batch, strict=True))
    for entry in recording.tape.entries:
        if entry.kind is EntryKind.BATCH:
            continue
        slot = slots.get((entry.kind, entry.name))
        if slot is not None:
            made[entry.node] = slot.get()
        elif _is_real(entry.tensor):
            made[entry.node] = entry.tensor
        else:
            made[entry.node] = make_up(recording, entry.node).zero_()
    return made


def resident_bytes(recording: Recording, batch: list[torch.Tensor], device: torch.device) -> int:
    """The bytes on a device of all that enters the step and exists by now."""
    tensors = [entry.tensor for entry in recording.tape.entries if _is_real(entry.tensor)]
    tensors += [*(slot.get() for slot in recording.state.slots), *batch]
    storages = {t.untyped_storage().data_ptr(): t for t in tensors if t.device.type == device.type}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def make_up(recording: Recording, node: fx.Node) -> torch.Tensor:
    """A tensor of a node's form: random numbers, or zeros where an index may be meant."""
    meta = recording.tape.metas[node]
    device = recording.tape.storages[meta.storage].device
    last = sum((size - 1) * step for size, step in zip(meta.shape, meta.stride, strict=True))
    count = last + 1 if 0 not in meta.shape else 0
    memory = torch.zeros(count, dtype=meta.dtype, device=device)
    if meta.dtype.is_floating_point:
        memory.normal_()
    return memory.as_strided(meta.shape, meta.stride)


@contextmanager
def preserved(recording: Recording, batch: list[torch.Tensor] | None = None) -> Iterator[None]:
    """Put every real tensor and generator back as it was, from copies in host memory."""
    tensors = [entry.tensor for entry in recording.tape.entries if _is_real(entry.tensor)]
    tensors += [slot.get() for slot in recording.state.slots] + (batch or [])
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    copies = [(storage, storage.cpu().clone()) for storage in storages.values()]
    generators = {id(g): g for call in recording.tape.calls for g in _generators(call.node)}
    own_states = [(generator, generator.get_state()) for generator in generators.values()]
    states = undo.random_states()
    try:
        yield
    finally:
        with uninterrupted():
            for storage, copy in copies:
                storage.copy_(copy)
            for generator, state in own_states:
                generator.set_state(state)
            undo.set_random_states(states)


def _is_real(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _generators(node: fx.Node) -> Iterator[torch.Generator]:
    """The generators of the user's own that a call draws from."""
    for arg in (*node.args, *node.kwargs.values()):
        if isinstance(arg, torch.Generator):
            yield arg


def run(recording: Recording, env: dict[fx.Node, Any], around: Around) -> None:
    """Run every op in order, freeing each value after its last use. `env` is used up."""
    calls = {call.node: index for index, call in enumerate(recording.tape.calls)}
    nodes = executed(recording)
    dying = _last_uses(nodes)
    with torch.enable_grad(), AutoDispatchBelowAutograd():
        for node in nodes:
            if node.target is operator.getitem:
                env[node] = env[node.all_input_nodes[0]][node.args[1]]
            else:
                args = fx.map_arg(node.args, env.__getitem__)
                kwargs = fx.map_arg(node.kwargs, env.__getitem__)
                set_grad_enabled(recording.tape.calls[calls[node]].grad_enabled)
                env[node] = around(calls[node], node.target, args, kwargs)
                del args, kwargs
            for dead in dying[node]:
                del env[dead]


def executed(recording: Recording) -> list[fx.Node]:
    """The nodes that stand for operators, the optimizer's included, and their results."""
    known = {call.node for call in recording.tape.calls}
    return [
        node
        for node in recording.tape.graph.nodes
        if node in known or node.target is operator.getitem
    ]


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    seen: set[fx.Node] = set()
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        last = [n for n in (node, *node.all_input_nodes) if n not in seen]
        seen.update(last)
        dying[node] = last
    return dying
