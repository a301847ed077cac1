"""Attention on a GPU reads queries, keys and values wherever they lie.

`torch.nn.MultiheadAttention` computes all three in one matrix product, adds a bias, and copies the
result into another order, in which each is a tensor of its own. The bias can be part of the
product, and the copy is needless: kernels for attention take tensors with gaps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from rekindle.engines.inductor.recording_builder import Builder, is_view
from rekindle.engines.inductor.strides import contiguous_stride

aten = torch.ops.aten

# Where queries, keys and values are among an operator's arguments.
ARGUMENTS: dict[Any, slice] = {
    aten._scaled_dot_product_flash_attention.default: slice(0, 3),
    aten._scaled_dot_product_flash_attention_backward.default: slice(1, 4),
    aten._scaled_dot_product_cudnn_attention.default: slice(0, 3),
    aten._scaled_dot_product_cudnn_attention_backward.default: slice(1, 4),
    aten._scaled_dot_product_efficient_attention.default: slice(0, 3),
    aten._scaled_dot_product_efficient_attention_backward.default: slice(1, 4),
    aten._scaled_dot_product_flash_attention_for_cpu.default: slice(0, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: slice(1, 4),
}
_ALIGNED = 8  # elements: where rows have to start


class Place(NamedTuple):
    """Where a tensor's elements are, in the storage of another."""

    tensor: fx.Node
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def tensors(node: fx.Node) -> list[fx.Node]:
    """Queries, keys and values, as they are given to attention."""
    return [arg for arg in node.args[ARGUMENTS[node.target]] if isinstance(arg, fx.Node)]


def before_copy(build: Builder, node: fx.Node) -> Place | None:
    """Where the elements of a view of a copy were before they were copied; None if they were not.

    Rows must start where kernels like it, and their elements lie side by side.
    """
    maker = {made: call for call in build.tape.calls for made in call.results}
    copied = node
    while copied in maker and is_view(maker[copied], build.tape):
        copied = maker[copied].node.all_input_nodes[0]
    if copied not in maker or maker[copied].node.target is not aten.clone.default:
        return None
    return _place(build, node, copied, maker[copied].node.all_input_nodes[0])


def _place(build: Builder, node: fx.Node, copied: fx.Node, source: fx.Node) -> Place | None:
    view, copy, original = build.fake(node), build.fake(copied), build.fake(source)
    if copy.stride() != contiguous_stride(tuple(copy.shape)):
        return None
    sides = list(zip(copy.stride(), copy.shape, original.stride(), strict=True))
    digits = [view.storage_offset() // step % size for step, size, _ in sides]
    reach = digits[:]
    stride: list[int] = []
    for size, step in zip(view.shape, view.stride(), strict=True):
        if size == 1 or step == 0:
            stride.append(0 if step == 0 else 1)
            continue
        side = next(i for i, (low, many, _) in enumerate(sides) if low <= step < low * many)
        low, _, there = sides[side]
        if step % low:
            return None
        reach[side] += (size - 1) * (step // low)
        stride.append(step // low * there)
    if any(end >= size for end, (_, size, _) in zip(reach, sides, strict=True)):
        return None  # it goes across the end of a row
    steps = zip(digits, sides, strict=True)
    offset = int(original.storage_offset()) + sum(digit * there for digit, (_, _, there) in steps)
    rows = [step for step, size in zip(stride, view.shape, strict=True) if size != 1]
    if not rows or rows[-1] != 1 or any(each % _ALIGNED for each in (offset, *rows[:-1])):
        return None
    return Place(source, tuple(view.shape), tuple(stride), offset)
