"""Plans and trade-off curves as plain dicts for JSON; bytes and microseconds throughout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rekindle.core.graph.schedule import Plan
from rekindle.planners.curve import Curve
from rekindle.report.plan_summary import DecisionRow, Dropped, PlanSummary
from rekindle.report.summary import Summary


def plan_data(summary: PlanSummary) -> dict[str, Any]:
    """A planned step, beside the plain one, with the decision about every activation."""
    op = summary.peak.op
    return {
        **_head(summary.plain),
        "planner": summary.planner,
        "budget_bytes": summary.budget_bytes,
        "plain": _plain(summary.plain),
        "planned": {
            "peak_bytes": summary.peak.nbytes,
            "step_us": summary.step_us,
            "recompute_us": summary.recompute_us,
        },
        "bound_us": summary.bound_us,
        "plan_seconds": summary.plan_seconds,
        "recomputed_ops": summary.recomputed_ops,
        "peak_op": None if op is None else op.name,
        "peak_parts": {
            "plain": {part.label: part.nbytes for part in summary.plain.peak.parts},
            "planned": {part.label: part.nbytes for part in summary.peak.parts},
        },
        "dropped": {
            "all": _group(summary.dropped),
            "operators": [_group(group) for group in summary.kinds],
            "modules": [_group(group) for group in summary.modules],
        },
        "decisions": [_decision(row) for row in summary.decisions],
    }


def curve_data(plain: Summary, curves: Sequence[Curve]) -> dict[str, Any]:
    """The points of every planner, from the largest budget to the smallest."""
    return {
        **_head(plain),
        "plain": _plain(plain),
        "curves": [
            {
                "planner": curve.planner,
                "plan_seconds": curve.seconds,
                "points": [_point(plan, plain.step_us) for plan in curve.plans],
            }
            for curve in curves
        ],
    }


def _head(plain: Summary) -> dict[str, Any]:
    return {
        "model": plain.about.get("model"),
        "batch": plain.about.get("batch"),
        "precision": plain.about.get("precision"),
        "device": plain.device,
        "is_measured": plain.is_measured,
    }


def _plain(plain: Summary) -> dict[str, Any]:
    return {"peak_bytes": plain.peak.nbytes, "step_us": plain.step_us}


def _point(plan: Plan, plain_us: float) -> dict[str, Any]:
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "step_us": plain_us + plan.recompute_us,
        "recompute_us": plan.recompute_us,
        "bound_us": plan.bound_us,
        "dropped": sum(not decision.is_kept for decision in plan.decisions),
    }


def _group(group: Dropped) -> dict[str, Any]:
    return {
        "label": group.label,
        "dropped": group.dropped,
        "activations": group.count,
        "freed_bytes": group.freed_bytes,
        "added_us": group.added_us,
    }


def _decision(row: DecisionRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "operator": row.kind,
        "module": row.module,
        "source": row.source,
        "bytes": row.nbytes,
        "is_kept": row.is_kept,
        "freed_bytes": row.freed_bytes,
        "added_us": row.added_us,
        "reason": row.reason,
    }
