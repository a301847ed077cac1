"""Packs blocks with known lifetimes into the smallest arena (dynamic storage allocation).

Blocks that are live at the same time must not overlap; others may share memory. The problem is
NP-hard, but a greedy packing mostly reaches the lower bound on training steps: largest block first,
each at the lowest gap between those live at the same time (Pisarchyk and Lee, "Efficient Memory
Management for Deep Neural Net Inference", 2020). If it does not, the blocks above the bound come
earlier in the next attempt.
"""

from __future__ import annotations

import numpy as np

from rekindle.core.graph.liveness import Ints, live_bytes

_CLOSE_TO_BOUND_RATIO = 1.005  # an arena this close to the lower bound is accepted
_MAX_ATTEMPTS = 300
_MAX_BLOCKS_PLACED = 60_000  # in all attempts together
_INFINITE_BYTES = np.iinfo(np.int64).max


def least_bytes(start: Ints, end: Ints, nbytes: Ints) -> int:
    """The most bytes live at one moment, a lower bound on the arena. Ends are inclusive."""
    n_positions = int(end.max(initial=-1)) + 1
    return int(live_bytes(start, end, nbytes, n_positions).max(initial=0))


def pack(start: Ints, end: Ints, nbytes: Ints) -> Ints:
    """An offset for every block, in the smallest arena of a limited number of attempts."""
    n, bound = len(start), least_bytes(start, end, nbytes)
    best, height = np.zeros(n, dtype=np.int64), _INFINITE_BYTES
    urgency = np.zeros(n, dtype=np.int64)
    random = np.random.default_rng(0)
    ties = (-end, start, start - end)  # equal blocks: last to end, first to start, longest first
    for attempt in range(min(max(_MAX_BLOCKS_PLACED // max(n, 1), 4), _MAX_ATTEMPTS)):
        size = nbytes * (end - start + 1.0) if attempt == 3 else nbytes  # once: bytes × lifetime
        order = np.lexsort((start, ties[attempt % 3], -size, -urgency))
        offsets = _stack(start, end, nbytes, order)
        tops = offsets + nbytes
        if (top := int(tops.max(initial=0))) < height:
            best, height = offsets, top
        limit_bytes = _CLOSE_TO_BOUND_RATIO * bound
        if height <= limit_bytes:
            break
        if attempt >= 3:  # blocks above the bound come earlier; from attempt 10, a random half
            urgency += (tops > limit_bytes) & ((attempt < 10) | (random.random(n) < 0.5))
    return best


def _stack(start: Ints, end: Ints, nbytes: Ints, order: Ints) -> Ints:
    """Place one block after the other into the lowest gap that fits at all times it is live."""
    n = len(order)
    begins, ends = start[order], end[order]
    sizes = nbytes[order]
    lows, tops = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    for i in range(n):
        meets = np.flatnonzero((begins[:i] <= ends[i]) & (ends[:i] >= begins[i]))
        if len(meets):
            meets = meets[np.argsort(lows[meets], kind="stable")]
            gap_from = np.concatenate(([0], np.maximum.accumulate(tops[meets])))
            gap_to = np.concatenate((lows[meets], [_INFINITE_BYTES]))
            lows[i] = gap_from[np.argmax(gap_to - gap_from >= sizes[i])]
        tops[i] = lows[i] + sizes[i]
    offsets = np.zeros(n, dtype=np.int64)
    offsets[order] = lows
    return offsets
