"""The comparison of two trainings finds what differs, and nothing else."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.square_step import square_step as train_step
from torch import nn

import rekindle
from rekindle.measuring.bitwise_compare import Parts, compare, differences, state_of

BATCH = torch.linspace(0, 1, 12).reshape(3, 4)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def make() -> Parts:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    return train_step, model, torch.optim.Adam(model.parameters()), BATCH


def test_a_training_equals_itself_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    stages: list[str] = []
    found = compare(make, rekindle.optimize, steps=3, on_stage=stages.append)
    assert found.equal
    assert found.compared == {
        "result": 3,
        "parameter": 4,
        "buffer": 3,
        "optimizer": 12,
        "generator": 1,
    }
    assert found.steps == len(found.captured_samples_us) == 3
    assert found.graph.ops
    assert len(stages) == 5
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_budget_there_is_no_plan() -> None:
    found = compare(make, rekindle.optimize, steps=1)
    assert (found.budget_bytes, found.profile, found.plan) == (None, None, None)
    assert found.is_within_budget
    assert min(found.plain_peak_bytes, found.captured_peak_bytes) > 0


def test_with_a_budget_there_are_a_peak_a_profile_and_a_plan() -> None:
    within = partial(rekindle.optimize, budget="100%", planner="none")
    found = compare(make, within, steps=2)
    assert found.equal
    assert found.profile is not None
    assert found.plan is not None
    assert found.plain_trace is not None
    assert found.budget_bytes == found.plain_trace.peak_bytes
    assert found.plan is not None
    assert found.trace is not None
    assert found.trace.peak_bytes == found.plan.peak_bytes
    assert found.captured_peak_bytes <= found.budget_bytes
    assert found.is_within_budget
    over = dataclasses.replace(found, captured_peak_bytes=found.budget_bytes + 1)
    assert not over.is_within_budget


def spoil_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = model.get_parameter("0.weight")
    weight.data[0, 0] = torch.nextafter(weight.data[0, 0], torch.tensor(9.0))


def spoil_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.get_buffer("1.num_batches_tracked").add_(1)


def spoil_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.get_parameter("1.bias")]["exp_avg"].neg_()


def spoil_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 2


def spoil_generator(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.rand(1)


def spoil_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.get_parameter("0.bias").grad = torch.zeros(3)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (spoil_parameter, "parameter 0.weight"),
        (spoil_buffer, "buffer 1.num_batches_tracked"),
        (spoil_optimizer, "optimizer state.3.exp_avg"),
        (spoil_rate, "optimizer param_groups.0.lr"),
        (spoil_generator, "generator cpu"),
        (spoil_gradient, "gradient 0.bias"),
    ],
)
def test_a_difference_of_each_kind_is_named(spoil: Any, expected: str) -> None:
    _, model, optimizer, batch = make()
    train_step(model, optimizer, batch)
    before = state_of(model, optimizer)
    assert differences(before, state_of(model, optimizer)) == []
    spoil(model, optimizer)
    assert differences(before, state_of(model, optimizer)) == [expected]


def test_results_that_differ_are_named_by_step() -> None:
    def optimize(step: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
        captured = rekindle.optimize(step, model, optimizer, batch)

        class Wrong:
            graph = captured.graph
            profile = plan = budget_bytes = trace = plain_trace = plain_profile = None
            graphs_peak_bytes = 0
            is_compiled = False

            def __call__(self, batch: Any) -> Any:
                return captured(batch) + 1

        return Wrong()

    assert compare(make, optimize, steps=2).differences == ("result 1", "result 2")


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        (torch.ones(3, 2).t(), torch.ones(2, 3), True),
        (torch.empty(0), torch.empty(0), True),
        (torch.tensor([True, False]), torch.tensor([True, False]), True),
        (1, 1.0, False),
        (None, torch.zeros(1), False),
        ((1, 2), (1, 2), True),
    ],
)
def test_same_means_every_bit(a: Any, b: Any, same: bool) -> None:
    assert (differences({"x": a}, {"x": b}) == []) is same


def test_a_plain_step_that_does_not_fit_is_a_result() -> None:
    """With a budget; without one it is an error."""
    n_made = 0

    def make_twice() -> Any:
        nonlocal n_made
        n_made += 1
        function, *objects = make()

        def out_of_memory(*_: Any) -> Any:
            raise torch.OutOfMemoryError("no room")

        return (function if n_made == 1 else out_of_memory), *objects

    within = partial(rekindle.optimize, budget="100%", planner="none")
    found = compare(make_twice, within, steps=3)
    assert not found.plain_fits
    assert not found.equal
    assert (found.steps, found.is_within_budget) == (3, True)
    assert found.captured_peak_bytes > 0
    n_made = 0
    with pytest.raises(torch.OutOfMemoryError):
        compare(make_twice, rekindle.optimize, steps=3)
