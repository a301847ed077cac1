"""How tensors lie in memory."""

from __future__ import annotations

from rekindle.tracing.tape import Meta


def in_memory(meta: Meta) -> list[int]:
    """The strides that matter: a dimension of one element makes no difference."""
    return [step for size, step in zip(meta.shape, meta.stride, strict=True) if size != 1]


def is_dense(meta: Meta) -> bool:
    """Whether a tensor's elements lie side by side, each in a place of its own."""
    expected = 1
    for step, size in sorted(zip(meta.stride, meta.shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor that lies in memory row by row."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
