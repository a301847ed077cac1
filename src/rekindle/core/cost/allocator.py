"""What allocators make of a request for bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MIB = 1 << 20
_ROUND = 512
_LARGE = 10 * _MIB  # from here on, a request gets a segment of its own
_SEGMENT = 2 * _MIB  # whose size is a multiple of this
_SPLIT = 1 * _MIB  # and whose rest is split off if it is larger than this

LARGE_BYTES = 1 * _MIB
"""What is no larger comes from segments of its own kind, which are small."""

ALLOCATORS = ("arena", "cuda", "exact")


def allocated_bytes(requested_bytes: NDArray[np.int64], allocator: str) -> NDArray[np.int64]:
    """The bytes that count as allocated for each request.

    CUDA's caching allocator rounds up to 512; a large request gets a whole segment of 2 MiB pages,
    unless more than 1 MiB of it would be left over. From one arena, as CUDA graphs have it, every
    request gets what it asks for, rounded up to 512.

    >>> [int(n) for n in allocated_bytes(np.array([1, 512, 11 * _MIB, 12 * _MIB - 1]), "cuda")]
    [512, 512, 12582912, 12582912]
    >>> [int(n) for n in allocated_bytes(np.array([1, 512, 11 * _MIB, 12 * _MIB - 1]), "arena")]
    [512, 512, 11534336, 12582912]
    >>> [int(n) for n in allocated_bytes(np.array([1, 513]), "exact")]
    [1, 513]
    """
    if allocator == "exact":
        return requested_bytes
    if allocator not in ALLOCATORS:
        raise ValueError(f"unknown allocator {allocator!r}: one of {', '.join(ALLOCATORS)}")
    rounded = -(-requested_bytes // _ROUND) * _ROUND
    if allocator == "arena":
        return rounded
    segment = -(-rounded // _SEGMENT) * _SEGMENT
    is_whole = (rounded >= _LARGE) & (segment - rounded <= _SPLIT)
    return np.where(is_whole, segment, rounded)
