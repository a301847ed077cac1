"""Gives large matrix products sides that suit a GPU, before anything is planned.

A product whose rows do not begin at multiples of 16 bytes takes a GPU much longer; a language model
with an odd number of words has three such products, the largest of all. Inductor adds zeros to the
sides of what they read, and copies what is large several times for it. Here every tensor is made
with the zeros in it, once, and all products read that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rekindle.dynamo.fusion import after
from rekindle.engines.inductor import matmul_padding

aten = torch.ops.aten

_DEVICES = ("cuda",)
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_PAD = aten.constant_pad_nd.default


def align(graph: fx.Graph) -> None:
    """Change the large products of a joint graph whose tensors do not lie as a GPU wants them."""
    work = _Align(graph)
    for node in list(graph.nodes):
        if node.target in _PRODUCTS and not node.kwargs and work.is_worth_it(node):
            work.change(node)
    work.finish()


class _Align:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.padded: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.parts: set[fx.Node] = set()  # what shows a matrix without the sides that were added

    def is_worth_it(self, node: fx.Node) -> bool:
        *bias, a, b = (each.meta["val"] for each in _arguments(node))
        shapes = [*a.shape, *b.shape, *(side for each in bias for side in each.shape)]
        is_long = a.dtype.itemsize == 4
        return (
            a.device.type in _DEVICES
            and all(isinstance(side, int) for side in shapes)
            and (a.dtype.itemsize == 2 or (is_long and torch.backends.cuda.matmul.allow_tf32))
            and matmul_padding.is_large(a.shape, b.shape)
            and all(each.shape == b.shape[1:] for each in bias)
            and any(_missing(a, b))
        )

    def change(self, node: fx.Node) -> None:
        """A product of tensors with zeros at their sides; a part of it is the result."""
        *bias, a, b = _arguments(node)
        shape = a.meta["val"].shape[0], b.meta["val"].shape[1]
        rows, inner, columns = _missing(a.meta["val"], b.meta["val"])
        first, second = self._padded(a, rows, inner), self._padded(b, inner, columns)
        with self.graph.inserting_before(node):
            if columns:
                bias = [self._call(_PAD, (each, [0, columns]), like=each) for each in bias]
            whole = self._call(node.target, (*bias, first, second), like=node)
            part = self._part(whole, shape)
        node.replace_all_uses_with(part)
        self.graph.erase_node(node)

    def _part(self, whole: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """What was there of a matrix before zeros were added."""
        part = whole
        for dim, side in enumerate(shape):
            if whole.meta["val"].shape[dim] != side:
                part = self._call(aten.slice.Tensor, (part, dim, 0, side), like=whole)
        self.parts.add(part)
        return part

    def _padded(self, node: fx.Node, rows: int, columns: int) -> fx.Node:
        """A matrix with rows and columns of zeros added, of which others read a part from then on.

        Of a matrix that is turned, it is the one before that.
        """
        if not rows and not columns:
            return node
        if node.target is aten.permute.default and node.args[1] == [1, 0]:
            whole = self._padded(node.all_input_nodes[0], columns, rows)
            with self.graph.inserting_after(whole):
                return self._call(aten.permute.default, (whole, [1, 0]), like=node)
        if (node, rows, columns) not in self.padded:
            self.padded[node, rows, columns] = self._make(node, rows, columns)
        return self.padded[node, rows, columns]

    def _make(self, node: fx.Node, rows: int, columns: int) -> fx.Node:
        """A matrix with zeros, right after what it is made of."""
        base, shape = node, tuple(node.meta["val"].shape)
        while base.target in _RESHAPES:
            base = base.all_input_nodes[0]
        with self.graph.inserting_before(after(base).next):
            flat = self._call(aten.view.default, (base, list(shape)), like=node)
            whole = self._call(_PAD, (flat, [0, columns, 0, rows]), like=node)
            if base.op == "call_function":
                part = self._part(whole, shape)
                again = self._call(
                    aten.view.default, (part, list(base.meta["val"].shape)), like=base
                )
                self.padded[part, rows, columns] = whole
                node.replace_all_uses_with(part, lambda user: user is not flat)
                base.replace_all_uses_with(again, lambda user: user is not flat)
        return whole

    def finish(self) -> None:
        """What is returned lies in memory as it did; said here, as the compiler will do it."""
        (output,) = self.graph.find_nodes(op="output")
        copies: dict[fx.Node, fx.Node] = {}

        def copied(node: fx.Node) -> fx.Node:
            if not self._shows_part(node):
                return node
            if node not in copies:
                with self.graph.inserting_before(output):
                    copies[node] = self._call(aten.clone.default, (node,), like=node)
            return copies[node]

        output.args = fx.map_arg(output.args, copied)
        if self.parts:
            self.graph.eliminate_dead_code()

    def _shows_part(self, node: fx.Node) -> bool:
        """Whether a node shows a matrix that has gaps now, perhaps in another shape."""
        while node not in self.parts:
            if node.target not in _RESHAPES:
                return False
            node = node.all_input_nodes[0]
        return not node.meta["val"].is_contiguous()

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.meta = dict(like.meta)
        made.meta["val"] = target(*fx.map_arg(args, lambda node: node.meta["val"]))
        return made


def _arguments(node: fx.Node) -> list[fx.Node]:
    """A product's tensors; one may be there twice."""
    return [each for each in node.args if isinstance(each, fx.Node)]


def _missing(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
    return matmul_padding.missing(a.shape, a.stride(), b.shape, b.stride(), a.dtype.itemsize)
