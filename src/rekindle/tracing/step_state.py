"""Finds the tensors that a step uses besides its batch, and the attributes that it sets on modules.

A `Slot` is a place, not a tensor: `load_state_dict(assign=True)` or a module that replaces its
buffer puts another tensor there, and the next step must use that one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from rekindle.core.identity import IdentityDict, IdentitySet
from rekindle.tracing import batch_tree

log = logging.getLogger("rekindle")

Attributes = dict[str, tuple[dict[str, Any], dict[str, Any]]]  # a module's buffers and __dict__

_ABSENT = object()


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
            elif isinstance(value, (tuple, list, dict)) and not key.startswith("_"):
                for number in range(len(batch_tree.flatten(value).tensors)):
                    nested = _NestedTensors(store, key)
                    yield Slot(EntryKind.ATTRIBUTE, f"{prefix}{key}.{number}", nested, number)


@dataclass(frozen=True, slots=True)
class _NestedTensors:
    """The tensors in a tuple, list or dict that is a module's attribute now."""

    store: dict[str, Any]
    key: str

    def __getitem__(self, number: int) -> torch.Tensor:
        return batch_tree.flatten(self.store[self.key]).tensors[number]


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
    """The step sets `container[key]`; `before` is the value before the capture."""

    name: str
    container: dict[str, Any]
    key: str
    before: Any
    structure: batch_tree.Structure
    nodes: list[fx.Node]


def note_attributes(modules: dict[str, nn.Module]) -> Attributes:
    """The attributes of every module, for a comparison later."""
    return {path: (dict(m._buffers), dict(m.__dict__)) for path, m in modules.items()}


def find_effects(
    modules: dict[str, nn.Module], before: Attributes, node_of: Callable[[torch.Tensor], fx.Node]
) -> list[Effect]:
    """The attributes that the step set. Python numbers cannot be replayed; a warning names them."""
    effects: list[Effect] = []
    for path, module in modules.items():
        for store, old in zip((module._buffers, module.__dict__), before[path], strict=True):
            for key, value in store.items():
                if value is old.get(key, _ABSENT):
                    continue
                name = f"{path}.{key}" if path else key
                flat = batch_tree.flatten(value)
                if not flat.tensors and key != "training":
                    log.warning(
                        "the step sets %s to %r; the captured step will not set it", name, value
                    )
                    continue
                nodes = [node_of(tensor) for tensor in flat.tensors]
                effects.append(Effect(name, store, key, old.get(key), flat.structure, nodes))
    return effects
