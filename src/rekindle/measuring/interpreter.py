"""Runs a traced step op by op, the optimizer's operators included, for measuring.

It may run on the user's own tensors; `preserved` puts their values back.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from rekindle.measuring.meters import CallOp
from rekindle.torch_internals import AutoDispatchBelowAutograd, set_grad_enabled
from rekindle.tracing import undo
from rekindle.tracing.defer_sigint import uninterrupted
from rekindle.tracing.step_state import EntryKind, Slot
from rekindle.tracing.tape import Recording


def inputs(recording: Recording, batch: list[torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    """A tensor for each entry of the step; optimizer state that does not exist yet is all zeros.

    Optimizers start from zeros. Random state could turn parameters into NaN (the square root of a
    negative average), for which kernels may take another time.
    """
    slots = slots_of_entries(recording)
    made = dict(zip(recording.batch_nodes, batch, strict=True))
    for entry in recording.tape.entries:
        if entry.kind is EntryKind.BATCH:
            continue
        if entry.node in slots:
            made[entry.node] = slots[entry.node].get()
        elif _is_real(entry.tensor):
            made[entry.node] = entry.tensor
        else:
            made[entry.node] = synthetic_tensor(recording, entry.node).zero_()
    return made


def slots_of_entries(recording: Recording) -> dict[fx.Node, Slot]:
    """The slot of each entry that has one."""
    slots = {(slot.kind, slot.name): slot for slot in recording.state.slots}
    entries = (entry for entry in recording.tape.entries if (entry.kind, entry.name) in slots)
    return {entry.node: slots[entry.kind, entry.name] for entry in entries}


def input_bytes(recording: Recording, batch: list[torch.Tensor], device: torch.device) -> int:
    """Bytes on a device of the entries of the step that exist by now."""
    storages = _real_storages(recording, batch)
    return sum(s.nbytes() for s in storages if s.device.type == device.type)


def synthetic_tensor(recording: Recording, node: fx.Node) -> torch.Tensor:
    """A tensor laid out like a node's value: random floats; zeros for integers, often indices."""
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
    """Restore every real tensor and generator after the block, from copies in host memory."""
    copies = [(s, s.cpu().clone()) for s in _real_storages(recording, batch or [])]
    nodes = (call.node for call in recording.tape.calls)
    args: Iterator[Any] = (arg for node in nodes for arg in (*node.args, *node.kwargs.values()))
    generators = {id(arg): arg for arg in args if isinstance(arg, torch.Generator)}
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


def _real_storages(
    recording: Recording, batch: list[torch.Tensor]
) -> Iterator[torch.UntypedStorage]:
    tensors = [entry.tensor for entry in recording.tape.entries if _is_real(entry.tensor)]
    tensors += [*(slot.get() for slot in recording.state.slots), *batch]
    storages = (tensor.untyped_storage() for tensor in tensors)
    yield from {storage.data_ptr(): storage for storage in storages}.values()


def _is_real(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def run(recording: Recording, values: dict[fx.Node, Any], call_op: CallOp) -> None:
    """Run every op in order, and delete each of the `values` after its last use."""
    calls = {call.node: index for index, call in enumerate(recording.tape.calls)}
    nodes = [n for n in recording.tape.graph.nodes if n in calls or n.target is operator.getitem]
    dying = _last_uses(nodes)
    with torch.enable_grad(), AutoDispatchBelowAutograd():
        for node in nodes:
            if node.target is operator.getitem:
                values[node] = values[node.all_input_nodes[0]][node.args[1]]
            else:
                args = fx.map_arg(node.args, values.__getitem__)
                kwargs = fx.map_arg(node.kwargs, values.__getitem__)
                set_grad_enabled(recording.tape.calls[calls[node]].grad_enabled)
                values[node] = call_op(calls[node], node.target, args, kwargs)
                del args, kwargs
            for dead in dying[node]:
                del values[dead]


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    seen: set[fx.Node] = set()
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        last = [n for n in (node, *node.all_input_nodes) if n not in seen]
        seen.update(last)
        dying[node] = last
    return dying
