"""Steps on the CPU are held to their budgets: recurrent modules, and steps above the forecast."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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


def least_bytes(parts: tuple[Any, Any, torch.Tensor], planner: str = PLANNER) -> int:
    with pytest.raises(rekindle.InfeasibleBudget) as caught:
        rekindle.optimize(train_step, *parts, budget=1, planner=planner)
    return caught.value.least_peak_bytes


def assert_least_budget_is_kept(
    make: Callable[[], tuple[Any, Any, torch.Tensor]], planner: str = PLANNER
) -> None:
    """Train with the least budget: no step takes more, and all losses are those of plain steps."""
    model, optimizer, batch = make()
    plain = [train_step(model, optimizer, batch) for _ in range(3)]
    least = least_bytes(make(), planner)
    model, optimizer, batch = make()
    step = rekindle.optimize(train_step, model, optimizer, batch, budget=least, planner=planner)
    losses: list[torch.Tensor] = []
    for expected in plain:
        peak = peak_bytes(
            lambda: losses.append(step(batch)), ON_CPU, lambda: step.captured.around(batch)
        )
        assert peak <= least
        assert torch.equal(losses[-1], expected)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bidirectional": True},
    {"num_layers": 2},
    {"num_layers": 2, "bias": False},
    {"num_layers": 2, "dropout": 0.3},
    {"num_layers": 2, "dropout": 0.5, "bidirectional": True},
]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("options", [*OPTIONS, {"proj_size": 8}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    if "proj_size" in options and kind is not nn.LSTM:
        return
    assert_least_budget_is_kept(lambda: made(kind, options))


class Noisy(nn.Module):
    """Random operators of all kinds: with and without a generator argument, and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(torch.tanh(self.layers[0](x)), 0.5)
        x = x * torch.rand_like(x)
        x, _ = torch.native_dropout(F.gelu(self.layers[1](x)), 0.4, train=True)
        x = torch.tanh(self.layers[2](x) + torch.randn(x.shape))
        x = F.rrelu(x * torch.empty_like(x).bernoulli_(0.5, generator=self.generator))
        x = F.alpha_dropout(torch.sin(self.layers[3](x)), 0.2, training=True)
        return F.feature_alpha_dropout(x, 0.1, training=True).exp()


QUICK, SLOW = ("all", "chen-recursive", "mutwo"), pytest.param("auto", marks=pytest.mark.slow)


@pytest.mark.parametrize("rows", [4, 30])
@pytest.mark.parametrize("planner", [*QUICK, SLOW])
def test_recomputed_random_ops_take_no_more_than_planned(planner: str, rows: int) -> None:
    """A generator's state has 5 KB, more than all activations of 4 rows."""

    def made_noisy() -> tuple[Any, Any, torch.Tensor]:
        torch.manual_seed(0)
        model = Noisy()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(rows, 8)

    assert_least_budget_is_kept(made_noisy, planner)


@pytest.mark.parametrize("width", [5, 16])
@pytest.mark.parametrize("n_groups", [1, 2])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop])
def test_early_updates_take_no_more_than_planned(kind: Any, n_groups: int, width: int) -> None:
    """An optimizer on lists makes small temporaries for each parameter, group by group."""

    def made_deep() -> tuple[Any, Any, torch.Tensor]:
        torch.manual_seed(0)
        sizes = [width, 3 * width, width, 2 * width, width]
        pairs = [nn.Sequential(nn.Linear(a, b), nn.LogSigmoid()) for a, b in pairwise(sizes)]
        model = nn.Sequential(*pairs)
        params = list(model.parameters())
        groups = [{"params": params[i::n_groups]} for i in range(n_groups)]
        return model, kind(groups, lr=0.01, foreach=True), torch.randn(3, width)

    least = least_bytes(made_deep())
    model, optimizer, batch = made_deep()
    step = rekindle.optimize(train_step, model, optimizer, batch, budget=least, planner=PLANNER)
    assert step.captured.first.planned.graph.early_updates
    for _ in range(3):
        assert peak_bytes(lambda: step(batch), ON_CPU, lambda: step.captured.around(batch)) <= least


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


def parts_of_more() -> tuple[nn.Module, torch.Tensor]:
    """A batch and a parameter that are parts of larger tensors."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))
    model[2].weight = nn.Parameter(torch.randn(16, 8)[::2])
    return model, torch.randn(9, 16)[1:, ::2]


def whole() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)), torch.randn(8, 8)


def leaves_gradients(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("step_function", [train_step, leaves_gradients])
@pytest.mark.parametrize("make", [whole, parts_of_more])
def test_every_step_of_every_capture_keeps_the_least_budget(
    make: Any, step_function: Any, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when model and gradients are as earlier steps left them."""
    model, batch = make()
    optimizer = kind(model.parameters(), lr=0.01)
    with pytest.raises(rekindle.InfeasibleBudget) as caught:
        rekindle.optimize(step_function, model, optimizer, batch, budget=1, planner=PLANNER)
    least = caught.value.least_peak_bytes
    step = rekindle.optimize(step_function, model, optimizer, batch, budget=least, planner=PLANNER)
    for i in range(4):  # a step that is captured is measured without the capture, and reported
        step(batch)
        model.train(i % 2 == 1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert step.n_captures == 2
    for i in range(2):
        assert peak_bytes(lambda: step(batch), ON_CPU, lambda: step.captured.around(batch)) <= least
        model.train(i % 2 == 1)


def test_a_given_profile_is_used_when_the_step_is_captured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the workspaces are measured again, and the least peak of before may be out of reach."""

    def remembers(model: Any, optimizer: Any, batch: Any) -> torch.Tensor:
        if model.kind is None:
            model.kind = "regression"
        return train_step(model, optimizer, batch)

    model, batch = whole()
    model.kind = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    profile = rekindle.profile(rekindle.capture(remembers, model, optimizer, batch), cache=False)
    step = rekindle.optimize(remembers, model, optimizer, batch, budget="90%", profile=profile)
    monkeypatch.setattr("rekindle.measuring.measure.measured_profile", None)
    step(batch)
    step(batch)
    assert step.n_captures == 2
