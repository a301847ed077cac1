"""Padding of large matmuls for a GPU: which sides slow it down, and the rewrite of a joint graph.

Tensor cores run at full speed only if rows start at multiples of 16 bytes. A language model with an
odd vocabulary size has three matmuls that do not, the largest of all. Inductor pads the inputs of
each one and copies large tensors several times for that; `pad_matmuls` pads every tensor once,
where it is computed, and all matmuls read the padded one.

`engines/inductor/gpu_layouts` rewrites recorded steps by the same rules. Their tensors may be
mutated in place later, unlike those of a joint graph; the two rewrites stay apart, since which
kernels they lead to can only be compared on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rekindle.passes.fx_nodes import RESHAPES, past_placeholders, root

aten = torch.ops.aten

ALIGNMENT_BYTES = 16
MATMULS = (aten.mm.default, aten.addmm.default)
_PAD = aten.constant_pad_nd.default

Sizes = Sequence[int]


@dataclass(frozen=True)
class PaddingOptions:
    """Which matmuls are padded: those on these devices with at least so many FLOPs."""

    device_types: tuple[str, ...] = ("cuda",)
    min_flops: int = 1 << 30


def is_large(a_shape: Sizes, b_shape: Sizes, options: PaddingOptions) -> bool:
    """True if a matmul is large enough to be worth padding."""
    return 2 * math.prod((*a_shape, b_shape[1])) >= options.min_flops


def missing(
    a_shape: Sizes, a_stride: Sizes, b_shape: Sizes, b_stride: Sizes, itemsize: int
) -> tuple[int, int, int]:
    """The padding that a matmul's rows, inner dimension and columns need.

    Only the contiguous dimension of each matrix counts: the first one's, the second one's, and the
    result's, which is row-major.

    >>> missing((4, 6), (6, 1), (6, 9), (9, 1), itemsize=2)
    (0, 2, 7)
    """
    numbers = ALIGNMENT_BYTES // itemsize
    rows, inner, columns = (-side % numbers for side in (*a_shape, b_shape[1]))
    is_inner = a_stride[1] == 1 or b_stride[0] == 1
    return (0 if a_stride[1] == 1 else rows), (inner if is_inner else 0), columns


def pad_matmuls(graph: fx.Graph, options: PaddingOptions) -> None:
    """Pad the large misaligned matmuls of a joint graph."""
    rewriter = _Rewriter(graph)
    for node in list(graph.nodes):
        if node.target in MATMULS and not node.kwargs and _is_worth_it(node, options):
            rewriter.pad(node)
    rewriter.finish()


def _is_worth_it(node: fx.Node, options: PaddingOptions) -> bool:
    *bias, a, b = (each.meta["val"] for each in _tensors(node))
    sides = [*a.shape, *b.shape, *(side for each in bias for side in each.shape)]
    is_float32 = a.dtype.itemsize == 4
    return (
        a.device.type in options.device_types
        and all(isinstance(side, int) for side in sides)
        and (a.dtype.itemsize == 2 or (is_float32 and torch.backends.cuda.matmul.allow_tf32))
        and is_large(a.shape, b.shape, options)
        and all(each.shape == b.shape[1:] for each in bias)
        and any(_missing(a, b))
    )


class _Rewriter:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.padded: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.parts: set[fx.Node] = set()  # views of padded matrices without their padding

    def pad(self, node: fx.Node) -> None:
        """Replace a matmul by part of a matmul of padded tensors."""
        *bias, a, b = _tensors(node)
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
        """A padded matrix without its padding."""
        part = whole
        for dim, side in enumerate(shape):
            if whole.meta["val"].shape[dim] != side:
                part = self._call(aten.slice.Tensor, (part, dim, 0, side), like=whole)
        self.parts.add(part)
        return part

    def _padded(self, node: fx.Node, rows: int, columns: int) -> fx.Node:
        """A padded matrix; other readers of the matrix read a part of it from then on.

        Of a transposed matrix, the original is padded.
        """
        if not rows and not columns:
            return node
        if node.target is aten.permute.default and node.args[1] == [1, 0]:
            whole = self._padded(node.all_input_nodes[0], columns, rows)
            with self.graph.inserting_after(whole):
                return self._call(aten.permute.default, (whole, [1, 0]), like=node)
        if (node, rows, columns) not in self.padded:
            self.padded[node, rows, columns] = self._pad_once(node, rows, columns)
        return self.padded[node, rows, columns]

    def _pad_once(self, node: fx.Node, rows: int, columns: int) -> fx.Node:
        """A padded matrix, right after the tensor that it shows."""
        base, shape = root(node, _reshape_source), tuple(node.meta["val"].shape)
        with self.graph.inserting_before(past_placeholders(base).next):
            flat = self._call(aten.view.default, (base, list(shape)), like=node)
            whole = self._call(_PAD, (flat, [0, columns, 0, rows]), like=node)
            if base.op == "call_function":
                part = self._part(whole, shape)
                reshaped = self._call(
                    aten.view.default, (part, list(base.meta["val"].shape)), like=base
                )
                self.padded[part, rows, columns] = whole
                node.replace_all_uses_with(part, lambda user: user is not flat)
                base.replace_all_uses_with(reshaped, lambda user: user is not flat)
        return whole

    def finish(self) -> None:
        """Copy results that show part of a padded matrix, as Inductor would, to keep strides."""
        (output,) = self.graph.find_nodes(op="output")
        copies: dict[fx.Node, fx.Node] = {}

        def copied(node: fx.Node) -> fx.Node:
            if not self._has_gaps(node):
                return node
            if node not in copies:
                with self.graph.inserting_before(output):
                    copies[node] = self._call(aten.clone.default, (node,), like=node)
            return copies[node]

        output.args = fx.map_arg(output.args, copied)
        if self.parts:
            self.graph.eliminate_dead_code()

    def _has_gaps(self, node: fx.Node) -> bool:
        """True if a node shows part of a padded matrix, perhaps reshaped, with gaps in memory."""
        part = root(node, lambda n: None if n in self.parts else _reshape_source(n))
        return part in self.parts and not part.meta["val"].is_contiguous()

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.meta = dict(like.meta)
        made.meta["val"] = target(*fx.map_arg(args, lambda node: node.meta["val"]))
        return made


def _reshape_source(node: fx.Node) -> fx.Node | None:
    return node.all_input_nodes[0] if node.target in RESHAPES else None


def _tensors(node: fx.Node) -> list[fx.Node]:
    """A matmul's tensors; one may occur twice."""
    return [each for each in node.args if isinstance(each, fx.Node)]


def _missing(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
    return missing(a.shape, a.stride(), b.shape, b.stride(), a.dtype.itemsize)
