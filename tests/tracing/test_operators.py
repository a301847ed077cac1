"""Facts about operators, each checked on operators that have it and on ones that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from rekindle.tracing import operators

aten = torch.ops.aten
X = torch.ones(2, 3)
RELU_BACKWARD = aten.threshold_backward


def norm_args(training: bool) -> tuple[Any, ...]:
    return X, None, None, torch.zeros(3), torch.ones(3), training, 0.1, 1e-5


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "written"),
    [
        (aten.add.Tensor, (X, X.clone()), {}, []),
        (aten.add_.Tensor, (X, X.clone()), {}, [0]),
        (aten._foreach_add_.Scalar, ([X, X.clone()], 1.0), {}, [0, 1]),
        (aten.add.out, (X, X.clone()), {"out": X.clone()}, [2]),
        (aten.native_batch_norm.default, norm_args(True), {}, [1, 2]),
        (aten.native_batch_norm.default, norm_args(False), {}, []),
    ],
    ids=["none", "in-place", "list", "out", "norm-training", "norm-eval"],
)
def test_written(op: OpOverload, args: Any, kwargs: Any, written: list[int]) -> None:
    found = operators.written(op, args, kwargs)
    tensors = list(operators.tensors((args, kwargs)))
    assert [next(i for i, t in enumerate(tensors) if t is w) for w in found] == written


def test_written_batch_norm_that_declares_its_writes() -> None:
    """The newer operators say so in their schemas; without statistics nothing is written."""
    mean, var = torch.zeros(3), torch.ones(3)
    args = (X, None, None, mean, var, True, 0.1, 1e-5)
    op = aten._native_batch_norm_legit.default
    assert [t is e for t, e in zip(operators.written(op, args, {}), (mean, var), strict=True)] == [
        True
    ] * 2
    args = (X, None, None, None, None, True, 0.1, 1e-5)
    assert operators.written(aten.native_batch_norm.default, args, {}) == []


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "is_random"),
    [
        (aten.bernoulli_.float, (X, 0.5), {}, True),
        (aten.rand.default, ([2],), {}, True),
        (aten.randperm.default, (3,), {}, True),
        (aten.native_dropout.default, (X, 0.5, True), {}, True),
        (aten.native_dropout.default, (X, 0.5, False), {}, False),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (X, X, X, 0.0), {}, False),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X, 0.25), {}, True),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X, 0.0), {}, False),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X), {}, False),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X), {"dropout_p": 0.5}, True),
        (aten.mm.default, (X, X.t()), {}, False),
    ],
)
def test_is_random(op: OpOverload, args: Any, kwargs: Any, is_random: bool) -> None:
    assert operators.is_random(op, args, kwargs) is is_random


@pytest.mark.parametrize(
    ("op", "is_in_place"),
    [
        (aten.relu_.default, True),
        (aten._foreach_mul_.Scalar, True),
        (aten.relu.default, False),
        (aten.view.default, False),
        (aten.native_batch_norm.default, False),
        (aten._fused_adam_.default, True),
    ],
    ids=str,
)
def test_is_in_place(op: OpOverload, is_in_place: bool) -> None:
    assert operators.is_in_place(op) is is_in_place


@pytest.mark.parametrize(
    ("op", "is_same"),
    [(aten.detach.default, True), (aten.alias.default, True), (aten.view.default, False)],
    ids=str,
)
def test_is_same_tensor(op: OpOverload, is_same: bool) -> None:
    assert operators.is_same_tensor(op) is is_same


@pytest.mark.parametrize(
    ("op", "is_composite"),
    [
        (aten.matmul.default, True),
        (aten.reshape.default, True),
        (aten.mm.default, False),
        (aten.silu_backward.default, False),  # composite, but the CPU has a kernel of its own
    ],
    ids=str,
)
def test_is_composite(op: OpOverload, is_composite: bool) -> None:
    assert operators.is_composite(op) is is_composite


@pytest.mark.parametrize(
    ("op", "is_bookkeeping"),
    [
        (torch.ops.profiler._record_function_exit.default, True),
        (torch.ops.prim.device.default, True),
        (aten.sym_size.int, True),
        (aten._assert_async.default, False),  # returns nothing, but may stop the step
        (aten.add_.Tensor, False),
        (aten.mm.default, False),
    ],
    ids=str,
)
def test_is_bookkeeping(op: OpOverload, is_bookkeeping: bool) -> None:
    assert operators.is_bookkeeping(op) is is_bookkeeping


@pytest.mark.parametrize(
    ("variant", "op", "expected"),
    [
        (operators.out_of_place, aten.unsqueeze_.default, aten.unsqueeze.default),
        (operators.in_place, aten.relu.default, aten.relu_.default),
        (
            operators.overwriting,
            aten.threshold_backward.default,
            aten.threshold_backward.grad_input,
        ),
        (operators.overwriting, aten.mm.default, None),
    ],
    ids=["out of place", "in place", "overwriting", "not overwriting"],
)
def test_variants_of_operators(variant: Any, op: OpOverload, expected: OpOverload | None) -> None:
    assert variant(op) is expected


def test_flops() -> None:
    """Two for each multiply-add, and none where no formula is known."""
    a, b = torch.ones(4, 2, 3), torch.ones(4, 3, 5)
    assert operators.flops(aten.bmm.default, (a, b), {}, a @ b) == 2 * 4 * 2 * 3 * 5
    assert operators.flops(aten.relu.default, (X,), {}, X) == 0
    image, weight = torch.ones(2, 3, 8, 8), torch.ones(5, 3, 3, 3)
    args = (image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    out = aten.convolution.default(*args)
    assert operators.flops(aten.convolution.default, args, {}, out) == 2 * 2 * 5 * 6 * 6 * 3 * 3 * 3


def test_tensors_in_order() -> None:
    a, b, c = (torch.ones(1) for _ in range(3))
    found = list(operators.tensors(([a, None], {"x": (b, 3)}, c)))
    assert [t is e for t, e in zip(found, (a, b, c), strict=True)] == [True] * 3


def test_map_tensors_keeps_the_form() -> None:
    tree = ([torch.zeros(2), 1], {"k": (torch.zeros(3), None)}, "text")
    assert operators.map_tensors(tree, lambda t: t.shape) == (
        [torch.Size([2]), 1],
        {"k": (torch.Size([3]), None)},
        "text",
    )
