"""Steps that are interrupted or run out of memory, alongside a twin that trains plainly."""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from support.square_step import square_step as train_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.measuring.bitwise_compare import State, differences, same, state_of

BEFORE, AFTER = "before", "after"


class Trial:
    """A step under test, and a twin of its model and optimizer that trains plainly."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        function: Callable[..., Any] = train_step,
        make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        **asked: Any,
    ) -> None:
        self.model, self.batch, self.function = model, batch, function
        self.optimizer = make(model.parameters(), lr=0.05)
        self.twin = copy.deepcopy((self.model, self.optimizer))
        self.step = rekindle.optimize(function, self.model, self.optimizer, batch, **asked)

    def state(self) -> State:
        return state_of(self.model, self.optimizer)

    def train(self) -> None:
        """One step of both, from the same random numbers; they must agree in every bit."""
        torch.manual_seed(3)
        result = self.step(self.batch)
        end = self.state()
        torch.manual_seed(3)
        assert same(result, self.function(*self.twin, self.batch))
        assert differences(state_of(*self.twin), end) == []

    def outcome(self) -> str:
        """Whether parameters and optimizer state are the twin's before its next step or after it.

        Of a step that is through, the twin makes up for it.
        """
        found = lasting(self.state())
        if not differences(lasting(state_of(*self.twin)), found):
            return BEFORE
        self.function(*self.twin, self.batch)
        wrong = differences(lasting(state_of(*self.twin)), found)
        return f"between: {wrong}" if wrong else AFTER

    def whole(self) -> State:
        """All that must be whole or not at all, attributes of modules and gradients included."""
        return {**lasting(self.state()), **attributes_of(self.model), **gradients_of(self.model)}

    def whole_outcome(self, before: State) -> str:
        """The same of everything that a step sets; `before` is `whole()` before it."""
        outcome, found = self.outcome(), self.whole()
        expected = before
        if outcome == AFTER:
            twin = self.twin[0]
            expected = {
                **lasting(state_of(*self.twin)),
                **attributes_of(twin),
                **gradients_of(twin),
            }
        else:  # a step clears gradients first, or adds to them before it updates anything
            expected, found = without_gradients(expected), without_gradients(found)
        wrong = differences(expected, found)
        return f"between: {outcome}, but {wrong}" if wrong else outcome


def lasting(state: State) -> State:
    """What must be whole or not at all."""
    return {key: value for key, value in state.items() if key.startswith(("param", "optimizer"))}


def attributes_of(model: nn.Module) -> State:
    """Copies of the tensors that modules hold as buffers and plain attributes."""
    return {
        f"attribute {path}.{key}": value.clone()
        for path, module in model.named_modules()
        for store in (module._buffers, vars(module))
        for key, value in store.items()
        if isinstance(value, torch.Tensor)
    }


def without_gradients(state: State) -> State:
    return {key: value for key, value in state.items() if not key.startswith("gradient")}


def gradients_of(model: nn.Module) -> State:
    """Copies of the gradients."""
    named = model.named_parameters()
    return {f"gradient {n}": p.grad.clone() for n, p in named if p.grad is not None}


def momentum(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9, foreach=False)


class AtOp(TorchDispatchMode):
    """Does something before the op of a number, counted from 0; counts all but profiler marks."""

    def __init__(self, number: int = -1, action: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.number, self.action = number, action
        self.count = 0
        self.func: Any = None  # the op of that number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in ("profiler", "prim"):  # autograd asks for devices: no operators
            self.count += 1
            if self.count - 1 == self.number:
                self.func = func
                self.action()
        return func(*args, **(kwargs or {}))


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("there is no room")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


class Traced:
    """Interrupts at the n-th of some places in some files, as Python comes by."""

    def __init__(self, *files: str, number: int = -1) -> None:
        self.files, self.number = files, number
        self.count = 0
        self.place = ""
        self._others = sys.gettrace()

    def __enter__(self) -> Traced:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._others)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        if self.is_place(frame, event):
            self.count += 1
            if self.count - 1 == self.number:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                interrupt()
        return self._trace

    def is_place(self, frame: FrameType, event: str) -> bool:
        raise NotImplementedError


class AtLine(Traced):
    """At any line, in the optimizer and where a `with` begins and ends each time it runs."""

    OPTIMIZERS = ("torch/optim/optimizer.py", "torch/optim/sgd.py")
    EACH_TIME = (*OPTIMIZERS, "/contextlib.py")

    def __init__(self, *files: str, number: int = -1) -> None:
        super().__init__(*files, number=number)
        self._seen: set[tuple[CodeType, int]] = set()

    def is_place(self, frame: FrameType, event: str) -> bool:
        line = (frame.f_code, frame.f_lineno)
        is_new = line not in self._seen
        self._seen.add(line)
        return event == "line" and (is_new or frame.f_code.co_filename.endswith(self.EACH_TIME))


def interrupted_at_lines(trial: Trial, *, every: int = 1) -> dict[str, set[str]]:
    """Interrupt steps at lines of the code around and in the optimizer; by outcome, which."""
    files = ("captured_step.py", "engines/program.py", "tracing/undo.py", *AtLine.EACH_TIME)
    for _ in range(3):  # the first steps under a budget are measured: they run other lines
        trial.train()
    with AtLine(*files) as lines:
        trial.step(trial.batch)
    assert trial.outcome() == AFTER
    assert lines.count > 100
    found: dict[str, set[str]] = {BEFORE: set(), AFTER: set()}
    for number in range(0, lines.count, every):
        line = AtLine(*files, number=number)
        before = trial.whole()
        with pytest.raises(KeyboardInterrupt), line:
            trial.step(trial.batch)
        found.setdefault(trial.whole_outcome(before), set()).add(line.place)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, line.place
        assert torch.is_grad_enabled(), line.place
        assert torch.ones(1, requires_grad=True).exp().requires_grad, line.place
    assert found.keys() == {BEFORE, AFTER}, found
    return found
