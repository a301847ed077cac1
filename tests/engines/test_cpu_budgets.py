"""Steps on the CPU are held to their budgets: recurrent modules, and steps above the forecast."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle import pipeline
from rekindle.measuring.meters import peak_bytes

ON_CPU = torch.device("cpu")
PLANNER = "chen-recursive"  # quick


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layers = kind(16, 24, **options)
        width = options.get("proj_size") or 24
        self.last = nn.Linear(width * (2 if options.get("bidirectional") else 1), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.layers(x)[0])
        return out


def train_step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def made(kind: type[nn.RNNBase], options: dict[str, Any]) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = Recurrent(kind, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(6, 3, 16)


def least_bytes(parts: tuple[Any, Any, torch.Tensor]) -> int:
    with pytest.raises(rekindle.InfeasibleBudget) as caught:
        rekindle.optimize(train_step, *parts, budget=1, planner=PLANNER)
    return caught.value.least_peak_bytes


OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bidirectional": True},
    {"num_layers": 2},
    {"num_layers": 2, "bias": False},
]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("options", [*OPTIONS, {"proj_size": 8}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    if "proj_size" in options and kind is not nn.LSTM:
        return
    model, optimizer, batch = made(kind, options)
    plain = [train_step(model, optimizer, batch) for _ in range(3)]
    least = least_bytes(made(kind, options))
    model, optimizer, batch = made(kind, options)
    step = rekindle.optimize(train_step, model, optimizer, batch, budget=least, planner=PLANNER)
    losses: list[torch.Tensor] = []
    for expected in plain:
        peak = peak_bytes(
            lambda: losses.append(step(batch)), ON_CPU, lambda: step.captured.around(batch)
        )
        assert peak <= least
        assert torch.equal(losses[-1], expected)


def test_an_overshoot_is_reported_and_replanned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workspaces of 0 bytes make the forecast too low."""
    parts = made(nn.LSTM, {})
    measured = pipeline.repeatable_profile

    def blind(*args: Any) -> Any:
        profile = measured(*args)
        costs = tuple(replace(cost, workspace_bytes=0) for cost in profile.costs)
        return replace(profile, costs=costs)

    monkeypatch.setattr(pipeline, "repeatable_profile", blind)
    least = least_bytes(parts)
    step = rekindle.optimize(train_step, *parts, budget=least, planner=PLANNER)
    with caplog.at_level(logging.WARNING, logger="rekindle"):
        for _ in range(3):
            step(parts[2])
    assert "and the budget is" in caplog.text


def test_a_step_within_its_budget_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    parts = made(nn.GRU, {})
    step = rekindle.optimize(train_step, *parts, budget="100%")
    with caplog.at_level(logging.WARNING, logger="rekindle"):
        for _ in range(3):
            step(parts[2])
    assert not caplog.records
    assert step.captured.first.is_held


def test_a_profiler_of_the_user_is_left_alone() -> None:
    parts = made(nn.GRU, {})
    step = rekindle.optimize(train_step, *parts, budget="100%")
    with torch.profiler.profile(acc_events=True) as profiler:
        step(parts[2])
    assert profiler.events()
    assert not step.captured.first.is_held
