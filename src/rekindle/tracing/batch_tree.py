"""Takes batches and results apart into tensors and everything else, and puts them together again.

On top of what torch's own pytree knows (tuples, lists, dicts, named tuples, registered classes),
any other mapping that can be built from a dict and any dataclass is taken apart, so that a
tokenizer's batch or the user's own batch class works as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from rekindle.torch_internals import pytree


class Flat(NamedTuple):
    """A tree taken apart: its tensors, and a hashable key of all else."""

    tensors: list[torch.Tensor]
    structure: Structure


class Structure(NamedTuple):
    """What remains of a tree without its tensors. Equal structures rebuild equal trees."""

    leaves: tuple[Any, ...]  # _TENSOR where a tensor was
    spec: Any

    def key(self) -> tuple[Any, ...]:
        """A hashable key that, unlike plain equality, tells 1 from 1.0 and True."""
        return (self.spec, *(_leaf_key(leaf) for leaf in self.leaves))

    def rebuild(self, tensors: list[torch.Tensor]) -> Any:
        """The tree again, with these tensors in place of the old ones."""
        rest = iter(tensors)
        leaves = [
            next(rest)
            if leaf is _TENSOR
            else leaf.rebuild(rest)
            if isinstance(leaf, _Container)
            else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)


def _leaf_key(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, _Container):
        return leaf.build, leaf.inner.key()
    if isinstance(leaf, float):  # so that -0.0 is not 0.0, and NaN is NaN
        return float, leaf.hex()
    return type(leaf), leaf


class _Container(NamedTuple):
    """An object that pytree does not know, as the dict of what it holds."""

    build: Callable[[dict[str, Any]], Any]
    inner: Structure

    def rebuild(self, tensors: Any) -> Any:
        count = _count(self.inner)
        return self.build(self.inner.rebuild([next(tensors) for _ in range(count)]))


_TENSOR = object()


def _count(structure: Structure) -> int:
    return sum(
        1 if leaf is _TENSOR else _count(leaf.inner) if isinstance(leaf, _Container) else 0
        for leaf in structure.leaves
    )


class _FromMapping(NamedTuple):
    kind: type

    def __call__(self, data: dict[str, Any]) -> Any:
        return self.kind(data)


class _FromFields(NamedTuple):
    kind: type

    def __call__(self, data: dict[str, Any]) -> Any:
        instance: Any = object.__new__(self.kind)
        for name, value in data.items():
            object.__setattr__(instance, name, value)
        return instance


def flatten(tree: Any) -> Flat:
    """Take a tree apart.

    >>> flat = flatten({"x": torch.ones(2), "scale": 3})
    >>> len(flat.tensors), flat.structure.rebuild([torch.zeros(1)])
    (1, {'x': tensor([0.]), 'scale': 3})
    """
    tensors: list[torch.Tensor] = []
    leaves, spec = pytree.tree_flatten(tree)
    kept: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            kept.append(_TENSOR)
        elif (container := _open(leaf)) is not None:
            build, content = container
            inner = flatten(content)
            tensors.extend(inner.tensors)
            kept.append(_Container(build, inner.structure))
        else:
            kept.append(leaf)
    return Flat(tensors, Structure(tuple(kept), spec))


def _open(leaf: Any) -> tuple[Any, dict[str, Any]] | None:
    if isinstance(leaf, Mapping):
        return _FromMapping(type(leaf)), dict(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
        return _FromFields(type(leaf)), fields
    return None


def opaque_leaves(structure: Structure) -> list[Any]:
    """The leaves that may hide tensors or change unseen: anything but plain constants."""
    found: list[Any] = []
    for leaf in structure.leaves:
        if isinstance(leaf, _Container):
            found.extend(opaque_leaves(leaf.inner))
        elif leaf is not _TENSOR and not isinstance(leaf, _CONSTANTS):
            found.append(leaf)
    return found


_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
)
