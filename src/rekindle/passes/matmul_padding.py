"""Which sides of a matrix product slow a GPU down, and how many zeros align them.

Tensor cores run at full speed only if rows start at multiples of 16 bytes. A language model with an
odd vocabulary size has three matmuls that do not, the largest of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 16
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

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
