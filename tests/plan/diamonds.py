"""Diamonds written by hand. Import with `from plan.diamonds import diamond`."""

from __future__ import annotations

from collections.abc import Sequence

from hand_made import BACKWARD, FORWARD, LOSS, Call, profile_of, step, storages

from rekindle.core.cost import Profile
from rekindle.core.ir import Role, StepGraph


def diamond(times_us: Sequence[float] = (10.0, 2.0, 3.0)) -> tuple[StepGraph, Profile]:
    """Cell 0 (4 bytes) leads to cells 1 and 2 (8 bytes each), and these to cell 3 (1 byte).

    Cell i lies in storage i + 1. The backward pass starts at op 5, which needs 30 bytes of
    workspace and makes a gradient of 1 byte: with everything kept, 51 bytes. Then op 6 reads cell
    2, op 7 reads cell 1, op 8 reads cell 0, with a byte for each gradient. Whatever is dropped, 21
    bytes are there when op 3 makes cell 3. The times are those of cells 0, 1 and 2.
    """
    graph = step(
        storages(
            (0, Role.INPUT),
            (4, Role.ACTIVATION),
            (8, Role.ACTIVATION),
            (8, Role.ACTIVATION),
            (1, Role.TEMP),
            (0, Role.OUTPUT),
            *3 * [(1, Role.GRAD_MAP)],
        ),
        entering=[0],
        calls=[
            Call(FORWARD, [0], [1]),
            Call(FORWARD, [1], [2]),
            Call(FORWARD, [1], [3]),
            Call(FORWARD, [2, 3], [4]),
            Call(LOSS, [4], [5]),
            Call(BACKWARD, [5], [6]),
            Call(BACKWARD, [3, 6], [7]),
            Call(BACKWARD, [2, 6], [8]),
            Call(BACKWARD, [1, 7, 8]),
        ],
        outputs=[5],
    )
    return graph, profile_of(graph, times_us=[*times_us, *6 * [1.0]], workspaces={5: 30})


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
