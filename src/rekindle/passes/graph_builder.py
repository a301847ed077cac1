"""Collects the ops, values and storages of an FX graph into a `StepGraph`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx

from rekindle.core.graph.graph import Op, Role, StepGraph, Storage, Value, assign_roles


class GraphBuilder:
    """A `StepGraph` in the making; `value_of` maps FX nodes to values."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.value_of: dict[fx.Node, int] = {}
        self._storages: list[tuple[int, str]] = []  # bytes and device
        self._known_roles: dict[int, Role] = {}

    def add_storage(self, nbytes: int, device: object) -> int:
        """A new storage's index."""
        self._storages.append((nbytes, str(device)))
        return len(self._storages) - 1

    def add_value(
        self,
        source: fx.Node | str,
        storage: int,
        shape: Iterable[int],
        dtype: torch.dtype,
        producer: int | None = None,
        role: Role | None = None,
    ) -> int:
        """The index of a node's value, or of state that has only a name."""
        index = len(self.values)
        name = source if isinstance(source, str) else source.name
        dtype_name = str(dtype).removeprefix("torch.")
        self.values.append(Value(index, name, storage, tuple(shape), dtype_name, producer))
        if isinstance(source, fx.Node):
            self.value_of[source] = index
        if role is not None:
            self._known_roles[storage] = role
        return index

    def build(
        self, outputs: tuple[int, ...], grads: Collection[int], held_until: Mapping[int, int]
    ) -> StepGraph:
        """The graph; `grads` are the storages of gradients, `held_until` those held past use."""
        roles = assign_roles(
            len(self._storages),
            self.ops,
            self.values,
            known=self._known_roles,
            grads=grads,
            outputs={self.values[value].storage for value in outputs},
        )
        storages = tuple(
            Storage(index, nbytes, role, device, held_until.get(index, -1))
            for index, ((nbytes, device), role) in enumerate(
                zip(self._storages, roles, strict=True)
            )
        )
        return StepGraph(tuple(self.ops), tuple(self.values), storages, outputs)
