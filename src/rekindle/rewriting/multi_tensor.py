"""Small calls that a multi-tensor (foreach) kernel can make all at once.

Two kinds are worth it: the casts of weights' gradients from autocast's type to the parameters', and
the step counters of batch norms. On a GPU each such call takes longer to launch than to run.
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

# The names of these two are in graphs and saved plans (`rekindle.cast`).


def cast(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The tensors, cast to another dtype by one kernel."""
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    foreach_copy_(made, tensors)
    return made


def count(tensors: list[torch.Tensor], number: int) -> None:
    """Add a number to each tensor, in place, by one kernel."""
    foreach_add_(tensors, number)


def foreach_form(call: Call) -> tuple[Callable[..., Any], Any]:
    """The function that makes several calls like this one at once, and its second argument."""
    if call.node.target is _CAST:
        return cast, call.node.kwargs["dtype"]
    return count, call.node.args[1]


def batchable_ops(recording: Recording, graph: StepGraph) -> list[list[int]]:
    """Lists of ops that one foreach call could replace."""
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
            key = (*foreach_form(call), source, result.device, call.grad_enabled)
            found.setdefault(key, []).append(op.index)
    return list(found.values())


def _is_cast(call: Call, device: torch.device) -> bool:
    """True if a call changes a tensor's dtype and nothing else."""
    usual = {"layout": torch.strided, "device": device, "pin_memory": False, "non_blocking": False}
    kwargs = dict(call.node.kwargs)
    return (
        call.node.target is _CAST
        and kwargs.pop("dtype", None) is not None
        and all(value in (None, usual.get(key)) for key, value in kwargs.items())
    )


def _is_count(call: Call) -> bool:
    """True if a call adds an integer to a tensor from before the step."""
    if call.node.target is not _COUNT or call.node.kwargs or len(call.node.args) != 2:
        return False
    tensor, number = call.node.args
    return isinstance(number, int) and isinstance(tensor, fx.Node) and tensor.op == "placeholder"
