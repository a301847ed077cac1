"""The Python state of a step: variables, attributes and containers that its code reads or writes.

A step's numbers depend on more than tensors: a weight in a global, a counter in a closure, an
attribute of a trainer or a config. While a step is traced, every function of the user or of a
library that runs is noted *before* its first line: the globals, closure variables and defaults that
it names, and the objects that these lead to. Of an object, only attributes count whose names occur
in the code of a function that has run. All of it is noted in its state before the step, so that
writes can be found, replayed and undone, and a guard can compare it before each step.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import gc
import io
import logging
import operator
import os
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSet,
    Set,
)
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from rekindle.core.identity import IdentityDict, IdentitySet
from rekindle.tracing import batch_tree
from rekindle.tracing.capture_thread import is_replacement
from rekindle.tracing.code_names import (
    CodeNames,
    is_noted,
    is_noted_class,
    is_noted_file,
    is_of_torch,
    names_in,
)
from rekindle.tracing.contents import (
    ABSENT,
    CONSTANTS,
    WHOLE,
    Array,
    Attributes,
    Cell,
    Content,
    ContextVariable,
    Elements,
    Items,
    RandomState,
    Slots,
    TensorPlace,
    is_same_constant,
)
from rekindle.tracing.user_line import NOWHERE, Line

log = logging.getLogger("rekindle")


_MAX_CONTENTS = 200_000
_MAX_ELEMENTS = 100_000
_MAX_ARRAY_BYTES = 1 << 26

_CALLABLES = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType),
    *(functools.partial, torch.Generator, torch.nn.Module, torch.optim.Optimizer, logging.Logger),
)
# Attributes of torch's objects that say what they do; others are scratch space.
_RELEVANT = {torch.autocast: {"device", "fast_dtype", "_enabled", "_cache_enabled"}}


class WriteKind(enum.Enum):
    """How the step writes to an entry."""

    SET = "set"
    REMOVE = "remove"
    APPEND = "append"  # to a list that the step does not read
    ADD = "add"  # to a counter that the step does not read otherwise


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


class PythonState:
    """Finds and notes the Python state of a step while the step is traced."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        train_step: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._contents: IdentityDict[dict[type, Content]] = IdentityDict()  # by owner, or its dict
        self.codes: dict[CodeType, CodeNames] = {}  # of functions that have run
        self._names: set[str] = set()
        self._is_wholesale = False  # some function reads attributes without naming them
        self._filtered: list[Attributes] = []
        self._globals: IdentityDict[Attributes] = IdentityDict()
        self._functions: dict[CodeType, list[types.FunctionType]] = {}
        self._held = IdentitySet()  # visited objects without content of their own
        self._tensors: IdentityDict[list[TensorPlace]] = IdentityDict()
        self._iterators: list[tuple[Content, Any]] = []
        self._is_full = False
        self._queue: deque[tuple[Any, str]] = deque()
        self._is_draining = False
        for path, module in modules.items():
            self._visit_module(path, module)
        self._visit(optimizer, "optimizer")
        self._visit(train_step, getattr(train_step, "__name__", "train_step"))

    def add_module(self, path: str, module: nn.Module) -> None:
        """Note a module from outside the model that the step calls."""
        self._visit_module(path, module)

    @contextmanager
    def applied(self, effects: Iterable[Any]) -> Iterator[None]:
        """The state after a step's effects on constants, inside the block."""
        try:
            for effect in effects:
                effect.apply(())
            yield
        finally:
            self.restore()

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
        if event == "call" and frame.f_code not in self.codes:
            self.enter(frame.f_code, frame.f_globals)

    def enter(self, code: CodeType, scope: dict[str, Any]) -> None:
        """Note the state that a function can name, before it runs."""
        names = self.codes[code] = names_in(code)
        if not is_noted(code):
            return
        held = self._scope(scope)
        assert held.names is not None
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
        for function in list(self._functions.get(code, ())):
            self._enter_function(function)
        self._add_names(names.attributes)
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

    def _note_chain(self, value: Any, attributes: list[str]) -> None:
        """Note the attributes of modules in `module.attribute`, or `package.module.attribute`."""
        for name in attributes:
            if value is os and name in ("environ", "environb", "getenv"):
                self._visit(os.environ, "os.environ")
            is_module = isinstance(value, types.ModuleType)
            if not is_module or not is_noted_file(getattr(value, "__file__", None) or ""):
                return
            scope = vars(value)
            content = self._scope(scope)
            content.names.add(name)  # type: ignore[union-attr]
            self._note_entries(content, {name})
            value = scope.get(name)

    def _scope(self, scope: dict[str, Any]) -> Attributes:
        """The content of a module's globals."""
        found = self._globals.get(scope)
        if found is None:
            found = self._globals[scope] = Attributes("", scope, scope, set())
        return found

    def _note_entries(self, content: Attributes, names: Set[str]) -> None:
        """Note attributes of a content whose names have just become relevant."""
        for name in names:
            if name in content.attributes and name not in content.before:
                value = content.attributes[name]
                if is_replacement(value):  # of a capture, for its own time
                    content.ignored.add(name)
                    continue
                content.before[name] = value
                self._visit_entry(content, name, value)

    def _enter_function(self, function: types.FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if name != "__class__" and cell not in self._contents:
                self._add(Cell(name, cell))
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for value in defaults:
            self._visit(value, f"a default of {function.__qualname__}")

    # What it leads to

    def _visit_module(self, path: str, module: nn.Module) -> None:
        if module.__dict__ in self._contents:
            return
        content = Attributes(path, module, module.__dict__)
        self._contents[module.__dict__] = {Attributes: content}
        self._visit_class(type(module))
        for key, value in content.before.items():
            if key.startswith(_OF_STATE_DICTS):
                continue
            if key in _REGISTRIES:
                self._visit_attributes(path, value, value, None)
            else:
                self._visit_entry(content, key, value)

    def _add(self, content: Content) -> None:
        self._contents.setdefault(content.owner, {})[type(content)] = content
        for key, value in list(content.before.items()):
            self._visit_entry(content, key, value)

    def _visit_entry(self, content: Content, key: Any, value: Any) -> None:
        if isinstance(content, Elements):
            for index, element in enumerate(value):
                self._visit_tuple(content, key, (index,), element)
        elif not isinstance(content, Array):
            self._visit_tuple(content, key, (), value)

    def _visit_tuple(self, content: Content, key: Any, path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor):
            place = TensorPlace(content, key, path)
            self._tensors.setdefault(value, []).append(place)
        elif isinstance(value, tuple) and not isinstance(value, CONSTANTS):
            for index, element in enumerate(value):
                self._visit_tuple(content, key, (*path, index), element)
        elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            self._iterators.append((content, key))
        elif value is not None:
            self._visit(value, TensorPlace(content, key, path).label)

    def _visit(self, value: Any, path: str) -> None:
        """Note an object and all that it leads to, without recursion."""
        self._queue.append((value, path))
        if len(self._queue) > 1 or self._is_draining:
            return
        self._is_draining = True
        try:
            while self._queue:
                self._visit_one(*self._queue.popleft())
        finally:
            self._is_draining = False
            self._queue.clear()

    def _visit_one(self, value: Any, path: str) -> None:
        if isinstance(value, CONSTANTS) or self._is_full:
            return
        if value in self._held:
            for content in self._contents.get(value, {}).values():
                content.is_shared = True
            return
        self._held.add(value)
        if len(self._held) > _MAX_CONTENTS:
            self._is_full = True
            log.warning(
                "the step reaches more than %d Python objects, by way of %s: a change of others "
                "between steps is not seen",
                _MAX_CONTENTS,
                path,
            )
            return
        match value:
            case torch.Tensor():
                self._tensors.setdefault(value, [])
            case nn.Module():
                self._visit_module(path, value)
            case types.FunctionType() if value is os.getenv:
                self._visit(os.environ, "os.environ")
            case types.FunctionType() if not is_noted(value.__code__):
                pass
            case types.FunctionType():
                self._functions.setdefault(value.__code__, []).append(value)
                if value.__code__ in self.codes:
                    self._enter_function(value)
                if value.__dict__:
                    self._visit_attributes(path, value, value.__dict__, self._names)
            case types.MethodType():
                self._visit(value.__func__, path)
                self._visit(value.__self__, path.rpartition(".")[0] or "self")
            case functools.partial():
                self._visit(value.func, path)
                for each in (*value.args, *value.keywords.values()):
                    self._visit(each, f"an argument of the partial {path}")
            case staticmethod() | classmethod():
                self._visit(value.__func__, path)
            case property():
                for each in (value.fget, value.fset, value.fdel):
                    self._visit(each, path) if each is not None else None
            case type():
                self._visit_class(value)
            case types.ModuleType():
                pass  # see `_note_chain`
            case np.ndarray():
                self._visit_array(path, value)
            case random.Random() | np.random.RandomState() if is_global_generator(value):
                pass  # what the step draws of it is refused, see `intercept`
            case random.Random() | np.random.Generator() | np.random.RandomState():
                self._add(RandomState(path, value))
            case weakref.ReferenceType():
                self._visit(value(), f"{path}()")
            case tuple():
                for index, element in enumerate(value):
                    self._visit(element, f"{path}[{index}]")
            case torch.optim.Optimizer():
                self._visit_optimizer(path, value)
            case _ if isinstance(value, _CALLABLES):
                pass
            case _:
                self._visit_object(path, value)

    def _visit_object(self, path: str, value: Any) -> None:
        module = type(value).__module__
        if module.startswith(("torch._", "torch.jit", "torch.fx")):
            return  # operators and compiled functions
        if module.startswith("rekindle.") and not module.startswith("rekindle.models."):
            return
        if isinstance(value, (MutableMapping, list, deque, MutableSet)):
            if len(value) > _MAX_ELEMENTS:
                log.warning(
                    "%s has %d elements: a change of it between steps is not seen", path, len(value)
                )
                return
            is_items = isinstance(value, MutableMapping)
            if not is_items or isinstance(value, dict):
                self._add((Items if is_items else Elements)(path, value))
        is_local = isinstance(value, threading.local)  # whose dict is this thread's
        attributes = value.__dict__ if is_local else batch_tree.attributes_of(value)
        if attributes is not None:
            of_torch = is_of_torch(sys.modules.get(type(value).__module__))
            names = None if of_torch or isinstance(value, Collection) else self._names
            relevant = next((r for kind, r in _RELEVANT.items() if isinstance(value, kind)), None)
            self._visit_attributes(path, value, attributes, relevant or names)
        slots = _slots(type(value))  # type: ignore[arg-type]
        if slots:
            self._add(Slots(path, value, slots))
        if attributes is None and not slots and value not in self._contents:
            self._visit_opaque(path, value)
        self._visit_class(type(value))

    def _visit_opaque(self, path: str, value: Any) -> None:
        """Note what an object without attributes leads to: a variable, a buffer, other objects."""
        if isinstance(value, contextvars.ContextVar):
            self._add(ContextVariable(value.name, value))
            return
        if isinstance(value, (operator.attrgetter, operator.methodcaller)):
            names = [each for each in value.__reduce__()[1] if isinstance(each, str)]
            self._add_names({part for name in names for part in name.split(".")})
            return
        try:
            memoryview(value).release()
        except (TypeError, ValueError, BufferError):
            pass
        else:
            self._add(Array(path, value))
            return
        if type(value).__module__ not in ("builtins", "collections", "functools", "itertools"):
            return
        for each in gc.get_referents(value):
            if not isinstance(each, (type, types.ModuleType)):
                self._visit(each, path)

    def _add_names(self, names: Set[str]) -> None:
        """Note attributes of these names of all objects."""
        new = names - self._names
        self._names |= new
        for content in list(self._filtered):
            self._note_entries(content, new)

    def _visit_attributes(
        self, path: str, owner: Any, attributes: Any, names: set[str] | None
    ) -> None:
        if self._is_wholesale and names is self._names:
            names = None
        content = Attributes(path, owner, attributes, names)
        held = attributes if isinstance(attributes, dict) else owner
        self._contents.setdefault(held, {})[Attributes] = content
        if names is self._names:
            self._filtered.append(content)
        for key, value in list(content.before.items()):
            if is_replacement(value):
                content.ignored.add(key)
                del content.before[key]
            else:
                self._visit_entry(content, key, value)

    def _visit_class(self, cls: type) -> None:
        """Note attributes of a class of the user or a library, and its functions."""
        for each in cls.__mro__:
            if each in self._contents or not is_noted_class(each):
                continue
            self._held.add(each)
            self._visit_attributes(each.__name__, each, vars(each), self._names)
            for value in vars(each).values():
                if isinstance(value, (types.FunctionType, staticmethod, classmethod, property)):
                    self._visit(value, each.__name__)

    def _visit_array(self, path: str, array: np.ndarray[Any, Any]) -> None:
        if array.nbytes > _MAX_ARRAY_BYTES:
            log.warning("%s has %d bytes: a change between steps is not seen", path, array.nbytes)
        else:
            self._add(Array(path, array))

    def _visit_optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        """Note the settings that the step's own code names; the optimizer reads its own itself."""
        for index, group in enumerate(optimizer.param_groups):
            where = f"{path}.param_groups[{index}]"
            self._visit_attributes(where, group, group, self._names)

    # Results

    def all_contents(self) -> list[Content]:
        """Every object whose content is part of the state."""
        return [
            *(c for kinds in self._contents.values() for c in kinds.values()),
            *self._globals.values(),
        ]

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

    def iterators(self) -> list[tuple[Content, Any]]:
        """The iterators that the step's code names, such as a data loader's."""
        return [
            (content, key)
            for content, key in self._iterators
            if not isinstance(content, Attributes) or key in self._names or content.names
        ]

    def is_known(self, value: Any) -> bool:
        """True for objects that existed before the step, and for functions and the like."""
        if isinstance(value, CONSTANTS) or value in self._held:
            return True
        return isinstance(value, _CALLABLES) and not isinstance(value, nn.Module)

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


_OF_STATE_DICTS = ("_non_persistent_buffers", "_state_dict", "_load_state_dict")
_REGISTRIES = ("_parameters", "_buffers", "_modules")


def _is_builtin(name: str) -> bool:
    return name in vars(sys.modules["builtins"])


@functools.lru_cache(maxsize=4096)
def _slots(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in cls.__mro__:
        if is_noted_class(each):
            declared = vars(each).get("__slots__", ())
            names = (declared,) if isinstance(declared, str) else tuple(declared)
            found |= {name: vars(each)[name] for name in names if name in vars(each)}
    return found


def is_global_generator(value: Any) -> bool:
    """True for the generators behind the functions of `random` and `np.random`."""
    of_functions = (random.random, np.random.random)
    return any(value is getattr(function, "__self__", None) for function in of_functions)


def holder_of(tensor: torch.Tensor) -> str:
    """A description of an object that holds a tensor; empty if it cannot be found."""
    for holder in gc.get_referrers(tensor):
        if isinstance(holder, dict):
            owners = [o for o in gc.get_referrers(holder) if batch_tree.attributes_of(o) is holder]
            return f"a {type(owners[0]).__name__}" if owners else "a dict"
        if not isinstance(holder, (FrameType, list, tuple)):
            return f"a {type(holder).__name__}"
    return ""
