"""Convolutions whose windows tile a picture, as matrix products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.uncompiled import Parts, assert_close, grouped_for_gpu, no_compiler, recorded, train
from torch import Tensor, nn

from rekindle.engines.inductor.decompose import decompose
from rekindle.tracing.tape import Tape

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
OPTIONS: dict[str, dict[str, Any]] = {
    "pictures": {"dims": 2, "kernel_size": 4, "stride": 4},
    "oblong": {"dims": 2, "kernel_size": (2, 4), "stride": (2, 4)},
    "no bias": {"dims": 2, "kernel_size": 2, "stride": 2, "bias": False},
    "rows": {"dims": 1, "kernel_size": 4, "stride": 4},
    "videos": {"dims": 3, "kernel_size": 2, "stride": 2},
}


class Convolves(nn.Module):
    """In front of the convolution is something with a weight if its gradient is wanted."""

    def __init__(
        self, dims: int, channels: int = 3, has_gradient: bool = False, **how: Any
    ) -> None:
        super().__init__()
        make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.scale = nn.Parameter(torch.ones(())) if has_gradient else None
        self.convolution = make(channels, 8, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x if self.scale is None else x * self.scale)


def convolves(dims: int, channels: int = 3, layout: Any = None, **how: Any) -> Parts:
    """Small whole numbers: sums are exact in any order."""
    draw = torch.Generator().manual_seed(0)
    model = Convolves(dims, channels, **how).bfloat16()
    for parameter in model.parameters():
        parameter.data = _whole(parameter.shape, draw)
    x = _whole((2, channels, *(8,) * dims), draw)
    weights = _whole(model(x).shape, draw)
    batch = x if layout is None else x.contiguous(memory_format=layout)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, given: list[Tensor]) -> Tensor:
        x, weights = given
        loss = (model(x) * weights).float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model, torch.optim.SGD(model.parameters(), lr=0.25), [[batch, weights]]


def _whole(shape: Any, draw: torch.Generator) -> Tensor:
    return torch.randint(-1, 2, shape, generator=draw).bfloat16()


def normal(parts: Parts) -> Tape:
    with no_compiler():
        return decompose(recorded(parts), for_gpu=True).tape


def n_convolutions(tape: Tape) -> int:
    return sum(call.node.target in CONVOLUTIONS for call in tape.calls)


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("how", OPTIONS)
def test_the_same_numbers(how: str, has_gradient: bool) -> None:
    options = {**OPTIONS[how], "has_gradient": has_gradient}
    tape = normal(convolves(**options))
    assert n_convolutions(tape) == 0
    assert_same(options)


def assert_same(options: dict[str, Any]) -> None:
    rewritten = train(convolves(**options), grouped_for_gpu)
    assert_close(rewritten, train(convolves(**options), None), rtol=0, atol=0)


def test_a_picture_with_channels_last() -> None:
    options = {**OPTIONS["pictures"], "layout": torch.channels_last}
    assert n_convolutions(normal(convolves(**options))) == 0
    assert_same(options)


def test_windows_are_copied_once() -> None:
    tape = normal(convolves(**OPTIONS["pictures"]))
    copies = [c for c in tape.calls if c.node.target is aten.clone.default and not c.in_backward]
    assert len(copies) == 1
    products = [c for c in tape.calls if c.node.target in (aten.mm.default, aten.addmm.default)]
    assert len(products) == 2
    assert all(call.flops == 2 * 8 * 8 * 48 for call in products)


@pytest.mark.parametrize(
    "how",
    [
        {"kernel_size": 3, "stride": 1},  # windows that overlap
        {"kernel_size": 4, "stride": 4, "padding": 2},
        {"kernel_size": 2, "stride": 2, "dilation": 2},
        {"kernel_size": 3, "stride": 3},  # leaves a part of the picture out
        {"kernel_size": 1, "stride": 1},  # a matmul already
        {"kernel_size": 2, "stride": 2, "channels": 8},  # fast already
        {"kernel_size": 2, "stride": 2, "channels": 2, "groups": 2},
    ],
)
def test_other_convolutions_stay(how: dict[str, Any]) -> None:
    assert n_convolutions(normal(convolves(dims=2, **how))) == 2


def test_full_precision_stays() -> None:
    step, model, optimizer, (batch,) = convolves(**OPTIONS["pictures"])
    parts = step, model.float(), optimizer, [[each.float() for each in batch]]
    assert n_convolutions(normal(parts)) == 2
