"""On a GPU: a planned step gives the plain step's bits, and its peak is the forecast one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import rekindle
from rekindle import models


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(False)


# Dropout, attention with dropout, batch norm with statistics and in-place ops are all in these.
CASES = [("resnet18", 64, "70%"), ("bert-base", 8, "80%"), ("vit", 32, "60%"), ("gpt2", 2, "80%")]


def parts(name: str, batch: int, precision: str) -> tuple[Any, ...]:
    gc.collect()  # what earlier tests left behind would count as memory of the step
    work = models.build(name, batch=batch, precision=precision, device="cuda")
    return work.train_step, work.model, work.optimizer, work.batch


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.filterwarnings("ignore:.*deterministic.*")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "batch", "budget"), CASES)
def test_the_same_bits(name: str, batch: int, budget: str, precision: str) -> None:
    given = parts(name, batch, precision)
    found = rekindle.verify(*given, budget=budget, steps=3, engine="python")  # graphs: elsewhere
    assert found.differences == ()


@pytest.mark.parametrize(("name", "batch", "budget"), CASES)
def test_the_peak_is_the_forecast_one(name: str, batch: int, budget: str) -> None:
    given = parts(name, batch, "bf16")
    step = rekindle.optimize(*given, budget=budget)
    assert step.plan is not None
    assert step.plan.recompute_us > 0
    found = step.measure(given[3], steps=2)
    assert step.budget_bytes is not None
    assert found.peak_bytes <= step.budget_bytes
    assert step.plan.peak_bytes == pytest.approx(found.peak_bytes, rel=0.01)
