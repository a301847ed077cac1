"""The figure of the schemes: feature maps as a model grows, and the added time or measured peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rekindle.report.figures import DPI, GREY, GRID, INK, annotate, hide_frame, new_figure
from rekindle.report.palette import MARKERS, SERIES
from rekindle.report.schemes_report import (
    SCHEMES,
    Scheme,
    SizeResult,
    Study,
    growth_in_words,
    schemes_title,
)
from rekindle.report.tables import ABSENT
from rekindle.report.words import percent
from rekindle.units import format_bytes

SCHEMES_INCHES = (10.5, 5.4)
COLOURS = {
    scheme.name: SERIES[place] for scheme, place in zip(SCHEMES, (7, 4, 0, 5, 2, 3, 1), strict=True)
}
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST_TICKS = 7
_LINE_POINTS = 14.0  # from one label to the next

Number = Callable[[Scheme, SizeResult], float | None]


def write_schemes_png(path: Path, study: Study) -> None:
    """Write the bytes of feature maps by scheme, next to the measured peaks or the added time."""
    figure = new_figure(schemes_title(study), SCHEMES_INCHES)
    wide, narrow = figure.subplots(1, 2, width_ratios=[1.75, 1])
    is_run = any(result.measured for result in study.results)
    wide.set_title("Feature maps, estimated", loc="left", fontsize=11, color=INK)
    aside = "All that a step takes, measured" if is_run else "Time added to the plain step"
    narrow.set_title(aside, loc="left", fontsize=11, color=INK)
    draw = _draw_lines if len(study.results) > 1 else _draw_bars

    def added(scheme: Scheme, result: SizeResult) -> float | None:
        return result.added_share(scheme) if scheme.planner else None

    draw(wide, study, lambda s, r: r.feature_bytes(s) or None, format_bytes, is_named=True)
    if is_run:
        draw(narrow, study, lambda s, r: r.measured_bytes(s), format_bytes, is_named=False)
    else:
        draw(narrow, study, added, percent, is_named=False)
    figure.savefig(path, dpi=DPI, format="png", pil_kwargs={"optimize": True})


def _draw_lines(
    axes: Any, study: Study, number: Number, write: Callable[[Any], str], *, is_named: bool
) -> None:
    """One line per scheme over all sizes; at its end the name, or only the last number."""
    growths = study.growths if is_named else {}
    ends: list[tuple[float, float, str, str]] = []
    for index, scheme in enumerate(SCHEMES):
        found = [(result.size, number(scheme, result)) for result in study.results]
        line = [(x, y) for x, y in found if x is not None and y is not None]
        if not line:
            continue
        xs, ys = zip(*line, strict=True)
        colour = COLOURS[scheme.name]
        style = {"marker": MARKERS[index], "color": colour, "lw": 2.0, "ms": 6}
        style |= (
            {"ls": "--"} if scheme.name == "in-place-sharing" else {}
        )  # mostly covers another line
        axes.plot(xs, ys, zorder=4 + index, clip_on=False, **style)
        text = write(ys[-1])
        if is_named:
            base, _, exponent = growth_in_words(growths[scheme.name]).partition("^")
            text = f"{scheme.label}   {text}   ${base}^{{{exponent}}}$"
        ends.append((xs[-1], ys[-1], text, colour))
    sizes = [result.size for result in study.results if result.size is not None]
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(study.size_name, color=INK)
    numbers = [number(scheme, result) for scheme in SCHEMES for result in study.results]
    _scale(axes, [n for n in numbers if n is not None], write)
    axes.grid(color=GRID, lw=0.8, zorder=1)
    axes.tick_params(labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _label_ends(axes, ends)


def _scale(axes: Any, numbers: Sequence[float], write: Callable[[Any], str]) -> None:
    """Set up the axis: logarithmic for bytes, from zero for shares."""
    if write is percent:
        axes.set_ylim(0, max(numbers, default=1.0) * 1.1 or 1.0)
        axes.yaxis.set_major_formatter(lambda share, place: f"{share:.0%}")
        return
    low, high = min(numbers, default=1.0), max(numbers, default=1.0)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.5, high * 1.5)
    powers = [power for power in range(50) if low / 1.5 <= 2**power <= high * 1.5]
    every = -(-len(powers) // _MOST_TICKS) or 1
    ticks = [2**power for power in powers if power % every == 0]
    axes.set_yticks(ticks, [_round_bytes(tick) for tick in ticks])
    axes.set_yticks([], minor=True)


def _round_bytes(nbytes: int) -> str:
    """A power of two without decimals."""
    place = (nbytes.bit_length() - 1) // 10
    return f"{nbytes >> 10 * place} {_BYTE_UNITS[place]}"


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write a text next to each line's end; texts that would overlap are moved apart."""
    figure = axes.figure
    figure.canvas.draw()  # sets the positions on the page
    points = 72 / figure.dpi
    heights = [axes.transData.transform((x, y))[1] * points for x, y, _, _ in ends]
    for place, moved in zip(*spread_apart(heights), strict=True):
        x, y, text, colour = ends[place]
        shift = moved - heights[place]
        leader = {"arrowstyle": "-", "color": colour, "lw": 0.8, "shrinkA": 2, "shrinkB": 5}
        leader |= {"relpos": (0.0, 0.5)}  # the start of the text
        style = {"color": colour, "arrowprops": leader if abs(shift) > 2 else None}
        annotate(axes, text, (x, y), (16, shift), va="center", annotation_clip=False, **style)


def spread_apart(heights: Sequence[float]) -> tuple[list[int], list[float]]:
    """The indices from the lowest up, and heights at which no two are too close.

    >>> spread_apart([50.0, 20.0, 22.0])
    ([1, 2, 0], [14.0, 28.0, 50.0])
    """
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    groups: list[list[float]] = []  # middle, and how many
    for place in order:
        groups.append([heights[place], 1])
        while len(groups) > 1 and _reach(groups[-2], 1) > _reach(groups[-1], -1) - _LINE_POINTS:
            (low, m), (high, n) = groups[-2:]
            groups[-2:] = [[(low * m + high * n) / (m + n), m + n]]
    places = []
    for middle, n in groups:
        places += [middle + (each - (n - 1) / 2) * _LINE_POINTS for each in range(int(n))]
    return order, places


def _reach(group: Sequence[float], side: int) -> float:
    middle, n = group
    return middle + side * (n - 1) / 2 * _LINE_POINTS


def _draw_bars(
    axes: Any, study: Study, number: Number, write: Callable[[Any], str], *, is_named: bool
) -> None:
    """One bar per scheme, for a model with one size."""
    (result,) = study.results
    for place, scheme in enumerate(SCHEMES):
        value = number(scheme, result)
        if value is not None:
            axes.barh(place, value, color=COLOURS[scheme.name], height=0.72, zorder=3)
        if value is None and write is percent:
            continue  # nothing is recomputed
        text, colour = (ABSENT, GREY) if value is None else (write(value), INK)
        annotate(axes, text, (value or 0.0, place), (5, 0), va="center", color=colour)
    names = [scheme.label if is_named else "" for scheme in SCHEMES]
    axes.set_yticks(range(len(SCHEMES)), names)
    axes.set_ylim(len(SCHEMES) - 0.5, -0.5)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.15)
    hide_frame(axes)
