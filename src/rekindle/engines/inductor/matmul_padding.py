"""Which sides of a matrix product slow a GPU down, and by how much they are to be longer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_BYTES = 16  # fast products want rows to begin at multiples of this
_WORTH_FLOPS = 1 << 30  # a smaller product is not worth it

Sizes = Sequence[int]


@dataclass(frozen=True)
class PaddingOptions:
    """Which matmuls are padded: those with at least so many FLOPs."""

    min_flops: int = _WORTH_FLOPS


def is_large(a_shape: Sizes, b_shape: Sizes, options: PaddingOptions | None = None) -> bool:
    """Whether a product is worth longer sides."""
    min_flops = options.min_flops if options else _WORTH_FLOPS
    return 2 * math.prod((*a_shape, b_shape[1])) >= min_flops


def missing(
    a_shape: Sizes, a_stride: Sizes, b_shape: Sizes, b_stride: Sizes, itemsize: int
) -> tuple[int, int, int]:
    """How much is missing to a product's rows, to the side that is summed over, and to its columns.

    It matters for the sides along which tensors lie in memory: the first one's, the second one's,
    and the result's, which lies along its rows.

    >>> missing((4, 6), (6, 1), (6, 9), (9, 1), itemsize=2)
    (0, 2, 7)
    """
    numbers = _BYTES // itemsize
    rows, inner, columns = (-side % numbers for side in (*a_shape, b_shape[1]))
    is_inner = a_stride[1] == 1 or b_stride[0] == 1
    return (0 if a_stride[1] == 1 else rows), (inner if is_inner else 0), columns
