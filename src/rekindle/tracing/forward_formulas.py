"""Finds forward operators that a capture would run in another way than a plain step does.

Some kernels call other operators, which autocast casts in a plain step; a captured step runs with
its casts in the graph, and none inside kernels. And torch asks some kernels for more results than a
plain step needs when it meets a fake tensor: singular vectors for `svdvals`, eigenvectors for
`eigvalsh`, by another algorithm, with other bits.

Both kinds were found by comparing the operators of torch's own samples under autocast, with and
without a dispatch mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from rekindle.torch_internals import OpOverload, restored_tls
from rekindle.tracing.tape import Call

_CAST_INSIDE = frozenset({"aten::_trilinear", "aten::linalg_pinv", "aten::linalg_lstsq"})
# The results that only fake tensors, and tensors with a gradient, need.
_MORE_ON_FAKES = {"aten::_linalg_svd": (0, 2), "aten::_linalg_eigh": (1,)}
_UNLIKE = frozenset({"aten::linalg_lstsq"})  # other bits under any dispatch mode


def problem(func: OpOverload) -> tuple[str, str] | None:
    """Why an operator cannot be captured here, with advice; None if it can."""
    name = func._schema.name
    if name in _UNLIKE:
        return (
            f"uses {name}, which computes other bits in a capture",
            "Solve with torch.linalg.solve or a QR decomposition, or do it outside the step.",
        )
    if name in _CAST_INSIDE and _in_autocast():
        return (
            f"uses {name} within torch.autocast, which casts inside of this operator",
            "Call it within `with torch.autocast(device, enabled=False):`, on float32 tensors.",
        )
    return None


def _in_autocast() -> bool:
    """True if autocast is on where the user calls the operator."""
    with restored_tls():
        return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def may_need_less(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """True if a plain step may ask the kernel for fewer results."""
    if func._schema.name not in _MORE_ON_FAKES:
        return False
    return not (torch.is_grad_enabled() and args[0].requires_grad)


def undecided(calls: Iterable[Call], outputs: Iterable[fx.Node]) -> Iterator[Call]:
    """The calls of which nobody can tell whether a plain step asks for all results."""
    kept = set(outputs)
    for call in calls:
        if call.may_need_less:
            name = call.node.target._schema.name  # type: ignore[union-attr]
            more = [call.results[i] for i in _MORE_ON_FAKES[name] if i < len(call.results)]
            if not any(node.users or node in kept for node in more):
                yield call
