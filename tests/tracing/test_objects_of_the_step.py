"""Objects that a step shares with its surroundings: results, caches, the optimizer's own state."""

from __future__ import annotations

import functools
import logging
import queue
import random
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.equality import clone_result
from torch import nn

import rekindle
from rekindle.measuring.bitwise_compare import differences, state_of
from rekindle.torch_internals import FakeTensor, pytree

BATCHES = [torch.full((3, 4), 0.5 + i) for i in range(4)]
Parts = tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any]]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def update(loss: torch.Tensor, optimizer: Any) -> torch.Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(parts: Parts, captured: bool, between: Callable[[Any, int], None]) -> dict[str, Any]:
    model, optimizer, train_step = parts
    step: Any = functools.partial(train_step, model, optimizer)
    if captured:
        step = rekindle.optimize(train_step, model, optimizer, BATCHES[0])
    found: dict[str, Any] = {}
    for i, batch in enumerate(BATCHES):
        result = step(batch)
        leaves = pytree.tree_leaves(clone_result(result))
        found |= {f"result {i} {k}": leaf for k, leaf in enumerate(leaves)}
        found |= {f"{i} {name}": value for name, value in state_of(model, optimizer).items()}
        between(model, i)
    return found


def assert_same(make: Callable[[], Parts], between: Any = lambda model, i: None) -> None:
    plain, found = (trained(make(), captured, between) for captured in (False, True))
    assert plain.keys() == found.keys()
    tensors = [{k: v for k, v in f.items() if isinstance(v, torch.Tensor)} for f in (plain, found)]
    assert differences(*tensors) == []
    rest = [{k: v for k, v in f.items() if not isinstance(v, torch.Tensor)} for f in (plain, found)]
    assert rest[0] == rest[1]


def returns_a_dict() -> Parts:
    metrics: dict[str, Any] = {"loss": None}

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        metrics["loss"] = update(model(batch).square().mean(), optimizer)
        return metrics

    return model_with(train_step)


def returns_a_growing_list() -> Parts:
    history: list[Any] = []

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        history.append(update(model(batch).square().mean(), optimizer))
        return history

    return model_with(train_step)


def model_with(train_step: Any, make_optimizer: Any = sgd) -> Parts:
    model = net()
    return model, make_optimizer(model), train_step


class Grows(nn.Module):
    """Builds a table when it is first needed, and again for a longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.longest = net(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.longest:
            self.longest = len(x)
            self.table = torch.arange(self.longest, dtype=torch.float32).unsqueeze(1)
        return self.linear(x) + self.table[: len(x)]


def builds_a_cache() -> Parts:
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        return update(model(batch).square().mean(), optimizer)

    model = Grows()
    return model, sgd(model), train_step


def keeps_a_detached_parameter() -> Parts:
    kept: dict[str, Any] = {}

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        before = kept.get("weight")
        loss = model(batch).square().mean()
        if before is not None:
            loss = loss + (before * model.weight).sum()
        kept["weight"] = model.weight.detach()
        loss = update(loss, optimizer)
        return loss, kept["weight"].requires_grad, model.weight.data

    return model_with(train_step)


class Warm(torch.optim.SGD):
    """Has a schedule of its own, in a dict and in a class attribute."""

    calls: list[int] = []  # noqa: RUF012

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.own = {"n": 0}

    def step(self, closure: Any = None) -> Any:
        self.own["n"] += 1
        self.calls.append(1)
        for group in self.param_groups:
            group["lr"] = 0.1 if self.own["n"] < 3 else 0.01
        return super().step(closure)


def has_an_optimizer_with_state() -> Parts:
    Warm.calls.clear()

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        return update(model(batch).square().mean(), optimizer)

    return model_with(train_step, lambda model: Warm(model.parameters()))


def scales_by_a_setting() -> Parts:
    key = "lr"

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        return update(model(batch).square().mean() * optimizer.param_groups[0][key], optimizer)

    return model_with(train_step)


SAME = [
    returns_a_dict,
    returns_a_growing_list,
    builds_a_cache,
    keeps_a_detached_parameter,
    has_an_optimizer_with_state,
    scales_by_a_setting,
]


@pytest.mark.parametrize("make", SAME, ids=lambda make: make.__name__)
def test_trains_the_same(make: Callable[[], Parts]) -> None:
    assert_same(make)


def test_a_gradient_that_appears_on_a_frozen_parameter() -> None:
    def make() -> Parts:
        def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        model = nn.Sequential(net(), nn.Linear(2, 2).requires_grad_(False))
        return model, torch.optim.AdamW(model.parameters()), train_step

    def give_gradients(model: nn.Module, i: int) -> None:
        if i == 1:
            for param in model.parameters():
                param.grad = torch.ones_like(param)

    assert_same(make, give_gradients)


def test_an_attribute_of_a_parameter() -> None:
    def make() -> Parts:
        def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
            return update(model(batch).square().mean() * model.weight.scale, optimizer)

        parts = model_with(train_step)
        parts[0].weight.scale = 1.0  # type: ignore[union-attr, assignment]
        return parts

    def change(model: Any, i: int) -> None:
        model.weight.scale = 1.0 + i

    assert_same(make, change)


# What is refused leaves everything as it was.


def refusal(train_step: Any, model: Any = None, optimizer: Any = None) -> str:
    model = model or net()
    with pytest.raises(rekindle.CaptureError) as caught:
        rekindle.optimize(train_step, model, optimizer or sgd(model), BATCHES[0])
    return str(caught.value)


def test_what_is_kept_in_two_places() -> None:
    log: list[Any] = []
    trainer = types.SimpleNamespace(last=None)

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        record = {"loss": update(model(batch).square().mean(), optimizer)}
        log.append(record)
        trainer.last = record

    assert "one new dict in two places" in refusal(train_step)
    assert log == []
    assert trainer.last is None


def test_a_container_that_is_moved() -> None:
    state = types.SimpleNamespace(now=[torch.zeros(())], before=[torch.zeros(())])

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        state.now, state.before = state.before, state.now
        return update(model(batch).square().mean() + state.now[0], optimizer)

    assert "a list from before the step" in refusal(train_step)


class Reads(torch.optim.SGD):
    """Reads what the step writes."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 0.1 / (1 + self.trainer.n)
        return super().step(closure)


def test_an_optimizer_that_reads_what_the_step_writes() -> None:
    trainer = types.SimpleNamespace(n=0)

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        trainer.n += 1
        return update(model(batch).square().mean(), optimizer)

    model = net()
    optimizer = Reads(model.parameters(), lr=0.1)
    optimizer.trainer = trainer
    assert "trainer.n" in refusal(train_step, model, optimizer)
    assert trainer.n == 0


def test_a_hook_of_the_optimizer_that_counts_for_the_step() -> None:
    n = [0]

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        return update(model(batch).square().mean(), optimizer), n[0]

    model = net()
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: n.__setitem__(0, n[0] + 1))
    assert "use the same Python value, n" in refusal(train_step, model, optimizer)


def test_a_generator_that_the_step_seeds() -> None:
    generator = torch.Generator().manual_seed(1)

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        generator.manual_seed(5)
        noise = torch.rand(3, 4, generator=generator)
        return update(model(batch + noise).square().mean(), optimizer)

    assert "seeds a random generator" in refusal(train_step)


def test_an_array_on_the_memory_of_a_buffer() -> None:
    model: Any = net()
    model.register_buffer("n", torch.zeros(1))
    array = model.n.numpy()

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        model.n += 1
        return update(model(batch).square().mean() * float(array[0]), optimizer)

    assert "array shares memory" in refusal(train_step, model)


def test_a_refused_step_leaves_nothing_behind() -> None:
    kept: list[Any] = []
    keep, draws, numbers = kept.append, random.Random(0), np.zeros(2)
    waiting: queue.Queue[Any] = queue.Queue()
    state = draws.getstate()

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        out = model(batch)
        keep(out)
        numbers[0] = draws.random()
        model.weight.previous = out
        waiting.put(1)
        out.sum().item()

    model: Any = net()
    refusal(train_step, model)
    assert not hasattr(model.weight, "previous")
    assert draws.getstate() == state
    assert not numbers.any()
    assert not any(isinstance(each, FakeTensor) for each in kept)


def test_a_cache_of_a_refused_step_is_empty() -> None:
    @functools.lru_cache
    def table(n: int) -> torch.Tensor:
        return torch.ones(n)

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        return update(model(batch).square().mean() * table(2).sum(), optimizer)

    refusal(train_step)
    assert not isinstance(table(2), FakeTensor)


def test_reading_the_clock_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        scale = 1.0 if time.monotonic() > 0 else 2.0
        return update(model(batch).square().mean() * scale, optimizer)

    with caplog.at_level(logging.WARNING):
        rekindle.optimize(train_step, *model_with(train_step)[:2], BATCHES[0])
    assert "calls monotonic" in caplog.text
    assert __file__ in caplog.text
