"""Small models, and one step of training with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Residual(nn.Module):
    """Adds a module's output to its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def perceptron(dropout: float = 0.1) -> nn.Module:
    """Linear layers with GELU, dropout and layer norm."""

    def block() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16)
        )

    return nn.Sequential(*(Residual(block()) for _ in range(4)))


def convolutions() -> nn.Module:
    """Convolutions with batch norm and pooling."""

    def block(size: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(size, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )

    return nn.Sequential(
        *(block(3), Residual(block(8)), nn.MaxPool2d(2), block(8), Residual(block(8))),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )


def attention(dropout: float = 0.1) -> nn.Module:
    """Encoder layers of a transformer."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def batch_for(make: Callable[..., nn.Module], size: int = 32) -> torch.Tensor:
    """A batch for a model of this module."""
    generator = torch.Generator().manual_seed(3)
    shapes = {perceptron: (size * 8, 16), convolutions: (size, 3, 8, 8), attention: (size, 12, 16)}
    return torch.randn(shapes[make], generator=generator)


def step(model: Any, batch: torch.Tensor, loss: Any = None) -> dict[str, torch.Tensor]:
    """One step's loss, gradients, buffers and random state, from the same seed every time."""
    torch.manual_seed(11)
    for parameter in model.parameters():
        parameter.grad = None
    out = model(batch)
    found = (loss or torch.Tensor.square)(out).mean()
    found.backward()
    inner = getattr(model, "_orig_mod", model)
    named = {f"grad {name}": p.grad.clone() for name, p in inner.named_parameters()}
    named |= {f"buffer {name}": b.clone() for name, b in inner.named_buffers()}
    return {"loss": found.detach(), **named, "random": torch.get_rng_state()}


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that differ in any bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]
