"""Schemes of memory optimisation side by side: the results as data, table, JSON and figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rekindle.report.figures import DPI, GREY, GRID, INK, annotate, hide_frame, new_figure
from rekindle.report.palette import MARKERS, SERIES
from rekindle.report.tables import ABSENT, ForWidth, indented, known_bytes, new_table
from rekindle.report.words import percent
from rekindle.units import format_bytes

_NAME_COLUMNS = 27  # of the terminal
_NUMBER_COLUMNS = 11
_GROWTH_COLUMNS = 7
SCHEMES_INCHES = (10.5, 5.4)
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST_TICKS = 7
_LINE_POINTS = 14.0  # from one label to the next


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to save memory. Without a planner nothing is dropped.

    `runs` is True if steps can be run that way, and not only estimated.
    """

    name: str
    label: str
    in_place: bool = True
    sharing: bool = True
    planner: str | None = None
    runs: bool = True


SCHEMES = (
    Scheme("none", "no optimisation", in_place=False, sharing=False, runs=False),
    Scheme("in-place", "in-place", sharing=False, runs=False),
    Scheme("sharing", "sharing", in_place=False),
    Scheme("in-place-sharing", "in-place and sharing", runs=False),
    Scheme("sqrt", "√n checkpointing", planner="chen-sqrt"),
    Scheme("selective", "selective checkpointing", planner="chen-selective"),
    Scheme("auto", "auto, least peak", planner="auto"),
)
COLOURS = {
    scheme.name: SERIES[place] for scheme, place in zip(SCHEMES, (7, 4, 0, 5, 2, 3, 1), strict=True)
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """The bytes of a step's feature maps, and the time that recomputation adds."""

    feature_bytes: int
    added_us: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The peak of a step above the memory before it, gradients of weights included.

    `forecast_bytes` is the same from the simulator.
    """

    peak_bytes: int
    forecast_bytes: int


@dataclass(frozen=True)
class SizeResult:
    """All schemes on a model of one size, by name. `size` is None for a model with only one."""

    size: int | None
    n_ops: int
    step_us: float
    estimates: Mapping[str, Estimate]
    measured: Mapping[str, Measured]

    def feature_bytes(self, scheme: Scheme) -> int:
        """The bytes of feature maps, estimated."""
        return self.estimates[scheme.name].feature_bytes

    def measured_bytes(self, scheme: Scheme) -> int | None:
        """The measured peak; None if the scheme was not run."""
        taken = self.measured.get(scheme.name)
        return taken.peak_bytes if taken else None

    def added_share(self, scheme: Scheme) -> float:
        """The added time, as a share of the plain step's."""
        return self.estimates[scheme.name].added_us / (self.step_us or 1.0)


@dataclass(frozen=True)
class Study:
    """All schemes on a model in several sizes, from the smallest up.

    `size_name` says what a size is, such as a depth; "" for a model with only one.
    """

    model: str
    title: str
    size_name: str
    batch: int | None
    precision: str
    device: str
    is_measured: bool  # True if the times of ops are measured, False if estimated
    results: tuple[SizeResult, ...]

    @property
    def growths(self) -> dict[str, float]:
        """The exponent with which each scheme's feature maps grow over the two largest sizes."""
        last = self.results[-2:]
        sizes = [result.size for result in last if result.size is not None]
        if len(sizes) < 2:
            return {}
        return {
            scheme.name: growth(sizes, [each.estimates[scheme.name].feature_bytes for each in last])
            for scheme in SCHEMES
        }


def growth(sizes: Sequence[int], nbytes: Sequence[int]) -> float:
    """The exponent with which bytes grow with size: 1 if twice the size takes twice the bytes."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(nbytes, 1)), 1)[0])


Number = Callable[[SizeResult, Scheme], float | None]
Write = Callable[[Any], str]


def schemes_title(study: Study) -> str:
    """The title of a study: ``ResNet on 224x224 images: batch 32, fp32, estimated for H200``."""
    batch = "" if study.batch is None else f"batch {study.batch}"
    where = f"{'on' if study.is_measured else 'estimated for'} {study.device}"
    facts = [fact for fact in (batch, study.precision, where) if fact]
    return f"{study.title}: {', '.join(facts)}"


def growth_in_words(exponent: float) -> str:
    """An exponent of the size: ``n^0.50``."""
    return f"n^{round(exponent, 2) + 0.0:.2f}"  # adding zero turns -0.0 into 0.0


def schemes_table(study: Study) -> RenderableType:
    """Bytes of feature maps by scheme and size, the added time, and the measured peaks."""
    parts: list[RenderableType] = [Text(schemes_title(study), style="bold")]

    title = "Feature maps, estimated by laying the step out"
    parts += _section(title, study, SizeResult.feature_bytes, format_bytes, with_growth=True)
    planned = [scheme for scheme in SCHEMES if scheme.planner]
    title = "Time added, of the plain step"
    parts += _section(title, study, SizeResult.added_share, percent, planned)
    if any(result.measured for result in study.results):
        title = "All that the step takes, weights' gradients included, measured"
        parts += _section(title, study, SizeResult.measured_bytes, known_bytes)
        parts += [indented(_forecast_line(study)), ""]
    return Group(*parts)


def schemes_data(study: Study) -> dict[str, Any]:
    """A study as data, in bytes and microseconds."""
    settings = asdict(study)
    del settings["results"]
    return {
        **settings,
        "schemes": [
            {"name": scheme.name, "label": scheme.label, "planner": scheme.planner}
            for scheme in SCHEMES
        ],
        "sizes": [_size_data(result) for result in study.results],
        "growth": study.growths,
    }


def _size_data(result: SizeResult) -> dict[str, Any]:
    measured = {name: asdict(taken) for name, taken in result.measured.items()}
    rows = {
        name: {**asdict(estimate), "measured": measured.get(name)}
        for name, estimate in result.estimates.items()
    }
    return {"size": result.size, "ops": result.n_ops, "step_us": result.step_us, "schemes": rows}


def _section(
    title: str,
    study: Study,
    number: Number,
    write: Write,
    schemes: Sequence[Scheme] = SCHEMES,
    *,
    with_growth: bool = False,
) -> Iterator[RenderableType]:
    yield ""
    yield Text(title)

    def table(results: Sequence[SizeResult], growths: Mapping[str, float]) -> Table:
        sizes = ["" if each.size is None else f"{each.size:,}" for each in results]
        table = new_table(*sizes, *(["growth"] if growths else []), label=study.size_name)
        table.show_header = bool(study.size_name)
        for scheme in schemes:
            row = [write(number(result, scheme)) for result in results]
            row += [growth_in_words(growths[scheme.name])] if growths else []
            table.add_row(scheme.label, *row)
        return table

    def make(width: int) -> RenderableType:
        is_narrow = width < _NAME_COLUMNS + _NUMBER_COLUMNS + _GROWTH_COLUMNS
        growths = study.growths if with_growth and not is_narrow else {}
        room = width - _NAME_COLUMNS - (_GROWTH_COLUMNS if growths else 0)
        each, results = max(1, room // _NUMBER_COLUMNS), study.results
        groups = [results[at : at + each] for at in range(0, len(results), each)]
        return Group(*(table(group, growths if group is groups[-1] else {}) for group in groups))

    yield indented(ForWidth(make))


def _forecast_line(study: Study) -> str:
    """The ratio of forecast to measured peaks."""
    ratios = [
        taken.forecast_bytes / taken.peak_bytes
        for result in study.results
        for taken in result.measured.values()
        if taken.peak_bytes
    ]
    forecast = f"{min(ratios):.3f} to {max(ratios):.3f} of what was measured"
    return f"sharing is what torch does by itself; the forecast was {forecast}"


def write_schemes_png(path: Path, study: Study) -> None:
    """Write the bytes of feature maps by scheme, next to the measured peaks or the added time."""
    figure = new_figure(schemes_title(study), SCHEMES_INCHES)
    wide, narrow = figure.subplots(1, 2, width_ratios=[1.75, 1])
    is_run = any(result.measured for result in study.results)
    wide.set_title("Feature maps, estimated", loc="left", fontsize=11, color=INK)
    aside = "All that a step takes, measured" if is_run else "Time added to the plain step"
    narrow.set_title(aside, loc="left", fontsize=11, color=INK)
    draw = _draw_lines if len(study.results) > 1 else _draw_bars

    def added(result: SizeResult, scheme: Scheme) -> float | None:
        return result.added_share(scheme) if scheme.planner else None

    draw(wide, study, lambda r, s: r.feature_bytes(s) or None, format_bytes, is_named=True)
    if is_run:
        draw(narrow, study, SizeResult.measured_bytes, format_bytes, is_named=False)
    else:
        draw(narrow, study, added, percent, is_named=False)
    figure.savefig(path, dpi=DPI, format="png", pil_kwargs={"optimize": True})


def _draw_lines(axes: Any, study: Study, number: Number, write: Write, *, is_named: bool) -> None:
    """One line per scheme over all sizes; at its end the name, or only the last number."""
    growths = study.growths if is_named else {}
    ends: list[tuple[float, float, str, str]] = []
    for index, scheme in enumerate(SCHEMES):
        found = [(result.size, number(result, scheme)) for result in study.results]
        line = [(x, y) for x, y in found if x is not None and y is not None]
        if not line:
            continue
        xs, ys = zip(*line, strict=True)
        colour = COLOURS[scheme.name]
        style = {"marker": MARKERS[index], "color": colour, "lw": 2.0, "ms": 6}
        if scheme.name == "in-place-sharing":
            style["ls"] = "--"  # mostly covers another line
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
    numbers = [number(result, scheme) for scheme in SCHEMES for result in study.results]
    _scale(axes, [n for n in numbers if n is not None], write)
    axes.grid(color=GRID, lw=0.8, zorder=1)
    axes.tick_params(labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _label_ends(axes, ends)


def _scale(axes: Any, numbers: Sequence[float], write: Write) -> None:
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
    """The indices from the lowest up, and heights at which no two are too close."""
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


def _draw_bars(axes: Any, study: Study, number: Number, write: Write, *, is_named: bool) -> None:
    """One bar per scheme, for a model with one size."""
    (result,) = study.results
    for place, scheme in enumerate(SCHEMES):
        value = number(result, scheme)
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
