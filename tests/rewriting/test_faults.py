"""Faults in the middle of a step: it completes or changes nothing, and the next one trains right.

Every test trains a twin plainly alongside the step under test: after a fault, parameters and
optimizer state are those of the twin before its next step, or those after it.
"""

from __future__ import annotations

import copy
import dis
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.faults import (
    AFTER,
    BEFORE,
    AtOp,
    Traced,
    Trial,
    interrupt,
    interrupted_at_lines,
    lasting,
    momentum,
    run_out_of_memory,
)
from support.square_step import square_step as train_step
from torch import nn

import rekindle
from rekindle.measuring.bitwise_compare import State, differences
from rekindle.tracing import undo


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def _usual_interrupts() -> Iterator[None]:
    """An interrupt raises KeyboardInterrupt, as in any script; each test leaves it so."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_grad_enabled(True)  # in case a failed test has left it off
    yield
    found = signal.signal(signal.SIGINT, old)
    assert found is signal.default_int_handler


def adam(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, foreach=False)


def chain(n_layers: int = 3) -> nn.Module:
    """Without batch norm and dropout: nothing but the parameters changes."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(n_layers)]
    return nn.Sequential(*layers)


# Steps of both kinds: as captured, and with parts computed again. The planner is one that does not
# look at times: it does the same in every run.
KINDS: dict[str, dict[str, Any]] = {
    "captured": {},
    "planned": {"budget": "80%", "planner": "chen-recursive"},
}


def chain_trial(kind: str, **settings: Any) -> Trial:
    found = Trial(chain(), torch.randn(256, 8), **KINDS[kind], **settings)
    assert (found.step.plan is not None and found.step.plan.recompute_us > 0) == (kind == "planned")
    return found


def count_ops(trial: Trial) -> tuple[int, int]:
    """How many ops a step runs before the optimizer, and how many in all; it trains for that."""
    trial.train()  # the optimizer makes its state in the first step
    before: list[int] = []
    with AtOp() as counter:
        handle = trial.optimizer.register_step_pre_hook(lambda *_: before.append(counter.count))
        trial.step(trial.batch)
    handle.remove()
    assert trial.outcome() == AFTER
    return before[0], counter.count


def settle(trial: Trial) -> None:
    """The first steps under a budget are measured, and run other lines than later ones."""
    for _ in range(3):
        trial.train()


# Memory that runs out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [momentum, adam])
def test_memory_that_runs_out_at_any_op_before_the_optimizer(kind: str, make: Any) -> None:
    trial = chain_trial(kind, make=make)
    n_before, n_ops = count_ops(trial)
    assert 20 < n_before < n_ops
    for number in range(n_before):
        before = trial.state()
        with pytest.raises(torch.OutOfMemoryError), AtOp(number, run_out_of_memory):
            trial.step(trial.batch)
        assert differences(before, trial.state()) == [], number
        assert torch.is_grad_enabled()
        if number % 5 == 0:
            trial.train()
    trial.train()
    assert trial.step.n_captures == 1


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_runs_out_in_the_first_step_of_all(kind: str) -> None:
    """The optimizer has no state then, and gets none."""
    trial = chain_trial(kind, make=adam)
    with pytest.raises(torch.OutOfMemoryError), AtOp(10, run_out_of_memory):
        trial.step(trial.batch)
    assert not trial.optimizer.state
    assert trial.outcome() == BEFORE
    trial.train()


def test_after_a_fault_the_model_can_be_used_without_the_step() -> None:
    """Autograd and autocast are as they were: plain training of the same model goes on."""
    trial = chain_trial("planned")
    n_before, _ = count_ops(trial)
    for number in (3, n_before - 2):
        with pytest.raises(torch.OutOfMemoryError), AtOp(number, run_out_of_memory):
            trial.step(trial.batch)
        train_step(trial.model, trial.optimizer, trial.batch)
        assert trial.outcome() == AFTER
    trial.train()


# Interrupts from the keyboard


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [momentum, adam])
def test_an_interrupt_at_any_op(kind: str, make: Any) -> None:
    """In the optimizer it waits: the step is through by then."""
    trial = chain_trial(kind, make=make)
    n_before, n_ops = count_ops(trial)
    assert n_before + 5 < n_ops
    for number in range(n_ops):
        with pytest.raises(KeyboardInterrupt), AtOp(number, interrupt):
            trial.step(trial.batch)
        assert trial.outcome() == (BEFORE if number < n_before else AFTER), number
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert all(param.grad is None for param in trial.model.parameters())
    trial.train()
    assert trial.step.n_captures == 1


def test_an_interrupt_in_the_optimizers_hooks() -> None:
    """A hook is part of the optimizer's step."""
    trial = chain_trial("planned", make=momentum)
    for register in (
        trial.optimizer.register_step_pre_hook,
        trial.optimizer.register_step_post_hook,
    ):
        handle = register(lambda *_: interrupt())
        with pytest.raises(KeyboardInterrupt):
            trial.step(trial.batch)
        handle.remove()
        assert trial.outcome() == AFTER
    trial.train()


class AfterCall(Traced):
    """After any call, before its result is stored: where Python handles signals."""

    def __init__(self, *files: str, number: int = -1) -> None:
        super().__init__(*files, number=number)
        self._last: dict[FrameType, int] = {}

    def is_place(self, frame: FrameType, event: str) -> bool:
        frame.f_trace_opcodes = True
        last = self._last.get(frame)
        self._last[frame] = frame.f_lasti
        code = frame.f_code.co_code
        return event == "opcode" and last is not None and dis.opname[code[last]].startswith("CALL")


def test_an_interrupt_after_any_call_before_the_first_operator() -> None:
    """Nothing has happened then; above all, the step does not take itself to be running still."""
    files = ("captured_step.py", "tracing/guard.py", "batch_tree.py")
    trial = chain_trial("planned", make=momentum)
    settle(trial)
    n_calls: list[int] = []
    with AfterCall(*files) as calls, AtOp(0, lambda: n_calls.append(calls.count)):
        trial.step(trial.batch)
    assert trial.outcome() == AFTER
    assert n_calls[0] > 20
    stuck = []
    for number in range(n_calls[0]):
        call = AfterCall(*files, number=number)
        with pytest.raises(KeyboardInterrupt), call:
            trial.step(trial.batch)
        assert trial.outcome() == BEFORE
        try:
            trial.train()
        except RuntimeError as error:
            stuck.append(f"after an interrupt at {call.place}: {error}")
            break
    assert stuck == []


def test_an_interrupt_at_any_line_of_the_optimizer() -> None:
    """Between operators, too: while gradients are handed over, and while handlers are changed."""
    trial = chain_trial("planned", make=momentum)
    settle(trial)
    found = interrupted_at_lines(trial)
    assert any("torch/optim" in place for place in found[AFTER])
    assert not any("torch/optim" in place for place in found[BEFORE])
    trial.train()


class Remembering(nn.Module):
    """Keeps an activation, and replaces a buffer: attributes that a step sets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = chain(2)
        self.register_buffer("mean", torch.zeros(8))
        self.last = torch.zeros(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        self.mean = 0.9 * self.mean + out.detach().mean(0)
        self.last = out.detach()
        return out


def keeps_gradients(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("function", [train_step, keeps_gradients])
def test_an_interrupt_at_any_line_of_a_step_that_sets_attributes(function: Any) -> None:
    """Once parameters change, gradients and attributes follow, too."""
    trial = Trial(Remembering(), torch.randn(256, 8), function=function, make=momentum)
    trial.train()
    interrupted_at_lines(trial, every=3)
    trial.train()
    assert trial.step.n_captures == 1


def test_a_handler_of_the_users_own_is_called_once_the_step_is_through() -> None:
    trial = chain_trial("planned", make=momentum)
    n_before, _ = count_ops(trial)
    seen: list[State] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(lasting(trial.state())))
    with AtOp(n_before + 2, interrupt):
        trial.step(trial.batch)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert trial.outcome() == AFTER
    assert len(seen) == 1
    assert differences(seen[0], lasting(trial.state())) == []
    trial.train()


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    trial = chain_trial("planned", make=momentum)
    n_before, _ = count_ops(trial)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (2, n_before + 2):
        with AtOp(number, interrupt):
            trial.step(trial.batch)
        assert trial.outcome() == AFTER
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_inside_the_optimizer_is_as_in_plain_training(kind: str) -> None:
    """What the optimizer has done stays done (decision 28); nothing else is left behind."""
    trial = chain_trial(kind, make=momentum)
    n_before, n_ops = count_ops(trial)
    for number in range(n_before, n_ops, 3):
        with pytest.raises(torch.OutOfMemoryError), AtOp(number, run_out_of_memory):
            trial.step(trial.batch)
        assert all(param.grad is None for param in trial.model.parameters())
        assert torch.is_grad_enabled()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        trial.model.load_state_dict(trial.twin[0].state_dict())
        trial.optimizer.load_state_dict(copy.deepcopy(trial.twin[1].state_dict()))
        trial.train()


# Threads


def in_thread(function: Callable[[], Any]) -> Any:
    """The result or error of a function in a second thread."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():  # not join, which an interrupt does not end
        time.sleep(0.001)
    return results[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_a_second_thread_touches_no_handler(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = chain_trial(kind, make=adam)
    touched: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(undo, "_set_handler", lambda *args: touched.append(args))
        result = in_thread(lambda: trial.step(trial.batch))
    assert isinstance(result, torch.Tensor), result
    assert touched == []
    assert trial.outcome() == AFTER
    trial.train()


def test_an_interrupt_while_a_second_thread_is_in_the_optimizer() -> None:
    """It is the main thread's business: the step goes on."""
    trial = chain_trial("planned", make=adam)
    n_before, _ = count_ops(trial)
    results: list[Any] = []

    def run() -> None:
        with AtOp(n_before + 3, interrupt):
            results.append(trial.step(trial.batch))

    thread = threading.Thread(target=run)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        thread.start()
        while thread.is_alive():
            time.sleep(0.001)
        time.sleep(0.01)
    thread.join()
    assert len(results) == 1
    assert trial.outcome() == AFTER
    trial.train()


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_thread_must_wait(kind: str) -> None:
    trial = chain_trial(kind, make=adam)
    n_before, n_ops = count_ops(trial)
    for number in (0, n_before - 1, n_before + 1, n_ops - 1):
        found: list[Any] = []

        def call(found: list[Any] = found) -> None:
            found.append(in_thread(lambda: trial.step(trial.batch)))

        with AtOp(number, call):
            trial.step(trial.batch)
        assert isinstance(found[0], RuntimeError)
        assert "one thread at a time" in str(found[0])
        assert trial.outcome() == AFTER
    trial.train()


# Batches that are not what the step can take


class Unsteady(nn.Module):
    """Statistics and dropout: even a forward pass leaves a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.second(F.dropout(torch.tanh(x * torch.rand_like(x)), 0.4))


def labelled_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def unsteady_trial(kind: str) -> Trial:
    batch = torch.randn(256, 8), torch.arange(256) % 4
    found = Trial(Unsteady(), batch, function=labelled_step, make=adam, **KINDS[kind])
    found.train()
    return found


INPUTS, LABELS = torch.zeros(256, 8), torch.zeros(256, dtype=torch.int64)
BAD: dict[str, Any] = {
    "shape": (torch.zeros(256, 7), LABELS),
    "dimensions": (torch.zeros(2, 3, 256, 8), LABELS),
    "labels of another number": (INPUTS, LABELS[:-1]),
    "whole numbers": (INPUTS.long(), LABELS),
    "doubles": (INPUTS.double(), LABELS),
    "no memory": (INPUTS.to("meta"), LABELS.to("meta")),
    "no memory for a part": (INPUTS.to("meta"), LABELS),
    "a part is missing": (INPUTS,),
    "a part too many": (INPUTS, LABELS, LABELS),
    "a tensor": INPUTS,
    "a mapping": {"inputs": INPUTS, "labels": LABELS},
    "nothing": None,
    "text": "batch",
}
OPAQUE: dict[str, Any] = {
    "object": object(),
    "object inside": (INPUTS, object()),
    "function": (lambda: INPUTS, LABELS),
    "numpy": (INPUTS.numpy(), LABELS.numpy()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_refused_and_changes_nothing(kind: str, name: str) -> None:
    trial = unsteady_trial(kind)
    before = trial.state()
    with pytest.raises((RuntimeError, ValueError, TypeError, rekindle.CaptureError)):
        trial.step(BAD[name])
    assert differences(before, trial.state()) == []
    trial.train()


@pytest.mark.parametrize("name", OPAQUE)
def test_a_batch_that_cannot_be_looked_into_is_named(name: str) -> None:
    """In a later step as in the first."""
    trial = unsteady_trial("captured")
    before = trial.state()
    with pytest.raises(rekindle.CaptureError, match="which Rekindle cannot look into"):
        trial.step(OPAQUE[name])
    assert differences(before, trial.state()) == []
    trial.train()


@pytest.mark.parametrize("kind", KINDS)
def test_a_label_that_does_not_exist(kind: str) -> None:
    """Found out when the loss is computed: parameters and optimizer state stay."""
    trial = unsteady_trial(kind)
    statistics = trial.model.get_buffer("norm.running_mean").clone()
    with pytest.raises(IndexError):
        trial.step((trial.batch[0], LABELS + 4))
    assert trial.outcome() == BEFORE
    assert not torch.equal(statistics, trial.model.get_buffer("norm.running_mean"))
    trial.model.load_state_dict(trial.twin[0].state_dict())
    trial.train()


def test_a_batch_too_large_for_the_budget_is_refused_and_changes_nothing() -> None:
    batch = torch.randn(256, 8), torch.arange(256) % 4
    trial = Trial(Unsteady(), batch, function=labelled_step, make=adam, budget=100_000)
    trial.train()
    large = torch.randn(4096, 8), torch.arange(4096) % 4
    before = trial.state()
    with pytest.raises(rekindle.InfeasibleBudget) as caught:
        trial.step(large)
    assert caught.value.budget_bytes == 100_000 < caught.value.least_peak_bytes
    assert differences(before, trial.state()) == []
    trial.train()
    assert trial.step.n_captures == 1


@pytest.mark.parametrize("kind", KINDS)
def test_another_size_that_fits_trains_right(kind: str) -> None:
    trial = unsteady_trial(kind)
    trial.batch = torch.randn(192, 8), torch.arange(192) % 4
    trial.train()
    assert trial.step.n_captures == 2
