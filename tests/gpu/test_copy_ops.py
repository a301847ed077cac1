"""Operators that compute a result again from other results: the bits must be the same."""

from __future__ import annotations

import pytest
import torch

from rekindle.tracing import operators

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = [(128, 256, 28, 28), (64, 64, 112, 112), (32, 2048, 7, 7), (16, 30), (8, 3, 17, 5)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_affine", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_from_its_own_statistics(
    dtype: torch.dtype, shape: tuple[int, ...], is_affine: bool, layout: torch.memory_format
) -> None:
    if layout is torch.channels_last and len(shape) != 4:
        pytest.skip("channels_last is for images")
    channels = shape[1]
    tensor = (torch.randn(shape, device="cuda") * 3 + 1).to(dtype).to(memory_format=layout)
    weight, bias = (torch.randn(channels, device="cuda") if is_affine else None for _ in "wb")
    mean, var = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
    op = torch.ops.aten.native_batch_norm.default
    args = (tensor, weight, bias, mean, var, True, 0.1, 1e-5)
    results = op(*args)
    other = operators.copy_op(op, tensor.device, writes=True)
    assert other is not None
    again = other(*operators.copy_arguments(args, results))
    assert torch.equal(again, results[0])
    assert again.stride() == results[0].stride()
