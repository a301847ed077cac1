"""Training steps with Python state: every kind of place, and everything a step can do with one.

Programs are generated as source text: `STATE` stands for the place.
"""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Place:
    """Where a step keeps a value: source text."""

    state: str
    setup: str = ""  # in the enclosing function; INITIAL is the value
    declare: str = ""  # at the top of each function that uses it
    outer: str = ""  # at the top level


PLACES: dict[str, Place] = {
    "closure": Place("v", "v = INITIAL", "nonlocal v"),
    "global": Place("V", "global V; V = INITIAL", "global V", "V = None"),
    "object": Place("holder.v", "holder = Holder(); holder.v = INITIAL"),
    "class attribute": Place("Config.v", "class Config: pass\n    Config.v = INITIAL"),
    "inherited attribute": Place(
        "type(holder).v", "class Own(Holder): pass\n    Own.v = INITIAL; holder = Own()"
    ),
    "slots": Place("holder.v", "holder = Slotted(); holder.v = INITIAL"),
    "namespace": Place("ns.v", "ns = types.SimpleNamespace(v=INITIAL)"),
    "dict": Place("d['v']", "d = {'v': INITIAL}"),
    "default dict": Place("d['v']", "d = collections.defaultdict(int); d['v'] = INITIAL"),
    "list": Place("items[0]", "items = [INITIAL]"),
    "nested": Place("a.b['c'][0].v", "a = Holder(); h = Holder(); h.v = INITIAL; a.b = {'c': [h]}"),
    "default argument": Place(
        "cell(None)[0]",
        "def cell(_, kept=[INITIAL]): return kept",
    ),
    "function attribute": Place("train_step.v", "late = 'train_step.v = INITIAL'"),
    "imported module": Place("side.v", "side.v = INITIAL"),
    "submodule": Place("pkg.side.v", "pkg.side.v = INITIAL"),
    "model attribute": Place("model.v", "model.v = INITIAL"),
    "private attribute": Place("model._v", "model._v = INITIAL"),
    "model dict": Place("model.state['v']", "model.state = {'v': INITIAL}"),
    "private dict": Place("model._state['v']", "model._state = {'v': INITIAL}"),
    "nested in model": Place("model[0].x['y'][1]", "model[0].x = {'y': [0, INITIAL]}"),
    "model config": Place("model.config.v", "model.config = Holder(); model.config.v = INITIAL"),
    "model namespace": Place("model.ns.v", "model.ns = types.SimpleNamespace(v=INITIAL)"),
    "trainer": Place("trainer.v", "trainer = Trainer(); trainer.v = INITIAL"),
}

# before: at the top of the step; scale: a factor of the loss; after: at its end; change: between
# steps, with `i` as the number of the step.


@dataclass(frozen=True)
class Use:
    """What a step does with its value."""

    initial: str
    before: str = ""
    scale: str = "1.0"
    after: str = ""
    change: str = ""
    may_refuse: bool = False
    max_captures: int = 2


USES: dict[str, Use] = {
    "read": Use("0.5", scale="STATE"),
    "read, changed outside": Use(
        "0.5", scale="STATE", change="STATE = 0.5 + i // 2", max_captures=4
    ),
    "changed to an equal value": Use("0.5", scale="STATE", change="STATE = float('0.5')"),
    "changed to another type": Use(
        "1",
        scale="(2.0 if type(STATE) is int else 3.0)",
        change="STATE = [1, True, 1.0][i % 3]",
        max_captures=4,
    ),
    "zero and minus zero": Use(
        "0.0", scale="math.copysign(2.0, STATE)", change="STATE = [0.0, -0.0][i % 2]"
    ),
    "text": Use("'a'", scale="{'a': 1.5, 'b': 2.5}[STATE]", change="STATE = 'ab'[i % 2]"),
    "a list changed in place": Use(
        "[1, [2.0]]", scale="STATE[1][0]", change="STATE[1][0] = 2.0 + i % 2"
    ),
    "a list that grows": Use(
        "[1]",
        scale="float(len(STATE))",
        change="STATE.append(1) if i < 2 else None",
        max_captures=4,
    ),
    "an equal new dict": Use("{'a': 2.0}", scale="STATE['a']", change="STATE = {'a': 2.0}"),
    "set": Use("{1, 2}", scale="float(sum(STATE))", change="STATE = {1, 2 + i % 2}"),
    "array": Use(
        "np.ones(2)", scale="float(STATE.sum())", change="STATE[0] = i % 2", max_captures=3
    ),
    "set once": Use("0", scale="(STATE + 1.0)", after="STATE = 1"),
    "set to the shape": Use("None", after="STATE = tuple(batch.shape)"),
    "counter for the log": Use("0", after="STATE += 1", may_refuse=True),
    "counter that decides": Use(
        "0", scale="(2.0 if STATE % 2 else 1.0)", after="STATE += 1", may_refuse=True
    ),
    "toggle": Use(
        "False", scale="(2.0 if STATE else 1.0)", after="STATE = not STATE", may_refuse=True
    ),
    "tensor": Use("torch.full((), 0.5)", scale="STATE"),
    "tensor, another one": Use(
        "torch.full((), 0.5)", scale="STATE", change="STATE = torch.full((), 0.5 + i)"
    ),
    "tensor, changed in place": Use("torch.full((), 0.5)", scale="STATE", change="STATE.fill_(i)"),
    "tensor of another shape": Use(
        "torch.full((), 0.5)",
        scale="STATE.sum()",
        change="STATE = torch.ones(1 + i % 2)",
        max_captures=4,
    ),
    "running mean": Use(
        "torch.zeros(())", scale="(1 + STATE)", after="STATE = 0.9 * STATE + loss.detach()"
    ),
    "running sum in place": Use(
        "torch.zeros(())", scale="(1 + STATE)", after="STATE.add_(loss.detach())"
    ),
    "hidden state": Use(
        "None",
        before="h = torch.zeros(3, 2) if STATE is None else STATE",
        scale="(1 + h.sum())",
        after="STATE = torch.tanh(out.detach() + h)",
    ),
    "pair of tensors": Use(
        "(torch.zeros(()), torch.ones(()))",
        scale="(STATE[0] + STATE[1])",
        after="STATE = (STATE[1], loss.detach())",
    ),
    "list of tensors": Use(
        "[]", after="STATE.append(loss.detach())", may_refuse=False, max_captures=9
    ),
    "list of numbers": Use("[]", after="STATE.append(len(batch))", may_refuse=True, max_captures=9),
    "window": Use(
        "[torch.zeros(()), torch.zeros(())]",
        scale="(1 + STATE[0])",
        after="STATE.pop(0); STATE.append(loss.detach())",
        max_captures=3,
    ),
    "dict of tensors": Use("{}", after="STATE['loss'] = loss.detach()", max_captures=2),
    "a new list of tensors": Use(
        "[torch.zeros(())]", scale="(1 + STATE[0])", after="STATE = [loss.detach()]"
    ),
    "a new dict of tensors": Use(
        "{'h': torch.zeros(())}", scale="(1 + STATE['h'])", after="STATE = {'h': loss.detach()}"
    ),
    "nested new containers": Use(
        "{'h': [torch.zeros(())]}",
        scale="(1 + STATE['h'][0])",
        after="STATE = {'h': [loss.detach() * 2]}",
    ),
    "a new object of tensors": Use(
        "Kept(torch.zeros(()))", scale="(1 + STATE.h)", after="STATE = Kept(loss.detach())"
    ),
    "an equal new list, another tensor": Use(
        "[torch.full((), 0.5)]", scale="STATE[0]", change="STATE = [torch.full((), 0.5 + i)]"
    ),
    "an equal new list, written to": Use(
        "[torch.zeros(())]",
        scale="(1 + STATE[0])",
        after="STATE[0] = loss.detach()",
        change="STATE = list(STATE)",
    ),
    "detached parameter": Use("None", after="STATE = model[0].weight.detach()", max_captures=3),
    "order of a dict": Use(
        "{'a': 2.0, 'b': 3.0}",
        scale="[*STATE.values()][0]",
        change="STATE.update(a=STATE.pop('a')) if i == 1 else None",
    ),
    "removed": Use("{'a': 2.0}", scale="STATE.get('a', 3.0)", after="STATE.pop('a', None)"),
    "generator": Use("np.random.default_rng(0)", scale="float(STATE.random())", may_refuse=True),
    "iterator": Use("iter([1.0] * 4 + [2.0] * 40)", scale="next(STATE)", may_refuse=True),
}

TEMPLATE = """
import collections, math, types
import numpy as np
import torch
import {module}.side as pkg_side, {module} as pkg
from {module} import side
from support.python_state_programs import Holder, Kept, Slotted, Trainer
{outer}

def make(model, optimizer):
    late = ""
    {setup}

    def train_step(model, optimizer, batch):
        {declare}
        {before}
        out = model(batch)
        loss = out.square().mean() * {scale}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        {after}
        return loss

    def change(i):
        {declare}
        {change}

    def look():
        {declare}
        return STATE

    exec(late) if late else None
    return train_step, change, look
"""


class Holder:
    """An object of the user's."""

    v: Any


@dataclass
class Kept:
    """A dataclass with a tensor."""

    h: Any


class Slotted:
    """An object without a dict."""

    __slots__ = ("v",)


class Trainer:
    """An object whose bound method is the step, in some programs."""

    v: Any


_serial = 0


def made(place: Place, use: Use) -> tuple[Callable[..., Any], ...]:
    """A model, an optimizer, a step on them, a change between steps, and a look at the state."""
    global _serial
    _serial += 1
    package = f"rekindle_test_package_{_serial}"
    sys.modules[package] = types.ModuleType(package)
    side = sys.modules[f"{package}.side"] = types.ModuleType(f"{package}.side")
    sys.modules[package].side = side  # type: ignore[attr-defined]
    text = TEMPLATE.format(
        module=package,
        outer=place.outer,
        setup=place.setup.replace(
            "INITIAL", use.initial.replace("'", '"') if "late" in place.setup else use.initial
        ),
        declare=place.declare or "pass",
        before=use.before or "pass",
        scale=use.scale,
        after=use.after or "pass",
        change=use.change or "pass",
    ).replace("STATE", place.state)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    name = f"<program {_serial}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope: dict[str, Any] = {"__name__": f"program_{_serial}", "__builtins__": __builtins__}
    exec(compile(text, name, "exec"), scope)
    return model, optimizer, *scope["make"](model, optimizer)
