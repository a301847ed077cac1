"""The simplest training step: the loss is the mean square of the model's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def square_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    """Forward, loss, backward, update; gradients are cleared."""
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
