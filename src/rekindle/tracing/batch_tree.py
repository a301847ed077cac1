"""Splits batches and results into tensors and a hashable structure, and rebuilds them.

torch's pytree handles tuples, lists, dicts, named tuples and registered classes. In addition, any
other mapping that can be built from a dict and any dataclass is taken apart, with its attributes,
so that a tokenizer's batch or the user's own batch class works.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from rekindle.torch_internals import pytree

_TENSOR, _DETACHED, _UNSET = object(), object(), object()
CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
)


# A tokenizer's own notes in a batch of transformers, which raises an error where they are missing.
_LEFT_OUT = {"_encodings", "_n_sequences"}


class Flat(NamedTuple):
    """A tree's tensors, and its structure without them."""

    tensors: list[torch.Tensor]
    structure: Structure


class Structure(NamedTuple):
    """A tree without its tensors. Equal structures rebuild equal trees."""

    leaves: tuple[Any, ...]  # _TENSOR or _DETACHED in place of a tensor
    spec: Any

    def key(self) -> tuple[Any, ...]:
        """A hashable key that, unlike plain equality, distinguishes 1 from 1.0 and True."""
        return (self.spec, *(leaf_key(leaf) for leaf in self.leaves))

    def rebuild(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The tree with these tensors."""
        rest = iter(tensors)
        leaves: list[Any] = []
        for leaf in self.leaves:
            if leaf is _TENSOR:
                leaves.append(next(rest))
            elif leaf is _DETACHED:
                leaves.append(next(rest).detach())
            else:
                leaves.append(leaf.rebuild(rest) if isinstance(leaf, _Container) else leaf)
        return pytree.tree_unflatten(leaves, self.spec)

    def detaching(self, is_detached: Iterator[bool]) -> Structure:
        """The same, with another tensor object in place of each tensor for which that is True."""
        leaves = [
            (_DETACHED if next(is_detached) else leaf)
            if leaf is _TENSOR
            else leaf._replace(content=leaf.content.detaching(is_detached))
            if isinstance(leaf, _Container)
            else leaf
            for leaf in self.leaves
        ]
        return self._replace(leaves=tuple(leaves))


def leaf_key(leaf: Any) -> tuple[Any, ...]:
    """A key of a constant that, unlike plain equality, distinguishes 1 from 1.0 and True."""
    if isinstance(leaf, _Container):
        return leaf.kind, leaf.content.key()
    if isinstance(leaf, float):  # -0.0 is not 0.0, and NaN equals NaN
        return float, leaf.hex()
    if isinstance(leaf, complex):
        return complex, leaf.real.hex(), leaf.imag.hex()
    return type(leaf), leaf


class _Container(NamedTuple):
    """A mapping or dataclass that pytree does not know: its items, if any, and its attributes."""

    kind: type
    content: Structure

    def rebuild(self, tensors: Iterator[torch.Tensor]) -> Any:
        items, attributes = self.content.rebuild(tensors)
        if items is None:
            instance: Any = object.__new__(self.kind)
        else:
            instance = self.kind(items)
        for name, value in attributes.items():
            object.__setattr__(instance, name, value)
        return instance


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Flat:
    """Split a tree; what `is_leaf` is True of is not taken apart."""
    tensors: list[torch.Tensor] = []
    leaves, spec = pytree.tree_flatten(tree, is_leaf=is_leaf)
    kept: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            kept.append(_TENSOR)
        elif is_leaf is not None and is_leaf(leaf):
            kept.append(leaf)
        elif (content := _content(leaf)) is not None:
            inner = flatten(content, is_leaf)
            tensors.extend(inner.tensors)
            kept.append(_Container(type(leaf), inner.structure))
        else:
            kept.append(leaf)
    return Flat(tensors, Structure(tuple(kept), spec))


def _content(leaf: Any) -> tuple[dict[Any, Any] | None, dict[str, Any]] | None:
    """The items and attributes of a mapping or dataclass; None for anything else."""
    if isinstance(leaf, Mapping):
        left_out = _LEFT_OUT | {"data"} if isinstance(leaf, UserDict) else _LEFT_OUT
        attributes = (attributes_of(leaf) or {}).items()
        return dict(leaf), {key: value for key, value in attributes if key not in left_out}
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return None, {**(attributes_of(leaf) or {}), **fields_of(leaf)}
    return None


def attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's own dict of attributes; None if it has none. It runs no code of its class."""
    found = _stored(value, "__dict__")
    return found if isinstance(found, dict) else None


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are set, as it holds them; not what its class shows instead.

    A class may answer `getattr` with something else, or with an error of its own.
    """
    found = {f.name: _stored(value, f.name) for f in dataclasses.fields(type(value))}
    return {name: each for name, each in found.items() if each is not _UNSET}


def _stored(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _UNSET


def opaque_leaves(structure: Structure) -> list[Any]:
    """The leaves that are not plain constants: they may hide tensors, or change unnoticed."""
    found: list[Any] = []
    for leaf in structure.leaves:
        if isinstance(leaf, _Container):
            found.extend(opaque_leaves(leaf.content))
        elif leaf is not _TENSOR and leaf is not _DETACHED and not isinstance(leaf, CONSTANTS):
            found.append(leaf)
    return found
