"""Finds the tensors that a step uses besides its batch, and describes what else it writes.

A `Slot` is a place, not a tensor: `load_state_dict(assign=True)` or a module that replaces its
buffer puts another tensor there, and the next step must use that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from rekindle.core.identity import IdentityDict, IdentitySet
from rekindle.tracing import batch_tree
from rekindle.tracing.contents import Content, TensorPlace
from rekindle.tracing.python_state import WriteKind


class EntryKind(Enum):
    """The kinds of tensors that enter a step."""

    PARAM = "param"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"  # a tensor that a module holds as a plain attribute
    GRAD = "grad"  # a gradient from before the step
    OPT_STATE = "state"
    BATCH = "batch"
    EXTERNAL = "external"  # tensors in closures and globals


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor: `container[key]`, where the container may be a module's dict."""

    kind: EntryKind
    name: str
    container: Any
    key: Any

    def get(self) -> torch.Tensor:
        """The tensor in this place now."""
        tensor: torch.Tensor = self.container[self.key]
        return tensor


class StepState:
    """The modules, the optimizer and the tensors that a step works on."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, others: list[nn.Module]
    ) -> None:
        """`others` are modules outside the model that the step is known to call."""
        self.optimizer = optimizer
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        for module in others:
            self.add_module(module)
        self.slots: list[Slot] = []
        self.ties: list[tuple[Slot, int]] = []  # further places of a tensor, and its slot
        slot_of: IdentityDict[int] = IdentityDict()  # by tensor: tied weights have one slot
        trained = IdentitySet(p for group in optimizer.param_groups for p in group["params"])
        for slot in self._all_slots():
            if slot.get() in trained:  # may be a plain tensor attribute
                slot = replace(slot, kind=EntryKind.PARAM)
            index = slot_of.setdefault(slot.get(), len(self.slots))
            if index == len(self.slots):
                self.slots.append(slot)
            else:
                self.ties.append((slot, index))
        self._index_of = slot_of
        # Weak: autograd reuses a gradient's memory only if nobody else holds it.
        self._others = WeakTensorKeyDictionary()
        self._find_others()
        self.contents: list[Content] = []  # the Python state, after the capture
        self.functions: list[FunctionType] = []  # that have run in it

    def add_places(self, places: list[TensorPlace], tensor: torch.Tensor) -> Slot:
        """Add a slot for a tensor that the user's objects hold, at one or more places."""
        names = {slot.name for slot in self.slots}
        name = places[0].label
        while name in names:
            name += "_"
        slots = [Slot(EntryKind.EXTERNAL, name, place, 0) for place in places]
        self._index_of[tensor] = len(self.slots)
        self.ties.extend((slot, len(self.slots)) for slot in slots[1:])
        self.slots.append(slots[0])
        return slots[0]

    def add_module(self, module: nn.Module) -> list[str]:
        """Add a module from outside the model and its submodules; returns the names of new ones."""
        known = IdentitySet(self.modules.values())
        root = f"{type(module).__name__}{len(self.modules)}"
        new = {p: m for p, m in module.named_modules(prefix=root) if m not in known}
        self.modules.update(new)
        return list(new)

    def params(self) -> dict[int, torch.Tensor]:
        """The parameters, by their index in `slots`."""
        return {i: slot.get() for i, slot in enumerate(self.slots) if slot.kind is EntryKind.PARAM}

    @staticmethod
    def has_tensors(module: nn.Module) -> bool:
        """True if the module itself holds a tensor, in its registries or its attributes."""
        return any(True for _ in _module_slots("", module))

    def _all_slots(self) -> Iterator[Slot]:
        for path, module in self.modules.items():
            yield from _module_slots(f"{path}." if path else "", module)
        groups = _GroupParams(self.optimizer)
        for index, group in enumerate(self.optimizer.param_groups):
            for position in range(len(group["params"])):
                name = f"optimizer.group{index}.{position}"
                yield Slot(EntryKind.PARAM, name, groups, (index, position))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every real tensor from before the step: slots, gradients, optimizer state."""
        yield from (slot.get() for slot in self.slots)
        yield from (param.grad for param in self.params().values() if param.grad is not None)
        yield from (state for _, state in self.optimizer_state())

    def name_of(self, tensor: torch.Tensor) -> tuple[EntryKind, str] | None:
        """The kind and name of a real tensor that belongs to a module or the optimizer."""
        if (index := self._index_of.get(tensor)) is not None:
            return self.slots[index].kind, self.slots[index].name
        if tensor not in self._others:
            self._find_others()  # an optimizer may create its state in the step
        found: tuple[EntryKind, str] | None = self._others.get(tensor)
        return found

    def _find_others(self) -> None:
        """Note gradients and optimizer state; those of before the step keep their names."""
        for index, param in self.params().items():
            if param.grad is not None:
                self._others.setdefault(param.grad, (EntryKind.GRAD, self.slots[index].name))
        for name, state in self.optimizer_state():
            self._others.setdefault(state, (EntryKind.OPT_STATE, name))

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor in the optimizer's state, with a name made from its parameter's."""
        for owner, state in self.optimizer.state.items():
            index = self._index_of.get(owner)
            prefix = "optimizer" if index is None else self.slots[index].name
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield f"{prefix}.{key}", value


def _module_slots(prefix: str, module: nn.Module) -> Iterator[Slot]:
    stores: list[tuple[EntryKind, dict[str, Any]]] = [
        (EntryKind.PARAM, module._parameters),
        (EntryKind.BUFFER, module._buffers),
        (EntryKind.ATTRIBUTE, module.__dict__),
    ]
    for kind, store in stores:
        for key, value in store.items():
            if isinstance(value, torch.Tensor):
                yield Slot(kind, prefix + key, store, key)


@dataclass(frozen=True, slots=True)
class _GroupParams:
    """An optimizer's parameters, by group and position."""

    optimizer: torch.optim.Optimizer

    def __getitem__(self, key: tuple[int, int]) -> torch.Tensor:
        group, position = key
        tensor: torch.Tensor = self.optimizer.param_groups[group]["params"][position]
        return tensor


@dataclass(frozen=True)
class Effect:
    """An entry of the user's objects that the step writes, as tensors and constants."""

    content: Content
    key: Any
    kind: WriteKind
    structure: batch_tree.Structure
    nodes: list[fx.Node]

    @property
    def name(self) -> str:
        """The entry as a user would write it."""
        return self.content.label(self.key)

    @property
    def is_constant(self) -> bool:
        """True if it sets an entry to what does not depend on tensors."""
        return not self.nodes and self.kind in (WriteKind.SET, WriteKind.REMOVE)

    def contradicts(self, other: Effect) -> bool:
        """True if both write to one entry of one object, and not the same."""
        is_same_entry = self.key == other.key and other.content.is_of(self.content)
        return is_same_entry and (self.kind, self.structure) != (other.kind, other.structure)

    def apply(self, tensors: Iterable[torch.Tensor]) -> None:
        """Write what the step writes, with these tensors in place of the nodes."""
        value = self.structure.rebuild(tensors)
        match self.kind:
            case WriteKind.SET:
                self.content.assign(self.key, value)
            case WriteKind.REMOVE:
                self.content.remove(self.key)
            case WriteKind.APPEND:
                self.content.owner.extend(value)
            case WriteKind.ADD:
                self.content.assign(self.key, self.content.read()[self.key] + value)
