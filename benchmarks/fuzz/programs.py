"""From a seed to a random training program, as source text, and from the text to its objects.

A program's `make()` returns (model, optimizer, train_step, batch_of, change, look): a step, the
batch of each number, a change of the user's objects between steps, and a look at its Python state.
"""

from __future__ import annotations

import linecache
import random
import re
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from support.python_state_programs import PLACES, USES
from torch import nn

from benchmarks.fuzz import snippets
from benchmarks.fuzz.snippets import EMBEDDINGS, PARTS, PRELUDE, Part

N_STEPS = 3
MAX_PARTS = 7
DTYPES = ("float32", "float32", "float32", "float32", "bfloat16", "float16", "float64")
# Places that a program of this form has; the others need a model or names of their own.
_PLACES = [
    name for name in PLACES if name not in ("nested in model", "imported module", "submodule")
]
_USES = [name for name in USES if "out." not in USES[name].after]

_TEMPLATE = """{prelude}
{outer}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cfg = types.SimpleNamespace(scale=0.7)
        self.names, self.order, self.use_head = {{'a': 1.5}}, [0, 1], True
        self.drop, self.norm, self.head = nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("extra", torch.zeros(8))
{init}

    def forward(self, x):
        d = self.head.weight.dtype
{forward}
        if self.use_head:
            x = self.head(x)
        {tail}
        return x


def make():
    model = Net().to(DTYPE)
    optimizer = {optimizer}
    late = ""
    {setup}

    def train_step(model, optimizer, batch):
        {declare}
        extra = []
        {unpack}
{step}
        return loss, extra

    def batch_of(i):
        g = torch.Generator().manual_seed(100 + i)
        n = {rows}
        {batch}
        y = torch.randint(0, 3, (n,), generator=g){same_labels}
        {cast}
        return {form}

    def change(i):
        {declare}
{change}

    def look():
        {declare}
        return {look}

    exec(late) if late else None
    return model, optimizer, train_step, batch_of, change, look
"""

# Of the module attributes that every program has, those that its forward pass uses.
_TAILS = [
    "x = self.drop(self.norm(x)) + self.extra",
    "x = self.norm(x) * self.names['a']",
    "x = self.drop(x)",
    "x = x + self.extra + self.order[0]",
    "pass",
]


class Objects(NamedTuple):
    """What a program's `make()` returns."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train_step: Callable[..., Any]
    batch_of: Callable[[int], Any]
    change: Callable[[int], None]
    look: Callable[[], Any]


def source(seed: int) -> str:
    """The text of a random program."""
    return _Writer(random.Random(seed)).text()


def load(seed: int, text: str) -> Callable[[], Objects]:
    """A function that makes a program's objects anew; each call is a module of its own."""

    def make() -> Objects:
        name = _filename(seed)
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        module = types.ModuleType(f"rekindle_fuzz_{seed}")
        sys.modules[module.__name__] = module
        torch.manual_seed(seed)
        exec(compile(text, name, "exec"), module.__dict__)
        return Objects(*module.make())

    return make


def forget(seed: int) -> None:
    """Remove a program from the interpreter's tables."""
    linecache.cache.pop(_filename(seed), None)
    sys.modules.pop(f"rekindle_fuzz_{seed}", None)


def _filename(seed: int) -> str:
    return f"program_{seed}.py"


class _Writer:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._n_names = 0

    def text(self) -> str:
        rng = self._rng
        kind = rng.choice("vvvssit")
        init, forward = self._parts(kind)
        dtype = rng.choice(DTYPES)
        declare, setup, look, outer, state_before, scale, state_after, state_change = self._state()
        form, unpack = rng.choice(snippets.FORMS)
        changes = [state_change] if state_change else []
        changes += [self._pick(snippets.CHANGES) for _ in range(rng.choice((0, 0, 1, 1, 1, 2)))]
        rows = rng.choice(snippets.ROW_COUNTS) if rng.random() < 0.5 else "4"
        step = self._step(scale)
        if state_before:
            step = f"{state_before}\n{step}"
        if state_after:
            step = f"{step}\n{state_after}"
        return _TEMPLATE.format(
            prelude=PRELUDE,
            outer=f"{outer}\nDTYPE = torch.{dtype}",
            init=textwrap.indent("\n".join(init) or "pass", " " * 8),
            forward=textwrap.indent("\n".join(forward) or "pass", " " * 8),
            tail=rng.choice(_TAILS),
            optimizer=self._pick(snippets.OPTIMIZERS).replace(
                "GROUPS", self._pick(snippets.GROUPS)
            ),
            setup=setup,
            declare=declare,
            unpack=unpack,
            step=textwrap.indent(step, " " * 8),
            rows=rows,
            batch=rng.choice(snippets.BATCHES[kind]),
            same_labels=rng.choice(("", ".clamp(0, 0)", ".clamp(1, 2)")),
            cast="pass" if kind == "t" else self._cast(),
            form=form,
            change=textwrap.indent(self._change(changes), " " * 8),
            look=look,
        )

    def _pick(self, choices: list[str]) -> str:
        return self._filled(self._rng.choice(choices))

    def _filled(self, text: str) -> str:
        """Choose among alternatives, and number names."""
        self._n_names += 1
        text = re.sub(r"<<(.*?)>>", lambda m: self._rng.choice(m[1].split("|")), text, flags=re.S)
        return re.sub(r"(?<=\w)#", str(self._n_names), text)

    def _parts(self, kind: str) -> tuple[list[str], list[str]]:
        """Lines of `__init__` and `forward`, to a tensor of kind "v" in the end."""
        rng = self._rng
        init: list[str] = []
        forward: list[str] = []
        kept: dict[str, str] = {}  # by kind: an earlier tensor

        def add(part: Part) -> None:
            nonlocal kind
            lines = self._filled(f"{part.init}\0{part.forward}").split("\0")
            init.extend(line for line in lines[:1] if line)
            forward.extend(lines[1].split("\n"))
            kind = part.to or kind

        if kind == "t":
            add(rng.choice(EMBEDDINGS))
        else:
            forward.append("x = x.to(d)")
        if rng.random() < 0.3:
            first = {"v": "self.l0 = nn.Linear(8, 8)", "s": "self.l0 = nn.Linear(8, 8)"}
            init.append(first.get(kind, "self.l0 = nn.Conv2d(4, 4, 1)"))
            forward.append("x = self.l0(x)")
        for _ in range(rng.randint(1, MAX_PARTS)):
            if kind in kept and rng.random() < 0.2:
                kept_name = kept[kind]
                shaped = f"if x.shape == {kept_name}.shape: x = x "
                forward.append(f"{shaped}{rng.choice('+*-')} {kept_name}")
            if rng.random() < 0.25:
                self._n_names += 1
                kept[kind] = f"kept{self._n_names}"
                forward.append(f"{kept[kind]} = x")
            part = rng.choice([p for p in PARTS if kind in p.kinds])
            if rng.random() < 0.1:  # some of the model under autocast
                before = len(forward)
                add(part)
                dtype = rng.choice(("bfloat16", "bfloat16", "float16"))
                lines = textwrap.indent("\n".join(forward[before:]), "    ")
                forward[before:] = [f"with torch.autocast('cpu', torch.{dtype}):", lines]
                forward.append("x = x.to(d)")
            else:
                add(part)
        while kind != "v":
            add(rng.choice([p for p in PARTS if kind in p.kinds and p.to == "v"]))
        return init, forward

    def _step(self, scale: str) -> str:
        """The lines of a step: forward, loss, backward, update."""
        rng = self._rng
        lines = []
        starts_with_zero = rng.random() < 0.3
        if starts_with_zero:
            lines.append(f"optimizer.zero_grad(set_to_none={rng.random() < 0.7})")
        if rng.random() < 0.15:
            lines.append(self._pick(snippets.READS))
            scale = f"{scale} * scale"
        forward = f"out = model(x)\n{self._pick(snippets.LOSSES)}"
        if rng.random() < 0.12:
            dtype = rng.choice(("bfloat16", "bfloat16", "float16"))
            forward = f"with torch.autocast('cpu', torch.{dtype}):\n" + textwrap.indent(
                forward, "    "
            )
        forward += f"\nloss = loss * ({scale})"
        way = rng.random()
        if way < 0.1:
            lines.append(
                f"for _ in range(2):\n{textwrap.indent(forward, '    ')}\n    loss.backward()"
            )
        elif way < 0.15:
            lines += [forward, "loss.backward(retain_graph=True)", "(loss * 0.5).backward()"]
        elif way < 0.2:
            options = "create_graph=True, allow_unused=True"
            penalty = f"(found,) = torch.autograd.grad(loss, model.head.weight, {options})"
            lines += [
                forward,
                penalty,
                "if found is not None: loss = loss + found.float().square().sum()",
            ]
            lines.append("loss.backward()")
        elif way < 0.25:
            lines += [
                forward,
                "trained = [p for p in model.parameters() if p.requires_grad]",
                "grads = torch.autograd.grad(loss, trained, allow_unused=True)",
                "for p, grad in zip(trained, grads): p.grad = grad",
            ]
        else:
            lines += [forward, "loss.backward()"]
        if rng.random() < 0.25:
            lines.append(self._pick(snippets.AFTER_BACKWARD))
        lines.append("optimizer.step()")
        if not starts_with_zero and rng.random() < 0.9:
            lines.append(f"optimizer.zero_grad(set_to_none={rng.random() < 0.8})")
        if rng.random() < 0.3:
            lines.append(self._pick(snippets.RESULTS))
        if rng.random() < 0.7:
            lines.append("loss = loss.detach()")
        return "\n".join(lines)

    def _state(self) -> tuple[str, ...]:
        """Python state: declare, setup, look, outer, before, scale, after, change."""
        rng = self._rng
        if rng.random() > 0.2:
            return "pass", "", "None", "", "", "1.0", "", ""
        place, use = PLACES[rng.choice(_PLACES)], USES[rng.choice(_USES)]
        initial = use.initial.replace("'", '"') if "late" in place.setup else use.initial
        before = use.before.replace("torch.zeros(3, 2)", "torch.zeros(())")
        parts = (
            place.declare or "pass",
            place.setup.replace("INITIAL", initial),
            "STATE",
            place.outer,
            before,
            use.scale,
            use.after.replace("batch.shape", "x.shape").replace("len(batch)", "len(x)"),
            use.change,
        )
        return tuple(part.replace("STATE", place.state) for part in parts)

    def _cast(self) -> str:
        """The batch has the model's dtype, or one that changes."""
        way = self._rng.random()
        if way < 0.1:
            return "x = x.double() if i == 1 else x"
        return "x = x.to(torch.bfloat16)" if way < 0.15 else "pass"

    def _change(self, changes: list[str]) -> str:
        rng = self._rng
        lines = []
        for text in changes:
            when = rng.choice(("i == 0", "i == 1", "True"))
            lines.append(f"if {when}:\n{textwrap.indent(text, '    ')}")
        return "\n".join(lines) or "pass"
