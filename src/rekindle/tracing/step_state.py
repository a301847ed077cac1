"""Finds every tensor a step may touch beside its batch, and where to look it up anew each time.

A `Slot` is a place, not a tensor: `load_state_dict(assign=True)` or a module that replaces its
buffer puts another tensor there, and the next step must see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rekindle.tracing import batch_tree
from rekindle.tracing.tape import Kind


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lives: `container[key]`, which may be a module's dict or a group's list."""

    kind: Kind
    name: str
    container: Any
    key: Any

    def get(self) -> torch.Tensor:
        """The tensor that is there now."""
        tensor: torch.Tensor = self.container[self.key]
        return tensor


class StepState:
    """The modules, parameters and other tensors around a step."""

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
        slot_of: dict[int, int] = {}  # by the identity of the tensor: tied weights are one
        trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for slot in self._all_slots():
            if id(slot.get()) in trained:  # a plain tensor that a module holds may be, too
                slot = replace(slot, kind=Kind.PARAM)
            index = slot_of.setdefault(id(slot.get()), len(self.slots))
            if index == len(self.slots):
                self.slots.append(slot)
            else:
                self.ties.append((slot, index))
        self._slot_of = {key: self.slots[index] for key, index in slot_of.items()}
        self._born_later: dict[int, tuple[Kind, str]] = {}

    def add_module(self, module: nn.Module) -> list[str]:
        """Take in a module from outside the model, with its parts; returns their names."""
        known = {id(each) for each in self.modules.values()}
        root = f"{type(module).__name__}{len(self.modules)}"
        new = {p: m for p, m in module.named_modules(prefix=root) if id(m) not in known}
        self.modules.update(new)
        return list(new)

    def params(self) -> dict[int, torch.Tensor]:
        """The parameters, by their slots' positions in `slots`."""
        return {i: slot.get() for i, slot in enumerate(self.slots) if slot.kind is Kind.PARAM}

    @staticmethod
    def has_tensors(module: nn.Module) -> bool:
        """Whether a module itself holds tensors in any way that is followed."""
        return any(True for _ in _module_slots("", module))

    def _all_slots(self) -> Iterator[Slot]:
        for path, module in self.modules.items():
            yield from _module_slots(f"{path}." if path else "", module)
        groups = _GroupParams(self.optimizer)
        for index, group in enumerate(self.optimizer.param_groups):
            for position in range(len(group["params"])):
                name = f"optimizer.group{index}.{position}"
                yield Slot(Kind.PARAM, name, groups, (index, position))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every real tensor that is there before the step: slots, gradients, optimizer state."""
        yield from (slot.get() for slot in self.slots)
        yield from (param.grad for param in self.params().values() if param.grad is not None)
        yield from (state for _, state in self.optimizer_state())

    def name_of(self, tensor: torch.Tensor) -> tuple[Kind, str] | None:
        """What a real tensor is called, if it has a place in a module or the optimizer."""
        slot = self._slot_of.get(id(tensor))
        if slot is not None:
            return slot.kind, slot.name
        if id(tensor) not in self._born_later:
            self._born_later = dict(self._grads_and_state())
        return self._born_later.get(id(tensor))

    def _grads_and_state(self) -> Iterator[tuple[int, tuple[Kind, str]]]:
        for index, param in self.params().items():
            if param.grad is not None:
                yield id(param.grad), (Kind.GRAD, self.slots[index].name)
        for name, state in self.optimizer_state():
            yield id(state), (Kind.OPT_STATE, name)

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor in the optimizer's state, by the name of its parameter."""
        for owner, state in self.optimizer.state.items():
            slot = self._slot_of.get(id(owner))
            prefix = slot.name if slot is not None else "optimizer"
            items = state.items() if isinstance(state, dict) else ()
            for key, value in items:
                if isinstance(value, torch.Tensor):
                    yield f"{prefix}.{key}", value


def _module_slots(prefix: str, module: nn.Module) -> Iterator[Slot]:
    """The places where a module itself holds tensors."""
    stores: list[tuple[Kind, dict[str, Any]]] = [
        (Kind.PARAM, module._parameters),
        (Kind.BUFFER, module._buffers),
        (Kind.ATTRIBUTE, module.__dict__),
    ]
    for kind, store in stores:
        for key, value in store.items():
            if isinstance(value, torch.Tensor):
                yield Slot(kind, prefix + key, store, key)
            elif isinstance(value, (tuple, list, dict)) and not key.startswith("_"):
                for number in range(len(batch_tree.flatten(value).tensors)):
                    inside = _Inside(store, key)
                    yield Slot(Kind.ATTRIBUTE, f"{prefix}{key}.{number}", inside, number)


class _Inside:
    """The tensors inside a tuple, list or dict that a module holds, whichever it holds now."""

    def __init__(self, store: dict[str, Any], key: str) -> None:
        self._store = store
        self._key = key

    def __getitem__(self, number: int) -> torch.Tensor:
        return batch_tree.flatten(self._store[self._key]).tensors[number]


class _GroupParams:
    """An optimizer's parameters by group and position, wherever it keeps its groups now."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, key: tuple[int, int]) -> torch.Tensor:
        group, position = key
        tensor: torch.Tensor = self._optimizer.param_groups[group]["params"][position]
        return tensor
