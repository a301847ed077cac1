"""An interrupt leaves model and optimizer as they were, wherever it comes in a capture."""

from __future__ import annotations

import copy
import gc
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from support.equality import differences, snapshot
from torch import nn
from torch.nn.modules import module as module_hooks

import rekindle
from rekindle.tracing.python_state import PythonState
from rekindle.tracing.undo import Sandbox, remember, uninterrupted


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    """Shells start background jobs with SIGINT ignored."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, old) is signal.default_int_handler


def by_signal() -> None:
    """As Ctrl-C does: through the current handler."""
    signal.raise_signal(signal.SIGINT)


def by_exception() -> None:
    """Past any handler."""
    raise KeyboardInterrupt


class AtLine:
    """Interrupts at the n-th distinct line that runs in some files; by default, counts lines."""

    def __init__(self, *files: str, number: int = -1, interrupt: Any = by_signal) -> None:
        self.count = 0
        self.place = ""
        self._files, self._number, self._interrupt = files, number, interrupt
        self._seen: set[tuple[CodeType, int]] = set()
        self._others = sys.gettrace()

    def __enter__(self) -> AtLine:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._others)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        line = frame.f_code, frame.f_lineno
        if event == "line" and line not in self._seen:
            self._seen.add(line)
            self.count += 1
            if self.count - 1 == self._number:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self._interrupt()
        return self._trace


class Changing(nn.Module):
    """Replaces a buffer, sets an attribute, and deletes and sets again a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x) * self.scale + self.shift
        self.last = out.detach()
        self.mean = self.last.mean(0)
        scale = self.scale
        del self.scale
        self.scale = scale
        return out


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Any:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(Changing())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything that model and optimizer hold, by name and identity, in order."""
    stores: list[Any] = [optimizer.__dict__, optimizer.state, *optimizer.param_groups]
    for module in model.modules():
        stores += [module.__dict__, module._parameters, module._buffers]
    found: list[Any] = [[(key, id(value)) for key, value in store.items()] for store in stores]
    return [*found, [id(param.grad) for param in model.parameters()]]


def patched() -> tuple[Any, ...]:
    """Everything that a capture replaces in torch."""
    return (
        torch.autograd.backward,
        torch.get_rng_state,
        nn.Module.__init__,
        dict(module_hooks._global_forward_pre_hooks),
        torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        signal.getsignal(signal.SIGINT),
    )


def test_an_interrupt_at_any_line_of_a_capture() -> None:
    """Of the code that replaces, traces and restores; the step's own lines are the user's."""
    model, optimizer = made()
    batch = torch.linspace(-1, 1, 8).view(2, 4)
    files = ("tracing/undo.py", "tracing/trace.py", "tracing/intercept.py")
    with AtLine(*files) as lines:
        rekindle.capture(train_step, model, optimizer, batch)
    assert lines.count > 200
    before = contents(model, optimizer), snapshot(model, optimizer), patched()
    for number in range(0, lines.count, 7):
        line = AtLine(*files, number=number)
        try:
            with line:
                rekindle.capture(train_step, model, optimizer, batch)
        except KeyboardInterrupt:
            assert line.place
        else:  # a later capture may run fewer lines than the first, which fills caches
            assert not line.place, "the interrupt was lost"
            assert number > 200
        assert contents(model, optimizer) == before[0], line.place
        assert not differences(before[1], snapshot(model, optimizer)), line.place
        assert patched() == before[2], line.place


def test_an_interrupted_restore_lacks_nothing_and_can_be_completed() -> None:
    """Also where no handler defers the interrupt."""
    model, optimizer = made()
    batch = torch.linspace(-1, 1, 8).view(2, 4)
    sandbox = Sandbox([*model.parameters()], optimizer)
    python = PythonState(dict(model.named_modules()), train_step, optimizer)
    files = ("tracing/undo.py", "tracing/contents.py", "tracing/python_state.py")

    def restore() -> None:
        python.restore()
        sandbox.restore()

    before = contents(model, optimizer)
    names = [[name for name, _ in store] for store in before[:-1]]
    train_step(model, optimizer, batch)
    with AtLine(*files) as lines:
        restore()
    assert lines.count > 20
    assert contents(model, optimizer) == before
    for number in range(lines.count):
        train_step(model, optimizer, batch)
        assert contents(model, optimizer) != before
        line = AtLine(*files, number=number, interrupt=by_exception)
        with pytest.raises(KeyboardInterrupt), line:
            restore()
        now = [[name for name, _ in store] for store in contents(model, optimizer)[:-1]]
        assert all(set(a) <= set(b) for a, b in zip(names, now, strict=True)), line.place
        restore()
        assert contents(model, optimizer) == before, line.place


def test_an_abandoned_part_does_not_defer_interrupts_for_good() -> None:
    """As where an interrupt comes between `__enter__` and the block: there is no `__exit__`."""
    handler = signal.getsignal(signal.SIGINT)
    with uninterrupted() as interruptible:
        interruptible().__enter__()
    gc.collect()
    assert signal.getsignal(signal.SIGINT) is handler


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "replaced": lambda store: store.update(b=3),
    "added": lambda store: store.update(d=4),
    "deleted": lambda store: store.pop("a"),
    "deleted and added": lambda store: store.update(a=store.pop("a")),
    "emptied": lambda store: store.clear(),
    "inside": lambda store: store["c"].append(5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [dict, lambda store: defaultdict(list, store)])
def test_a_dict_gets_its_content_and_order_back(change: str, kind: Any) -> None:
    inner = [1, 2]
    store = kind({"a": 1, "b": 2, "c": inner})
    undo = remember(store)
    expected = copy.deepcopy([*store.items()])
    CHANGES[change](store)
    undo()
    assert [*store.items()] == expected
    assert store["c"] is inner


def test_keys_may_be_tensors() -> None:
    """As in an optimizer's state, where identity distinguishes them."""
    keys = [torch.ones(2) for _ in range(3)]
    store = dict.fromkeys(keys, 0)
    undo = remember(store)
    del store[keys[0]]
    store[torch.ones(2)] = 1
    store[keys[0]] = 2
    undo()
    assert [id(key) for key in store] == [id(key) for key in keys]
    assert set(store.values()) == {0}
