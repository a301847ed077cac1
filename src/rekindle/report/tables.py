"""The raw tables, for other programs: every op as CSV, and everything as JSON."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.simulate import ROLES, Trace
from rekindle.report.names import source_line
from rekindle.report.summary import Activation, Part, Summary, Work, summarize

OP_COLUMNS = (
    "index",
    "name",
    "target",
    "phase",
    "module",
    "source",
    "time_us",
    "workspace_bytes",
    "flops",
    "moved_bytes",
    "live_bytes",
)


def write_csv(path: Path, graph: StepGraph, profile: Profile, trace: Trace) -> None:
    """Write one line an op, with a header."""
    summary = summarize(graph, profile, trace)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(OP_COLUMNS)
        writer.writerows(_op_rows(graph, profile, trace, summary))


def profile_data(
    graph: StepGraph,
    profile: Profile,
    trace: Trace,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A profiled step as plain dicts and lists; bytes and microseconds throughout."""
    summary = summarize(graph, profile, trace, about)
    rows = _op_rows(graph, profile, trace, summary)
    return {
        "model": summary.about.get("model"),
        "batch": summary.about.get("batch"),
        "precision": summary.about.get("precision"),
        "device": summary.device,
        "method": summary.method,
        "is_measured": summary.is_measured,
        "profile_versions": dict(profile.versions),
        "fingerprint": graph.fingerprint,
        "step_us": summary.step_us,
        "flops": summary.total.flops,
        "moved_bytes": summary.total.moved_bytes,
        "backward_forward_flops": summary.backward_ratio,
        "peak": _peak(summary),
        "phases": [_work(row) for row in summary.phases],
        "operators": [_work(row) for row in summary.operators],
        "activations": [_activation(row, graph) for row in summary.activations],
        "ops": [dict(zip(OP_COLUMNS, row, strict=True)) for row in rows],
        "timeline": {
            "starts_us": [round(float(start), 3) for start in trace.starts_us],
            "role_bytes": {
                role.value: trace.by_role[row].tolist() for row, role in enumerate(ROLES)
            },
            "overhead_bytes": trace.overhead_bytes,
        },
    }


def _op_rows(
    graph: StepGraph, profile: Profile, trace: Trace, summary: Summary
) -> Iterator[tuple[Any, ...]]:
    for op, cost in zip(graph.ops, profile.costs, strict=True):
        yield (
            op.index,
            op.name,
            op.target,
            op.phase.value,
            op.source.module,
            source_line(op.source),
            round(cost.time_us, 3),
            cost.workspace_bytes,
            op.flops,
            int(summary.moved_bytes[op.index]),
            int(trace.live_bytes[op.index]),
        )


def _peak(summary: Summary) -> dict[str, Any]:
    peak = summary.peak
    op = peak.op
    return {
        "bytes": peak.nbytes,
        "activation_share": peak.activation_share,
        "start_us": peak.start_us,
        "op": None
        if op is None
        else {
            "index": op.index,
            "name": op.name,
            "phase": op.phase.value,
            "module": op.source.module,
            "source": source_line(op.source),
        },
        "parts": [_part(part) for part in peak.parts],
        "activation_kinds": [_part(part) for part in peak.activation_kinds],
        "activation_modules": [_part(part) for part in peak.activation_modules],
    }


def _part(part: Part) -> dict[str, Any]:
    return {
        "label": part.label,
        "bytes": part.nbytes,
        "share": part.share,
        "storages": part.count,
    }


def _work(row: Work) -> dict[str, Any]:
    return {
        "label": row.label,
        "ops": row.ops,
        "time_us": row.time_us,
        "share": row.share,
        "flops": row.flops,
        "moved_bytes": row.moved_bytes,
        "flops_per_byte": row.intensity,
    }


def _activation(row: Activation, graph: StepGraph) -> dict[str, Any]:
    def name(op: int | None) -> str | None:
        return None if op is None else graph.ops[op].name

    return {
        "name": row.name,
        "operator": row.kind,
        "module": row.module,
        "source": row.source,
        "shape": list(row.shape),
        "dtype": row.dtype,
        "bytes": row.nbytes,
        "idle_us": row.idle_us,
        "last_forward_op": name(row.last_forward),
        "first_backward_op": name(row.first_backward),
    }
