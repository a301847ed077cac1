"""The planner inside `torch.compile` on a GPU: budgets hold, and gradients are what they were."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import rekindle
from rekindle import models

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]
STEPS = 14  # the second is watched; if the model is compiled once more, the second after that


def trained(name: str, batch: int, compiled: Any) -> tuple[Any, list[float], int]:
    """Some steps with a model that was changed so: the model, the losses, and the peak."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    work = models.build(name, batch=batch, precision="bf16", device="cuda")
    model = compiled(work.model, work.optimizer)
    losses = []
    for index in range(STEPS):
        if index == STEPS - 1:
            torch.cuda.reset_peak_memory_stats()
        losses.append(float(work.train_step(model, work.optimizer, work.batch)))
    return model, losses, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize(
    ("name", "batch"), [("bert-tiny", 2048), ("gpt2-tiny", 2048), ("resnet-tiny", 4096)]
)
def test_a_budget_holds(name: str, batch: int) -> None:
    _, losses, most = trained(name, batch, lambda model, _: torch.compile(model))
    budget = int(0.75 * most)

    def planned(model: Any, optimizer: Any) -> Any:
        return rekindle.compile(model, budget=budget, optimizer=optimizer)

    model, found, peak_bytes = trained(name, batch, planned)
    assert model.measured_peak_bytes is not None
    assert model.measured_peak_bytes <= budget
    assert peak_bytes <= budget
    assert peak_bytes >= 0.85 * model.session.forecast_bytes
    assert found == pytest.approx(losses, rel=0.05)
