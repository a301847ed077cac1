"""Walks over Python objects, and notes the content of those that a step may read or write.

It starts from the model, the optimizer, the step's function and the functions that run
(`python_state`), and goes on to everything that these lead to. No code of the user's runs.
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
import threading
import types
import weakref
from collections import deque
from collections.abc import (
    Collection,
    Iterator,
    MutableMapping,
    MutableSet,
    Set,
)
from contextlib import suppress
from types import CodeType
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
)
from rekindle.tracing.contents import (
    CONSTANTS,
    Array,
    Attributes,
    Cell,
    Content,
    ContextVariable,
    Elements,
    Flag,
    Items,
    RandomState,
    Slots,
    SpecialMethods,
    Stream,
    TensorPlace,
    ThreadLocal,
)

log = logging.getLogger("rekindle")


_MAX_CONTENTS = 200_000
_MAX_ELEMENTS = 100_000
_MAX_ARRAY_BYTES = 1 << 26

CALLABLES = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType),
    *(functools.partial, torch.Generator, torch.nn.Module, torch.optim.Optimizer, logging.Logger),
)
# What a wrapper may call; other objects in its closure are its own.
_WRAPPED = (
    *(types.FunctionType, types.MethodType, functools.partial, nn.Module),
    *(types.BuiltinFunctionType, types.MethodWrapperType),
)
# Modules whose objects are shared with other threads and processes.
_OF_THREADS = frozenset(
    {
        *("threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio"),
        *("logging", "socket", "selectors", "subprocess", "contextlib"),
    }
)
# Attributes of torch's objects that say what they do; others are scratch space.
_RELEVANT = {torch.autocast: {"device", "fast_dtype", "_enabled", "_cache_enabled"}}


class ObjectWalk:
    """Finds the objects that some objects lead to, and notes their content.

    Of an object, only attributes count whose names occur in code that has run (`_names`): as more
    functions run, more of them are noted.
    """

    def __init__(self) -> None:
        self._contents: IdentityDict[dict[type, Content]] = IdentityDict()  # by owner, or its dict
        self.codes: dict[CodeType, CodeNames] = {}  # of functions that have run
        self._names: set[str] = set()
        self._is_wholesale = False  # some function reads attributes without naming them
        self._filtered: list[Attributes] = []
        self._groups: list[Attributes] = []  # of the optimizer
        self._globals: IdentityDict[Attributes] = IdentityDict()
        self._functions: dict[CodeType, list[types.FunctionType]] = {}
        self._held = IdentitySet()  # visited objects without content of their own
        self._tensors: IdentityDict[list[TensorPlace]] = IdentityDict()
        self._iterators: list[tuple[TensorPlace | None, str]] = []
        self._generators: list[tuple[str, torch.Generator, int]] = []  # with their seeds
        self._modules: IdentityDict[str] = IdentityDict()  # that are used as objects
        self._caches: list[Any] = []  # of lru_cache
        self._is_full = False
        self._queue: deque[tuple[Any, str, TensorPlace | None]] = deque()
        self._is_draining = False

    def add_module(self, path: str, module: nn.Module) -> None:
        """Note a module from outside the model that the step calls."""
        self._visit_module(path, module)

    def add_hooks(self, name: str, tensor: torch.Tensor) -> None:
        """Note what users have put on a tensor of the model: hooks and attributes."""
        for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):  # type: ignore[attr-defined]
            for hook in (hooks or {}).values():
                self._visit(hook, f"a hook of {name}")
        if vars(tensor):
            self._visit_attributes(name, tensor, vars(tensor), self._names)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note all of an optimizer's own attributes, for code of its own."""
        attributes = vars(optimizer)
        for name, value in attributes.items():
            if name not in _OF_OPTIMIZERS and name != "step":
                self._visit(value, f"optimizer.{name}")
        if is_noted_class(type(optimizer)):
            self._visit_class(type(optimizer))

    def _note_chain(self, value: Any, attributes: list[str]) -> None:
        """Note the attributes of modules in `module.attribute`, or `package.module.attribute`."""
        for name in attributes:
            if value is os and name in ("environ", "environb", "getenv"):
                self._visit(os.environ, "os.environ")
            if not isinstance(value, types.ModuleType):
                return
            scope = vars(value)
            if not is_noted_file(getattr(value, "__file__", None) or ""):
                if isinstance(scope.get(name), types.FunctionType) and is_of_torch(value):
                    held = self._scope(scope)  # which may be replaced, but not looked into
                    assert held.names is not None
                    if not is_replacement(scope[name]):
                        held.names.add(name)
                        held.before[name] = scope[name]
                value = scope.get(name)
                continue
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
            is_new = name not in content.before and name not in content.ignored
            if is_new and name in content.attributes:
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

    def _enter_wrapper(self, function: types.FunctionType, path: str) -> None:
        """Note the functions that a wrapper of torch or the standard library calls."""
        for cell in function.__closure__ or ():
            with suppress(ValueError):
                if isinstance(cell.cell_contents, _WRAPPED):
                    self._visit(cell.cell_contents, path)
        for name in ("__wrapped__", "_torchdynamo_orig_callable"):
            if name in vars(function):
                self._visit(vars(function)[name], path)

    # What it leads to

    def _visit_module(self, path: str, module: nn.Module) -> None:
        if module.__dict__ in self._contents:
            return
        content = Attributes(path, module, module.__dict__)
        self._contents[module.__dict__] = {Attributes: content}
        self._visit_class(type(module))
        for each in type(module).__mro__:
            if each not in self._contents and "forward" in vars(each):  # of torch
                methods = SpecialMethods(each.__name__, each, vars(each), {"forward"})
                self._contents[each] = {SpecialMethods: methods}
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
        elif value is not None:
            place = TensorPlace(content, key, path)
            self._visit(value, place.label, place)

    def _visit(self, value: Any, path: str, place: TensorPlace | None = None) -> None:
        """Note an object, at a place, and all that it leads to, without recursion."""
        self._queue.append((value, path, place))
        if len(self._queue) > 1 or self._is_draining:
            return
        self._is_draining = True
        try:
            while self._queue:
                self._visit_one(*self._queue.popleft())
        finally:
            self._is_draining = False
            self._queue.clear()

    def _visit_one(self, value: Any, path: str, place: TensorPlace | None) -> None:
        if isinstance(value, enum.Enum) and value not in self._held:
            self._held.add(value)
            self._visit_attributes(path, value, vars(value), self._names)
            self._visit_class(type(value))
        if isinstance(value, CONSTANTS) or self._is_full:
            return
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            self._iterators.append((place, path))
            return
        is_new = value not in self._held
        if is_new:
            self._visit_new(value, path)
        for content in self._contents_of(value):
            content.is_shared |= not is_new
            if place is not None:
                place.content.children.setdefault(place.key, []).append((place.path, content))

    def _contents_of(self, value: Any) -> list[Content]:
        """The contents of an object itself."""
        if isinstance(value, (type, types.FunctionType, types.ModuleType, nn.Module)):
            return []
        found = [*self._contents.get(value, {}).values()]
        attributes = batch_tree.attributes_of(value)
        if attributes is not None:
            found += self._contents.get(attributes, {}).values()
        return found

    def _visit_new(self, value: Any, path: str) -> None:
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
                self._enter_wrapper(value, path)
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
                if is_noted_file(getattr(value, "__file__", None) or ""):
                    self._modules[value] = path
                    self._note_in_module(value, self._names)
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                if not isinstance(value.__self__, (types.ModuleType, type(None), type)):
                    self._visit(value.__self__, f"{path}.__self__")
            case torch.Generator():
                self._generators.append((path, value, value.initial_seed()))
            case np.ndarray():
                self._visit_array(path, value)
            case random.Random() | np.random.RandomState() if is_global_generator(value):
                pass  # what the step draws of it is refused, see `intercept`
            case random.Random() | np.random.Generator() | np.random.RandomState():
                self._add(RandomState(path, value))
            case io.StringIO() | io.BytesIO():
                self._add(Stream(path, value))
            case threading.Event() | threading.Semaphore():
                name = "_flag" if isinstance(value, threading.Event) else "_value"
                self._contents[value] = {Flag: Flag(path, value, vars(value), {name})}
            case threading.local():
                content = ThreadLocal(path, value, None)
                self._contents[value] = {ThreadLocal: content}
                for key, each in list(content.before.items()):
                    self._visit_entry(content, key, each)
            case weakref.ReferenceType():
                self._visit(value(), f"{path}()")
            case tuple():
                for index, element in enumerate(value):
                    self._visit(element, f"{path}[{index}]")
            case torch.optim.Optimizer():
                self._visit_optimizer(path, value)
            case _ if isinstance(value, CALLABLES):
                pass
            case _:
                self._visit_object(path, value)

    def _visit_object(self, path: str, value: Any) -> None:
        module = type(value).__module__
        if module.startswith(("torch._", "torch.jit", "torch.fx")):
            return  # operators and compiled functions
        if module.startswith("multiprocessing.sharedctypes"):
            self._visit(vars(value).get("_obj"), path)
            return
        if module.partition(".")[0] in _OF_THREADS:
            return  # others may use it meanwhile
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
        attributes = batch_tree.attributes_of(value)
        if attributes is not None:
            is_own = is_noted_class(type(value))  # or no code that is noted names its attributes
            names = None if not is_own or isinstance(value, Collection) else self._names
            relevant = next((r for kind, r in _RELEVANT.items() if isinstance(value, kind)), None)
            self._visit_attributes(path, value, attributes, relevant or names)
        slots = _slots(type(value))  # type: ignore[arg-type]
        if slots:
            self._add(Slots(path, value, slots))
        is_known = bool(slots) or value in self._contents
        if not is_known and (attributes is None or not is_noted_class(type(value))):
            self._visit_opaque(path, value)
        self._visit_class(type(value))

    def _visit_opaque(self, path: str, value: Any) -> None:
        """Note what an object without attributes leads to: a variable, a buffer, other objects."""
        wrapped = getattr(value, "__wrapped__", None) if callable(value) else None
        if isinstance(wrapped, _WRAPPED):  # by lru_cache
            self._visit(wrapped, path)
            self._caches.append(value)
            return
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
        for module in self._modules:
            self._note_in_module(module, new)

    def _note_in_module(self, module: types.ModuleType, names: Set[str]) -> None:
        """Note values of these names in a module that serves as an object, such as a config."""
        scope, held = vars(module), self._scope(vars(module))
        assert held.names is not None
        values = (*CONSTANTS, list, dict, set, tuple, torch.Tensor, np.ndarray)
        found = {name for name in names if isinstance(scope.get(name), values)} - held.names
        held.names |= found
        self._note_entries(held, found)

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
            self._add_names(frozenset(vars(each).get("__match_args__", ())))
            if type(each) is not type:
                self._visit_class(type(each))
            special = {n for n, value in vars(each).items() if _is_special(n, value)}
            if special:
                content = SpecialMethods(each.__name__, each, vars(each), special)
                self._contents[each][SpecialMethods] = content
            for value in vars(each).values():
                if isinstance(value, (types.FunctionType, staticmethod, classmethod, property)):
                    self._visit(value, each.__name__)

    def _visit_array(self, path: str, array: np.ndarray[Any, Any]) -> None:
        if array.nbytes > _MAX_ARRAY_BYTES:
            log.warning("%s has %d bytes: a change between steps is not seen", path, array.nbytes)
        else:
            self._add(Array(path, array))

    def _visit_optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        """Note what the step's own code names of it; the optimizer reads its own state itself."""
        self._visit_attributes(path, optimizer, vars(optimizer), self._names)
        content = self._contents[vars(optimizer)][Attributes]
        assert isinstance(content, Attributes)
        content.ignored.update({*_OF_OPTIMIZERS, *(n for n in vars(optimizer) if n == "step")})
        for name in content.ignored:
            content.before.pop(name, None)
        for index, group in enumerate(optimizer.param_groups):
            where = f"{path}.param_groups[{index}]"
            self._visit_attributes(where, group, group, self._names)
            self._groups.append(self._contents[group][Attributes])  # type: ignore[arg-type]

    def all_contents(self) -> list[Content]:
        """Every object whose content is part of the state."""
        return [
            *(c for kinds in self._contents.values() for c in kinds.values()),
            *self._globals.values(),
        ]


_OF_OPTIMIZERS = {
    *(
        "state",
        "param_groups",
        "defaults",
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
    ),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_patch_step_function"),
    *("_opt_called", "_step_count"),
}
_OF_STATE_DICTS = ("_non_persistent_buffers", "_state_dict", "_load_state_dict")
_REGISTRIES = ("_parameters", "_buffers", "_modules")


def _is_special(name: str, value: Any) -> bool:
    """True for methods that Python calls without naming them."""
    return name.startswith("__") and name.endswith("__") and isinstance(value, types.FunctionType)


@functools.lru_cache(maxsize=4096)
def _slots(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in cls.__mro__:
        if is_noted_class(each):
            declared = vars(each).get("__slots__", ())
            names = (declared,) if isinstance(declared, str) else tuple(declared)
            found |= {name: vars(each)[name] for name in names if name in vars(each)}
    return found


# The generators behind the functions of `random` and `np.random`, which a capture replaces.
_GLOBAL_GENERATORS = [
    getattr(function, "__self__", None) for function in (random.random, np.random.random)
]


def is_global_generator(value: Any) -> bool:
    """True for the generators behind the functions of `random` and `np.random`."""
    return any(value is each for each in _GLOBAL_GENERATORS)
