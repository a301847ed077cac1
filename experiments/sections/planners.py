"""All planners at several budgets: forecast and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from experiments import drawing
from experiments.page import ABSENT, Page, not_measured, paragraphs, table, times, title_of
from experiments.pieces import planners_name
from experiments.tasks import UNFINISHED
from rekindle.report.figures import GREY, byte_unit, new_figure
from rekindle.report.palette import MARKERS, SERIES
from rekindle.report.words import fine_percent
from rekindle.units import format_bytes, format_us

Found = dict[str, Any]
Cell = Callable[[Found | None, Found], str]
_INCHES = (10.5, 5.4)


def section(page: Page) -> str:
    """A figure and two tables for each planned step."""
    parts = []
    for planned in page.config.planned:
        name = planners_name(planned.step)
        every = page.results.rows(name)
        if every:
            parts.append(_one(page, every[0]["found"]))
            if every[0]["status"] == UNFINISHED:
                parts.append(not_measured(name, is_begun=True))
        else:
            parts.append(f"**{title_of(*planned.step)}**: {not_measured(name)}")
    return paragraphs(*parts)


def _one(page: Page, found: Found) -> str:
    title = title_of(found["model"], found["batch"])
    plain = found["plain"]
    intro = (
        f"**{title}**: the plain step takes {format_bytes(plain['peak_bytes'])} and "
        f"{format_us(plain['step_us'])}; {format_us(found['forecast']['step_us'])} is forecast for "
        "the step without a plan if it is not host-bound. Time that plans add to that, as forecast:"
    )
    about = f"Every planner on {title}"
    picture = page.picture(f"planners-{found['model']}", about, planners_figure(found))
    return paragraphs(
        picture,
        intro,
        _table(found, _forecast_cell, with_bound=True),
        "Measured step time, relative to the plain step (in brackets, the peak; equal plans are "
        "run once):",
        _table(found, _measured_cell),
        _beside(found),
    )


def _table(found: Found, cell: Cell, *, with_bound: bool = False) -> str:
    percents = list(dict.fromkeys(row["percent"] for row in found["rows"]))
    planners = list(dict.fromkeys(row["planner"] for row in found["rows"]))
    by_place = {(row["planner"], row["percent"]): row for row in found["rows"]}
    rows = [
        (f"`{planner}`", *(cell(by_place.get((planner, each)), found) for each in percents))
        for planner in planners
    ]
    rows += [("proven lower bound", *(_bound(found, each) for each in percents))] * with_bound
    return table(("planner", *(f"{each}%" for each in percents)), rows)


def _forecast_cell(row: Found | None, found: Found) -> str:
    if row is None or row["status"] == "refused":
        return ABSENT
    if row["status"] == "infeasible":
        return f"needs {row['least_peak_bytes'] / found['plain']['peak_bytes']:.1%}"
    return f"+{fine_percent(row['recompute_us'] / found['forecast']['step_us'])}"


def _bound(found: Found, percent: int) -> str:
    """The best known lower bound on the added time."""
    own = (row for row in found["rows"] if row["percent"] == percent)
    bounds = [row["bound_us"] for row in own if row.get("bound_us") is not None]
    return f"+{fine_percent(max(bounds) / found['forecast']['step_us'])}" if bounds else ABSENT


def _measured_cell(row: Found | None, found: Found) -> str:
    if row is None or "measured" not in row:
        return ABSENT
    taken, plain = row["measured"], found["plain"]
    share = taken["peak_bytes"] / plain["peak_bytes"]
    return f"{times(taken['step_us'] / plain['step_us'], 3)} ({share:.0%})"


def _beside(found: Found) -> str:
    """What the tables do not show: plans refused, not run, or over budget."""
    rows = found["rows"]
    lines = [
        f"- `{planner}`: {message}"
        for planner, message in dict.fromkeys(
            (row["planner"], row["message"]) for row in rows if row["status"] == "refused"
        )
    ]
    for word, key in (("was not run", "not_run"), ("failed", "failed")):
        lines += [f"- {_named(row)} {word}: {row[key]}" for row in rows if row.get(key)]
    lines += [
        f"- {_named(row)} took {format_bytes(row['measured']['peak_bytes'])}, above its budget of "
        f"{format_bytes(row['budget_bytes'])}."
        for row in rows
        if "measured" in row and row["measured"]["peak_bytes"] > row["budget_bytes"]
    ]
    lines += [
        f"- {_named(row)} was replanned, since its first step exceeded the budget."
        for row in rows
        if row.get("is_planned_again")
    ]
    return "\n".join(lines)


def _named(row: Found) -> str:
    return f"`{row['planner']}` at {row['percent']}%"


def planners_figure(found: Found) -> Any:
    """Time against peak memory, forecast and measured, one line per planner."""
    title = f"{title_of(found['model'], found['batch'])}, {found['precision']}, {found['device']}"
    figure = new_figure(title, _INCHES)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    drawing.head(left, "forecast")
    drawing.head(right, "measured")
    unit, unit_name = byte_unit(found["plain"]["peak_bytes"])
    planners = list(dict.fromkeys(row["planner"] for row in found["rows"]))
    for axes, key in ((left, "forecast"), (right, "measured")):
        for index, planner in enumerate(planners):
            rows = [row for row in found["rows"] if row["planner"] == planner and key in row]
            _draw(axes, [row[key] for row in rows], index, planner, unit)
        plain = found["forecast"] if key == "forecast" else found["plain"]
        style = {"marker": "o", "ms": 8, "color": GREY, "ls": "none", "label": "plain"}
        axes.plot([plain["peak_bytes"] / unit], [plain["step_us"] / 1e3], **style)
        drawing.finish(axes, f"peak memory, {unit_name}", "step time, ms" if axes is left else "")
    drawing.name_below(figure, left, right, columns=8)
    return figure


def _draw(axes: Any, points: Sequence[Found], index: int, planner: str, unit: int) -> None:
    line = sorted({(point["peak_bytes"] / unit, point["step_us"] / 1e3) for point in points})
    if line:
        xs, ys = zip(*line, strict=True)
        style = {"marker": MARKERS[index % len(MARKERS)], "color": SERIES[index % len(SERIES)]}
        axes.plot(xs, ys, label=planner, ms=6, lw=1.6, zorder=9 - index, **style)
