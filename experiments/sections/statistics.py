"""Statistics of the profiled steps: ops, FLOPs, times, and lifetimes of activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import drawing
from experiments.page import ABSENT, Page, not_measured, paragraphs, table, title_of
from rekindle.report.figures import GREY, INK, new_figure
from rekindle.report.names import shorten_path
from rekindle.report.palette import PHASES, SERIES, colour
from rekindle.report.words import percent
from rekindle.units import format_bytes, format_count, format_us

Found = dict[str, Any]
_TIME_INCHES = (10.5, 5.0)
_LIVES_INCHES = (10.5, 4.6)
_KINDS_NAMED = 5  # others are too thin to be legible
_ROOM = 0.055  # of the longest bar: a part this long has room for its name


def section(page: Page) -> str:
    """Ops, FLOPs and time by phase and kind of operator."""
    every = page.results.found("statistics")
    if not every:
        return not_measured("statistics")
    return paragraphs(
        _phases(every),
        page.picture("time", "Time by phase and by kind of operator", time_figure(every)),
        *(_kinds(found) for found in every),
    )


def activations(page: Page) -> str:
    """First and last uses of activations, and their idle times."""
    every = page.results.found("statistics")
    if not every:
        return not_measured("statistics")
    return paragraphs(
        _idle(every),
        page.picture("lives", "When activations are made, idle and used", lives_figure(every)),
        *(_largest(found) for found in every),
    )


def _phases(every: Sequence[Found]) -> str:
    rows = []
    for found in every:
        name = title_of(found["model"], found["batch"])
        for phase in found["phases"]:
            share = percent(phase["time_us"] / found["forecast"]["step_us"])
            time = format_us(phase["time_us"])
            work = (f"{phase['ops']:,}", format_count(phase["flops"]))
            rows.append((name, phase["label"], *work, time, share))
            name = ""
    return table(("", "phase", "ops", "FLOPs", "time", "of the step"), rows)


def _kinds(found: Found) -> str:
    whole = found["forecast"]["step_us"]
    rows = [
        (
            f"`{kind['label']}`" if "others" not in kind["label"] else kind["label"],
            f"{kind['ops']:,}",
            format_us(kind["time_us"]),
            percent(kind["time_us"] / whole),
            format_count(kind["flops"]),
            format_bytes(kind["moved_bytes"]),
        )
        for kind in found["kinds"]
    ]
    names = ("operator", "calls", "time", "of the step", "FLOPs", "bytes moved")
    return f"**{title_of(found['model'], found['batch'])}**, by operator:\n\n{table(names, rows)}"


def _idle(every: Sequence[Found]) -> str:
    rows = []
    for found in every:
        kept, step_us = found["activations"], found["forecast"]["step_us"]
        mean = kept["mean_idle_us"]
        half = sum(kept["bins_bytes"][len(kept["bins_bytes"]) // 2 :]) / (kept["bytes"] or 1)
        cells = (f"{kept['count']:,}", format_bytes(kept["bytes"]), format_us(mean))
        name = title_of(found["model"], found["batch"])
        rows.append((name, *cells, percent(mean / step_us), percent(half)))
    names = (
        "",
        "activations",
        "bytes",
        "mean idle time",
        "of the step",
        "bytes idle for half of it",
    )
    return table(names, rows)


def _largest(found: Found) -> str:
    """The activations with the most bytes × idle time, with the ops that use them."""
    rows = [
        (
            f"`{shorten_path(row['module'] or row['name'], 36)}`",
            f"`{row['kind']}`",
            "×".join(str(side) for side in row["shape"]),
            format_bytes(row["bytes"]),
            *(_op(row[use]) for use in ("made_by", "last_forward", "first_backward")),
            _op(row["last_backward"]),
            format_us(row["idle_us"]),
        )
        for row in found["activations"]["largest"]
    ]
    uses = ("op that makes it", "last forward use", "first backward use", "last backward use")
    names = ("module", "made by", "shape", "bytes", *uses, "idle")
    title = f"{title_of(found['model'], found['batch'])}, {found['ops']:,} ops"
    return f"**{title}**; by bytes × idle time:\n\n{table(names, rows)}"


def _op(index: int | None) -> str:
    return ABSENT if index is None else str(index)


def time_figure(every: Sequence[Found]) -> Any:
    """Two bars per step: its time by phase, and by kind of operator."""
    figure = new_figure("Where the time goes", _TIME_INCHES)
    above, below = figure.subplots(2, 1, sharex=True)
    drawing.head(above, "by phase")
    drawing.head(below, "by kind of operator")
    names = [title_of(found["model"], found["batch"]) for found in every]
    longest = max(sum(row["time_us"] for row in found["kinds"]) for found in every)
    for place, found in enumerate(every):
        phases = [(row["label"], row["time_us"]) for row in found["phases"]]
        _stack(above, place, phases, PHASES)
        kinds = found["kinds"][:_KINDS_NAMED]
        rest = sum(row["time_us"] for row in found["kinds"][_KINDS_NAMED:])
        parts = [(row["label"], row["time_us"]) for row in kinds] + [("all others", rest)]
        colours = dict(zip([label for label, _ in parts], SERIES, strict=False))
        _stack(below, place, parts, colours | {"all others": GREY}, named_from=_ROOM * longest)
    for axes, label in ((above, ""), (below, "ms")):
        axes.set_yticks(range(len(every)), names)
        axes.invert_yaxis()
        drawing.finish(axes, label, "", grid="x")
    drawing.name_below(figure, above)
    return figure


def _stack(
    axes: Any,
    place: int,
    parts: Sequence[tuple[str, float]],
    colours: dict[str, str],
    *,
    named_from: float | None = None,
) -> None:
    """Parts of a bar; with labels inside those above `named_from`, or else in the legend."""
    start = 0.0
    for label, time_us in parts:
        name = label if named_from is None else None
        axes.barh(place, time_us / 1e3, left=start, color=colours[label], height=0.7, label=name)
        if named_from is not None and time_us > named_from:
            middle = (start + time_us / 2e3, place)
            style = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
            axes.annotate(_short(label), middle, **style)
        start += time_us / 1e3


def _short(label: str) -> str:
    """An operator's name without common prefixes, on several lines.

    >>> _short("_scaled_dot_product_cudnn_attention_backward")
    'attention\\nbackward'
    """
    for part in ("_scaled_dot_product_", "native_", "cudnn_", "flash_", "efficient_"):
        label = label.replace(part, "")
    return label.strip("_").replace("_backward", "\nbackward")


def lives_figure(every: Sequence[Found]) -> Any:
    """A line per activation: in use, idle, in use again."""
    figure = new_figure("Activations are used in the order of a stack", _LIVES_INCHES)
    panels = figure.subplots(1, len(every), squeeze=False)[0]
    busy, idle = SERIES[0], colour("activation")
    for axes, found in zip(panels, every, strict=True):
        drawing.head(axes, title_of(found["model"], found["batch"]))
        rows = sorted(life[1:] for life in found["activations"]["lives"] if None not in life)
        for place, (made, last, first, end) in enumerate(rows):
            axes.plot([last / 1e3, first / 1e3], [place, place], color=idle, lw=0.6, label="idle")
            for a, b in ((made, last), (first, end)):
                style = {"color": busy, "lw": 1.2, "label": "from one use to the next"}
                axes.plot([a / 1e3, b / 1e3], [place, place], **style)
        axes.set_xlim(0, found["forecast"]["step_us"] / 1e3)
        drawing.finish(axes, "time in the step, ms", "activation, as they are made", grid="")
        axes.tick_params(colors=INK)
    drawing.name_below(figure, *panels)
    return figure
