"""Mutable Python objects with a snapshot of their content: dicts, lists, attributes, variables.

`PythonState` finds them while a step is traced; a guard compares them before each step.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import hashlib
import operator
import pickle
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from rekindle.tracing import batch_tree

ABSENT = type("Absent", (), {"__repr__": lambda self: "nothing"})()
WHOLE = "*"  # the key of a list or set as a whole

CONSTANTS = (
    *batch_tree.CONSTANTS,
    *(enum.Enum, range, slice, type(Ellipsis), np.generic, np.dtype, PurePath),
)


class Content:
    """One mutable object whose content is part of the state, and that content before the step.

    `children` are the contents of the objects that an entry's value is or contains, by their path
    in it: when another object with the same structure takes its place, they are rebound to that.
    """

    def __init__(self, path: str, owner: Any) -> None:
        self.path = path
        self.owner = owner  # held, so that its identity stays its own
        self.is_shared = False  # True if several contents hold the owner
        self.children: dict[Any, list[tuple[tuple[Any, ...], Content]]] = {}  # in an entry's value
        self.is_fixed = False  # True if the owner must stay the same object
        self.before: dict[Any, Any] = dict(self.read())

    def read(self) -> Mapping[Any, Any]:
        """The content now."""
        raise NotImplementedError

    def rebind(self, owner: Any) -> bool:
        """Be the content of another object of the same kind; False if that is not possible."""
        if type(owner) is not type(self.owner) or self.is_shared or self.is_fixed:
            return False
        self.owner = owner
        return True

    def is_reordered(self, keys: Collection[Any]) -> bool:
        """True if a dict has the same keys as these, in another order."""
        return False

    def assign(self, key: Any, value: Any) -> None:
        """Set one entry."""
        raise NotImplementedError

    def remove(self, key: Any) -> None:
        """Remove one entry."""
        raise NotImplementedError

    def is_of(self, other: Content) -> bool:
        """True if both are the content of one object."""
        return type(other) is type(self) and other.owner is self.owner

    def label(self, key: Any) -> str:
        """One entry as a user would write it."""
        return f"{self.path}[{key!r}]"

    def changed(self) -> dict[Any, Any]:
        """Every entry that is another object than before; ABSENT for one that is gone."""
        now, before = self.read(), self.before
        found = {k: v for k, v in now.items() if v is not before.get(k, ABSENT)}
        found.update((key, ABSENT) for key in before if key not in now)
        return found

    def is_identical(self, last: Mapping[Any, Any]) -> bool:
        """True if all entries, and no others, are the objects in `last`."""
        now = self.read()
        return len(now) == len(last) and all(now.get(k, ABSENT) is v for k, v in last.items())

    def forget(self) -> None:
        """Hold nothing that is needed for `restore` only."""

    def restore(self) -> None:
        """Give the object its content of before, in its order."""
        now = self.read()
        for key, value in self.before.items():
            if now.get(key, ABSENT) is not value:
                self.assign(key, value)
        for key in [key for key in self.read() if key not in self.before]:
            self.remove(key)


class Items(Content):
    """The items of a dict, without what a subclass makes of them."""

    def is_reordered(self, keys: Collection[Any]) -> bool:
        now = self.read()
        return len(now) == len(keys) and list(now) != list(keys)

    def read(self) -> Mapping[Any, Any]:
        owner: dict[Any, Any] = self.owner
        return owner if type(owner) in _PLAIN_DICTS else dict(dict.items(owner))

    def assign(self, key: Any, value: Any) -> None:
        self._base.__setitem__(self.owner, key, value)

    def remove(self, key: Any) -> None:
        self._base.__delitem__(self.owner, key)

    def restore(self) -> None:
        super().restore()
        if list(self.read()) != list(self.before):  # a deleted key came back at the end
            for key, value in self.before.items():
                self.remove(key)
                self.assign(key, value)

    @property
    def _base(self) -> type[dict[Any, Any]]:
        return OrderedDict if isinstance(self.owner, OrderedDict) else dict


_PLAIN_DICTS = (dict, OrderedDict, defaultdict, Counter)


class Attributes(Items):
    """The attributes of an object, or the globals of a module: all, or those in `names`."""

    def __init__(
        self, path: str, owner: Any, attributes: Any, names: set[str] | None = None
    ) -> None:
        self.attributes = attributes
        self.names = names
        self.ignored: set[str] = set()
        super().__init__(path, owner)

    def rebind(self, owner: Any) -> bool:
        attributes = batch_tree.attributes_of(owner)
        if attributes is None or self.attributes is self.owner or not super().rebind(owner):
            return False
        self.attributes = attributes
        return True

    def is_reordered(self, keys: Collection[Any]) -> bool:
        return False

    def is_identical(self, last: Mapping[Any, Any]) -> bool:
        if self.names is None or self.ignored or len(self.names) < len(self.attributes):
            return super().is_identical(last)
        attributes = self.attributes
        if not all(attributes.get(key, ABSENT) is value for key, value in last.items()):
            return False
        return len(self.names.intersection(attributes)) == len(last)

    def read(self) -> Mapping[Any, Any]:
        if self.names is None and not self.ignored:
            return self.attributes  # type: ignore[no-any-return]
        names = set(self.attributes) if self.names is None else self.names
        names = names - self.ignored if self.ignored else names
        if len(names) < len(self.attributes):
            return {k: self.attributes[k] for k in names if k in self.attributes}
        return {k: v for k, v in self.attributes.items() if k in names}

    def label(self, key: Any) -> str:
        return f"{self.path}.{key}" if self.path else str(key)

    def assign(self, key: Any, value: Any) -> None:
        if isinstance(self.attributes, dict):
            self.attributes[key] = value
        else:
            setattr(self.owner, key, value)  # of a class

    def remove(self, key: Any) -> None:
        if isinstance(self.attributes, dict):
            del self.attributes[key]
        else:
            delattr(self.owner, key)

    def restore(self) -> None:
        Content.restore(self)
        now = self.attributes
        is_whole = self.names is None and isinstance(now, dict)
        if is_whole and list(now) != list(self.before):
            for key in self.before:
                now[key] = now.pop(key)


class ThreadLocal(Attributes):
    """The attributes of a `threading.local`, in the thread that asks."""

    def __init__(self, path: str, owner: Any, names: set[str] | None) -> None:
        super().__init__(path, owner, {}, names)

    @property
    def attributes(self) -> Any:
        """The dict of this thread."""
        return self.owner.__dict__

    @attributes.setter
    def attributes(self, _: Any) -> None:
        """There is one for each thread."""


class Flag(Attributes):
    """The state of an object by which threads communicate: it is read, and never put back."""

    def changed(self) -> dict[Any, Any]:
        return {}

    def restore(self) -> None:
        """Nothing: another thread may have set it."""


class SpecialMethods(Attributes):
    """The methods of a class that no code names: `__call__`, `__len__`, `__getattr__`."""


class Slots(Content):
    """The attributes in `__slots__` of an object."""

    def __init__(self, path: str, owner: Any, slots: dict[str, Any]) -> None:
        self._slots = slots  # the descriptors
        super().__init__(path, owner)

    def read(self) -> Mapping[Any, Any]:
        found = {}
        for name, slot in self._slots.items():
            with suppress(AttributeError):
                found[name] = slot.__get__(self.owner)
        return found

    def label(self, key: Any) -> str:
        return f"{self.path}.{key}"

    def assign(self, key: Any, value: Any) -> None:
        self._slots[key].__set__(self.owner, value)

    def remove(self, key: Any) -> None:
        self._slots[key].__delete__(self.owner)


class Cell(Content):
    """A variable of an enclosing function."""

    def read(self) -> Mapping[Any, Any]:
        try:
            return {self.path: self.owner.cell_contents}
        except ValueError:  # it is empty
            return {}

    def label(self, key: Any) -> str:
        return self.path

    def assign(self, key: Any, value: Any) -> None:
        self.owner.cell_contents = value

    def remove(self, key: Any) -> None:
        del self.owner.cell_contents


class Elements(Content):
    """The elements of a list, deque or set."""

    def read(self) -> Mapping[Any, Any]:
        return {WHOLE: list(self.owner)}

    def label(self, key: Any) -> str:
        return self.path

    def changed(self) -> dict[Any, Any]:
        return {} if self.is_identical(self.before) else dict(self.read())

    def is_identical(self, last: Mapping[Any, Any]) -> bool:
        values = last[WHOLE]
        return len(self.owner) == len(values) and all(map(operator.is_, self.owner, values))

    def assign(self, key: Any, value: Any) -> None:
        if isinstance(self.owner, list):
            self.owner[:] = value
        else:
            self.owner.clear()
            add_all = self.owner.extend if isinstance(self.owner, deque) else self.owner.update
            add_all(value)

    def restore(self) -> None:
        if self.changed():
            self.assign(WHOLE, self.before[WHOLE])


class ContextVariable(Cell):
    """A `contextvars.ContextVar`."""

    def read(self) -> Mapping[Any, Any]:
        value = self.owner.get(ABSENT)
        return {} if value is ABSENT else {self.path: value}

    def assign(self, key: Any, value: Any) -> None:
        self.owner.set(value)

    def remove(self, key: Any) -> None:
        """Nothing: a variable that was set stays so."""


class Array(Content):
    """The bytes of a numpy array or another buffer, as a checksum.

    A step that writes to it is refused; until then, a copy is kept to undo that.
    """

    def __init__(self, path: str, owner: Any) -> None:
        super().__init__(path, owner)
        self._copy: Any = self._copied()

    def _copied(self) -> Any:
        return self.owner.copy() if isinstance(self.owner, np.ndarray) else None

    def forget(self) -> None:
        self._copy = None

    def read(self) -> Mapping[Any, Any]:
        if not isinstance(self.owner, np.ndarray):
            with memoryview(self.owner) as buffer:
                return {WHOLE: (buffer.format, buffer.shape, _digest(buffer.tobytes()))}
        array: np.ndarray[Any, Any] = self.owner
        form = str(array.dtype), array.shape
        if array.dtype.hasobject:
            return {WHOLE: (*form, repr(array.tolist()))}
        return {WHOLE: (*form, _digest(array.tobytes()))}

    def label(self, key: Any) -> str:
        return self.path

    def changed(self) -> dict[Any, Any]:
        return {} if self.is_identical(self.before) else dict(self.read())

    def is_identical(self, last: Mapping[Any, Any]) -> bool:
        return self.read() == last

    def restore(self) -> None:
        if self._copy is not None and self.changed():
            self._put_back()

    def _put_back(self) -> None:
        if self.owner.shape == self._copy.shape and self.owner.flags.writeable:
            self.owner[...] = self._copy


class Stream(Array):
    """The text or bytes of an `io.StringIO` or `io.BytesIO`."""

    def read(self) -> Mapping[Any, Any]:
        return {WHOLE: (self.owner.getvalue(), self.owner.tell())}

    def _copied(self) -> Any:
        return self.read()[WHOLE]

    def _put_back(self) -> None:
        value, position = self._copy
        self.owner.seek(0)
        self.owner.truncate()
        self.owner.write(value)
        self.owner.seek(position)


class RandomState(Array):
    """The state of a random generator of Python or numpy."""

    def _copied(self) -> Any:
        if isinstance(self.owner, np.random.Generator):
            return copy.deepcopy(self.owner.bit_generator.state)
        is_python = isinstance(self.owner, random.Random)
        return self.owner.getstate() if is_python else self.owner.get_state()

    def _put_back(self) -> None:
        if isinstance(self.owner, np.random.Generator):
            self.owner.bit_generator.state = self._copy
        elif isinstance(self.owner, random.Random):
            self.owner.setstate(self._copy)
        else:
            self.owner.set_state(self._copy)

    def read(self) -> Mapping[Any, Any]:
        if isinstance(self.owner, random.Random):
            return {WHOLE: self.owner.getstate()}
        if isinstance(self.owner, np.random.Generator):
            return {WHOLE: pickle.dumps(self.owner.bit_generator.state)}
        return {WHOLE: pickle.dumps(self.owner.get_state())}


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class TensorPlace(NamedTuple):
    """The place of a tensor: an entry of a content, or an element of a tuple there."""

    content: Content
    key: Any
    path: tuple[Any, ...] = ()

    def __getitem__(self, _: Any) -> torch.Tensor:  # type: ignore[override]
        """The tensor that is there now."""
        value = self.content.read()[self.key]
        for index in self.path:
            value = value[index]
        if not isinstance(value, torch.Tensor):
            raise KeyError(self.key)
        return value

    @property
    def label(self) -> str:
        """The place as a user would write it."""
        steps = "".join(f"[{index!r}]" for index in self.path)
        return f"{self.content.label(self.key)}{steps}"


def is_live(content: Content) -> bool:
    """True if `read` returns the user's dict itself."""
    if isinstance(content, Attributes):
        is_whole = content.names is None and not content.ignored
        is_whole = is_whole and not isinstance(content, ThreadLocal)
        return is_whole and isinstance(content.attributes, dict)
    return isinstance(content, Items) and type(content.owner) in _PLAIN_DICTS


def nested_owners(value: Any) -> Iterator[Any]:
    """The containers in a value, and itself if it is one."""
    if isinstance(value, (list, tuple, set, deque, dict)):
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from nested_owners(each)


def freeze(value: Any) -> Any:
    """A form of a value to compare others with: tensors without values, objects by identity.

    It holds no tensor of the value.
    """
    if isinstance(value, torch.Tensor):
        return signature(value)
    if type(value) in (tuple, list, deque) or (isinstance(value, tuple) and _is_named(value)):
        return (type(value), *map(freeze, value))
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        return (type(value), *((freeze(k), freeze(v)) for k, v in value.items()))
    if type(value) in (set, frozenset):
        return type(value), frozenset(map(freeze, value))
    if isinstance(value, CONSTANTS):
        return batch_tree.leaf_key(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = batch_tree.fields_of(value)
        return (type(value), *((name, freeze(each)) for name, each in fields.items()))
    if isinstance(value, types.MethodType):
        return types.MethodType, Same(value.__func__), Same(value.__self__)
    return Same(value)


def _is_named(value: tuple[Any, ...]) -> bool:
    return hasattr(value, "_fields")


class Same:
    """Equal to itself for the same object only."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return object.__hash__(self._value)


def signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that a capture depends on: all but its values."""
    return (
        *(type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad),
        tensor.layout,
        *((tensor.stride(), tensor.is_conj(), tensor.is_neg()) if _is_strided(tensor) else ()),
    )


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def is_same_constant(value: Any, before: Any) -> bool:
    """True if both are the same number, text or other constant."""
    if not isinstance(value, CONSTANTS) or type(value) is not type(before):
        return False
    try:
        return bool(batch_tree.leaf_key(value) == batch_tree.leaf_key(before))
    except (TypeError, ValueError):
        return False
