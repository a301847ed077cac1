"""Small calls of one kind that a step makes many of, and the calls that make them all at once.

Two kinds are worth it. Weights' gradients that autocast computes in a short type are cast to the
parameters' own, each for itself; and every batch norm counts its steps. On a GPU each such call is
a kernel that takes longer to start than to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rekindle.core.graph.graph import Phase, Role, StepGraph
from rekindle.torch_internals import foreach_add_, foreach_copy_
from rekindle.tracing.tape import Call, Recording

_CAST = torch.ops.aten._to_copy.default
_COUNT = torch.ops.aten.add_.Tensor


def cast(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The same tensors in another type."""
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    foreach_copy_(made, tensors)
    return made


def count(tensors: list[torch.Tensor], number: int) -> None:
    """Add a number to each tensor, in place."""
    foreach_add_(tensors, number)


def combined(call: Call) -> tuple[Callable[..., Any], Any]:
    """What does several calls like this one at once, and with which argument beside the tensors."""
    if call.node.target is _CAST:
        return cast, call.node.kwargs["dtype"]
    return count, call.node.args[1]


def operand(call: Call) -> fx.Node:
    """The tensor that a call casts or counts in."""
    tensor = call.node.args[0]
    assert isinstance(tensor, fx.Node)
    return tensor


def kinds(recording: Recording, graph: StepGraph) -> list[list[int]]:
    """The ops of a step that could be done together, those of one kind in a list each."""
    call_of = {call.node.name: call for call in recording.tape.calls if not call.in_optimizer}
    found: dict[Any, list[int]] = {}
    for op in graph.ops:
        call = call_of.get(op.name)
        if call is None or len(op.outputs) > 1 or len(op.inputs) != 1:
            continue
        result = graph.storage_of((*op.outputs, *op.inputs)[0])
        device = recording.tape.storages[result.index].device
        is_cast = op.phase is Phase.BACKWARD and result.role is Role.GRAD and _is_cast(call, device)
        is_count = op.phase is Phase.FORWARD and not op.outputs and _is_count(call)
        if is_cast or is_count:
            source = graph.values[op.inputs[0]].dtype
            key = (*combined(call), source, result.device, call.grad_enabled)
            found.setdefault(key, []).append(op.index)
    return list(found.values())


def _is_cast(call: Call, device: torch.device) -> bool:
    """Whether a call changes the type of a tensor on a device, and nothing else."""
    usual = {"layout": torch.strided, "device": device, "pin_memory": False, "non_blocking": False}
    how = dict(call.node.kwargs)
    return (
        call.node.target is _CAST
        and how.pop("dtype", None) is not None
        and all(value in (None, usual.get(key)) for key, value in how.items())
    )


def _is_count(call: Call) -> bool:
    """Whether a call adds a number to a counter that was there before the step."""
    if call.node.target is not _COUNT or call.node.kwargs or len(call.node.args) != 2:
        return False
    tensor, number = call.node.args
    return isinstance(number, int) and isinstance(tensor, fx.Node) and tensor.op == "placeholder"
