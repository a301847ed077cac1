"""The engine for CUDA graphs, with graphs that are played on the CPU.

What is left for a GPU is in tests/gpu: that CUDA itself plays along, and where random numbers come
from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.played import Player
from support.square_step import square_step as train_step
from torch import nn
from torch.utils.checkpoint import checkpoint

import rekindle
from rekindle import models
from rekindle.engines import select_engine
from rekindle.engines.cudagraph.graph_engine import CudaGraphEngine
from rekindle.engines.strides import is_dense
from rekindle.measuring.bitwise_compare import compare, differences, state_of

Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Any]


@pytest.fixture
def player(monkeypatch: pytest.MonkeyPatch) -> Player:
    """Every step that is made runs from played graphs."""
    made = Player()

    def make(self: Any, program: Any, *known: Any) -> Any:
        return CudaGraphEngine(program, made, *known)

    monkeypatch.setattr(select_engine.EngineFactory, "build", make)
    return made


class Block(nn.Module):
    """Statistics, a counter, dropout and in-place ops."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.dropout(torch.relu_(self.norm(self.linear(x)))) / self.calls


class Cut(nn.Module):
    """A checkpoint in the middle reads and sets random state on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.second, self.first(x), use_reentrant=False)
        return y * 2


def parts(model: nn.Module, **options: Any) -> Parts:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    return train_step, model, optimizer, torch.randn(16, 8)


def engine_of(step: rekindle.TrainStep) -> CudaGraphEngine:
    found = step.captured.first.engine
    assert isinstance(found, CudaGraphEngine)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "resnet-tiny", "bert-tiny", "gpt2-tiny", "vit-tiny"])
def test_the_zoo_from_graphs(name: str, player: Player) -> None:
    def make() -> Parts:
        work = models.build(name, batch=2)
        return work.train_step, work.model, work.optimizer, work.batch

    assert compare(make, rekindle.optimize, steps=4).differences == ()
    assert len(player.graphs) == 1  # forward and backward; the optimizer is called


def test_a_planned_step_from_graphs(player: Player) -> None:
    def make() -> Parts:
        work = models.build("resnet-tiny", batch=8)
        return work.train_step, work.model, work.optimizer, work.batch

    def optimize(*given: Any) -> rekindle.TrainStep:
        step = rekindle.optimize(*given, budget="75%")
        assert step.plan is not None
        assert step.plan.recompute_us > 0
        return step

    assert compare(make, optimize, steps=4).differences == ()
    assert len(player.graphs) == 1


def test_other_batches_and_learning_rates_every_step(player: Player) -> None:
    """Batches go into the graph's own tensors, and the optimizer is not frozen."""
    ends = []
    for way in ("plain", "captured"):
        torch.manual_seed(0)
        train, model, optimizer, batch = parts(Block())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step = rekindle.optimize(train, model, optimizer, batch) if way == "captured" else None
        losses = []
        for seed in range(6):
            other = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
            losses.append(step(other) if step else train(model, optimizer, other))
            schedule.step()
        ends.append(
            {**state_of(model, optimizer), **{f"loss {i}": x for i, x in enumerate(losses)}}
        )
    assert len(player.graphs) == 1
    for index in range(6):  # they are safe to keep
        ends[0][f"loss {index}"] = ends[0][f"loss {index}"].detach()
    assert differences(*ends) == []
    assert len({float(ends[1][f"loss {i}"]) for i in range(6)}) == 6


class Autocast(nn.Module):
    """Casts its input; a second reader needs the original dtype."""

    def __init__(self, *, reads_twice: bool) -> None:
        super().__init__()
        self.inner = Block()
        self.reads_twice = reads_twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(x).float()
        return y * x.sum() if self.reads_twice else y


@pytest.mark.parametrize("reads_twice", [False, True])
@pytest.mark.parametrize("budget", [None, "99%"])
def test_a_batch_that_is_only_cast_is_held_as_it_is_used(
    player: Player, reads_twice: bool, budget: str | None
) -> None:
    """Batches of other numbers are cast on their way, and the user's are left alone."""
    ends = []
    for way in ("plain", "captured"):
        torch.manual_seed(0)
        train, model, optimizer, batch = parts(Autocast(reads_twice=reads_twice))
        if way == "captured":
            step = rekindle.optimize(train, model, optimizer, batch, budget=budget)
        torch.manual_seed(1)
        losses = {}
        for index in range(4):
            other = torch.randn(16, 8)
            before = other.clone()
            loss = step(other) if way == "captured" else train(model, optimizer, other)
            losses[f"loss {index}"] = loss.detach()
            assert torch.equal(other, before)
        ends.append({**state_of(model, optimizer), **losses})
    assert differences(*ends) == []
    capture = engine_of(step)._capture
    assert capture is not None
    is_cast = not reads_twice and budget is None  # a plan expects a copy in the batch's own dtype
    assert capture.batch[0].dtype == (torch.bfloat16 if is_cast else torch.float32)


def test_work_on_the_host_lies_between_graphs(player: Player) -> None:
    assert compare(lambda: parts(Cut()), rekindle.optimize, steps=5).differences == ()
    assert len(player.graphs) > 1
    torch.manual_seed(0)
    step = rekindle.optimize(*parts(Cut()))
    kinds = [part.is_graph for part in engine_of(step)._parts]
    assert all(a != b for a, b in pairwise(kinds))
    assert kinds.count(False) >= 2


def test_nothing_is_captured_before_the_second_step(player: Player) -> None:
    given = parts(Block())
    step = rekindle.optimize(*given)
    step(given[3])
    assert not player.graphs
    step(given[3])
    step(given[3])
    assert len(player.graphs) == 1


def test_a_parameter_that_moves_is_captured_anew_and_one_that_keeps_moving_is_not(
    player: Player, caplog: pytest.LogCaptureFixture
) -> None:
    def train(step: Any, model: nn.Module, batch: torch.Tensor) -> None:
        for index in range(8):
            step(batch)
            if index > 1:
                weight = model.get_parameter("linear.weight")
                weight.data = weight.data.clone()

    ends = []
    for way in ("plain", "captured"):
        torch.manual_seed(0)
        function, model, optimizer, batch = parts(Block())
        if way == "captured":
            step: Any = rekindle.optimize(function, model, optimizer, batch)
        else:
            step = partial(function, model, optimizer)
        with caplog.at_level(logging.INFO, logger="rekindle"):
            train(step, model, batch)
        ends.append(state_of(model, optimizer))
    assert differences(*ends) == []
    assert 1 < len(player.graphs) <= 3
    assert "keep moving" in caplog.text


def test_a_capture_that_fails_ends_in_generated_code(
    player: Player, caplog: pytest.LogCaptureFixture
) -> None:
    player.fails_at = 0
    assert compare(lambda: parts(Block()), rekindle.optimize, steps=4).differences == ()
    assert not player.graphs
    assert "cannot be captured (operation not permitted when stream is capturing)" in caplog.text


def test_a_later_part_that_cannot_be_captured_does_not_spoil_the_step(player: Player) -> None:
    player.fails_at = 1
    assert compare(lambda: parts(Cut()), rekindle.optimize, steps=4).differences == ()
    assert len(player.graphs) == 1


def test_gradients_that_are_left_can_be_read(player: Player) -> None:
    def zero_first(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def make() -> Parts:
        return zero_first, *parts(Block())[1:]

    found = compare(make, rekindle.optimize, steps=4)
    assert found.differences == ()
    assert found.compared["gradient"] == 4
    assert len(player.graphs) == 1


def test_gradients_that_are_added_up_over_calls(player: Player) -> None:
    def add_up(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def make() -> Parts:
        return add_up, *parts(Block())[1:]

    assert compare(make, rekindle.optimize, steps=6).differences == ()


@pytest.mark.parametrize(
    ("name", "reason"), [("writes", "writes into its batch"), ("returns", "returns its batch")]
)
def test_steps_that_graphs_cannot_run(
    name: str, reason: str, player: Player, caplog: pytest.LogCaptureFixture
) -> None:
    def odd(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        if name == "writes":
            batch.mul_(0.5)
        loss = train_step(model, optimizer, batch)
        return loss if name == "writes" else (loss, batch.view(-1))

    def make() -> Parts:
        return odd, *parts(Block())[1:]

    with caplog.at_level(logging.INFO, logger="rekindle"):
        assert compare(make, rekindle.optimize, steps=4).differences == ()
    assert not player.graphs
    assert reason in caplog.text


def test_results_lie_outside_of_the_graphs(player: Player) -> None:
    """And a parameter that is returned is the parameter."""

    def with_weight(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, model.get_parameter("linear.weight")

    _, model, optimizer, batch = parts(Block())
    step = rekindle.optimize(with_weight, model, optimizer, batch)
    results = [step(batch) for _ in range(4)]
    assert len({loss.data_ptr() for loss, _ in results}) == 4
    weight = model.get_parameter("linear.weight")
    assert all(found.data_ptr() == weight.data_ptr() for _, found in results)


def test_on_the_cpu_the_engine_is_generated_code(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rekindle"):
        found = compare(
            lambda: parts(Block()),
            lambda *given: rekindle.optimize(*given, engine="cudagraph"),
            steps=2,
        )
    assert found.equal
    assert "without CUDA graphs: the model is on the cpu" in caplog.text


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(rekindle.RekindleError, match="the engines are auto, python, cudagraph"):
        rekindle.optimize(*parts(Block()), engine="jet")


@pytest.mark.parametrize(
    ("shape", "stride", "dense"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 1, 3), (3, 99, 1), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((0, 3), (3, 1), True),
        ((), (), True),
    ],
)
def test_dense_tensors(shape: tuple[int, ...], stride: tuple[int, ...], dense: bool) -> None:
    assert is_dense(shape, stride) is dense
