"""How large an arena a steered step needs: it is rehearsed on paper, against the model.

So the bytes that will be reserved are known before anything runs.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import NamedTuple

import numpy as np

from rekindle.core.memory.allocator_steering import (
    APART_BYTES,
    Arena,
    Blocks,
    PlannedAddresses,
    Steering,
)
from rekindle.core.memory.packing import Ints, pack

PAGE_BYTES = 2 << 20  # an arena is a multiple of this

_CLOSE = 1.01  # of the most bytes that are there at once: nothing more is tried then
_CLOSE_SMALL = 1.02  # the same of a small arena, as far as that is no more than
_CLOSE_BYTES = 16 << 20
_SHORT = 50  # a piece is short-lived if it is there for one part in so many of the step


class ArenaPlan(NamedTuple):
    """Where each piece should lie, and how large an arena the steered step needs."""

    offsets: Ints
    arena_bytes: int


def plan_arena(pieces: Blocks) -> ArenaPlan:
    """Find an address for every piece, and the size of the arena, by going through the step.

    Two holes that touch are one, and may be taken for something else. So pieces that are asked for
    together are kept apart if they are short-lived; or none is, or all are, if that fits better.
    Behind pieces of equal size that are asked for together is room for larger holes.
    """
    rank = _rank_among_equals(pieces)
    n_positions = int(pieces.end.max(initial=0)) + 1
    is_together = (np.bincount(pieces.start, minlength=1)[pieces.start] > 1) & pieces.is_steered
    is_short = pieces.end - pieces.start <= n_positions // _SHORT
    least_bytes = pieces.least_bytes
    small_bytes = min(_CLOSE_SMALL * least_bytes, least_bytes + _CLOSE_BYTES)
    close_bytes = max(_CLOSE * least_bytes, small_bytes, least_bytes + PAGE_BYTES)
    best: ArenaPlan | None = None
    for is_apart in (is_together & is_short, is_together & False, is_together):
        room = np.where(is_apart, np.maximum(rank, 1), rank) * APART_BYTES
        offsets = pack(pieces.start, pieces.end, pieces.nbytes + room)
        arena_bytes = _arena_bytes(pieces, offsets)
        if best is None or arena_bytes < best.arena_bytes:
            best = ArenaPlan(offsets, arena_bytes)
        if best.arena_bytes <= close_bytes:
            break
    assert best is not None
    return best


def _rank_among_equals(pieces: Blocks) -> Ints:
    """How many pieces of the same size are asked for at the same position before each."""
    seen: Counter[tuple[int, int]] = Counter()
    ranks: list[int] = []
    for key in zip(pieces.start.tolist(), pieces.nbytes.tolist(), strict=True):
        ranks.append(seen[key])
        seen[key] += 1
    return np.array(ranks, dtype=np.int64)


def _arena_bytes(pieces: Blocks, offsets: Ints) -> int:
    """The smallest arena tried in which the step stays: each is a little larger than the last."""
    planned_bytes = int((offsets + pieces.nbytes).max(initial=0))
    arenas = (_paged(planned_bytes + planned_bytes * n**2 // 1000) for n in count())
    return next(nbytes for nbytes in arenas if rehearse(pieces, offsets, nbytes) is not None)


def rehearse(pieces: Blocks, offsets: Ints, arena_bytes: int) -> int | None:
    """Go through a step on paper: the most bytes that are handed out at once, plugs apart.

    None if it does not stay in the arena.
    """
    arena = Arena({0: arena_bytes})
    steering = Steering(Arena({0: arena_bytes}), arena, PlannedAddresses(pieces, offsets))
    made, gone = _by_position(pieces.start), _by_position(pieces.end)
    sizes = pieces.nbytes.tolist()
    where: dict[int, int] = {}
    peak_bytes = 0
    for position in sorted(made.keys() | gone.keys()):
        asked = made.get(position, [])
        if asked and pieces.is_steered[asked].all():
            steering.arrange(asked)
        elif asked:
            steering.open_all()
        for each in asked:
            address = arena.allocate(sizes[each])
            if address is None:
                return None
            steering.took(address, sizes[each])
            where[each] = address
        peak_bytes = max(peak_bytes, arena.taken_bytes - steering.plugged_bytes)
        for each in gone.get(position, []):
            arena.free(where[each])
            steering.gave_back(where[each])
    return peak_bytes


def _by_position(positions: Ints) -> dict[int, list[int]]:
    """The pieces of each position."""
    found: dict[int, list[int]] = {}
    for piece, position in enumerate(positions.tolist()):
        found.setdefault(position, []).append(piece)
    return found


def _paged(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
