"""The bytes that an allocator counts for a request."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MIB = 1 << 20
_ROUND_BYTES = 512
_OWN_SEGMENT_BYTES = 10 * _MIB  # from here on, a request gets a segment of its own
_SEGMENT_MULTIPLE_BYTES = 2 * _MIB
_SPLIT_BYTES = 1 * _MIB  # a larger remainder of a segment is split off

LARGE_BYTES = 1 * _MIB
"""Requests up to this size come from separate, small segments."""

ALLOCATORS = ("arena", "cuda", "exact")


def allocated_bytes(requested_bytes: NDArray[np.int64], allocator: str) -> NDArray[np.int64]:
    """The bytes that count as allocated for each request.

    CUDA's caching allocator rounds up to 512; a large request gets a whole segment of 2 MiB pages,
    unless more than 1 MiB of it would remain. In one arena, as for CUDA graphs, every request is
    only rounded up to 512.
    """
    if allocator == "exact":
        return requested_bytes
    if allocator not in ALLOCATORS:
        raise ValueError(f"unknown allocator {allocator!r}: one of {', '.join(ALLOCATORS)}")
    rounded = -(-requested_bytes // _ROUND_BYTES) * _ROUND_BYTES
    if allocator == "arena":
        return rounded
    segment = -(-rounded // _SEGMENT_MULTIPLE_BYTES) * _SEGMENT_MULTIPLE_BYTES
    is_whole = (rounded >= _OWN_SEGMENT_BYTES) & (segment - rounded <= _SPLIT_BYTES)
    return np.where(is_whole, segment, rounded)
