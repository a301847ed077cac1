"""Reports as data: JSON as plain dicts, in bytes and microseconds, and every op as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rekindle.core.cost.profile import OpCost
from rekindle.core.graph.graph import Op
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import ROLES
from rekindle.planners.curve import Curve
from rekindle.report.names import source_line
from rekindle.report.summary import Activation, DecisionRow, Peak, PeakPart, Summary, Work

JSON_SCHEMA = 1
"""The version of every JSON document; it grows when a key changes its meaning or goes away."""

_OP_COLUMNS: dict[str, Callable[[Op, OpCost, Summary], Any]] = {
    "index": lambda op, cost, summary: op.index,
    "name": lambda op, cost, summary: op.name,
    "target": lambda op, cost, summary: op.target,
    "phase": lambda op, cost, summary: op.phase.value,
    "module": lambda op, cost, summary: op.source.module,
    "source": lambda op, cost, summary: source_line(op.source),
    "time_us": lambda op, cost, summary: round(cost.time_us, 3),
    "workspace_bytes": lambda op, cost, summary: cost.workspace_bytes,
    "flops": lambda op, cost, summary: op.flops,
    "moved_bytes": lambda op, cost, summary: int(summary.moved_bytes[op.index]),
    "live_bytes": lambda op, cost, summary: int(summary.unplanned.live_bytes[op.index]),
}
_NAMES = {"nbytes": "bytes", "kind": "operator", "count": "storages"}


def write_csv(path: Path, summary: Summary) -> None:
    """Write one line per op of the plain step, with a header."""
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.DictWriter(file, _OP_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(_op_rows(summary))


def step_data(summary: Summary) -> dict[str, Any]:
    """A profiled step; or a planned one, with the decision about every activation."""
    return _profile_data(summary) if summary.plan is None else _plan_data(summary, summary.plan)


def curve_data(plain: Summary, curves: Sequence[Curve]) -> dict[str, Any]:
    """The points of every planner, from the largest budget to the smallest."""
    return {
        **_head(plain),
        "plain": {"peak_bytes": plain.peak.nbytes, "step_us": plain.step_us},
        "curves": [
            {
                "planner": curve.planner,
                "plan_seconds": curve.seconds,
                "points": [_point(plan, plain.step_us) for plan in curve.plans],
            }
            for curve in curves
        ],
    }


def _profile_data(summary: Summary) -> dict[str, Any]:
    about, trace = _head(summary), summary.trace
    return {
        **{key: about[key] for key in ("model", "batch", "precision", "device")},
        "method": summary.method,
        "is_measured": summary.is_measured,
        "profile_versions": dict(summary.profile.versions),
        "fingerprint": summary.graph.fingerprint,
        "step_us": summary.step_us,
        "flops": summary.total.flops,
        "moved_bytes": summary.total.moved_bytes,
        "backward_forward_flops": summary.backward_ratio,
        "peak": _peak(summary.peak),
        "phases": [_work(row) for row in summary.phases],
        "operators": [_work(row) for row in summary.operators],
        "activations": [_activation(row, summary) for row in summary.activations],
        "ops": list(_op_rows(summary)),
        "timeline": {
            "starts_us": [round(float(start), 3) for start in trace.starts_us],
            "role_bytes": {
                role.value: trace.by_role[row].tolist() for row, role in enumerate(ROLES)
            },
            "overhead_bytes": trace.overhead_bytes,
        },
    }


def _plan_data(summary: Summary, plan: Plan) -> dict[str, Any]:
    op, plain = summary.peak.op, summary.plain
    return {
        **_head(summary),
        "planner": plan.planner,
        "budget_bytes": plan.budget_bytes,
        "plain": {"peak_bytes": plain.peak.nbytes, "step_us": plain.step_us},
        "planned": {
            "peak_bytes": summary.peak.nbytes,
            "step_us": summary.step_us,
            "recompute_us": summary.trace.recompute_us,
        },
        "bound_us": plan.bound_us,
        "plan_seconds": summary.plan_seconds,
        "recomputed_ops": summary.recomputed_ops,
        "peak_op": None if op is None else op.name,
        "peak_parts": {
            "plain": {part.label: part.nbytes for part in plain.peak.parts},
            "planned": {part.label: part.nbytes for part in summary.peak.parts},
        },
        "dropped": {
            "all": asdict(summary.dropped),
            "operators": [asdict(group) for group in summary.dropped_kinds],
            "modules": [asdict(group) for group in summary.dropped_modules],
        },
        "decisions": [_row(row) for row in summary.decisions],
    }


def _head(summary: Summary) -> dict[str, Any]:
    return {
        "model": summary.about.get("model"),
        "batch": summary.about.get("batch"),
        "precision": summary.about.get("precision"),
        "device": summary.device,
        "is_measured": summary.is_measured,
    }


def _op_rows(summary: Summary) -> Iterator[dict[str, Any]]:
    for op, cost in zip(summary.graph.ops, summary.profile.costs, strict=True):
        yield {name: value(op, cost, summary) for name, value in _OP_COLUMNS.items()}


def _peak(peak: Peak) -> dict[str, Any]:
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
        "parts": [_row(part) for part in peak.parts],
        "activation_kinds": [_row(part) for part in peak.activation_kinds],
        "activation_modules": [_row(part) for part in peak.activation_modules],
    }


def _row(row: PeakPart | DecisionRow) -> dict[str, Any]:
    """The fields of a row, by their names in JSON."""
    return {_NAMES.get(name, name): each for name, each in asdict(row).items() if name != "storage"}


def _work(row: Work) -> dict[str, Any]:
    return {**asdict(row), "flops_per_byte": row.intensity}


def _activation(row: Activation, summary: Summary) -> dict[str, Any]:
    def name(op: int | None) -> str | None:
        return None if op is None else summary.graph.ops[op].name

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


def _point(plan: Plan, plain_us: float) -> dict[str, Any]:
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "step_us": plain_us + plan.recompute_us,
        "recompute_us": plan.recompute_us,
        "bound_us": plan.bound_us,
        "dropped": sum(not decision.is_kept for decision in plan.decisions),
    }
