"""Compares two traces of a step, which must be the same.

Between them everything was restored that Rekindle knows of. What differs depends on something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from rekindle.core.graph.graph import Source
from rekindle.torch_internals import FakeTensor
from rekindle.tracing import batch_tree
from rekindle.tracing.contents import Same
from rekindle.tracing.tape import EntryKind, Recording

_NO_SOURCE = Source("", "", 0)


def first_difference(first: Recording, second: Recording) -> tuple[str, Source] | None:
    """A description of the first difference and its place; None if the traces are the same."""
    sources = {call.node: call.source for call in first.tape.calls}
    sources |= {call.node: call.source for call in second.tape.calls}
    for one, other in zip_longest(_described(first), _described(second)):
        if one is None or other is None or one[1:] != other[1:]:
            node, *_ = one or other or (None,)
            name = node.name if isinstance(node, fx.Node) else "its result"
            arguments = " has other arguments"
            if one is None or other is None or one[1] != other[1]:
                arguments = " runs in one of the traces only"
            return f"{name}{arguments}", sources.get(node, _NO_SOURCE)  # type: ignore[arg-type]
    return None


def _described(recording: Recording) -> Iterator[tuple[Any, ...]]:
    """Each node, with all that it depends on, and the results."""
    tape = recording.tape
    number = {node: index for index, node in enumerate(tape.graph.nodes)}
    entries = {entry.node: entry for entry in tape.entries}
    held = {(slot.kind, slot.name) for slot in recording.state.slots}

    def form(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "node", number[value]
        if isinstance(value, (list, tuple)):
            return (type(value), *map(form, value))
        if isinstance(value, dict):
            return tuple((key, form(each)) for key, each in value.items())
        if isinstance(value, batch_tree.CONSTANTS):
            return batch_tree.leaf_key(value)
        return Same(value)

    for node in tape.graph.nodes:
        meta = tape.metas.get(node)
        layout = None if meta is None else (*meta[:3], meta.storage)
        if node.op != "placeholder":
            yield node, node.target, form(node.args), form(node.kwargs), layout
            continue
        entry = entries[node]
        value: Any = None
        if entry.kind is EntryKind.EXTERNAL and (entry.kind, entry.name) not in held:
            value = _Constant(entry.tensor)
        yield node, entry.kind, entry.name, value, layout
    yield (
        None,
        recording.result.key(),
        form(recording.result_nodes),
        [(use.slot, use.reads_old, form(use.final)) for use in recording.grads],
        [(e.name, e.kind, e.structure.key(), form(e.nodes)) for e in recording.effects],
    )


class _Constant:
    """A tensor that the step made of numbers, or found where Rekindle does not look: its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant):
            return False
        one, two = self._tensor, other._tensor
        if one is two or isinstance(one, FakeTensor) or isinstance(two, FakeTensor):
            return one is two
        if one.shape != two.shape or one.dtype != two.dtype or one.device != two.device:
            return False
        return torch.equal(one, two) or _has_equal_bytes(one, two)

    __hash__ = None  # type: ignore[assignment]


def _has_equal_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    """True for equal NaNs, too."""
    as_bytes = (each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, two))
    return torch.equal(*as_bytes)
