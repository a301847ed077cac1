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
from rekindle.tracing import same_bits
from rekindle.tracing.same_bits import DTYPES, NAMES, OWN, Form
from rekindle.tracing.tape import Call, Meta, Recording

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
        if (is_cast or is_count) and _is_exact(call, recording, device):
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


def _is_exact(call: Call, recording: Recording, device: torch.device) -> bool:
    """True if the foreach form computes the call's bits, in tensors of the same strides."""
    metas = recording.tape.metas
    (source,) = (metas[node] for node in call.node.all_input_nodes)
    if call.node.target is _COUNT:
        form = _count_form(source.dtype)
        return same_bits.is_same(form, device, counts_exactly)
    made = metas[call.results[0]]
    is_alike = torch.empty_like(_on_meta(source)).stride() == made.stride
    return is_alike and same_bits.is_same(
        _cast_form(source.dtype, made.dtype), device, casts_exactly
    )


def _on_meta(meta: Meta) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _cast_form(source: torch.dtype, result: torch.dtype) -> Form | None:
    if source not in NAMES or result not in NAMES:
        return None
    return Form("rekindle.cast", NAMES[source], NAMES[result])


def _count_form(dtype: torch.dtype) -> Form | None:
    return Form("rekindle.count", f"{OWN} int", NAMES[dtype]) if dtype in NAMES else None


def every_form() -> list[Form]:
    """The forms that `same_bits.json` has of these two functions."""
    casts = [_cast_form(a, b) for a in NAMES for b in NAMES if a is not b]
    return [form for form in (*casts, *map(_count_form, NAMES)) if form is not None]


def casts_exactly(form: Form) -> bool | None:
    """True if `cast` computes the bits of single casts."""
    dtype, tensors = DTYPES[form.dtype], same_bits.tensors_of(DTYPES[form.pattern])
    wanted = [_CAST(tensor, dtype=dtype) for tensor in tensors]
    pairs = list(zip(cast(tensors, dtype), wanted, strict=True))
    has_strides = all(a.stride() == b.stride() for a, b in pairs)
    return has_strides and all(same_bits.equal_bits(*pair) for pair in pairs)


def counts_exactly(form: Form) -> bool | None:
    """True if `count` computes the bits of single additions."""
    for number in (1, 0, -1, 3, 255, 100_000):
        counted, wanted = (same_bits.tensors_of(DTYPES[form.dtype]) for _ in range(2))
        try:
            for tensor in wanted:
                _COUNT(tensor, number)
        except RuntimeError:  # as with booleans
            return None
        count(counted, number)
        if not all(map(same_bits.equal_bits, counted, wanted)):
            return False
    return True


PROOFS: dict[str, same_bits.Prove] = {
    "rekindle.cast": casts_exactly,
    "rekindle.count": counts_exactly,
}
