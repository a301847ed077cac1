"""The public verbs: they compose the stages and hold no logic of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rekindle.fx.step import CapturedStep, TrainStep


def capture(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
) -> CapturedStep:
    """Capture one whole training step as a graph; nothing is run, changed or allocated.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(model, optimizer, batch):
    ...     loss = model(batch).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    >>> step = capture(train_step, model, optimizer, torch.ones(8, 4))
    >>> [op.target for op in step.graph.ops][:2]
    ['aten.t.default', 'aten.addmm.default']
    """
    return CapturedStep(train_step, model, optimizer, batch)


def optimize(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
) -> TrainStep:
    """Capture a training step and return it ready to train with: ``loss = step(batch)``.

    The numbers are bit for bit those of the plain function. `model` and `optimizer` stay the live
    objects: state dicts, schedulers and evaluation between steps work as always.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(model, optimizer, batch):
    ...     loss = model(batch).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    >>> step = optimize(train_step, model, optimizer, torch.ones(8, 4))
    >>> bool(step(torch.ones(8, 4)) > step(torch.ones(8, 4)))
    True
    """
    return TrainStep(CapturedStep(train_step, model, optimizer, batch))
