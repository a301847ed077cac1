"""The data that the page's script draws: columns rather than rows, every text written once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.graph.graph import Phase
from rekindle.core.graph.simulate import ROLES, Trace
from rekindle.core.memory.layout import Layout, Piece
from rekindle.errors import ReportError
from rekindle.report.names import shorten, shorten_path, source_line
from rekindle.report.palette import LIBRARIES, ORDER, PHASE_BANDS, colour
from rekindle.report.summary import Activation, DecisionRow, Summary, first_values, summarize

MOST_POSITIONS = 20_000
MOST_ACTIVATIONS = 60
_MOST_BANDS = 24
_LABEL_WIDTH = 40
_KIND_WIDTH = 18


def page_data(summary: Summary, layout: Layout | None = None) -> dict[str, Any]:
    """All data of the page, ready for JSON; with a layout, the map of the arena."""
    graph, plan = summary.graph, summary.plan
    rows = summary if plan is None else summarize(graph, summary.profile, summary.unplanned)
    phases = [phase.value for phase in Phase]
    targets, target = _numbered(op.target for op in graph.ops)
    modules, module = _numbered(op.source.module for op in graph.ops)
    sources, source = _numbered(source_line(op.source) for op in graph.ops)
    columns = {
        "name": [op.name for op in graph.ops],
        "target": target,
        "phase": [phases.index(op.phase.value) for op in graph.ops],
        "module": module,
        "source": source,
        "time_us": _rounded(summary.profile.times_us),
        "workspace_bytes": summary.profile.workspaces_bytes.tolist(),
        "flops": [op.flops for op in graph.ops],
        "moved_bytes": rows.moved_bytes.tolist(),
    }
    data: dict[str, Any] = {
        "plain": _run_data(summary.unplanned),
        "phases": phases,
        "targets": targets,
        "modules": modules,
        "sources": sources,
        "ops": columns,
        "band_colours": PHASE_BANDS,
        "activations": [_bar(row) for row in _longest_idle(rows)],
        "operators": [
            {**asdict(row), "mean_us": row.mean_us, "intensity": row.intensity}
            for row in rows.operators
        ],
    }
    if plan is not None:
        data["planned"] = _run_data(summary.trace)
        data["budget_bytes"] = plan.budget_bytes
        data["decisions"] = [_decision(row) for row in summary.decisions]
    if layout is not None:
        data["map"] = map_data(summary.trace, layout)
    return data


def _numbered(texts: Iterable[str]) -> tuple[list[str], list[int]]:
    """The different texts, and for each text its number among them."""
    numbers: dict[str, int] = {}
    column = [numbers.setdefault(text, len(numbers)) for text in texts]
    return list(numbers), column


def _run_data(trace: Trace) -> dict[str, Any]:
    """Memory over one run of the step; without recomputation, position i is op i."""
    is_planned = len(trace.ops) != len(trace.graph.ops) or bool(trace.copies.any())
    return {
        "ops": trace.ops.tolist() if is_planned else None,
        "copies": trace.copies.tolist() if is_planned else None,
        "peak": {
            "bytes": trace.peak_bytes,
            "position": trace.peak_position if trace.graph.ops else 0,
        },
        "step_us": trace.step_us,
        "starts_us": _rounded(trace.starts_us),
        "live_bytes": trace.live_bytes.tolist(),
        "positions": positions(trace.live_bytes),
        "stack": _stack(trace),
        "bands": phase_bands(trace),
    }


def phase_bands(trace: Trace) -> list[tuple[str, int, int]]:
    """Stretches of one phase: phase, first and last position; the longest if there are many.

    A recomputation belongs to the phase that it is for.
    """
    phases = [trace.graph.ops[op].phase for op in _served(trace)]
    runs, first = [], 0
    for phase, run in groupby(phases):
        last = first + len(list(run)) - 1
        runs.append((phase.value, first, last))
        first = last + 1
    if len(runs) <= _MOST_BANDS:
        return runs
    longest = sorted(runs, key=lambda run: run[1] - run[2])[:_MOST_BANDS]
    return sorted(longest, key=lambda run: run[1])


def _served(trace: Trace) -> list[int]:
    """For each position, the op that it serves: its own, or the next that is no recomputation."""
    served, following = [], int(trace.ops[-1]) if len(trace.ops) else 0
    for op, copy in zip(trace.ops[::-1].tolist(), trace.copies[::-1].tolist(), strict=True):
        following = following if copy else op
        served.append(following)
    return served[::-1]


def positions(live_bytes: NDArray[np.int64], most: int = MOST_POSITIONS) -> list[int] | None:
    """The positions to draw, None for all: of a very long step, the highest of each stretch."""
    n_ops = len(live_bytes)
    if n_ops <= most:
        return None
    edges = np.linspace(0, n_ops, most + 1).astype(int)
    return [int(a + np.argmax(live_bytes[a:b])) for a, b in pairwise(edges)]


def _longest_idle(summary: Summary) -> list[Activation]:
    """Those with the most bytes × idle time, in the order in which they become idle."""
    top = [row for row in summary.activations if row.byte_us > 0][:MOST_ACTIVATIONS]
    return sorted(top, key=lambda row: (row.last_forward or 0, row.storage))


def stacked(trace: Trace) -> list[tuple[str, NDArray[np.int64]]]:
    """Bytes by role at every position, from the bottom of the stack to its top.

    Roles without bytes are left out. What libraries allocate is constant, and has a row of its own.
    """
    by_label = {role.value: trace.by_role[row] for row, role in enumerate(ROLES)}
    by_label[LIBRARIES] = np.full_like(trace.live_bytes, trace.overhead_bytes)
    return [(label, by_label[label]) for label in ORDER if by_label[label].any()]


def _stack(trace: Trace) -> list[dict[str, Any]]:
    rows = []
    for label, sizes in stacked(trace):
        is_constant = bool((sizes == sizes[0]).all())
        amounts: Any = int(sizes[0]) if is_constant else sizes.tolist()
        rows.append({"label": label, "colour": colour(label), "bytes": amounts})
    return rows


def _bar(row: Activation) -> dict[str, Any]:
    kind = shorten(row.kind, _KIND_WIDTH)
    where = shorten_path(row.module, _LABEL_WIDTH - len(kind) - 2)
    return {
        "label": f"{where}, {kind}" if where else shorten(row.name, _LABEL_WIDTH),
        "name": row.name,
        "module": row.module,
        "source": row.source,
        "shape": list(row.shape),
        "dtype": row.dtype,
        "bytes": row.nbytes,
        "idle_us": round(row.idle_us, 3),
        "from": row.last_forward,
        "to": row.first_backward,
    }


def _decision(row: DecisionRow) -> dict[str, Any]:
    return {
        "verb": "keep" if row.is_kept else "drop",
        "name": row.name,
        "operator": row.kind,
        "module": row.module,
        "source": row.source,
        "bytes": row.nbytes,
        "added_us": None if row.is_kept else round(row.added_us, 3),
        "reason": row.reason,
    }


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [float(value) for value in np.round(values, 3)]


def map_data(trace: Trace, layout: Layout) -> dict[str, Any]:
    """The map of the arena as columns of integers, one row per piece of the layout.

    Offsets and sizes are multiples of `unit_bytes`. A piece is made by the op that runs where it
    starts, and mostly has its name, or that name with a suffix: `names` has rows of (True if the
    text is such a suffix, text).
    """
    _check_layout(trace, layout)
    graph = trace.graph
    values = first_values(graph)
    makers = [graph.ops[op].name for op in trace.ops[layout.start].tolist()]
    names: dict[tuple[bool, str], int] = {}

    def named(storage: int, maker: str) -> int:
        name = values[storage].name
        is_suffix = name.startswith(maker)
        row = (is_suffix, name.removeprefix(maker) if is_suffix else name)
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


def _check_layout(trace: Trace, layout: Layout) -> None:
    """Raise for the layout of another run of the step: its positions would name the wrong ops."""
    is_longer = int(layout.end.max(initial=-1)) >= len(trace.ops)
    if is_longer or (trace.copies[layout.start] != layout.copy).any():
        raise ReportError(
            "the layout is not of the step that the page shows: make it with "
            "rekindle.layout(graph, plan), of the same plan as the trace."
        )
