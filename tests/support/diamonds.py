"""Diamonds written by hand. Import with `from plan.diamonds import diamond`."""

from __future__ import annotations

from collections.abc import Sequence

from support.hand_made import BACKWARD, FORWARD, LOSS, Costed, costed_step

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph


def diamond(times_us: Sequence[float] = (10.0, 2.0, 3.0)) -> tuple[StepGraph, Profile]:
    """Cell 0 (4 bytes) leads to cells 1 and 2 (8 bytes each), and these to cell 3 (1 byte).

    Cell i lies in storage i + 1. The backward pass starts at op 5, which needs 30 bytes of
    workspace and makes a gradient of 1 byte: with everything kept, 51 bytes. Then op 6 reads cell
    2, op 7 reads cell 1, op 8 reads cell 0, with a byte for each gradient. Under every plan, 21
    bytes are live when op 3 makes cell 3. The times are those of cells 0, 1 and 2.
    """
    return diamond_of(
        [4, 8, 8, 1],
        [*times_us, 1.0],
        backward=[
            Costed(BACKWARD, [5], [1], workspace=30),
            Costed(BACKWARD, [3, 6], [1]),
            Costed(BACKWARD, [2, 6], [1]),
            Costed(BACKWARD, [1, 7, 8]),
        ],
    )


def diamond_of(
    sizes: Sequence[int], times_us: Sequence[float], backward: Sequence[Costed]
) -> tuple[StepGraph, Profile]:
    """Four cells of these bytes and times, in storages 1 to 4, the loss, and these backward ops."""
    sources = ([0], [1], [1], [2, 3])
    cells = zip(sources, sizes, times_us, strict=True)
    return costed_step(
        *(Costed(FORWARD, reads, [nbytes], us) for reads, nbytes, us in cells),
        Costed(LOSS, [4], [0]),
        *backward,
    )


# Budgets, the cells that are best dropped to stay within each, and the time that adds.
DIAMOND_OPTIMA = [
    (51, [], 0.0),
    (50, [1], 2.0),
    (43, [1], 2.0),
    (42, [1, 2], 5.0),
    (35, [1, 2], 5.0),
    (34, [0, 1, 2], 15.0),
    (31, [0, 1, 2], 15.0),
]
DIAMOND_LEAST_PEAK = 31
