"""Figures for papers and slides: the peak's breakdown and memory over the step, as one PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.simulate import Trace
from rekindle.errors import ReportError
from rekindle.report.names import shorten
from rekindle.report.page_data import bands, stacked
from rekindle.report.palette import PHASE_BANDS, colour
from rekindle.report.summary import Summary, summarize
from rekindle.report.words import how_timed, percent
from rekindle.units import format_bytes, format_us

SIZE_INCHES = (11.0, 8.0)
DPI = 150
INK, GREY, GRID = "#1c2530", "#55606d", "#e3e8ee"
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
_LEAST_LABELLED = 0.06  # of the width: a phase that is narrower gets no label
_LEAST_NAMED = 0.002  # of the peak: what is thinner than a line gets no entry in the legend


def write_png(
    path: Path,
    graph: StepGraph,
    profile: Profile,
    trace: Trace,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write both figures into one image."""
    summary = summarize(graph, profile, trace, about)
    figure = new_figure(_title(summary), SIZE_INCHES)
    rows = max(len(summary.peak.parts), 3)
    above, below = figure.subplots(2, 1, height_ratios=[0.32 * rows, 4.6])
    _draw_peak(above, summary)
    draw_timeline(below, graph, trace)
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
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold", color=INK)
    return figure


def _title(summary: Summary) -> str:
    peak, time = format_bytes(summary.peak.nbytes), format_us(summary.step_us)
    return f"{shorten(summary.title, 48)}: peak {peak}, step {time}, {how_timed(summary)}"


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
        axes.annotate(
            text,
            (part.share * 100, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    axes.set_xlim(0, max([*sizes, 1.0]) * 1.2)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)


def byte_unit(nbytes: int) -> tuple[int, str]:
    """The unit in which so many bytes are a number that can be read, and its name."""
    return next((unit for unit in _UNITS if nbytes >= unit[0]), _UNITS[-1])


def draw_timeline(axes: Any, graph: StepGraph, trace: Trace, plain: Trace | None = None) -> None:
    """Memory by role over a step; the plain step's outline behind a planned one."""
    axes.set_title("Memory over one training step", loc="left", fontsize=11, color=INK, pad=20)
    if not graph.ops:
        axes.set_axis_off()
        return
    highest = max(trace.peak_bytes, plain.peak_bytes if plain else 0)
    unit, unit_name = byte_unit(highest)
    clock, clock_name = (1e3, "ms") if trace.step_us >= 1e3 else (1.0, "µs")
    # a step with no times at all is drawn op by op
    edges = trace.starts_us / clock if trace.step_us else np.arange(len(trace.ops) + 1.0)
    top, end = trace.peak_bytes / unit or 1.0, float(edges[-1])

    for phase, first, last in bands(graph, trace):
        start, stop = edges[first], edges[last + 1]
        axes.axvspan(start, stop, color=PHASE_BANDS[phase], lw=0, zorder=0)
        if first:
            axes.axvline(start, color=GREY, lw=0.8, ls=":", zorder=4)
        if (stop - start) / end > _LEAST_LABELLED:
            middle = ((start + stop) / 2, 1.0)
            axes.annotate(
                phase,
                middle,
                xycoords=("data", "axes fraction"),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=GREY,
            )

    bottom = np.zeros(len(trace.ops) + 1)
    for label, sizes in stacked(trace):
        upper = bottom + _held(sizes / unit)
        named = label if sizes.max() > _LEAST_NAMED * trace.peak_bytes else None
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
    axes.set_xlabel(f"time in the step, {clock_name}" if trace.step_us else "op", color=INK)
    axes.set_ylabel(unit_name, color=INK)
    axes.grid(axis="y", color=GRID, lw=0.8, zorder=1)
    axes.tick_params(labelsize=9)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=5, fontsize=9, frameon=False)
    for name in ("top", "right"):
        axes.spines[name].set_visible(False)


def _mark_peak(axes: Any, trace: Trace, edges: Any, top: float) -> None:
    position = trace.peak_position
    at = float(edges[position] + edges[position + 1]) / 2
    is_right = at > edges[-1] / 2
    name = shorten(trace.graph.ops[trace.peak_op].name, 40)
    axes.annotate(
        f"peak {format_bytes(trace.peak_bytes)}\n{name}",
        (at, top),
        xytext=(-24 if is_right else 24, 24),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="center",
        fontsize=9,
        color=INK,
        zorder=5,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": INK, "lw": 0.8},
        arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 0.9},
    )


def _held(sizes: Any) -> Any:
    """Each op's bytes last until the next op starts, the last one's until the step ends."""
    return np.append(sizes, sizes[-1])
