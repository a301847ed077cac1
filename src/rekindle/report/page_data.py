"""What the page's script draws: columns rather than rows, and every text written once."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Phase, StepGraph
from rekindle.core.graph.simulate import ROLES, Trace
from rekindle.report.names import shorten, shorten_path, source_line
from rekindle.report.palette import LIBRARIES, ORDER, PHASE_BANDS, colour
from rekindle.report.summary import Activation, Summary

MOST_POSITIONS = 20_000
MOST_ACTIVATIONS = 60
_MOST_BANDS = 24
_LABEL_WIDTH = 40
_KIND_WIDTH = 18


def page_data(graph: StepGraph, profile: Profile, trace: Trace, summary: Summary) -> dict[str, Any]:
    """Everything the script needs of a plain step, ready for JSON."""
    phases, targets, modules, sources = [p.value for p in Phase], _Texts(), _Texts(), _Texts()
    columns = {
        "name": [op.name for op in graph.ops],
        "target": [targets.number(op.target) for op in graph.ops],
        "phase": [phases.index(op.phase.value) for op in graph.ops],
        "module": [modules.number(op.source.module) for op in graph.ops],
        "source": [sources.number(source_line(op.source)) for op in graph.ops],
        "time_us": _rounded(profile.times_us),
        "workspace_bytes": profile.workspaces_bytes.tolist(),
        "flops": [op.flops for op in graph.ops],
        "moved_bytes": summary.moved_bytes.tolist(),
    }
    return {
        "plain": run_data(graph, trace),
        "phases": phases,
        "targets": targets.rows,
        "modules": modules.rows,
        "sources": sources.rows,
        "ops": columns,
        "band_colours": PHASE_BANDS,
        "activations": [_bar(row) for row in shown_activations(summary)],
        "operators": [
            {
                "label": row.label,
                "ops": row.ops,
                "time_us": round(row.time_us, 3),
                "share": row.share,
                "mean_us": row.mean_us,
                "flops": row.flops,
                "moved_bytes": row.moved_bytes,
                "intensity": row.intensity,
            }
            for row in summary.operators
        ],
    }


def run_data(graph: StepGraph, trace: Trace) -> dict[str, Any]:
    """Memory over one run of the step, plain or planned; plain, position i is op i."""
    is_planned = len(trace.ops) != len(graph.ops) or bool(trace.copies.any())
    return {
        "ops": trace.ops.tolist() if is_planned else None,
        "copies": trace.copies.tolist() if is_planned else None,
        "peak": {
            "bytes": trace.peak_bytes,
            "position": trace.peak_position if graph.ops else 0,
        },
        "step_us": trace.step_us,
        "starts_us": _rounded(trace.starts_us),
        "live_bytes": trace.live_bytes.tolist(),
        "positions": positions(trace.live_bytes),
        "stack": _stack(trace),
        "bands": bands(graph, trace),
    }


def bands(graph: StepGraph, trace: Trace | None = None) -> list[tuple[str, int, int]]:
    """The runs of one phase: phase, first and last position. Where phases mix, only long runs.

    What is computed again belongs to the phase that it is computed for.
    """
    phases = [op.phase for op in graph.ops]
    if trace is not None:
        phases = [phases[op] for op in _served(trace)]
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
    """For each position, the captured op that it is for: itself, or the next one to run."""
    served, following = [], int(trace.ops[-1]) if len(trace.ops) else 0
    for op, copy in zip(trace.ops[::-1].tolist(), trace.copies[::-1].tolist(), strict=True):
        following = following if copy else op
        served.append(following)
    return served[::-1]


def positions(live_bytes: NDArray[np.int64], most: int = MOST_POSITIONS) -> list[int] | None:
    """The ops to draw, or None for all: of a very long step, the highest op of each stretch."""
    n_ops = len(live_bytes)
    if n_ops <= most:
        return None
    edges = np.linspace(0, n_ops, most + 1).astype(int)
    return [int(a + np.argmax(live_bytes[a:b])) for a, b in pairwise(edges)]


def shown_activations(summary: Summary) -> list[Activation]:
    """Those with the most bytes × idle time, in the order in which they fall idle."""
    top = [row for row in summary.activations if row.byte_us > 0][:MOST_ACTIVATIONS]
    return sorted(top, key=lambda row: (row.last_forward or 0, row.storage))


def stacked(trace: Trace) -> list[tuple[str, NDArray[np.int64]]]:
    """Bytes by role at every op, from the bottom of the stack to its top; what is never there, not.

    What libraries hold is a part of its own, the same throughout.
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


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [float(value) for value in np.round(values, 3)]


class _Texts:
    """Texts that come again and again, written once and referred to by number."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.rows)
            self.rows.append(text)
        return self._numbers[text]
