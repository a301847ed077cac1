"""Hypothesis strategies for random modules: random layers in random order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

WIDTH, CHANNELS, SIDE = 8, 4, 4


ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.SiLU,
    lambda: nn.SiLU(inplace=True),
    nn.Mish,
    nn.GELU,
    lambda: nn.GELU(approximate="tanh"),
    nn.Hardswish,
    lambda: nn.Hardswish(inplace=True),
    lambda: nn.LeakyReLU(0.2),
    lambda: nn.LeakyReLU(0.2, inplace=True),
    nn.ELU,
    lambda: nn.ELU(inplace=True),
    nn.Softplus,
    nn.Sigmoid,
    nn.Tanh,
    nn.PReLU,
    nn.Hardtanh,
    nn.CELU,
    nn.LogSigmoid,
    nn.Softsign,
]


class Frozen(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.inner = inner
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        if not self.in_place:
            return out + x
        out = out * 1.5  # a tensor of this module's own, which nothing saved
        out += x
        return out


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x).tanh())


class TiedPair(nn.Module):
    """Two layers with one weight, the second transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.second(x), self.first.weight.t())


class Reordered(nn.Module):
    """Takes a tensor apart and puts it together again, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=1)
        if self.way == "cat":
            return torch.cat([second, first * 2], dim=1)
        if self.way == "transpose":
            return x.reshape(len(x), 2, -1).transpose(1, 2).reshape(x.shape)
        if self.way == "stack":
            return torch.stack([first, second.flip(0)], dim=1).reshape(x.shape)
        if self.way == "gate":
            return torch.cat([first * second.sigmoid(), second], dim=1)
        out = x.clone()
        out[:, ::2] = out[:, ::2].tanh()
        return out


WAYS = st.sampled_from(["cat", "transpose", "stack", "gate", "assign"])


activations = st.sampled_from(ACTIVATIONS).map(lambda build: build())


linears = st.booleans().map(lambda bias: nn.Linear(WIDTH, WIDTH, bias=bias))


vector_norms = st.sampled_from(
    [
        lambda: nn.BatchNorm1d(WIDTH),
        lambda: nn.BatchNorm1d(WIDTH, affine=False),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.GroupNorm(2, WIDTH),
        lambda: nn.RMSNorm(WIDTH),
    ]
).map(lambda build: build())


convolutions = st.sampled_from(
    [
        lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        lambda: nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False),
        lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=2),
        lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=2, dilation=2),
    ]
).map(lambda build: build())


image_norms = st.sampled_from(
    [
        lambda: nn.BatchNorm2d(CHANNELS),
        lambda: nn.GroupNorm(2, CHANNELS),
        lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
        lambda: nn.MaxPool2d(3, stride=1, padding=1),
        lambda: nn.AvgPool2d(3, stride=1, padding=1),
    ]
).map(lambda build: build())


dropouts = st.booleans().map(lambda in_place: nn.Dropout(0.3, inplace=in_place))


def blocks(layers: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    """Layers, and layers of layers."""

    def extend(inner: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
        sequences = st.lists(inner, min_size=1, max_size=3).map(lambda made: nn.Sequential(*made))
        # an in-place operator must not reach the block's input, which others still need
        safe = sequences.map(lambda inner: nn.Sequential(Reordered("cat"), inner))
        return st.one_of(
            sequences,
            st.builds(Residual, safe, st.booleans()),
            safe.map(Twice),
            safe.map(Frozen),
        )

    return st.recursive(layers, extend, max_leaves=6)


def leading(layer: st.SearchStrategy[nn.Module], rest: Any) -> st.SearchStrategy[nn.Module]:
    """A layer with parameters in front, so that in-place operators never write to the batch."""
    body = st.lists(rest, min_size=1, max_size=4)
    return st.builds(lambda first, layers: nn.Sequential(first, *layers), layer, body)


vector_layers = st.one_of(
    linears, vector_norms, dropouts, activations, WAYS.map(Reordered), st.builds(TiedPair)
)


image_layers = st.one_of(convolutions, image_norms, dropouts, activations, WAYS.map(Reordered))


bodies = st.one_of(
    leading(linears, blocks(vector_layers)).map(lambda body: (body, (5, WIDTH))),
    leading(convolutions, blocks(image_layers)).map(
        lambda body: (nn.Sequential(body, nn.Flatten()), (3, CHANNELS, SIDE, SIDE))
    ),
)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adam-fused": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
}
