"""Captures in several threads, and other people's code that runs meanwhile."""

from __future__ import annotations

import importlib
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.equality import differences, same, snapshot
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import rekindle
from rekindle import torch_internals
from rekindle.tracing import capture_thread, intercept

Made = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    """Threads take turns every few bytecodes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def made(seed: int, width: int = 8) -> Made:
    generator = torch.Generator().manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(3)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model, torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)


def batch(seed: int, rows: int = 64, width: int = 8) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def world() -> dict[str, Any]:
    """Every attribute of torch and others that a capture replaces, as it is now."""
    owners: list[Any] = [torch, torch.random, torch.cuda, torch.cuda.random, torch.autograd, F]
    owners += [random, np.random, nn.Module, *_schedulers()]
    owners += [module for name, module in sys.modules.items() if name.startswith("torch.optim.")]
    found = {
        f"{getattr(owner, '__name__', owner)}.{name}": value
        for owner in owners
        for name, value in list(vars(owner).items())
        if callable(value)
    }
    found["stance"] = importlib.import_module("torch._dynamo.eval_frame")._stance
    found["module hooks"] = dict(module_hooks._global_forward_pre_hooks)
    found["optimizer hooks"] = dict(torch_internals.global_optimizer_pre_hooks)
    found["warnings"] = list(warnings.filters)
    found["logger"] = list(intercept.logging.getLogger(torch_internals.FAKE_TENSOR_LOGGER).filters)
    found["installed"] = list(capture_thread._installed)
    found["lock"] = repr(torch_internals.compile_lock).split(" object")[0]
    return found


def _schedulers() -> list[type]:
    return [LRScheduler, *intercept._subclasses(LRScheduler)]


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """The results of functions that run at the same time; errors are raised."""
    results: list[Any] = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def run(index: int, function: Callable[[], Any]) -> None:
        start.wait()
        try:
            results[index] = function()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def captured_training(seed: int, **asked: Any) -> dict[str, Any]:
    model, optimizer = made(seed)
    step = rekindle.optimize(train_step, model, optimizer, batch(seed), **asked)
    for number in range(3):
        step(batch(seed + number))
    return snapshot(model, optimizer)


def plain_training(seed: int, steps: int = 3) -> dict[str, Any]:
    model, optimizer = made(seed)
    for number in range(steps):
        train_step(model, optimizer, batch(seed + number))
    return snapshot(model, optimizer)


def same_training(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """True if two trainings agree in all but the generators, which threads share."""
    return not [key for key in differences(a, b) if "generator" not in key and "rng" not in key]


# What innocent threads do


def trains(seed: int) -> bool:
    return same_training(plain_training(seed, 5), PLAIN[seed])


def evaluates(seed: int) -> bool:
    model, _ = made(seed)
    model.eval()
    with torch.no_grad():
        return same(model(batch(seed)), OUTPUTS[seed])


def makes_modules(seed: int) -> bool:
    made_here = nn.Sequential(nn.LSTM(3, 4), nn.Dropout(0.5), nn.MultiheadAttention(8, 2))
    return len(list(made_here.modules())) == 5 and type(made_here[0]) is nn.LSTM


def reads_random_state(seed: int) -> bool:
    state = torch.get_rng_state()
    torch.random.get_rng_state()
    generator = torch.Generator().manual_seed(seed)
    return type(state) is torch.Tensor and same(
        torch.rand(3, generator=generator),
        torch.rand(3, generator=torch.Generator().manual_seed(seed)),
    )


def draws(seed: int) -> bool:
    random.random()
    np.random.rand()
    return type(torch.rand(3)) is torch.Tensor


def steps_schedulers(seed: int) -> bool:
    model, optimizer = made(seed)
    scheduler = CosineAnnealingLR(optimizer, 10)
    rates = []
    for _ in range(4):
        train_step(model, optimizer, batch(seed))
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates == RATES


def checkpoints(seed: int) -> bool:
    model, _ = made(seed)
    model.eval()
    x = batch(seed).requires_grad_()
    loss = checkpoint(model, x, use_reentrant=False).sum()
    loss.backward()
    return type(x.grad) is torch.Tensor


def hooked(seed: int) -> bool:
    seen: list[Any] = []
    model, optimizer = made(seed)
    handle = optimizer.register_step_pre_hook(lambda *args: seen.append(args))
    train_step(model, optimizer, batch(seed))
    handle.remove()
    return len(seen) == 1


INNOCENT = [
    trains,
    evaluates,
    makes_modules,
    reads_random_state,
    draws,
    steps_schedulers,
    checkpoints,
    hooked,
]
PLAIN: dict[int, Any] = {}
OUTPUTS: dict[int, Any] = {}
RATES: list[float] = []


def prepare_expectations(seeds: range) -> None:
    for seed in seeds:
        PLAIN[seed] = plain_training(seed, 5)
        model, _ = made(seed)
        model.eval()
        with torch.no_grad():
            OUTPUTS[seed] = model(batch(seed))
    _, optimizer = made(0)
    scheduler = CosineAnnealingLR(optimizer, 10)
    RATES.clear()
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        RATES.append(optimizer.param_groups[0]["lr"])


def test_four_captures_among_innocent_threads() -> None:
    """All train and evaluate bit for bit as alone, and torch is as it was afterwards."""
    prepare_expectations(range(4))
    expected = [plain_training(seed) for seed in range(4)]
    rekindle.capture(train_step, *made(0), batch(0))  # imports what a first capture imports
    before = world()
    is_over = threading.Event()
    n_left = [4]

    def capture(seed: int) -> Any:
        try:
            asked = {"budget": "90%", "planner": "chen-recursive"} if seed % 2 else {}
            return captured_training(seed, **asked)
        finally:
            n_left[0] -= 1
            if not n_left[0]:
                is_over.set()

    def innocent(function: Callable[[int], bool]) -> list[bool]:
        found = []
        for number in range(10_000):
            found.append(function(number % 4))
            if is_over.is_set():
                break
        return found

    captures = [lambda seed=seed: capture(seed) for seed in range(4)]
    others = [lambda function=function: innocent(function) for function in INNOCENT]
    results = in_threads(*captures, *others)
    assert all(same_training(a, b) for a, b in zip(results[:4], expected, strict=True))
    for function, found in zip(INNOCENT, results[4:], strict=True):
        assert len(found) > 1, function.__name__
        assert all(found), function.__name__
    after = world()
    assert [
        key for key in before if before[key] is not after[key] and before[key] != after[key]
    ] == []
    assert before.keys() == after.keys()


def during_a_capture(innocent: Callable[[], Any]) -> Any:
    """What a function returns in another thread, in the middle of a capture's step."""
    has_begun, is_done = threading.Event(), threading.Event()

    def step(model: nn.Module, optimizer: Any, given: Any) -> torch.Tensor:
        loss = model(given).square().mean()
        has_begun.set()
        assert is_done.wait(60)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def wait_and_call() -> Any:
        assert has_begun.wait(60)
        try:
            return innocent()
        finally:
            is_done.set()

    return in_threads(wait_and_call, lambda: rekindle.capture(step, *made(1), batch(1)))[0]


@pytest.mark.parametrize("innocent", INNOCENT, ids=lambda each: each.__name__)
def test_other_threads_do_not_notice_a_capture(innocent: Callable[[int], bool]) -> None:
    prepare_expectations(range(2))
    before = world()
    assert during_a_capture(lambda: innocent(0)) is True
    assert world() == before


def test_numbers_that_others_draw_meanwhile_are_not_drawn_again() -> None:
    drawn = during_a_capture(lambda: (torch.rand(4), random.random(), np.random.rand()))
    again = torch.rand(4), random.random(), np.random.rand()
    assert not torch.equal(drawn[0], again[0])
    assert drawn[1:] != again[1:]


def test_a_draw_of_the_step_is_noticed_among_those_of_others() -> None:
    is_over = threading.Event()

    def step(model: nn.Module, optimizer: Any, given: Any) -> torch.Tensor:
        return train_step(model, optimizer, given * random.random())

    def capture() -> None:
        try:
            with pytest.raises(rekindle.CaptureError, match="draws from Python's or numpy's"):
                rekindle.capture(step, *made(1), batch(1))
        finally:
            is_over.set()

    def draw() -> None:
        while not is_over.is_set():
            draws(0)

    in_threads(draw, capture)


def test_compiled_code_of_other_threads_stays_compiled() -> None:
    seen: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append(1)
            return module(*args)

        return run

    torch.compiler.reset()
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend=backend)
    expected = model(torch.ones(2, 4))
    n_before = len(seen)
    assert same(during_a_capture(lambda: model(torch.ones(2, 4))), expected)
    assert len(seen) == n_before + 1
    torch.compiler.reset()


def test_an_early_update_in_another_thread_is_not_captured_again() -> None:
    """A capture's hook on optimizers is no reason: it does not see other threads."""
    model, optimizer = made(2)
    step = rekindle.optimize(train_step, model, optimizer, batch(2), budget="75%")
    step(batch(2))
    during_a_capture(lambda: step(batch(2)))
    assert step.n_captures == 1
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    step(batch(2))
    handle.remove()
    if step.graph.early_updates:
        assert step.n_captures == 2


class Hidden(list):  # type: ignore[type-arg]
    """A list that no capture looks into, as if it were another library's."""

    __module__ = "torch._test"


class Nested(torch.autograd.Function):
    """Runs a backward pass inside of one: deep ones run in threads of autograd's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inner: nn.Module, depth: int) -> torch.Tensor:
        ctx.inner, ctx.depth = inner, depth
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = ctx.inner(x.detach().requires_grad_())
            if ctx.depth:
                again = Nested.apply(again, ctx.inner, ctx.depth - 1)
            (extra,) = torch.autograd.grad(again.sum(), [ctx.inner.weight])
        return grad * 2 + extra.sum() * 1e-3, None, None


def test_threads_of_autograd_that_work_for_a_capture() -> None:
    idents = Hidden()

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            idents.append(threading.get_ident())
            return super().forward(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(4, 4, bias=False)
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(Nested.apply(self.inner(x), self.inner, 80))

    torch.manual_seed(0)
    plain = Outer()
    model = Outer()
    model.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    step = rekindle.optimize(train_step, model, optimizers[1], torch.ones(2, 4))
    assert len(set(idents)) > 1
    paths = {op.source.module for op in step.graph.ops if op.source is not None}
    assert "inner" in paths
    for _ in range(2):
        expected = train_step(plain, optimizers[0], torch.ones(2, 4))
        assert same(step(torch.ones(2, 4)), expected)
    assert not differences(plain.state_dict(), model.state_dict())


def test_an_attribute_that_others_replace_during_a_capture() -> None:
    """Theirs stays; when they put back what they found, it calls the original, and then goes."""
    original = torch.autograd.backward
    found = Hidden()

    def step(model: nn.Module, optimizer: Any, given: Any) -> torch.Tensor:
        if torch.autograd.backward is not theirs:
            found.append(torch.autograd.backward)
        torch.autograd.backward = theirs
        return train_step(model, optimizer, given)

    def theirs(*args: Any, **kwargs: Any) -> None:
        found[0](*args, **kwargs)

    try:
        rekindle.capture(step, *made(1), batch(1))
        assert torch.autograd.backward is theirs
        torch.autograd.backward = found[0]
        assert same_training(plain_training(0), plain_training(0))
        rekindle.capture(train_step, *made(1), batch(1))
        assert torch.autograd.backward is original
    finally:
        torch.autograd.backward = original
        capture_thread._installed.clear()


def test_a_scheduler_is_still_refused_in_the_capture() -> None:
    model, optimizer = made(0)
    scheduler = StepLR(optimizer, 1)

    def step(model: nn.Module, optimizer: Any, given: Any) -> torch.Tensor:
        loss = train_step(model, optimizer, given)
        scheduler.step()
        return loss

    with pytest.raises(rekindle.CaptureError, match="learning-rate scheduler"):
        rekindle.capture(step, model, optimizer, batch(0))
