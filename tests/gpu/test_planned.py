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


@pytest.fixture
def _uncapped() -> Any:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("_deterministic", "_uncapped")
@pytest.mark.filterwarnings("ignore:.*deterministic.*")
@pytest.mark.parametrize("engine", ["python", "cudagraph"])
def test_the_same_bits_where_memory_is_short(engine: str) -> None:
    """With and without a cap that leaves 6% of a budget for holes, in which segments grow."""
    _, total_bytes = torch.cuda.mem_get_info()
    states, grown, budget = [], [], "60%"
    for _ in range(2):
        torch.manual_seed(0)
        given = parts("resnet18", 512, "bf16")
        torch.cuda.empty_cache()
        step = rekindle.optimize(*given, budget=budget, engine=engine)
        step(given[3])
        segments = torch.cuda.memory_snapshot()
        grown.append(any(segment["is_expandable"] for segment in segments))
        for _ in range(2):
            step(given[3])
        states.append({name: each.cpu() for name, each in given[1].state_dict().items()})
        assert step.budget_bytes is not None
        budget = str(step.budget_bytes)
        torch.cuda.set_per_process_memory_fraction(1.06 * step.budget_bytes / total_bytes)
        del step, given
    assert grown == [False, True]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
