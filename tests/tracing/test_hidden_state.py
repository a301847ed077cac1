"""State that a step reaches by way of objects without attributes, or by names made at run time."""

from __future__ import annotations

import array
import contextvars
import functools
import operator
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

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
    assert differences(*trained) == []
    assert step.n_captures <= 3  # the first has no value of its own yet
