"""Figures of plans: the planned step over the plain one, and memory against added time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.simulate import Trace
from rekindle.planners.curve import Curve, bound_at
from rekindle.report.figures import DPI, GREY, GRID, INK, byte_unit, draw_timeline, new_figure
from rekindle.report.names import shorten
from rekindle.report.palette import MARKERS, SERIES
from rekindle.report.plan_summary import PlanSummary
from rekindle.report.plan_words import fine_percent
from rekindle.report.summary import Summary
from rekindle.report.words import how_timed
from rekindle.units import format_bytes, format_us

PLAN_INCHES = (11.0, 6.0)
CURVE_INCHES = (9.0, 6.0)
_FAR = 2.0  # what is so many times as high as the lines would squeeze them together


def write_plan_png(
    path: Path, graph: StepGraph, plain: Trace, planned: Trace, summary: PlanSummary
) -> None:
    """Write memory over the planned step, with the outline of the plain one."""
    peak, added = format_bytes(summary.peak.nbytes), fine_percent(summary.added_share)
    title = f"{shorten(summary.plain.title, 40)}, {summary.planner}: peak {peak}, {added} more time"
    figure = new_figure(title, PLAN_INCHES)
    axes = figure.subplots()
    draw_timeline(axes, graph, planned, plain)
    highest = max(plain.peak_bytes, planned.peak_bytes)
    if graph.ops and summary.budget_bytes <= 1.2 * highest:
        _mark_budget(axes, summary.budget_bytes, byte_unit(highest)[0])
    figure.savefig(path, dpi=DPI, format="png")


def write_curve_png(path: Path, plain: Summary, curves: Sequence[Curve]) -> None:
    """Write peak memory against added time: a line a planner, and the bound below them."""
    title = f"{shorten(plain.title, 48)}, {how_timed(plain)}"
    figure = new_figure(title, CURVE_INCHES)
    axes = figure.subplots()
    unit, unit_name = byte_unit(plain.peak.nbytes)
    whole = (plain.step_us or 1.0) / 100
    top = _top(curves, whole)
    for index, curve in enumerate(curves):
        is_line, colour = len(curve.plans) > 1, SERIES[index % len(SERIES)]
        xs = [plan.peak_bytes / unit for plan in curve.plans]
        ys = [plan.recompute_us / whole for plan in curve.plans]
        style = {"marker": MARKERS[index % len(MARKERS)], "color": colour, "lw": 1.6}
        style |= {"ms": 5} if is_line else {"ms": 8, "ls": "none"}
        axes.plot(xs, [min(y, top) for y in ys], label=curve.planner, zorder=9 - index, **style)
        if max(ys) > top:
            _note_height(axes, xs[ys.index(max(ys))], top, max(ys), colour)
    _draw_bound(axes, curves, unit, whole)
    _mark_plain(axes, plain, unit)
    axes.set_xlabel(f"peak memory, {unit_name}", color=INK)
    axes.set_ylabel(f"added time, % of {format_us(plain.step_us)}", color=INK)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.08)  # room for the plain step's name
    axes.set_ylim(0, top * 1.1)
    axes.grid(color=GRID, lw=0.8, zorder=1)
    axes.tick_params(labelsize=9)
    axes.legend(loc="best", fontsize=9, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=DPI, format="png")


def _top(curves: Sequence[Curve], whole: float) -> float:
    """How high the axis goes: to the top of the lines, and of what is not far above them."""
    heights = [max(plan.recompute_us for plan in curve.plans) / whole for curve in curves]
    lines = [h for h, curve in zip(heights, curves, strict=True) if len(curve.plans) > 1]
    if not lines or not max(lines):
        return max(heights) or 1.0
    return max(height for height in heights if height <= _FAR * max(lines))


def _note_height(axes: Any, x: float, top: float, height: float, colour: str) -> None:
    """Say how high a point is that stands above the axis."""
    text = f"↑ {height:.0f}%"
    place = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
    axes.annotate(text, (x, top), fontsize=9, color=colour, **place)


def _mark_budget(axes: Any, budget_bytes: int, unit: int) -> None:
    axes.axhline(budget_bytes / unit, color=INK, lw=1.0, ls=":", zorder=4)
    axes.annotate(
        f"budget {format_bytes(budget_bytes)}",
        (1.0, budget_bytes / unit),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=INK,
    )


def _draw_bound(axes: Any, curves: Sequence[Curve], unit: int, whole: float) -> None:
    plans = [plan for curve in curves for plan in curve.plans if plan.bound_us is not None]
    budgets = sorted({plan.budget_bytes for plan in plans})
    known = [(budget / unit, bound_at(curves, budget)) for budget in budgets]
    line = [(budget, bound / whole) for budget, bound in known if bound is not None]
    if line:
        xs, ys = zip(*line, strict=True)
        label = "lower bound"
        axes.plot(xs, ys, ls="--", lw=1.2, color=GREY, label=label, zorder=2)


def _mark_plain(axes: Any, plain: Summary, unit: int) -> None:
    at = plain.peak.nbytes / unit
    axes.plot([at], [0], marker="o", ms=8, color=INK, ls="none", clip_on=False, zorder=12)
    axes.annotate(
        f"plain step\n{format_bytes(plain.peak.nbytes)}",
        (at, 0),
        xytext=(8, 6),
        textcoords="offset points",
        fontsize=9,
        color=INK,
    )
