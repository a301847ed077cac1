"""A sweep over batch sizes: its cases as series, the table of all, and the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rekindle.report.figures import DPI, GREY, INK, annotate, byte_unit, finish, new_figure
from rekindle.report.names import shorten
from rekindle.report.palette import MARKERS, SERIES
from rekindle.report.tables import ABSENT, ForWidth, indented, known_bytes, new_table
from rekindle.report.words import percent
from rekindle.units import format_bytes, format_us

PLAIN, PLANNED, CHECKPOINT, COMPILE = "plain", "planned", "checkpoint", "compile"
"""The ways to run a step."""
DONE, OUT_OF_MEMORY, FAILED = "done", "out of memory", "failed"
"""The status of a case."""
INFEASIBLE = "InfeasibleBudget"

WAY_NAMES = {
    PLAIN: "plain",
    PLANNED: "Rekindle",
    CHECKPOINT: "checkpoint every block",
    COMPILE: "torch.compile",
}
_OPTIONAL_COLUMNS = ("setup", "reserved", "forecast", "of plain", "samples/s")  # first to go
_COLUMN_GAP = 3  # characters

MEMORY_INCHES = (10.5, 5.4)
LATENCY_INCHES = (10.5, 6.6)
TRADE_OFF_INCHES = (9.0, 6.0)

_COLOURS = {PLAIN: SERIES[7], PLANNED: SERIES[0], CHECKPOINT: SERIES[4], COMPILE: SERIES[2]}
_BUDGET_COLOURS = (SERIES[0], SERIES[5], SERIES[6], SERIES[3], SERIES[1])  # of planned steps
_MARKS = dict(zip((PLAIN, PLANNED, CHECKPOINT, COMPILE), MARKERS, strict=False))
_JOINED = {
    PLANNED: "Rekindle, by budget",
    COMPILE: "torch.compile, by share of activations kept",
}
_GROUP_WIDTH = 0.84  # of the distance between batch sizes
_MOST_FLAT_LABELS = 20  # with more bars, labels are upright
_FAR_ABOVE_RATIO = 2.0  # a cap this many times as high as the bars is not shown
_LOGARITHMIC_RATIO = 8.0  # from the smallest to the largest batch size
_MOSTWAY_NAMES = 7  # per row of a legend
_WHITE_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
_LASTWAY_NAMES = ("forecast", "cap", "does not fit")  # in a legend

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Series:
    """The records of one way to run the step, by batch size."""

    way: str
    setting: str | float | None
    records: Mapping[int, Record]

    @property
    def label(self) -> str:
        """The name in tables and figures: ``Rekindle, 60%``."""
        return label_of(self.way, self.setting)

    def done(self, batch: int) -> Record | None:
        """The record of a batch size, if the step ran."""
        record = self.records.get(batch)
        return record if record is not None and record["status"] == DONE else None

    def points(self, key: str) -> list[tuple[int, float]]:
        """Batch sizes at which the step ran, and the measured `key`."""
        found = ((batch, self.done(batch)) for batch in sorted(self.records))
        return [(batch, record[key]) for batch, record in found if record is not None]

    @property
    def too_large(self) -> list[int]:
        """The batch sizes that ran out of memory."""
        rows = self.records.items()
        return sorted(batch for batch, row in rows if row["status"] == OUT_OF_MEMORY)


def label_of(way: str, setting: str | float | None) -> str:
    """A way to run the step in words.

    >>> label_of("planned", "60%"), label_of("compile", 0.5), label_of("plain", None)
    ('Rekindle, 60%', 'torch.compile, 0.5', 'plain')
    """
    return WAY_NAMES[way] if setting is None else f"{WAY_NAMES[way]}, {setting}"


def setting_of(case: Mapping[str, Any]) -> str | float | None:
    """The setting of a case: its budget, or its share of activations."""
    return case["budget"] if case["way"] == PLANNED else case["share"]


def series_of(data: Mapping[str, Any]) -> list[Series]:
    """The cases of a sweep by way and setting, in order."""
    found: dict[tuple[str, str | float | None], dict[int, Record]] = {}
    for record in data["cases"]:
        case = record["case"]
        found.setdefault((case["way"], setting_of(case)), {})[case["batch"]] = record
    return [Series(way, setting, records) for (way, setting), records in found.items()]


def batches_of(data: Mapping[str, Any]) -> list[int]:
    """The batch sizes of all cases."""
    return sorted({record["case"]["batch"] for record in data["cases"]})


def sweep_data(settings: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """The settings of a sweep, and the records that exist."""
    ran = [record for record in records if record["status"] == DONE]
    devices = dict.fromkeys(record["device"] for record in ran)
    precisions = dict.fromkeys(record["precision"] for record in ran)
    return {
        **settings,
        "precision": ", ".join(precisions) or settings["precision"],
        "device": ", ".join(devices) or settings["device"],
        "cases": list(records),
    }


def failed_cases(data: Mapping[str, Any]) -> list[Record]:
    """The cases that ended with an error other than out of memory."""
    return [record for record in data["cases"] if record["status"] == FAILED]


def over_budget(data: Mapping[str, Any]) -> list[Record]:
    """The cases that took more than their budget."""
    return [record for record in data["cases"] if record.get("is_within_budget") is False]


def sweep_title(data: Mapping[str, Any]) -> str:
    """The title of a sweep: ``resnet152: bf16, on NVIDIA H200, capped at 40.0 GiB``."""
    facts = [data["precision"], f"on {data['device']}" if data["device"] else None]
    if data["engine"] not in (None, "auto"):
        facts.append(f"engine {data['engine']}")
    if data["cap_bytes"] is not None:
        facts.append(f"capped at {format_bytes(data['cap_bytes'])}")
    shown = ", ".join(fact for fact in facts if fact)
    return f"{shorten(data['model'], 48)}: {shown}" if shown else shorten(data["model"], 48)


def sweep_table(data: Mapping[str, Any]) -> RenderableType:
    """Every case with its measurements, then the errors."""
    parts: list[RenderableType] = [
        Text(sweep_title(data), style="bold"),
        indented(ForWidth(lambda width: _table(data, width))),
    ]
    parts += [indented(line) for line in _troubles(data)]
    return Group(*parts)


def _table(data: Mapping[str, Any], width: int) -> Table:
    rows = list(_rows(data))
    columns = list(rows[0]) if rows else ["batch"]
    sizes = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns if rows}
    for name in _OPTIONAL_COLUMNS:
        if sum(size + _COLUMN_GAP for size in sizes.values()) > width and name in sizes:
            del sizes[name]
    table = new_table()
    for name in sizes:
        is_left = name == "way"
        table.add_column("" if is_left else name, justify="left" if is_left else "right")
        table.columns[-1].no_wrap, table.columns[-1].overflow = True, "ellipsis"
    for row, after in zip_longest(rows, rows[1:]):
        is_last = after is not None and bool(after["batch"].plain)
        table.add_row(*(row[name] for name in sizes), end_section=is_last)
    return table


def _rows(data: Mapping[str, Any]) -> Iterator[dict[str, Text]]:
    """The cells of each case by column; only the first case of a batch size names it."""
    every = series_of(data)
    for batch in batches_of(data):
        base = _plain(every).done(batch)
        head = f"{batch:,}"
        for series in every:
            record = series.records.get(batch)
            if record is not None:
                cells = {name: _cell(name, record, base) for name in _CELLS}
                yield {"batch": Text(head), "way": Text(series.label), **cells}
                head = ""


def _cell(name: str, record: Record, base: Record | None) -> Text:
    if record["status"] == DONE:
        is_over = name == "peak" and record["is_within_budget"] is False
        return Text(_CELLS[name](record, base), style="bold red" if is_over else "")
    if name != "peak":
        return Text("")
    if record["kind"] == INFEASIBLE:
        return Text("no plan fits", style="yellow")
    is_failed = record["status"] == FAILED
    return Text(record["status"], style="bold red" if is_failed else "yellow")


def _of_plain(record: Record, base: Record | None) -> str:
    if base is None:
        return ABSENT
    peak, time = (record[key] / base[key] for key in ("peak_bytes", "step_us"))
    return f"{percent(peak)}, {time:.2f}×"


_CELLS: dict[str, Callable[[Record, Record | None], str]] = {
    "peak": lambda record, base: format_bytes(record["peak_bytes"]),
    "forecast": lambda record, base: known_bytes((record["forecast"] or {}).get("peak_bytes")),
    "reserved": lambda record, base: known_bytes(record["reserved_bytes"]),
    "step": lambda record, base: format_us(record["step_us"]),
    "samples/s": lambda record, base: f"{record['samples_per_s']:,.4g}",
    "of plain": _of_plain,
    "setup": lambda record, base: f"{record['setup_s']:.1f} s",
}


def _troubles(data: Mapping[str, Any]) -> Iterator[Text]:
    """A line for each case that failed or took more than its budget."""
    for record in failed_cases(data):
        first, *_ = str(record["message"]).strip().splitlines() or [""]
        yield Text(f"{case_in_words(record['case'])} failed: {first}", style="red")
    for record in over_budget(data):
        took, may = format_bytes(record["peak_bytes"]), format_bytes(record["budget_bytes"])
        yield Text(f"{case_in_words(record['case'])} took {took}, over {may}", style="red")


def case_in_words(case: Mapping[str, Any]) -> str:
    """A case on one line: ``batch 32, Rekindle, 60%``."""
    return f"batch {case['batch']:,}, {label_of(case['way'], setting_of(case))}"


def write_sweep_pngs(folder: Path, data: Record) -> list[Path]:
    """Write all figures that a sweep has numbers for; returns their paths."""
    figures: dict[str, Callable[[Record], Any]] = {
        "memory.png": memory_figure,
        "latency.png": latency_figure,
        "throughput.png": throughput_figure,
        "trade-off.png": trade_off_figure,
    }
    written = []
    for name, draw in figures.items():
        figure = draw(data)
        if figure is None:
            (folder / name).unlink(missing_ok=True)  # an old one would have other numbers
            continue
        figure.savefig(folder / name, dpi=DPI, format="png", pil_kwargs={"optimize": True})
        written.append(folder / name)
    return written


def _one_panel(data: Record, title: str) -> tuple[Any, Any]:
    """A figure of a sweep, and its only panel."""
    figure = new_figure(sweep_title(data), MEMORY_INCHES)
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    return figure, axes


def memory_figure(data: Record) -> Any:
    """Peak memory against batch size, one bar per way; the cap as a line."""
    every, batches = _main_series(data), batches_of(data)
    peaks = [peak for series in every for _, peak in series.points("peak_bytes")]
    if not peaks:
        return None
    figure, axes = _one_panel(data, "Peak memory of a training step")
    cap = data["cap_bytes"]
    highest = max(peaks)
    is_reached = any(series.too_large for series in every)
    if cap is not None and (is_reached or cap < _FAR_ABOVE_RATIO * highest):
        highest = max(highest, cap)
        style = {"color": INK, "lw": 1.2, "ls": "--", "zorder": 4}
        axes.axhline(cap / byte_unit(int(highest))[0], label=f"cap {format_bytes(cap)}", **style)
    unit, unit_name = byte_unit(int(highest))
    width = _GROUP_WIDTH / len(every)
    upright = len(every) * len(batches) > _MOST_FLAT_LABELS
    forecasts: list[tuple[float, float, float]] = []  # height, left and right end
    for index, series in enumerate(every):
        shift = (index - (len(every) - 1) / 2) * width
        places = {batch: place + shift for place, batch in enumerate(batches)}
        found = series.points("peak_bytes")
        bars = found or [(batches[0], 0)]  # the legend needs a bar
        at, heights = [places[batch] for batch, _ in bars], [peak / unit for _, peak in bars]
        colour, bar_width = _colour(series, every), width * 0.92
        axes.bar(at, heights, width=bar_width, color=colour, label=series.label, zorder=3)
        for batch, peak in found:
            style = {"ha": "center", "va": "bottom", "rotation": 90 if upright else 0}
            style |= {"zorder": 7, "bbox": _WHITE_BOX}
            annotate(axes, _short(peak / unit), (places[batch], peak / unit), (0, 3), **style)
            forecast = series.records[batch]["forecast"]
            if forecast is not None:
                ends = (places[batch] - width * 0.4, places[batch] + width * 0.4)
                forecasts.append((forecast["peak_bytes"] / unit, *ends))
        for batch in series.too_large:
            record, height = series.records[batch], (cap or highest) / unit
            _mark_missing(axes, record, places[batch], height, bar_width, colour)
    if forecasts:
        style = {"color": SERIES[1], "lw": 1.6, "zorder": 5, "label": "forecast"}
        axes.hlines(*zip(*forecasts, strict=True), **style)
    axes.set_xticks(range(len(batches)), [f"{batch:,}" for batch in batches])
    axes.set_xlim(-0.5, len(batches) - 0.5)
    axes.set_ylim(0, highest / unit * (1.2 if upright else 1.1))
    finish(axes, "batch size", f"peak memory, {unit_name}", "y")
    _add_legend(figure, axes)
    return figure


def latency_figure(data: Record) -> Any:
    """The time of a step against batch size; below, as a multiple of the plain step's."""
    every, batches = _main_series(data), batches_of(data)
    times = [time / 1e3 for series in every for _, time in series.points("step_us")]
    if not times:
        return None
    lines = {series.label: _against_plain(series, _plain(every)) for series in every}
    figure = new_figure(sweep_title(data), LATENCY_INCHES)
    has_plain = any(lines.values())
    if has_plain:
        above, below = figure.subplots(2, 1, height_ratios=[2.4, 1], sharex=True)
    else:
        above = figure.subplots()
    above.set_title("Time of a training step", loc="left", fontsize=11, color=INK)
    _draw_lines(above, every, batches, "step_us", unit=1e3)
    if _is_wide(batches):
        _scale_logarithmically(above, min(times) / 1.5, max(times) * 1.2)
    else:
        above.set_ylim(0, max(times) * 1.1)
    finish(above, "" if has_plain else "batch size", "step time, ms", "y")
    if has_plain:
        _draw_ratios(below, every, lines)
    _add_legend(figure, above)
    return figure


def _draw_ratios(
    axes: Any, every: Sequence[Series], lines: Mapping[str, list[tuple[int, float]]]
) -> None:
    """Times as multiples of the plain step's."""
    for series in every:
        style = {"color": _colour(series, every), "label": series.label}
        _plot(axes, series.way, lines[series.label], size=6, **style)
    ratios = [1.0, *(ratio for line in lines.values() for _, ratio in line)]
    room = max(max(ratios) - min(ratios), 0.1)
    axes.set_ylim(min(ratios) - 0.2 * room, max(ratios) + 0.2 * room)
    finish(axes, "batch size", "× plain", "y")


def throughput_figure(data: Record) -> Any:
    """Samples a second against batch size."""
    every, batches = _main_series(data), batches_of(data)
    rates = [rate for series in every for _, rate in series.points("samples_per_s")]
    if not rates:
        return None
    figure, axes = _one_panel(data, "Throughput")
    _draw_lines(axes, every, batches, "samples_per_s")
    axes.set_ylim(0, max(rates) * 1.1)
    axes.yaxis.set_major_formatter(lambda rate, place: f"{rate:,.10g}")
    finish(axes, "batch size", "samples a second", "y")
    _add_legend(figure, axes)
    return figure


def trade_off_figure(data: Record) -> Any:
    """Time against peak memory, relative to the plain step, at the largest batch that all ran."""
    batch = trade_off_batch(data)
    if batch is None:
        return None
    curves = _curves(data, batch)
    figure = new_figure(sweep_title(data), TRADE_OFF_INCHES)
    axes = figure.subplots()
    title = f"Time against memory of a training step, batch {batch:,}"
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    heights = {way: sum(y for _, y, _ in line) / len(line) for way, line in curves.items()}
    lowest = min(heights, key=lambda way: heights[way])
    for way, line in curves.items():
        _draw_curve(axes, way, line, is_lowest=way == lowest)
    xs, ys = zip(*((x, y) for line in curves.values() for x, y, _ in line), strict=True)
    room = max(max(ys) - min(ys), 0.1)
    axes.set_xlim(max(0.0, min(xs) - 8), max(xs) + 5)
    axes.set_ylim(min(ys) - 0.16 * room, max(ys) + 0.16 * room)
    axes.axhline(1.0, color=GREY, lw=0.8, ls=":", zorder=2)
    axes.axvline(100.0, color=GREY, lw=0.8, ls=":", zorder=2)
    finish(axes, "peak memory, % of plain", "step time, × plain")
    _add_legend(figure, axes)
    return figure


def trade_off_batch(data: Record) -> int | None:
    """The largest batch size at which plain and the most other ways ran."""
    every = series_of(data)

    def rank(batch: int) -> tuple[int, int]:
        return sum(series.done(batch) is not None for series in every), batch

    return max((batch for batch, _ in _plain(every).points("step_us")), key=rank, default=None)


def _curves(data: Record, batch: int) -> dict[str, list[tuple[float, float, Series]]]:
    """The points of each way at a batch size, from the least memory to the most.

    Points of `torch.compile` are ordered by the share of activations that it may keep.
    """
    every = series_of(data)
    base = _plain(every).done(batch)
    assert base is not None
    curves: dict[str, list[tuple[float, float, Series]]] = {}
    for series in every:
        found = series.done(batch)
        if found is not None:
            x, y = (found[key] / base[key] for key in ("peak_bytes", "step_us"))
            curves.setdefault(series.way, []).append((x * 100, y, series))
    return {way: sorted(line, key=_order) for way, line in curves.items()}


def _order(point: tuple[float, float, Series]) -> tuple[float, float]:
    peak, _, series = point
    if series.way != COMPILE:
        return 0.0, peak
    return (1.0 if series.setting is None else float(series.setting)), peak


def _against_plain(series: Series, plain: Series) -> list[tuple[int, float]]:
    """The step's time as a multiple of the plain step's, where both ran."""
    base = dict(plain.points("step_us"))
    times = series.points("step_us")
    return [(batch, time / base[batch]) for batch, time in times if batch in base]


def _main_series(data: Record) -> list[Series]:
    """All series but those of the trade-off figure only: `torch.compile` with less memory."""
    every = series_of(data)
    return [series for series in every if series.way != COMPILE or series.setting is None]


def _plain(every: Sequence[Series]) -> Series:
    """The plain steps; a series without records if none was asked for."""
    return next((series for series in every if series.way == PLAIN), Series(PLAIN, None, {}))


def _colour(series: Series, every: Sequence[Series]) -> str:
    """The colour of a way; each budget has its own."""
    if series.way != PLANNED:
        return _COLOURS[series.way]
    budgets = [each.setting for each in every if each.way == PLANNED]
    return dict(zip(budgets, cycle(_BUDGET_COLOURS), strict=False))[series.setting]


def _draw_lines(
    axes: Any, every: Sequence[Series], batches: Sequence[int], key: str, unit: float = 1.0
) -> None:
    """One line per way; a cross at the foot where it ran out of memory."""
    for series in every:
        line = [(batch, number / unit) for batch, number in series.points(key)]
        style = {"color": _colour(series, every), "label": series.label}
        _plot(axes, series.way, line, size=6, **style)
    first, last = min(batches), max(batches)
    if _is_wide(batches):
        axes.set_xscale("log", base=2)
        axes.set_xlim(first / 1.25, last * 1.25)
    else:
        room = 0.06 * (last - first or last)
        axes.set_xlim(first - room, last + room)
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.set_xticks([], minor=True)
    _mark_shortages(axes, every)


def _mark_shortages(axes: Any, every: Sequence[Series]) -> None:
    """Crosses at the foot, side by side, for the ways that ran out of memory."""
    short = [series for series in every if series.too_large]
    for place, series in enumerate(short):
        for batch in series.too_large:
            shift = (9.0 * (place - (len(short) - 1) / 2), 9.0)
            style = {"fontsize": 15, "color": _colour(series, every), "zorder": 9}
            style |= {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "center"}
            annotate(axes, "×", (batch, 0.0), shift, **style)
    if short:
        axes.plot([], [], marker="x", mew=1.5, ls="none", color=GREY, label="does not fit")


def _plot(
    axes: Any, way: str, line: Sequence[tuple[float, float]], *, size: int, **style: Any
) -> None:
    """A line through points, with the marker of its way."""
    style |= {"marker": _MARKS[way], "lw": 2.0, "ms": size, "zorder": 6 if way == PLANNED else 5}
    axes.plot([x for x, _ in line], [y for _, y in line], **style)


def _is_wide(batches: Sequence[int]) -> bool:
    """True if batch sizes differ so much that they need a logarithmic axis."""
    return max(batches) / min(batches) >= _LOGARITHMIC_RATIO


def _scale_logarithmically(axes: Any, low: float, high: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ticks = [step * 10.0**power for power in range(-4, 8) for step in (1, 2, 5)]
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick:,.10g}" for tick in shown])
    axes.set_yticks([], minor=True)


def _draw_curve(
    axes: Any, way: str, line: Sequence[tuple[float, float, Series]], *, is_lowest: bool
) -> None:
    """The points of one way as a line, labelled; labels of the lowest line are below it."""
    label = _JOINED[way] if len(line) > 1 else line[0][2].label
    _plot(axes, way, [(x, y) for x, y, _ in line], size=8, color=_COLOURS[way], label=label)
    shift = (0.0, -9.0 if is_lowest else 9.0)
    style = {"ha": "center", "va": "top" if is_lowest else "bottom", "color": _COLOURS[way]}
    for x, y, series in line if len(line) > 1 else ():
        text = "all" if series.setting is None else str(series.setting)
        annotate(axes, text, (x, y), shift, zorder=7, bbox=_WHITE_BOX, **style)


def _mark_missing(
    axes: Any, record: Record, place: float, height: float, width: float, colour: str
) -> None:
    """A dashed outline in place of the bar of a step that ran out of memory."""
    outline = {"facecolor": "none", "edgecolor": colour, "ls": (0, (4, 3)), "lw": 1.0}
    axes.bar([place], [height], width=width * 0.9, zorder=2, alpha=0.6, **outline)
    why = "no plan fits" if record["kind"] == INFEASIBLE else "out of memory"
    style = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 9, "zorder": 6}
    axes.text(place, height * 0.04, why, color=INK, **style)


def _short(number: float) -> str:
    """A number with three digits, or more if it has more before the point.

    >>> _short(0.1234), _short(29.0), _short(1234.5)
    ('0.123', '29.0', '1,234')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"


def _add_legend(figure: Any, axes: Any) -> None:
    """A legend below the figure: ways first, then the other marks."""
    handles, labels = axes.get_legend_handles_labels()
    last = [label.startswith(_LASTWAY_NAMES) for label in labels]
    order = sorted(range(len(labels)), key=lambda place: last[place])
    rows = -(-len(labels) // _MOSTWAY_NAMES) or 1
    figure.legend(
        [handles[place] for place in order],
        [labels[place] for place in order],
        loc="outside lower center",
        ncols=-(-len(labels) // rows) or 1,
        columnspacing=1.5,
        handlelength=1.6,
        fontsize=9,
        frameon=False,
    )
