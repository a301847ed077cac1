"""Fake results of operators have the dtypes, strides and bytes of real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from rekindle.tracing import kernel_check

aten = torch.ops.aten
SHORT, LONG = torch.bfloat16, torch.float32
TYPES = [(LONG, LONG), (SHORT, LONG), (SHORT, SHORT), (torch.half, LONG), (SHORT, None)]


def weights(dtype: torch.dtype | None, count: int = 8) -> Any:
    return None if dtype is None else torch.ones(count, dtype=dtype)


def norms(x_type: torch.dtype, weight_type: torch.dtype | None) -> dict[str, tuple[Any, list[Any]]]:
    rows, picture = torch.zeros(4, 8, dtype=x_type), torch.zeros(4, 8, 3, dtype=x_type)
    pair = [weights(weight_type), weights(weight_type)]
    running = [torch.zeros(8), torch.ones(8)] if weight_type is LONG else [None, None]
    return {
        "layer": (aten.native_layer_norm.default, [rows, [8], *pair, 1e-5]),
        "group": (aten.native_group_norm.default, [picture, *pair, 4, 8, 3, 2, 1e-5]),
        "batch": (aten.native_batch_norm.default, [rows, *pair, *running, True, 0.1, 1e-5]),
    }


def forms(results: Any) -> list[Any]:
    tensors = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
    return [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in tensors]


def check(op: Any, args: list[Any]) -> None:
    real = forms(op(*args))
    with FakeTensorMode() as mode:
        given = pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        assert forms(kernel_check.call(op, tuple(given), {})[0]) == real


@pytest.mark.parametrize("kind", ["layer", "group", "batch"])
@pytest.mark.parametrize(("x_type", "weight_type"), TYPES)
def test_norms(kind: str, x_type: torch.dtype, weight_type: torch.dtype | None) -> None:
    check(*norms(x_type, weight_type)[kind])


@pytest.mark.parametrize("dtype", [SHORT, LONG])
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss"])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses(name: str, reduction: int, dtype: torch.dtype) -> None:
    a, b = torch.zeros(4, 8, dtype=dtype), torch.ones(4, 8, dtype=dtype)
    check(getattr(aten, name).default, [a, b, reduction])
