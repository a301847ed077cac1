"""The map of the arena on the page: address against time, a rectangle for each piece of memory."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.simulate import Trace
from rekindle.core.memory.layout import Layout, Piece
from rekindle.errors import ReportError
from rekindle.report.palette import ORDER, colour
from rekindle.report.plan_words import fine_percent
from rekindle.report.summary import first_values
from rekindle.units import format_bytes


def map_data(graph: StepGraph, trace: Trace, layout: Layout) -> dict[str, Any]:
    """Columns over the layout's pieces, integers all: the page's other tables have the texts.

    Offsets and sizes count in a unit that they have in common. A piece is made by the op that runs
    where it starts, and is mostly called like it, or like it with an ending: `names` has rows of
    whether a text is such an ending, and the text.
    """
    _check(trace, layout)
    values = first_values(graph)
    makers = [graph.ops[op].name for op in trace.ops[layout.start].tolist()]
    names: dict[tuple[bool, str], int] = {}

    def named(storage: int, maker: str) -> int:
        name = values[storage].name
        is_ending = name.startswith(maker)
        row = (is_ending, name.removeprefix(maker) if is_ending else name)
        return names.setdefault(row, len(names))

    storages = layout.storage.tolist()
    roles = [graph.storages[storage].role.value for storage in storages]
    shown = [label for label in ORDER if label in set(roles)]
    pieces = {
        Piece(*row): i for i, row in enumerate(zip(storages, layout.copy.tolist(), strict=True))
    }
    unit = int(np.gcd.reduce(np.concatenate([layout.offset, layout.nbytes, [0]]))) or 1
    return {
        "arena_bytes": layout.arena_bytes,
        "bound_bytes": layout.lower_bound_bytes,
        "unit_bytes": unit,
        "roles": [{"label": label, "colour": colour(label)} for label in shown],
        "role": [shown.index(label) for label in roles],
        "start": layout.start.tolist(),
        "end": layout.end.tolist(),
        "offset": (layout.offset // unit).tolist(),
        "size": (layout.nbytes // unit).tolist(),
        "name": [named(*pair) for pair in zip(storages, makers, strict=True)],
        "names": [list(row) for row in names],
        "over": [[pieces[reuse.result], pieces[reuse.over]] for reuse in layout.reuses],
    }


def _check(trace: Trace, layout: Layout) -> None:
    """Refuse a layout of another run of the step: its positions would name the wrong ops."""
    is_longer = int(layout.end.max(initial=-1)) >= len(trace.ops)
    if is_longer or (trace.copies[layout.start] != layout.copy).any():
        raise ReportError(
            "the layout is not of the step that the page shows: make it with "
            "rekindle.layout(graph, plan), of the same plan as the trace."
        )


def map_words(layout: Layout) -> dict[str, str]:
    """What stands around the map: what the arena is, how large, and how close to the least."""
    arena, bound, count = layout.arena_bytes, layout.lower_bound_bytes, len(layout.storage)
    if arena == bound:
        close = "exactly the most bytes that are there at once (the dotted line): none is smaller"
    else:
        close = (
            f"{fine_percent(layout.ratio - 1)} above the most bytes that are there at once (the "
            f"dotted line, {format_bytes(bound)}), and no arena is smaller than those"
        )
    pieces = "1 piece" if count == 1 else f"{count:,} pieces"
    words = (
        f"Everything that the step makes, {pieces} of memory, can lie in one block, the arena, at "
        "addresses that are known before the step runs. The arena takes "
        f"{format_bytes(arena)}: {close}."
    )
    again = (
        " What is computed again is hatched; point at it, and a dashed frame shows where it was "
        "before."
    )
    return {"words": escape(words), "again": escape(again) if (layout.copy > 0).any() else ""}
