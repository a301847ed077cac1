"""The Python state of a step: variables, attributes and containers that its code reads or writes.

A step's numbers depend on more than tensors: a weight in a global, a counter in a closure, an
attribute of a trainer or a config. While a step is traced, every function of the user or of a
library that runs is noted *before* its first line: the globals, closure variables and defaults that
it names, and the objects that these lead to. Of an object, only attributes count whose names occur
in the code of a function that has run. All of it is noted in its state before the step, so that
writes can be found, replayed and undone, and a guard can compare it before each step.
"""

from __future__ import annotations

import builtins
import enum
import gc
import io
import logging
import os
import sys
import time
import types
from collections import deque
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from rekindle.core.identity import IdentityDict
from rekindle.tracing import batch_tree
from rekindle.tracing.code_names import (
    is_noted,
    is_of_torch_file,
    names_in,
)
from rekindle.tracing.contents import (
    ABSENT,
    CONSTANTS,
    WHOLE,
    Array,
    Attributes,
    Content,
    Elements,
    Items,
    Slots,
    TensorPlace,
    is_same_constant,
)
from rekindle.tracing.global_state import code_around_steps
from rekindle.tracing.object_walk import CALLABLES, ObjectWalk
from rekindle.tracing.user_line import NOWHERE, Line

log = logging.getLogger("rekindle")


# C functions whose results change by themselves.
_OUTSIDE = frozenset(
    {
        *(time.time, time.monotonic, time.perf_counter, time.process_time),
        *(time.time_ns, time.monotonic_ns, time.perf_counter_ns),
        *(os.stat, os.listdir, os.scandir, os.access, io.open),
    }
)


class WriteKind(enum.Enum):
    """How the step writes to an entry."""

    SET = "set"
    REMOVE = "remove"
    APPEND = "append"  # to a list that the step does not read
    ADD = "add"  # to a counter that the step does not read otherwise
    REORDER = "reorder"  # the keys of a dict, which is refused


@dataclass(frozen=True)
class Write:
    """An entry that the step has written to; `value` is the new, appended or added one."""

    content: Content
    key: Any
    value: Any
    kind: WriteKind = WriteKind.SET

    @property
    def name(self) -> str:
        """The entry as a user would write it."""
        return self.content.label(self.key)


class PythonState(ObjectWalk):
    """Finds and notes the Python state of a step while the step is traced."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        train_step: Callable[..., Any],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        super().__init__()
        self._hooks: list[CodeType] = []  # around the optimizer's step
        self._outside: dict[Line, str] = {}  # lines that read the clock or a file
        for path, module in modules.items():
            self._visit_module(path, module)
        if optimizer is not None:
            self._visit(optimizer, "optimizer")
        self._visit(train_step, getattr(train_step, "__name__", "train_step"))
        for name, value in code_around_steps():
            self._visit(value, name)

    @contextmanager
    def applied(self, effects: Iterable[Callable[[], None]]) -> Iterator[None]:
        """The state after a step's effects, inside the block."""
        try:
            for apply in effects:
                apply()
            yield
        finally:
            self.restore()

    def add_step_hooks(self, hooks: Iterable[Callable[..., Any]]) -> None:
        """Note hooks around the optimizer's step, which run in captured steps only."""
        for hook in hooks:
            self._visit(hook, "a hook of the optimizer")
            function = getattr(hook, "__func__", hook)
            if isinstance(function, types.FunctionType):
                self._hooks.append(function.__code__)
                self.enter(function.__code__, function.__globals__)

    def stores_of_hooks(self) -> list[Write]:
        """What hooks around the optimizer's step may write: containers, and names in their code."""
        if not self._hooks:
            return []
        names = {name for code in self._hooks for name in names_in(code).stored_at}
        return [
            Write(content, key, None)
            for content in self.all_contents()
            for key in content.before
            if key in names or type(content) in (Items, Elements)
        ]

    def noted(self, writes: Iterable[Write]) -> tuple[Content, Any] | None:
        """The first of some writes to an entry that is part of this state."""
        for write in writes:
            owner = write.content.owner
            if isinstance(write.content, Attributes):
                owner = write.content.attributes
            for content in (*self._contents.get(owner, {}).values(), *self._scopes(owner)):
                if write.key in content.before or write.key in content.read():
                    return content, write.key
        return None

    def _scopes(self, owner: Any) -> list[Content]:
        found = self._globals.get(owner) if isinstance(owner, dict) else None
        return [] if found is None else [found]

    # What runs

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note every function that this thread calls inside the block.

        There is no garbage collection in it: finalizers are no part of the step.
        """
        previous, collects = sys.getprofile(), gc.isenabled()
        gc.disable()
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()
            if previous is not None:
                enable = getattr(previous, "enable", None)  # cProfile's, which C code installs
                enable() if enable is not None else sys.setprofile(previous)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing inside the block."""
        current = sys.getprofile()
        if current != self._on_event:
            yield
            return
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(current)

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if frame.f_code not in self.codes:
                self.enter(frame.f_code, frame.f_globals)
        elif event == "c_call" and arg in _OUTSIDE:
            self._note_outside(frame, arg)

    def _note_outside(self, frame: FrameType | None, function: Any) -> None:
        """Note that the user's code reads the clock or a file, by way of the standard library."""
        for _ in range(4):
            if frame is None or is_of_torch_file(frame.f_code.co_filename):
                return
            if is_noted(frame.f_code):
                line = Line(frame.f_code.co_filename, frame.f_lineno)
                self._outside.setdefault(line, function.__name__)
                return
            frame = frame.f_back

    def reads_outside(self) -> dict[Line, str]:
        """The lines of the step that read the clock or a file, and what they call."""
        return self._outside

    def enter(self, code: CodeType, scope: dict[str, Any]) -> None:
        """Note the state that a function can name, before it runs."""
        names = self.codes[code] = names_in(code)
        if not is_noted(code):
            return
        held = self._scope(scope)
        assert held.names is not None
        for name in names.globals - scope.keys():
            if isinstance(vars(builtins).get(name), (*CONSTANTS, list, dict, set)):
                self._note_in_module(builtins, {name})  # put there by the user
        added = {name for name in names.globals if name in scope or not _is_builtin(name)}
        added -= held.names
        held.names |= added
        self._note_entries(held, added)
        for first, *rest in names.chains:
            self._note_chain(scope.get(first), rest)
            if first in names.imports:
                self._note_chain(sys.modules.get(names.imports[first]), rest)
        for name, attribute in names.imported:
            self._note_chain(sys.modules.get(name), [attribute])
        if names.is_by_text:  # globals()["weight"], sys.modules["config"].weight
            texts = names.texts.intersection(scope) - held.names
            held.names |= texts
            self._note_entries(held, texts)
            for name in names.texts.intersection(sys.modules):
                self._visit(sys.modules[name], name)
        for function in list(self._functions.get(code, ())):
            self._enter_function(function)
        self._add_names(names.attributes)
        if names.is_by_key:
            for content in self._groups:
                content.names = None
                self._note_entries(content, set(content.attributes) - {"params"})
                content.ignored.add("params")
        if names.is_wholesale:
            for first, *rest in names.chains:
                if not rest and isinstance(scope.get(first), types.ModuleType):
                    for name, value in list(vars(scope[first]).items()):
                        if isinstance(value, CONSTANTS):
                            self._note_chain(scope[first], [name])
        if names.is_wholesale and not self._is_wholesale:
            self._is_wholesale = True
            for content in list(self._filtered):
                content.names = None
                self._note_entries(content, set(content.attributes))

    # Results

    def functions(self) -> list[types.FunctionType]:
        """The functions that have run, as far as they are known."""
        ran = (fs for code, fs in self._functions.items() if code in self.codes)
        return [function for functions in ran for function in functions]

    def places_of(self, tensor: torch.Tensor) -> list[TensorPlace]:
        """Where the user's objects hold a tensor."""
        return self._tensors.get(tensor, [])

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in the state."""
        return list(self._tensors)

    def writes(self) -> list[Write]:
        """Every entry that the step has changed."""
        found: IdentityDict[dict[Any, Write]] = IdentityDict()
        for content in self.all_contents():
            owner = content.attributes if isinstance(content, Attributes) else content.owner
            for key, value in content.changed().items():
                write = self._write(content, key, value)
                if write is not None:
                    found.setdefault(owner, {})[key] = write
            if content.is_reordered(content.before):
                found.setdefault(owner, {})[WHOLE] = Write(content, WHOLE, None, WriteKind.REORDER)
        return [write for writes in found.values() for write in writes.values()]

    def _write(self, content: Content, key: Any, value: Any) -> Write | None:
        before = content.before.get(key, ABSENT)
        if value is ABSENT:
            return Write(content, key, value, WriteKind.REMOVE)
        if isinstance(content, Array):
            return Write(content, key, content.owner)
        if isinstance(content, Elements) and self._is_appended(content, value):
            return Write(content, key, value[len(before) :], WriteKind.APPEND)
        if is_same_constant(value, before):
            return None
        if type(value) is int and type(before) is int and self._uses(str(key)) == {"add"}:
            return Write(content, key, value - before, WriteKind.ADD)
        return Write(content, key, value)

    def _uses(self, name: str) -> set[str]:
        """How functions that have run use a variable or attribute of this name."""
        if self._is_wholesale or any(name in names.texts for names in self.codes.values()):
            return {"read"}
        return {use for names in self.codes.values() for use in names.uses_of.get(name, ())}

    def _is_appended(self, content: Content, now: list[Any]) -> bool:
        """True if values were appended to a list that no function that has run can read."""
        before = content.before[WHOLE]
        if not isinstance(content.owner, (list, deque)) or len(now) < len(before):
            return False
        if not all(a is b for a, b in zip(now, before, strict=False)):
            return False
        return not content.is_shared and self._uses(content.path.rpartition(".")[2]) == {"append"}

    def iterators(self) -> list[tuple[Line, str]]:
        """The iterators that the step's code names, such as a data loader's, and its lines."""
        return [
            (NOWHERE if place is None else self.line_of(place.content, place.key), path)
            for place, path in self._iterators
            if place is None
            or not isinstance(place.content, Attributes)
            or place.key in self._names
            or place.content.names
        ]

    def seeded(self) -> str:
        """The name of a torch generator that the step has seeded; empty if there is none."""
        return next((n for n, g, seed in self._generators if g.initial_seed() != seed), "")

    def clear_caches(self) -> None:
        """Empty the caches of functions, which may hold tensors of the trace."""
        for cache in self._caches:
            cache.cache_clear()

    def arrays(self) -> list[Array]:
        """The numpy arrays in the state."""
        return [c for c in self.all_contents() if isinstance(c, Array)]

    def is_container(self, value: Any) -> bool:
        """True for a list, dict or other container that existed before the step."""
        return value in self._held and any(
            isinstance(content, (Items, Elements, Slots)) for content in self._contents_of(value)
        )

    def fix(self, value: Any) -> None:
        """Note that the step returns an object from before: no other one may take its place."""
        for content in self._contents_of(value):
            content.is_fixed = True

    def is_known(self, value: Any) -> bool:
        """True for objects that existed before the step, and for functions and the like."""
        if isinstance(value, CONSTANTS) or value in self._held:
            return True
        return isinstance(value, CALLABLES) and not isinstance(value, nn.Module)

    def line_of(self, content: Content, key: Any) -> Line:
        """The line that writes an entry, as far as the code shows it."""
        key = content.path if key is WHOLE else str(key)
        name = key.rpartition(".")[2].partition("[")[0]
        for stores in (True, False):
            for code, names in self.codes.items():
                if is_noted(code):
                    lines = names.stored_at if stores else names.loaded_at
                    if name in lines:
                        return Line(code.co_filename, lines[name])
        return NOWHERE

    def restore(self) -> None:
        """Undo what the step has changed; if interrupted, another call completes it."""
        for content in self.all_contents():
            content.restore()


def _is_builtin(name: str) -> bool:
    return name in vars(sys.modules["builtins"])


def holder_of(tensor: torch.Tensor) -> str:
    """A description of an object that holds a tensor; empty if it cannot be found."""
    for holder in gc.get_referrers(tensor):
        if isinstance(holder, dict):
            owners = [o for o in gc.get_referrers(holder) if batch_tree.attributes_of(o) is holder]
            return f"a {type(owners[0]).__name__}" if owners else "a dict"
        if not isinstance(holder, (FrameType, list, tuple)):
            return f"a {type(holder).__name__}"
    return ""
