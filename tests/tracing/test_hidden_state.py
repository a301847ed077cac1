"""State that a step reaches by way of objects without attributes, or by names made at run time."""

from __future__ import annotations

import array
import contextlib
import contextvars
import enum
import functools
import io
import multiprocessing
import operator
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import rekindle
from rekindle.measuring.bitwise_compare import differences, state_of

Read, Set = Callable[[], float], Callable[[float], Any]


class Holder:
    """An object of the user's."""

    weight = 1.0


def by_context_variable() -> tuple[Read, Set]:
    variable = contextvars.ContextVar("variable", default=1.0)
    return (lambda: variable.get()), variable.set


def by_thread_local() -> tuple[Read, Set]:
    local = threading.local()
    local.weight = 1.0
    return (lambda: local.weight), functools.partial(setattr, local, "weight")


def by_weak_reference() -> tuple[Read, Set]:
    holder = Holder()
    reference = weakref.ref(holder)
    return (lambda: reference().weight), functools.partial(setattr, holder, "weight")  # type: ignore[union-attr]


def by_weak_dict() -> tuple[Read, Set]:
    holder = Holder()
    values = weakref.WeakValueDictionary(a=holder)
    return (lambda: values["a"].weight), functools.partial(setattr, holder, "weight")


def by_proxy() -> tuple[Read, Set]:
    values = {"weight": 1.0}
    proxy = types.MappingProxyType(values)
    return (lambda: proxy["weight"]), functools.partial(values.__setitem__, "weight")


def by_buffer() -> tuple[Read, Set]:
    values = array.array("d", [1.0])
    return (lambda: values[0]), functools.partial(values.__setitem__, 0)


def by_attrgetter() -> tuple[Read, Set]:
    holder, get = Holder(), operator.attrgetter("weight")
    return (lambda: get(holder)), functools.partial(setattr, holder, "weight")


def by_name() -> tuple[Read, Set]:
    holder, name = Holder(), "weight"
    return (lambda: getattr(holder, name)), functools.partial(setattr, holder, name)


def by_joined_name() -> tuple[Read, Set]:
    holder, parts = Holder(), ("wei", "ght")
    return (lambda: getattr(holder, "".join(parts))), functools.partial(setattr, holder, "weight")


def by_formatted_name() -> tuple[Read, Set]:
    holder, end = Holder(), "ght"
    return (lambda: getattr(holder, f"wei{end}")), functools.partial(setattr, holder, "weight")


def by_bound_method_of_a_dict() -> tuple[Read, Set]:
    values = {"weight": 1.0}
    get = values.get
    return (lambda: get("weight")), functools.partial(values.__setitem__, "weight")  # type: ignore[return-value]


def wrapped(wrap: Callable[..., Any]) -> tuple[Read, Set]:
    weight = 1.0

    @wrap
    def read() -> float:
        return weight

    def change(value: float) -> None:
        nonlocal weight
        weight = value

    return read, change


def by_no_grad() -> tuple[Read, Set]:
    return wrapped(torch.no_grad())


def by_autocast() -> tuple[Read, Set]:
    return wrapped(torch.autocast("cpu"))


def by_compiler_disable() -> tuple[Read, Set]:
    return wrapped(torch.compiler.disable)


def by_wraps() -> tuple[Read, Set]:
    return wrapped(lambda f: functools.wraps(f)(lambda: f()))


def by_context_manager() -> tuple[Read, Set]:
    def wrap(f: Callable[[], float]) -> Callable[[], float]:
        @contextlib.contextmanager
        def value() -> Any:
            yield f()

        def read() -> float:
            with value() as found:
                return found

        return read

    return wrapped(wrap)


def by_module() -> tuple[Read, Set]:
    module = types.ModuleType("config")
    module.__file__ = "/config.py"
    module.weight = 1.0  # type: ignore[attr-defined]
    holder = types.SimpleNamespace(config=module)
    return (lambda: holder.config.weight), functools.partial(setattr, module, "weight")


def by_globals() -> tuple[Read, Set]:
    return (lambda: globals()["WEIGHT"]), functools.partial(globals().__setitem__, "WEIGHT")


WEIGHT = 1.0


def by_stream() -> tuple[Read, Set]:
    stream = io.StringIO("1.0")

    def change(value: float) -> None:
        stream.seek(0)
        stream.truncate()
        stream.write(str(value))

    return (lambda: float(stream.getvalue())), change


def by_event() -> tuple[Read, Set]:
    event = threading.Event()
    return (
        lambda: 2.0 if event.is_set() else 1.0,
        lambda value: event.set() if value > 1 else event.clear(),
    )


def by_shared_memory() -> tuple[Read, Set]:
    value = multiprocessing.Value("d", 1.0)
    return (lambda: value.value), functools.partial(setattr, value, "value")


def by_metaclass() -> tuple[Read, Set]:
    class Meta(type):
        weight = 1.0

    class Config(metaclass=Meta):
        pass

    return (lambda: Config.weight), functools.partial(setattr, Meta, "weight")


def by_member_of_an_enum() -> tuple[Read, Set]:
    class Mode(enum.Enum):
        TRAIN = 1

    Mode.TRAIN.weight = 1.0  # type: ignore[attr-defined]
    return (lambda: Mode.TRAIN.weight), functools.partial(setattr, Mode.TRAIN, "weight")  # type: ignore[attr-defined]


def by_special_method() -> tuple[Read, Set]:
    class Weight:
        def __call__(self) -> float:
            return 1.0

    weight = Weight()

    def change(value: float) -> None:
        Weight.__call__ = (lambda self: 2.0) if value > 1 else (lambda self: 1.0)  # type: ignore[method-assign]

    return (lambda: weight()), change


def by_class_of_an_object() -> tuple[Read, Set]:
    class One:
        def read(self) -> float:
            return 1.0

    class Two(One):
        def read(self) -> float:
            return 2.0

    weight = One()
    return (
        lambda: weight.read(),
        lambda value: setattr(weight, "__class__", Two if value > 1 else One),
    )


def by_defaults_of_a_function() -> tuple[Read, Set]:
    def read(weight: float = 1.0) -> float:
        return weight

    return read, lambda value: setattr(read, "__defaults__", (value,))


def by_mode() -> tuple[Read, Set]:
    """In the closure of a hook of all modules."""
    holder = Holder()
    handle = register_module_forward_hook(lambda module, args, out: out * holder.weight)
    HANDLES.append(handle)
    return (lambda: 1.0), functools.partial(setattr, holder, "weight")


HANDLES: list[Any] = []
MAY_RECAPTURE = ("by_special_method",)  # its functions are new in every step
WAYS = [value for name, value in list(globals().items()) if name.startswith("by_")]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_change_is_seen(way: Callable[[], tuple[Read, Set]]) -> None:
    trained = []
    for captured in (False, True):
        read, change = way()
        torch.manual_seed(3)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def train_step(model: nn.Module, optimizer: Any, batch: Any, read: Read = read) -> Any:
            loss = model(batch).square().mean() * read()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step: Any = functools.partial(train_step, model, optimizer)
        if captured:
            step = rekindle.optimize(train_step, model, optimizer, torch.ones(3, 4))
        losses = []
        for i in range(4):
            change(1.0 + i % 2)
            losses.append(step(torch.ones(3, 4)).detach().clone())
        trained.append({**state_of(model, optimizer), **dict(enumerate(losses))})
        while HANDLES:
            HANDLES.pop().remove()
    assert differences(*trained) == []
    if way.__name__ not in MAY_RECAPTURE:
        assert step.n_captures <= 3  # the first has no value of its own yet
