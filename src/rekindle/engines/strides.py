"""Strides of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.tracing.tape import Meta


def significant_strides(meta: Meta) -> list[int]:
    """The strides of dimensions with more than one element: others do not matter."""
    return [step for size, step in zip(meta.shape, meta.stride, strict=True) if size != 1]


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if a tensor's elements fill its memory without gaps or overlap, in any order."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
