"""Random layers, wired at random, train to the same bits as without Rekindle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.equality import assert_trains_the_same
from support.random_modules import CHANNELS, OPTIMIZERS, SIDE, WIDTH, bodies
from torch import nn


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    body=bodies,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    precision=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_random_modules(
    body: tuple[nn.Module, tuple[int, ...]], optimizer: str, precision: torch.dtype
) -> None:
    module, shape = body
    features = WIDTH if len(shape) == 2 else CHANNELS * SIDE * SIDE
    model = nn.Sequential(module, nn.Linear(features, 3))
    start = {key: value.clone() for key, value in model.state_dict().items()}

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model.zero_grad()
        model.load_state_dict(start)
        return model, OPTIMIZERS[optimizer](model.parameters())

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        is_on = precision is not torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    g = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(shape, generator=g), torch.randint(0, 3, shape[:1], generator=g))
        for _ in range(3)
    ]
    try:
        train_step(*make(), batches[0])
    except RuntimeError:  # an in-place operator has overwritten what a gradient needs
        assume(False)
    step = assert_trains_the_same(train_step, make, batches)
    assert step.n_captures == 1
