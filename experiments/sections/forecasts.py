"""How far forecasts were off, over all measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from experiments import drawing
from experiments.page import ABSENT, Page, paragraphs, table, times, title_of
from experiments.pieces import compiled_name, half_name, planners_name, sweep_name
from experiments.sections.fits import Fit, fits_of
from rekindle.report.figures import GREY, new_figure
from rekindle.report.palette import SERIES
from rekindle.report.sweep_report import DONE

CLOSE_PEAK, CLOSE_TIME = 0.01, 0.05
"""The promised accuracy of forecasts: of the peak, and of the time."""
_INCHES = (10.5, 4.6)

Found = dict[str, Any]


class Pair(NamedTuple):
    """A forecast relative to its measurement; None if there is no such forecast."""

    source: str
    what: str
    peak: float | None
    time: float | None


def section(page: Page) -> str:
    """A figure, a table, and a list of forecasts that missed the promise."""
    pairs = list(pairs_of(page))
    if not pairs:
        return "*Nothing has been measured yet.*"
    picture = page.picture("forecasts", "Forecast of measured", forecasts_figure(pairs))
    return paragraphs(picture, _table(pairs), _far(pairs), _others(page))


def pairs_of(page: Page) -> Iterator[Pair]:
    """Every forecast with a measurement."""
    yield from _plain_steps(page)
    yield from _sweeps(page)
    yield from _planners(page)
    yield from _schemes(page)
    yield from _largest(page)
    yield from _compiled(page)
    yield from _benchmarks(page)


def _pair(source: str, what: str, forecast: Found, measured: Found) -> Pair:
    peak, time = (forecast[key] / measured[key] for key in ("peak_bytes", "step_us"))
    return Pair(source, what, peak, time)


def _plain_steps(page: Page) -> Iterator[Pair]:
    for found in page.results.found("statistics"):
        what = f"{title_of(found['model'], found['batch'])}, plain"
        yield _pair("plain steps", what, found["forecast"], found["measured"])


def _sweeps(page: Page) -> Iterator[Pair]:
    for sweep in page.config.sweeps:
        for piece in (sweep_name(sweep.model), half_name(sweep.model)):
            for record in page.results.found(piece):
                if record["status"] == DONE and record["forecast"]:
                    case = record["case"]
                    what = f"{title_of(case['model'], case['batch'])} within {case['budget']}"
                    yield _pair("batch sizes", what, record["forecast"], record)


def _planners(page: Page) -> Iterator[Pair]:
    for planned in page.config.planned:
        for found in page.results.found(planners_name(planned.step)):
            for row in found["rows"]:
                if "measured" in row and "same_as" not in row:
                    title = title_of(found["model"], found["batch"])
                    what = f"{title}, `{row['planner']}` at {row['percent']}%"
                    yield _pair("planners", what, row["forecast"], row["measured"])


def _schemes(page: Page) -> Iterator[Pair]:
    for found in page.results.found("schemes"):
        for size in found["sizes"]:
            for name, row in size["schemes"].items():
                if row["measured"]:
                    what = f"{found['title']}, {found['size_name']} {size['size']}, {name}"
                    taken = row["measured"]
                    yield Pair("schemes", what, taken["forecast_bytes"] / taken["peak_bytes"], None)


def _largest(page: Page) -> Iterator[Pair]:
    """Estimates without the GPU, if that very batch was run; and forecasts from profiles."""
    ran = [(fit, fit.ran) for fit in fits_of(page) if fit.ran]
    for fit, found in ran:
        if fit.forecast and fit.forecast["batch"] == found["case"]["batch"]:
            yield _pair("largest batches, estimated", _under_cap(fit, found), fit.forecast, found)
    for fit, found in ran:
        if found["forecast"]:
            what = _under_cap(fit, found)
            yield _pair("largest batches, profiled", what, found["forecast"], found)


def _others(page: Page) -> str:
    """Estimates whose batch was not the one that ran: their speeds can still be compared."""
    lines = []
    for fit in fits_of(page):
        if fit.ran and fit.forecast and fit.forecast["batch"] != fit.ran["case"]["batch"]:
            ratio = fit.forecast["samples_per_s"] / fit.ran["samples_per_s"]
            lines.append(
                f"- {title_of(fit.model, fit.forecast['batch'])}, {fit.way}, {fit.cap}: "
                f"{times(ratio, 3)} of the measured speed of ×{fit.ran['case']['batch']:,}."
            )
    head = (
        "Estimated samples per second, if another batch ran than was estimated (not counted above):"
    )
    return "\n".join([head, "", *lines]) if lines else ""


def _under_cap(fit: Fit, found: Found) -> str:
    return f"{title_of(fit.model, found['case']['batch'])}, {fit.way}, {fit.cap}"


def _compiled(page: Page) -> Iterator[Pair]:
    for record in page.results.found(compiled_name(page.config)):
        if record["status"] == DONE and record["forecast"]:
            case = record["case"]
            what = f"{title_of(case['model'], case['batch'])}, compiled, within {case['budget']}"
            yield _pair("compiled under a cap", what, record["forecast"], record)


def _benchmarks(page: Page) -> Iterator[Pair]:
    for name in ("planned_h200", "compiled_h200"):
        for row in (page.results.benchmark(name) or {}).get("cases", ()):
            if "forecast" in row and "step_us" in row:
                what = f"{title_of(row['model'], row['batch'])}, {row['budget']}"
                yield _pair(f"`{name}`", what, row["forecast"], row)


def _table(pairs: Sequence[Pair]) -> str:
    rows = []
    for source in [*dict.fromkeys(pair.source for pair in pairs), None]:
        own = [pair for pair in pairs if source in (pair.source, None)]
        peaks = [pair.peak for pair in own if pair.peak is not None]
        spans = [pair.time for pair in own if pair.time is not None]
        cells = (*_spread(peaks, CLOSE_PEAK), *_spread(spans, CLOSE_TIME))
        rows.append((source or "**all**", f"{len(own)}", *cells))
    names = ("forecast, of measured", "count", "peak: median", "min to max", "within 1%")
    return table((*names, "time: median", "min to max", "within 5%"), rows)


def _spread(ratios: Sequence[float], close: float) -> tuple[str, str, str]:
    if not ratios:
        return ABSENT, ABSENT, ABSENT
    near = sum(abs(ratio - 1) <= close for ratio in ratios)
    span = f"{min(ratios):.3f} to {max(ratios):.3f}"
    return f"{statistics.median(ratios):.3f}", span, f"{near} of {len(ratios)}"


def _far(pairs: Sequence[Pair]) -> str:
    """A list of forecasts that missed the promise."""
    lines = []
    for pair in pairs:
        off = []
        if pair.peak is not None and abs(pair.peak - 1) > CLOSE_PEAK:
            off.append(f"the peak was forecast at {times(pair.peak, 3)}")
        if pair.time is not None and abs(pair.time - 1) > CLOSE_TIME:
            off.append(f"the time was forecast at {times(pair.time, 3)}")
        if off:
            lines.append(f"- {pair.what} ({pair.source}): {', '.join(off)} of the measured value.")
    if not lines:
        return "No peak was off by more than 1%, and no time by more than 5%."
    return "Off by more than 1% of the peak or 5% of the time:\n\n" + "\n".join(lines)


def forecasts_figure(pairs: Sequence[Pair]) -> Any:
    """A dot per forecast, by source: of the peak, and of the time."""
    figure = new_figure("Forecast, of measured", _INCHES)
    left, right = figure.subplots(1, 2, sharey=True)
    sources = list(dict.fromkeys(pair.source for pair in pairs))
    for axes, key, close in ((left, "peak", CLOSE_PEAK), (right, "time", CLOSE_TIME)):
        drawing.head(axes, key)
        axes.axvspan(1 - close, 1 + close, color=GREY, alpha=0.15, lw=0)
        axes.axvline(1.0, color=GREY, lw=0.8)
        known = [(getattr(pair, key), pair) for pair in pairs if getattr(pair, key) is not None]
        xs = [ratio for ratio, _ in known]
        ys = [sources.index(pair.source) for _, pair in known]
        axes.plot(xs, ys, marker="o", ms=5, alpha=0.6, ls="none", color=SERIES[0])
        axes.set_yticks(range(len(sources)), [source.replace("`", "") for source in sources])
        axes.set_ylim(len(sources) - 0.5, -0.5)
        axes.locator_params(axis="x", nbins=5)
        drawing.finish(axes, "forecast, of measured", "", grid="x")
    return figure
