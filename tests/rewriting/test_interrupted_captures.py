"""Faults while a step is captured, measured, planned and built: the user's objects stay whole.

An interrupt is raised at lines of Rekindle's code, an error at operators. The quick test takes a
sample of the lines, another one each time the code changes; the slow one takes all of them.
"""

from __future__ import annotations

import contextlib
import copy
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
from support.equality import differences, same, snapshot
from support.faults import AtOp, Traced, interrupt, run_out_of_memory
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import rekindle
from rekindle.measuring import measure
from rekindle.tracing import capture_thread

SRC = str(Path(rekindle.__file__).parent)
# Pure functions of data: no user object is in sight.
DATA = tuple(f"{SRC}/{room}/" for room in ("core", "planners", "report", "cli"))


@pytest.fixture(autouse=True)
def _usual_interrupts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, old) is signal.default_int_handler


class Net(nn.Module):
    """Statistics, random draws, and attributes that a step sets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.notes: dict[str, Any] = {"kept": [torch.zeros(6)]}
        self.activation: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.activation = x.detach()
        return self.last(nn.functional.dropout(x, 0.25))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that has trained, so that there are gradients and optimizer state."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    train_step(model, optimizer, torch.randn(16, 6))
    return model, optimizer


def identities(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """The very objects that modules and optimizer hold, in order."""
    found: list[Any] = []
    for module in model.modules():
        for store in (vars(module), module._parameters, module._buffers, module._modules):
            found.extend((key, value) for key, value in store.items())
    found.extend((name, param.grad) for name, param in model.named_parameters())
    found.extend(vars(optimizer).items())
    for owner, state in optimizer.state.items():
        found.extend([("owner", owner), *state.items()])
    return found


def versions(model: nn.Module) -> list[int]:
    tensors = [*model.parameters(), *model.buffers()]
    return [tensor._version for tensor in tensors]


def process() -> list[Any]:
    """Attributes of torch that a capture replaces, and the thread's modes."""
    return [
        torch.autograd.backward,
        nn.Module.__call__,
        nn.Module.__init__,
        torch.get_rng_state,
        torch.manual_seed,
        random.random,
        np.random.rand,
        torch.optim.lr_scheduler.LRScheduler.step,
        list(capture_thread._installed),
        repr(capture_thread.capture_lock),
        _get_current_dispatch_mode_stack(),
        torch.is_grad_enabled(),
        torch.ones(1, requires_grad=True).exp().requires_grad,
        signal.getsignal(signal.SIGINT),
        threading.active_count(),
        random.getstate(),
        str(np.random.get_state()),
    ]


class Whole:
    """Everything about a model, its optimizer and the process, to be found unchanged later."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parts = model, optimizer
        self._values = snapshot(model, optimizer)
        self._objects = identities(model, optimizer)
        self._versions = versions(model)
        self._process = process()

    def check(self, place: str) -> None:
        assert not differences(self._values, snapshot(*self._parts)), place
        now = identities(*self._parts)
        assert [key for key, _ in now] == [key for key, _ in self._objects], place
        changed = [a[0] for a, b in zip(now, self._objects, strict=True) if a[1] is not b[1]]
        assert changed == [], place
        assert versions(self._parts[0]) == self._versions, place
        assert process() == self._process, place


class AtLineOfOurs(Traced):
    """At any line of Rekindle's code that may touch a user's object, the first time it runs."""

    def __init__(self, number: int = -1) -> None:
        super().__init__(".py", number=number)
        self._seen: set[tuple[CodeType, int]] = set()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(SRC) or name.startswith(DATA):
            return None
        return super()._trace(frame, event, arg)

    def is_place(self, frame: FrameType, event: str) -> bool:
        line = (frame.f_code, frame.f_lineno)
        is_new = event == "line" and line not in self._seen
        if is_new:
            self._seen.add(line)
        return is_new


ASKED = {"budget": "90%", "planner": "chen-recursive"}


def interrupted_captures(numbers: Any) -> int:
    """Interrupt captures at these lines, by number; returns how many lines there are."""
    model, optimizer = made()
    twin = copy.deepcopy((model, optimizer))
    for copied, param in zip(twin[0].parameters(), model.parameters(), strict=True):
        copied.grad = copy.deepcopy(param.grad)
    batch = torch.randn(64, 6)
    rekindle.optimize(train_step, model, optimizer, batch, **ASKED)  # fills caches of operators
    with AtLineOfOurs() as lines:
        rekindle.optimize(train_step, model, optimizer, batch, **ASKED)
    n_lines = lines.count
    places = set()
    for count, number in enumerate(numbers(n_lines)):
        whole, line = Whole(model, optimizer), AtLineOfOurs(number)
        # In a callback of a weak reference, Python itself drops the exception.
        with contextlib.suppress(KeyboardInterrupt), line:
            rekindle.optimize(train_step, model, optimizer, batch, **ASKED)
        whole.check(line.place)
        places.add(line.place)
        if count % 20 == 0:  # and the next one works
            torch.manual_seed(1)
            step = rekindle.optimize(train_step, model, optimizer, batch, **ASKED)
            result = step(batch)
            torch.manual_seed(1)
            assert same(result, train_step(*twin, batch)), line.place
            assert not differences(snapshot(*twin), snapshot(model, optimizer)), line.place
    assert len({place.rpartition(":")[0] for place in places}) > 5
    return n_lines


def test_interrupts_at_a_sample_of_lines() -> None:
    def sample(n_lines: int) -> list[int]:
        assert n_lines > 500
        return random.Random(n_lines).sample(range(n_lines), 25)

    interrupted_captures(sample)


@pytest.mark.exhaustive
def test_interrupts_at_every_line() -> None:
    interrupted_captures(range)


@pytest.mark.parametrize("fault", [interrupt, run_out_of_memory])
def test_faults_at_a_sample_of_operators(fault: Any) -> None:
    """Fake ones of the trace, and real ones of the measurement."""
    failing_captures(fault, lambda n_ops: random.Random(n_ops).sample(range(n_ops), 25))


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [interrupt, run_out_of_memory])
def test_faults_at_every_operator(fault: Any) -> None:
    failing_captures(fault, range)


def failing_captures(fault: Any, numbers: Any) -> None:
    model, optimizer = made()
    batch = torch.randn(64, 6)
    with AtOp() as counter:
        rekindle.optimize(train_step, model, optimizer, batch, **ASKED)
    n_ops = counter.count
    assert n_ops > 300
    for number in numbers(n_ops - 10):  # which differs a little from run to run
        whole, at = Whole(model, optimizer), AtOp(number)

        def fail(at: AtOp = at) -> None:
            if fault is interrupt or at.func is not torch.ops.aten.copy_.default:
                fault()  # a copy to where a tensor is takes no memory

        at.action = fail
        # In the trace, an optimizer that fails is one op, which cannot be measured; in the second
        # trace, that is a difference.
        refusals = (rekindle.ProfileError, rekindle.CaptureError)
        expected = (KeyboardInterrupt, torch.OutOfMemoryError, *refusals)
        measure._recent.clear()  # it measures each time
        with contextlib.suppress(*expected), at:
            rekindle.optimize(train_step, model, optimizer, batch, **ASKED)
        assert at.func is not None, number
        whole.check(f"operator {number}: {at.func}")


def test_the_interrupter_itself() -> None:
    """It sees lines of the trace, of measuring and of the generated program's room."""
    model, optimizer = made()
    seen: set[str] = set()

    class Noting(AtLineOfOurs):
        def is_place(self, frame: FrameType, event: str) -> bool:
            seen.add(frame.f_code.co_filename.removeprefix(SRC))
            return False

    with Noting():
        rekindle.optimize(train_step, model, optimizer, torch.randn(64, 6), **ASKED)
    assert {"/tracing/trace.py", "/measuring/measure.py", "/engines/program.py"} <= seen
