"""Where to put blocks of memory whose lives are known: the fewest bytes that hold them all.

Blocks that are there at the same time must not overlap; others may share memory. That is a packing
problem, and a hard one, but training steps are kind: put the largest block first, each as low as
it fits under those it meets in time, and the result is mostly the least there can be. Where it is
not, the blocks that stick out come earlier the next time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_CLOSE = 1.005  # of the bound: nothing more is tried then
_MOST_TRIES = 300
_BLOCK_TRIES = 60_000  # of all blocks together
_FAR = np.iinfo(np.int64).max


def least_bytes(start: Ints, end: Ints, nbytes: Ints) -> int:
    """The most bytes that are there at one moment: no arena is smaller. Ends are inclusive.

    >>> least_bytes(np.array([0, 1, 3]), np.array([1, 2, 4]), np.array([4, 2, 5]))
    6
    """
    if not len(start):
        return 0
    changes = np.zeros(int(end.max()) + 2, dtype=np.int64)
    np.add.at(changes, start, nbytes)
    np.subtract.at(changes, end + 1, nbytes)
    return int(np.cumsum(changes).max())


def pack(start: Ints, end: Ints, nbytes: Ints) -> Ints:
    """An offset for every block, in an arena as small as a few dozen tries make it.

    >>> pack(np.array([0, 1, 3]), np.array([1, 2, 4]), np.array([4, 2, 5])).tolist()
    [0, 4, 0]
    """
    n, bound = len(start), least_bytes(start, end, nbytes)
    best, height = np.zeros(n, dtype=np.int64), _FAR
    urgency = np.zeros(n, dtype=np.int64)
    chance = np.random.default_rng(0)
    ties = (-end, start, start - end)  # of equal blocks, first the last to go, to come, the longest
    for each in range(min(max(_BLOCK_TRIES // max(n, 1), 4), _MOST_TRIES)):
        size = nbytes * (end - start + 1.0) if each == 3 else nbytes  # once: bytes times life
        order = np.lexsort((start, ties[each % 3], -size, -urgency))
        offsets = _stack(start, end, nbytes, order)
        tops = offsets + nbytes
        if (top := int(tops.max(initial=0))) < height:
            best, height = offsets, top
        if height <= _CLOSE * bound:
            break
        if each >= 3:  # what sticks out comes earlier; from the tenth on every other, by chance
            urgency += (tops > _CLOSE * bound) & ((each < 10) | (chance.random(n) < 0.5))
    return best


def _stack(start: Ints, end: Ints, nbytes: Ints, order: Ints) -> Ints:
    """Put one block after the other into the lowest gap, of those it meets in time, that fits."""
    n = len(order)
    begins, ends = start[order], end[order]
    sizes = nbytes[order]
    lows, tops = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    for i in range(n):
        meets = np.flatnonzero((begins[:i] <= ends[i]) & (ends[:i] >= begins[i]))
        if len(meets):
            meets = meets[np.argsort(lows[meets], kind="stable")]
            gap_from = np.concatenate(([0], np.maximum.accumulate(tops[meets])))
            gap_to = np.concatenate((lows[meets], [_FAR]))
            lows[i] = gap_from[np.argmax(gap_to - gap_from >= sizes[i])]
        tops[i] = lows[i] + sizes[i]
    offsets = np.zeros(n, dtype=np.int64)
    offsets[order] = lows
    return offsets
