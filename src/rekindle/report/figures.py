"""Figures as PNG: a step's memory over time and its peak, a plan over the plain step, curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import Trace
from rekindle.errors import ReportError
from rekindle.planners.curve import Curve, bound_at
from rekindle.report.names import shorten
from rekindle.report.palette import MARKERS, PHASE_BANDS, SERIES, colour
from rekindle.report.summary import Summary, phase_bands, stacked
from rekindle.report.words import fine_percent, how_timed, percent
from rekindle.units import format_bytes, format_us

SIZE_INCHES = (11.0, 8.0)
PLAN_INCHES = (11.0, 6.0)
CURVE_INCHES = (9.0, 6.0)
DPI = 150
INK, GREY, GRID = "#1c2530", "#55606d", "#e3e8ee"
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
_LEAST_LABELLED_SHARE = 0.06  # of the width: a narrower phase gets no label
_LEAST_NAMED_SHARE = 0.002  # of the peak: a role thinner than a line is not in the legend
_FAR_ABOVE_RATIO = 2.0  # a point this many times as high as the lines would squeeze them


def write_png(path: Path, summary: Summary) -> None:
    """Write a profile's peak and its memory over time; of a plan, the memory of both steps."""
    if summary.plan is None:
        figure = _profile_figure(summary)
    else:
        figure = _plan_figure(summary, summary.plan)
    figure.savefig(path, dpi=DPI, format="png")


def _profile_figure(summary: Summary) -> Any:
    peak, time = format_bytes(summary.peak.nbytes), format_us(summary.step_us)
    title = f"{shorten(summary.title, 48)}: peak {peak}, step {time}, {how_timed(summary)}"
    figure = new_figure(title, SIZE_INCHES)
    rows = max(len(summary.peak.parts), 3)
    above, below = figure.subplots(2, 1, height_ratios=[0.32 * rows, 4.6])
    _draw_peak(above, summary)
    _draw_timeline(below, summary.trace)
    return figure


def _plan_figure(summary: Summary, plan: Plan) -> Any:
    """Memory over the planned step, with the outline of the plain one and the budget."""
    peak, added = format_bytes(summary.peak.nbytes), fine_percent(summary.added_share)
    title = f"{shorten(summary.title, 40)}, {plan.planner}: peak {peak}, {added} more time"
    figure = new_figure(title, PLAN_INCHES)
    axes = figure.subplots()
    _draw_timeline(axes, summary.trace, summary.unplanned)
    highest = max(summary.unplanned.peak_bytes, summary.trace.peak_bytes)
    if summary.graph.ops and plan.budget_bytes <= 1.2 * highest:
        _mark_budget(axes, plan.budget_bytes, byte_unit(highest)[0])
    return figure


def write_curve_png(path: Path, plain: Summary, curves: Sequence[Curve]) -> None:
    """Write peak memory against added time: one line per planner, and the lower bound."""
    title = f"{shorten(plain.title, 48)}, {how_timed(plain)}"
    figure = new_figure(title, CURVE_INCHES)
    axes = figure.subplots()
    unit, unit_name = byte_unit(plain.peak.nbytes)
    whole = (plain.step_us or 1.0) / 100
    top = _top(curves, whole)
    for index, curve in enumerate(curves):
        is_line, hue = len(curve.plans) > 1, SERIES[index % len(SERIES)]
        xs = [plan.peak_bytes / unit for plan in curve.plans]
        ys = [plan.recompute_us / whole for plan in curve.plans]
        style = {"marker": MARKERS[index % len(MARKERS)], "color": hue, "lw": 1.6}
        style |= {"ms": 5} if is_line else {"ms": 8, "ls": "none"}
        axes.plot(xs, [min(y, top) for y in ys], label=curve.planner, zorder=9 - index, **style)
        if max(ys) > top:
            place = (xs[ys.index(max(ys))], top)
            annotate(axes, f"↑ {max(ys):.0f}%", place, (0, 8), ha="center", color=hue)
    _draw_bound(axes, curves, unit, whole)
    _mark_plain(axes, plain, unit)
    finish(axes, f"peak memory, {unit_name}", f"added time, % of {format_us(plain.step_us)}")
    axes.set_xlim(0, axes.get_xlim()[1] * 1.08)  # room for the plain step's name
    axes.set_ylim(0, top * 1.1)
    axes.legend(loc="best", fontsize=9, frameon=False)
    figure.savefig(path, dpi=DPI, format="png")


def new_figure(title: str, size_inches: tuple[float, float]) -> Any:
    """An empty figure with a title."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ReportError(
            f'the figure needs matplotlib ({error}): pip install "rekindle[report]"'
        ) from error
    # Figure and canvas by hand: pyplot would choose a backend and keep state for the whole process
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=size_inches, dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    style = {"fontsize": 14, "fontweight": "bold", "color": INK}
    figure.suptitle(title, x=0.01, ha="left", parse_math=False, **style)
    return figure


def _draw_peak(axes: Any, summary: Summary) -> None:
    parts = summary.peak.parts
    axes.set_title("What the peak is made of", loc="left", fontsize=11, color=INK)
    places = np.arange(len(parts))
    sizes = [part.share * 100 for part in parts]
    axes.barh(places, sizes, color=[colour(part.label) for part in parts], height=0.72)
    axes.set_yticks(places, [part.label for part in parts])
    axes.invert_yaxis()
    for place, part in zip(places, parts, strict=True):
        text = f"{format_bytes(part.nbytes)}  ({percent(part.share)})"
        annotate(axes, text, (part.share * 100, float(place)), (5, 0), va="center")
    axes.set_xlim(0, max([*sizes, 1.0]) * 1.2)
    hide_frame(axes)


def annotate(
    axes: Any, text: str, at: tuple[float, float], shift: tuple[float, float], **style: Any
) -> None:
    """Write a text at a point of the axes, shifted by typographic points."""
    usual = {"textcoords": "offset points", "fontsize": 9, "color": INK}
    axes.annotate(text, at, xytext=shift, **(usual | style))


def finish(axes: Any, x_label: str, y_label: str, grid: str = "both") -> None:
    """Label the axes, and draw a grid and no frame."""
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.grid(axis=grid, color=GRID, lw=0.8, zorder=1)
    axes.tick_params(labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def hide_frame(axes: Any) -> None:
    """Leave only the names of bars on the vertical axis."""
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)


def byte_unit(nbytes: int) -> tuple[int, str]:
    """The largest unit that is at most `nbytes`, and its name."""
    return next((unit for unit in _UNITS if nbytes >= unit[0]), _UNITS[-1])


def _draw_timeline(axes: Any, trace: Trace, plain: Trace | None = None) -> None:
    """Draw memory by role over a step; behind a planned one, the outline of the plain one."""
    axes.set_title("Memory over one training step", loc="left", fontsize=11, color=INK, pad=20)
    if not trace.graph.ops:
        axes.set_axis_off()
        return
    highest = max(trace.peak_bytes, plain.peak_bytes if plain else 0)
    unit, unit_name = byte_unit(highest)
    clock, clock_name = (1e3, "ms") if trace.step_us >= 1e3 else (1.0, "µs")
    # a step with no times at all is drawn op by op
    edges = trace.starts_us / clock if trace.step_us else np.arange(len(trace.ops) + 1.0)
    top, end = trace.peak_bytes / unit or 1.0, float(edges[-1])

    for phase, first, last in phase_bands(trace):
        start, stop = edges[first], edges[last + 1]
        axes.axvspan(start, stop, color=PHASE_BANDS[phase], lw=0, zorder=0)
        if first:
            axes.axvline(start, color=GREY, lw=0.8, ls=":", zorder=4)
        if (stop - start) / end > _LEAST_LABELLED_SHARE:
            middle, frame = ((start + stop) / 2, 1.0), ("data", "axes fraction")
            annotate(axes, phase, middle, (0, 4), xycoords=frame, ha="center", color=GREY)

    bottom = np.zeros(len(trace.ops) + 1)
    for label, sizes in stacked(trace):
        upper = bottom + _held(sizes / unit)
        named = label if sizes.max() > _LEAST_NAMED_SHARE * trace.peak_bytes else None
        fill = {"step": "post", "color": colour(label), "lw": 0, "zorder": 2}
        axes.fill_between(edges, bottom, upper, label=named, **fill)
        bottom = upper
    axes.step(edges, bottom, where="post", color=INK, lw=0.8, zorder=3)
    if plain is not None and plain.step_us:
        outline = (plain.starts_us / clock, _held(plain.live_bytes / unit))
        style = {"where": "post", "color": GREY, "lw": 1.2, "ls": "--", "zorder": 3}
        axes.step(*outline, label="the plain step", **style)

    _mark_peak(axes, trace, edges, top)
    axes.set_xlim(0, end)
    axes.set_ylim(0, (highest / unit or 1.0) * 1.25)
    finish(axes, f"time in the step, {clock_name}" if trace.step_us else "op", unit_name, "y")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=5, fontsize=9, frameon=False)


def _mark_peak(axes: Any, trace: Trace, edges: Any, top: float) -> None:
    position = trace.peak_position
    at = float(edges[position] + edges[position + 1]) / 2
    is_right = at > edges[-1] / 2
    name = shorten(trace.graph.ops[trace.peak_op].name, 40)
    annotate(
        axes,
        f"peak {format_bytes(trace.peak_bytes)}\n{name}",
        (at, top),
        (-24 if is_right else 24, 24),
        ha="right" if is_right else "left",
        va="center",
        zorder=5,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": INK, "lw": 0.8},
        arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 0.9},
    )


def _held(sizes: Any) -> Any:
    """The sizes with the last one repeated, which lasts until the step ends."""
    return np.append(sizes, sizes[-1])


def _top(curves: Sequence[Curve], whole: float) -> float:
    """The upper end of the axis: the highest line, or the highest point not far above it."""
    heights = [max(plan.recompute_us for plan in curve.plans) / whole for curve in curves]
    lines = [h for h, curve in zip(heights, curves, strict=True) if len(curve.plans) > 1]
    if not lines or not max(lines):
        return max(heights) or 1.0
    return max(height for height in heights if height <= _FAR_ABOVE_RATIO * max(lines))


def _mark_budget(axes: Any, budget_bytes: int, unit: int) -> None:
    axes.axhline(budget_bytes / unit, color=INK, lw=1.0, ls=":", zorder=4)
    text, frame = f"budget {format_bytes(budget_bytes)}", ("axes fraction", "data")
    annotate(axes, text, (1.0, budget_bytes / unit), (-4, 3), xycoords=frame, ha="right")


def _draw_bound(axes: Any, curves: Sequence[Curve], unit: int, whole: float) -> None:
    plans = [plan for curve in curves for plan in curve.plans if plan.bound_us is not None]
    budgets = sorted({plan.budget_bytes for plan in plans})
    known = [(budget / unit, bound_at(curves, budget)) for budget in budgets]
    line = [(budget, bound / whole) for budget, bound in known if bound is not None]
    if line:
        xs, ys = zip(*line, strict=True)
        axes.plot(xs, ys, ls="--", lw=1.2, color=GREY, label="lower bound", zorder=2)


def _mark_plain(axes: Any, plain: Summary, unit: int) -> None:
    at = plain.peak.nbytes / unit
    axes.plot([at], [0], marker="o", ms=8, color=INK, ls="none", clip_on=False, zorder=12)
    annotate(axes, f"plain step\n{format_bytes(plain.peak.nbytes)}", (at, 0), (8, 6))
