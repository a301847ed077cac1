"""Modules outside the model, states in containers, and settings that change between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.equality import assert_trains_the_same, differences, snapshot
from torch import nn

import rekindle

Made = tuple[nn.Module, torch.optim.Optimizer]


def made(model: nn.Module | None = None) -> Made:
    model = model or nn.Linear(8, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def finish(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batches(n: int = 4) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    return [torch.randn(6, 8, generator=g) for _ in range(n)]


class Memory(nn.Module):
    """Replaces its buffer at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return out


class Step:
    """A callable object that holds a module."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __call__(self, model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
        return finish(model(self.memory(batch)).square().mean(), optimizer)


def with_first(memory: Any, model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    return finish(model(memory(batch)).square().mean(), optimizer)


def in_a_list(memory: Any) -> Callable[..., Any]:
    held = [memory]
    return lambda model, optimizer, batch: with_first(held[0], model, optimizer, batch)


@pytest.mark.parametrize(
    "reach",
    [Step, lambda memory: functools.partial(with_first, memory), in_a_list],
    ids=["callable object", "partial", "list in a closure"],
)
def test_a_module_with_state_outside_the_model(reach: Callable[[Any], Any]) -> None:
    memories: dict[int, Memory] = {}

    def make() -> Made:
        model, optimizer = made()
        memories[id(model)] = Memory()
        return model, optimizer

    def train_step(model: nn.Module, optimizer: Any, batch: Any) -> Any:
        return reach(memories[id(model)])(model, optimizer, batch), memories[id(model)].mean

    assert_trains_the_same(train_step, make, batches())


class Stateful(nn.Module):
    """Carries its hidden state over in a tuple, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 4)
        self.state: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, state = self.rnn(x.unsqueeze(0), self.state)
        self.state = tuple(part.detach() for part in state)
        return out


def plain_step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    return finish(model(batch).square().mean(), optimizer)


def test_a_hidden_state_in_a_tuple() -> None:
    step = assert_trains_the_same(plain_step, lambda: made(Stateful()), batches())
    assert step.n_captures == 2  # without a state, and with one


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.scales = [1.0]
        self.settings = {"shift": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scales[0] + self.settings["shift"]


def test_settings_changed_inside_a_list_or_dict() -> None:
    def after(model: Any, optimizer: Any, index: int) -> None:
        if index == 1:
            model.scales[0] = 3.0
        if index == 2:
            model.settings["shift"] = 0.5

    step = assert_trains_the_same(plain_step, lambda: made(Scaled()), batches(), after=after)
    assert step.n_captures == 3


def test_a_module_made_in_the_step() -> None:
    def train_step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
        loss = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Flatten())(model(batch))
        return finish(nn.MSELoss()(loss, torch.zeros_like(loss) + batch[:, :4]), optimizer)

    step = assert_trains_the_same(train_step, made, batches())
    assert step.n_captures == 1


def test_complex_constants() -> None:
    def train_step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
        return finish(((model(batch) + 0j).conj() * 1j).abs().mean(), optimizer)

    assert_trains_the_same(train_step, made, batches())


def sets_data(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    loss = finish(model(batch).square().mean(), optimizer)
    for param in model.parameters():
        param.data = param.data.clamp(-0.1, 0.1)
    return loss


def sets_grad_data(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad.data = param.grad.data.sign()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def steps_another(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    torch.optim.Adam(model.parameters()).step()
    return finish(model(batch).square().mean(), optimizer)


@pytest.mark.parametrize(
    ("train_step", "problem", "advice"),
    [
        (sets_data, "assigns to .data", "p.copy_(new)"),
        (sets_grad_data, "assigns to .data", "p.copy_(new)"),
        (steps_another, "steps a second optimizer", "in several groups"),
    ],
)
def test_unsupported_changes_are_refused(
    train_step: Callable[..., Any], problem: str, advice: str
) -> None:
    model, optimizer = made()
    before = snapshot(model, optimizer)
    with pytest.raises(rekindle.CaptureError) as info:
        rekindle.optimize(train_step, model, optimizer, batches()[0])
    assert problem in info.value.problem
    assert advice in info.value.advice
    assert info.value.filename == __file__
    assert not differences(before, snapshot(model, optimizer))


def test_lazy_modules_are_refused_until_they_are_initialised() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(rekindle.CaptureError, match="not initialised yet"):
        rekindle.optimize(plain_step, model, optimizer, batches()[0])


def test_a_running_total_of_the_step_itself() -> None:
    class Keeps:
        total: Any = torch.zeros(())

        def __call__(self, model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
            loss = plain_step(model, optimizer, batch)
            self.total = self.total + loss.detach()
            return loss

    keeps, losses = Keeps(), []
    step = rekindle.optimize(keeps, *made(), batches()[0])
    for rows in (5, 5, 3, 5):
        losses.append(step(batches()[0][:rows]).detach())
        assert torch.equal(keeps.total, torch.stack(losses).cumsum(0)[-1])
    assert Keeps.total == 0


@pytest.mark.parametrize("wrong", ["model", "optimizer"])
def test_arguments_in_the_wrong_order(wrong: str) -> None:
    model, optimizer = made()
    arguments = (optimizer, model) if wrong == "model" else (model, list(model.parameters()))
    with pytest.raises(TypeError, match=f"{wrong} must be a torch"):
        rekindle.optimize(plain_step, *arguments, batches()[0])  # type: ignore[arg-type]


def test_a_new_batch_shape_every_time_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rekindle.CapturedStep, "max_captures", 3)

    def train_step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
        return plain_step(model, optimizer, batch["x"])

    model, optimizer = made()
    named = [{"x": x, "name": f"image {i}"} for i, x in enumerate(batches(6))]
    step = rekindle.optimize(train_step, model, optimizer, named[0])
    for batch in named:
        step(batch)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "more than 3 captures" in warnings[0].getMessage()
    assert step.n_captures == 3


def test_the_shape_in_use_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rekindle.CapturedStep, "max_captures", 3)
    model, optimizer = made()
    first = batches()[0]
    step = rekindle.optimize(plain_step, model, optimizer, first)
    kept = step.captured.first
    for rows in (1, 2, 3, 4, 5):
        step(first[:rows])
        step(first)
    assert kept in step.captured.variants


class DistributedDataParallel(nn.Module):
    """Named like torch's, which needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_distributed_models_are_refused_at_the_door() -> None:
    model, optimizer = made()
    with pytest.raises(rekindle.CaptureError, match=r"(?s)DistributedData.*rekindle\.compile"):
        rekindle.optimize(plain_step, DistributedDataParallel(model), optimizer, batches()[0])
