"""The largest batches that fit: estimated, and run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from experiments import drawing
from experiments.config import Cap
from experiments.page import ABSENT, Page, not_measured, paragraphs, table, times, title_of
from experiments.pieces import FITS, beyond, budget_under, check_name, fit_task
from experiments.tasks import DONE, key_of
from rekindle.report.figures import new_figure
from rekindle.report.palette import SERIES
from rekindle.report.sweep_report import INFEASIBLE
from rekindle.units import format_bytes, parse_bytes

WAYS = ("plain", "quick", "planned")
_COLOURS = dict(zip(WAYS, (SERIES[7], SERIES[5], SERIES[0]), strict=True))
_INCHES = (10.5, 4.6)

Found = dict[str, Any]


class Fit(NamedTuple):
    """A way to run a model under a cap: the estimated batch, and the one that ran.

    `tried` has the results of all batches that were run; `ran` that of the largest that fit, and
    `beyond` that of a batch 2% larger, if one was tried.
    """

    model: str
    cap: str
    way: str
    forecast: Found | None
    tried: tuple[Found, ...]
    ran: Found | None
    beyond: Found | None


def fits_of(page: Page) -> list[Fit]:
    """Every model, cap and way."""
    return [fit for cap in page.config.caps for fit in _under(page, cap)]


def _under(page: Page, cap: Cap) -> Iterator[Fit]:
    forecasts = {key_of(row): row["found"] for row in page.results.rows(FITS)}
    checks = page.results.rows(check_name(cap))
    for model in page.config.fits:
        forecast = forecasts.get(fit_task(page.config, model, cap.memory).key)
        if forecast is None:
            continue
        for way in WAYS:
            tried = tuple(_checked(checks, model, way))
            done = (found for found in tried if found["status"] == DONE)
            ran = max(done, key=lambda found: found["case"]["batch"], default=None)
            larger = next(iter(_checked(checks, model, beyond(way))), None)
            yield Fit(model, cap.memory, way, forecast[way], tried, ran, larger)


def _checked(checks: Sequence[Found], model: str, way: str) -> list[Found]:
    """The results of a model's batches that were run in one way."""
    return [
        row["found"]
        for row in checks
        if row["settings"]["of"] == way and row["settings"]["case"]["model"] == model
    ]


def section(page: Page) -> str:
    """The batches as a figure and a table, relative to the plain one; what is missing."""
    every = fits_of(page)
    if not every:
        return not_measured(FITS)
    picture = page.picture("max-batch", "The largest batches under caps", fits_figure(every))
    missing = (_missing(page, cap, every) for cap in page.config.caps)
    return paragraphs(
        picture, _table(page, every), _too_large(page, every), _beyond(page, every), *missing
    )


def _too_large(page: Page, every: Sequence[Fit]) -> str:
    """The batches that were tried and did not fit."""
    lines = [
        _line(page, fit, found) for fit in every for found in fit.tried if found["status"] != DONE
    ]
    return _listed("Tried, but too large:", lines)


def _beyond(page: Page, every: Sequence[Fit]) -> str:
    """The results of batches 2% larger than those found, compared with the budget."""
    lines = [_line(page, fit, fit.beyond) for fit in every if fit.beyond]
    return _listed("2% more, or one more, where that was tried:", lines)


def _listed(head: str, lines: Sequence[str]) -> str:
    return "\n".join([head, "", *lines]) if lines else ""


def _line(page: Page, fit: Fit, found: Found) -> str:
    title = title_of(fit.model, found["case"]["batch"])
    return f"- {title}, {fit.way}, {fit.cap}: {_outcome(page, fit.cap, found)}."


def _outcome(page: Page, cap: str, found: Found) -> str:
    if found["status"] == DONE:
        within = parse_bytes(budget_under(page.config, cap))
        side = "above" if found["peak_bytes"] > within else "within"
        return f"{format_bytes(found['peak_bytes'])}, {side} the budget"
    if found["kind"] == INFEASIBLE:
        more = found["least_peak_bytes"] / found["budget_bytes"] - 1
        return f"no plan; it would need {more:.1%} more than the budget"
    return str(found["status"])


def _missing(page: Page, cap: Cap, every: Sequence[Fit]) -> str:
    """A note on what was to be run under a cap and was not; empty if nothing."""
    asked = [
        fit
        for fit in every
        if fit.cap == cap.memory and fit.model in page.config.checked and fit.way in cap.ways
    ]
    tried = [fit for fit in asked if fit.tried or not fit.forecast]
    if len(tried) == len(asked):
        return ""
    return not_measured(check_name(cap), is_begun=any(fit.tried for fit in tried))


def _names(page: Page) -> dict[str, str]:
    quick = f"planned, ≥ {page.config.quick:.0%} of plain's speed"
    return {"plain": "plain", "quick": quick, "planned": "planned"}


def _table(page: Page, every: Sequence[Fit]) -> str:
    names = _names(page)
    rows = []
    before = None
    for fit in every:
        plain = next(each for each in every if each[:3] == (fit.model, fit.cap, "plain"))
        name = f"{title_of(fit.model)}, {fit.cap}"
        rows.append((name if name != before else "", names[fit.way], *_cells(fit, plain)))
        before = name
    columns = ("", "", "batch, forecast", "ran", "of plain's", "peak, forecast", "measured")
    return table((*columns, "samples/s, forecast", "measured", "of plain's"), rows)


def _cells(fit: Fit, plain: Fit) -> Iterator[str]:
    told, ran = fit.forecast, fit.ran
    yield ABSENT if told is None else f"{told['batch']:,}"
    yield f"{ran['case']['batch']:,}" if ran else _not_ran(fit)
    yield times(ran["case"]["batch"] / plain.ran["case"]["batch"]) if ran and plain.ran else ABSENT
    yield ABSENT if told is None else format_bytes(told["peak_bytes"])
    yield format_bytes(ran["peak_bytes"]) if ran else ABSENT
    yield ABSENT if told is None else f"{told['samples_per_s']:,.4g}"
    yield f"{ran['samples_per_s']:,.4g}" if ran else ABSENT
    yield times(ran["samples_per_s"] / plain.ran["samples_per_s"]) if ran and plain.ran else ABSENT


def _not_ran(fit: Fit) -> str:
    batches = ", ".join(f"{found['case']['batch']:,}" for found in fit.tried)
    return f"none of {batches}" if batches else ABSENT


def _batches(every: Sequence[Fit], model: str) -> list[int]:
    """The estimated batches of a model."""
    own = (fit.forecast for fit in every if fit.model == model)
    return [forecast["batch"] for forecast in own if forecast] or [1]


def fits_figure(every: Sequence[Fit]) -> Any:
    """A panel per model: bars of the estimated batches, and a mark where one was run."""
    models = list(dict.fromkeys(fit.model for fit in every))
    caps = list(dict.fromkeys(fit.cap for fit in every))
    figure = new_figure("The largest batch that fits", _INCHES)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        drawing.head(axes, title_of(model))
        for fit in (each for each in every if each.model == model):
            place = caps.index(fit.cap) + (WAYS.index(fit.way) - 1) * 0.27
            if fit.forecast:
                style = {
                    "color": _COLOURS[fit.way],
                    "width": 0.25,
                    "label": f"{fit.way}, estimated",
                }
                bar = axes.bar(place, fit.forecast["batch"], **style)
                axes.bar_label(bar, fmt="{:,.0f}", fontsize=8, padding=2)
            if fit.ran:
                mark = {"marker": "_", "ms": 16, "mew": 2, "color": SERIES[1], "ls": "none"}
                axes.plot([place], [fit.ran["case"]["batch"]], label="ran", **mark)
        axes.set_xticks(range(len(caps)), caps)
        axes.set_yscale("log")
        axes.set_ylim(bottom=min(_batches(every, model)) / 2)
        axes.yaxis.set_major_formatter(lambda batch, place: f"{batch:,.0f}")
        axes.yaxis.set_minor_formatter(lambda batch, place: "")
        drawing.finish(axes, "memory", "batch size" if axes is panels[0] else "")
    drawing.name_below(figure, *panels)
    return figure
