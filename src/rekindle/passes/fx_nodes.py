"""Walks through FX graphs: from a result to its call, from a view to its tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def item_path(node: fx.Node) -> tuple[fx.Node, tuple[Any, ...]]:
    """The call that a node is a result of, and the indices that lead to it, outermost first."""
    indices: tuple[Any, ...] = ()
    while node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        node, indices = source, (index, *indices)
    return node, indices


def root(node: fx.Node, source: Callable[[fx.Node], fx.Node | None]) -> fx.Node:
    """The tensor behind a chain of views; `source` is a view's tensor, None if it is no view."""
    while (shown := source(node)) is not None:
        node = shown
    return node


def past_placeholders(node: fx.Node) -> fx.Node:
    """The first node from this one on after which a call can be inserted."""
    while node.next.op == "placeholder":
        node = node.next
    return node
