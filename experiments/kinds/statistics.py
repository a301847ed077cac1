"""Statistics of a profiled step: ops and times by phase and kind, the peak, idle activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import rekindle
from experiments.kinds.work import built, parts_of, plainly
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.liveness import Lifetime
from rekindle.core.graph.simulate import Trace
from rekindle.measuring.measure import device_name
from rekindle.report.summary import Activation, Peak, PeakPart, Summary, Work, summarize

MOST_KINDS = 10
MOST_LARGEST = 8
MOST_LIVES = 120
BINS = 20
"""The number of bins of idle times, from zero to the whole step."""


def gather_statistics(settings: dict[str, Any], before: object, save: object) -> dict[str, Any]:
    """Measure and profile a step, and return the numbers for the document."""
    work = built(settings)
    plain = plainly(work, settings["steps"])
    captured = rekindle.capture(*parts_of(work))
    about = {name: settings[name] for name in ("model", "batch", "precision")}
    about["device"] = device_name(torch.device(work.device))
    return {**about, "measured": plain, **of_step(captured.graph, rekindle.profile(captured))}


def of_step(graph: StepGraph, profile: Profile) -> dict[str, Any]:
    """The statistics of a step and what its ops cost."""
    trace = rekindle.simulate(graph, profile)
    summary = summarize(graph, profile, trace)
    return {
        "method": profile.method,
        "ops": summary.n_ops,
        "forecast": {"peak_bytes": trace.peak_bytes, "step_us": trace.step_us},
        "phases": [_work(row) for row in summary.phases],
        "kinds": _kinds(summary),
        "peak": _peak(summary.peak),
        "activations": _activations(trace, summary.activations),
    }


def _work(row: Work) -> dict[str, Any]:
    names = ("label", "ops", "time_us", "flops", "moved_bytes")
    return {name: getattr(row, name) for name in names}


def _kinds(summary: Summary) -> list[dict[str, Any]]:
    """The kinds of operators with the most time, and all others as one row."""
    first, rest = summary.operators[:MOST_KINDS], summary.operators[MOST_KINDS:]
    rows = [_work(row) for row in first]
    if rest:
        sums = {
            name: sum(getattr(row, name) for row in rest)
            for name in ("ops", "time_us", "flops", "moved_bytes")
        }
        rows.append({"label": f"{len(rest)} others", **sums})
    return rows


def _peak(peak: Peak) -> dict[str, Any]:
    op = peak.op
    return {
        "bytes": peak.nbytes,
        "op": op.name if op else None,
        "phase": op.phase.value if op else None,
        "module": op.source.module if op else None,
        "at_us": peak.start_us,
        "parts": [_part(part) for part in peak.parts],
        "activation_kinds": [_part(part) for part in peak.activation_kinds[:MOST_KINDS]],
    }


def _part(part: PeakPart) -> dict[str, Any]:
    return {"label": part.label, "bytes": part.nbytes, "count": part.count}


def _activations(trace: Trace, rows: Sequence[Activation]) -> dict[str, Any]:
    """The idle times of activations: of all, by bins, and of the largest one by one."""
    sizes = np.array([row.nbytes for row in rows], dtype=np.float64)
    idle = np.array([row.idle_us for row in rows], dtype=np.float64)
    whole = trace.step_us or 1.0
    bins, _ = np.histogram(idle / whole, bins=BINS, range=(0.0, 1.0), weights=sizes)
    total = float(sizes.sum()) or 1.0
    lifetimes = {each.storage: each for each in trace.liveness.activations()}
    largest = sorted(rows, key=lambda row: (-row.nbytes, row.storage))
    return {
        "count": len(rows),
        "bytes": int(sizes.sum()),
        "mean_idle_us": float((sizes * idle).sum() / total),
        "bins_bytes": [int(each) for each in bins],
        "largest": [_named(row, lifetimes[row.storage]) for row in rows[:MOST_LARGEST]],
        "lives": [
            [row.nbytes, *_uses(lifetimes[row.storage], trace)] for row in largest[:MOST_LIVES]
        ],
    }


def _named(row: Activation, lifetime: Lifetime) -> dict[str, Any]:
    """One activation: what it is, and the ops that use it first and last."""
    return {
        **{name: getattr(row, name) for name in ("name", "kind", "module", "idle_us")},
        "bytes": row.nbytes,
        "shape": list(row.shape),
        "made_by": lifetime.birth,
        "last_forward": lifetime.last_forward_use,
        "first_backward": lifetime.first_backward_use,
        "last_backward": lifetime.last_backward_use,
    }


def _uses(lifetime: Lifetime, trace: Trace) -> list[int | None]:
    """When an activation is made, last used forward, first and last used backward, in µs."""
    uses = (
        lifetime.birth,
        lifetime.last_forward_use,
        lifetime.first_backward_use,
        lifetime.last_backward_use,
    )
    return [None if use is None else round(float(trace.starts_us[use])) for use in uses]
