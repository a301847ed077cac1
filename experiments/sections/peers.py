"""Other ways to save memory compared with Rekindle, from the benchmarks' results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from experiments import drawing
from experiments.page import Page, paragraphs, table, times, title_of
from rekindle.report.figures import GREY, new_figure
from rekindle.report.palette import MARKERS, SERIES
from rekindle.report.words import percent
from rekindle.units import format_bytes, format_us

FILES = ("planned_h200", "compiled_h200", "partitioned_h200")
EAGER, CHECKPOINT, COMPILE = "eager", "checkpoint on every block", "`torch.compile`"
KNOB = "`activation_memory_budget`"
OURS, OURS_COMPILED, OURS_PARTITIONED = (
    "Rekindle",
    "Rekindle, compiled",
    "`rekindle.compile`",
)
WAYS = (EAGER, CHECKPOINT, COMPILE, KNOB, OURS, OURS_COMPILED, OURS_PARTITIONED)
_OWN = (OURS, OURS_COMPILED, OURS_PARTITIONED)
_INCHES = (9.0, 5.6)
_SAME = 1.005  # peaks whose ratio is below this count as equal

Found = dict[str, Any]


class Point(NamedTuple):
    """A way to run a step: its peak and time, absolute and relative to eager in the same file."""

    case: str
    way: str
    setting: str
    peak_bytes: int
    step_us: float
    of_peak: float
    of_time: float
    file: str


def section(page: Page) -> str:
    """For each case a figure, all measurements, and a comparison at equal memory."""
    points = list(_points(page))
    missing = [name for name in FILES if page.results.benchmark(name) is None]
    lines = [
        f"*`benchmarks/results/{name}.json` does not exist yet and is left out.*"
        for name in missing
    ]
    cases = dict.fromkeys(point.case for point in points)
    return paragraphs(*(_case(page, points, case) for case in cases), *lines)


def _points(page: Page) -> Iterator[Point]:
    wanted = {step.model for step in page.config.statistics}
    for name in FILES:
        rows = (page.results.benchmark(name) or {}).get("cases", [])
        rows = [row for row in rows if "step_us" in row and "case" in row]
        eager = {row["case"]: row for row in rows if row["way"] in ("plain", EAGER)}
        for row in rows:
            known = _way(row, name)
            if known and row["case"].rpartition("_b")[0] in wanted and row["case"] in eager:
                yield _point(row, eager[row["case"]], *known, name)


def _way(row: Found, file: str) -> tuple[str, str] | None:
    """The way and the setting of a benchmark's row; None if it is left out."""
    way, setting = row["way"], str(row.get("budget", ""))
    setting = "no budget" if setting == "none" else setting
    if way in ("plain", EAGER):
        return EAGER, ""
    if way == "checkpoint every block":
        return CHECKPOINT, ""
    if way.startswith("torch.compile"):
        share = way.removeprefix("torch.compile").strip()
        return (KNOB, share) if share else (COMPILE, "")
    if way == "rekindle":
        return OURS_PARTITIONED, setting
    if way == "planned":
        return (OURS_COMPILED if file.startswith("compiled") else OURS), setting
    return None


def _point(row: Found, eager: Found, way: str, setting: str, file: str) -> Point:
    peak, time = row["peak_bytes"], row["step_us"]
    shares = (peak / eager["peak_bytes"], time / eager["step_us"])
    return Point(row["case"], way, setting, peak, time, *shares, file)


def _case(page: Page, points: Sequence[Point], case: str) -> str:
    own = sorted((p for p in points if p.case == case), key=lambda p: WAYS.index(p.way))
    model, _, batch = case.rpartition("_b")
    title = title_of(model, int(batch))
    picture = page.picture(f"peers-{case}", f"Ways to run {title}", peers_figure(title, own))
    rows = [
        (
            point.way if place == 0 or own[place - 1].way != point.way else "",
            point.setting,
            format_bytes(point.peak_bytes),
            percent(point.of_peak),
            format_us(point.step_us),
            times(point.of_time, 3),
            f"`{point.file}`",
        )
        for place, point in enumerate(own)
    ]
    names = ("", "setting", "peak", "of eager's", "step", "of eager's", "from")
    return paragraphs(f"### {title}", picture, table(names, rows), _same_memory(own))


def _same_memory(points: Sequence[Point]) -> str:
    """For each of the others, the fastest runs of Rekindle that need no more memory."""
    rows = []
    eager = [point for point in points if point.way == EAGER]
    for peer in [*eager[:1], *(p for p in points if p.way not in (EAGER, *_OWN))]:
        cells = []
        for way in _OWN:
            best = quickest(points, way, peer.of_peak)
            cells.append(f"{times(best.of_time, 3)} ({percent(best.of_peak)})" if best else "")
        name = f"{peer.way} {peer.setting}".strip()
        rows.append((name, percent(peer.of_peak), times(peer.of_time, 3), *cells))
    shown = [place for place, way in enumerate(_OWN) if any(row[3 + place] for row in rows)]
    names = ("at the same memory", "peak", "time", *(_OWN[place] for place in shown))
    kept = [(*row[:3], *(row[3 + place] or "–" for place in shown)) for row in rows]
    return table(names, kept)


def quickest(points: Sequence[Point], way: str, of_peak: float) -> Point | None:
    """The fastest run of a way that takes no more memory."""
    fitting = [p for p in points if p.way == way and p.of_peak <= of_peak * _SAME]
    return min(fitting, key=lambda point: point.of_time, default=None)


def peers_figure(title: str, points: Sequence[Point]) -> Any:
    """Time against memory, relative to eager in the same run; one line per way."""
    figure = new_figure(f"{title}: time against memory", _INCHES)
    axes = figure.subplots()
    axes.axhline(1.0, color=GREY, lw=0.8, ls=":", zorder=2)
    axes.axvline(100.0, color=GREY, lw=0.8, ls=":", zorder=2)
    colours = (SERIES[7], SERIES[4], SERIES[2], SERIES[3], SERIES[0], SERIES[1], SERIES[6])
    for way, colour, marker in zip(WAYS, colours, MARKERS, strict=False):
        line = sorted((100 * p.of_peak, p.of_time) for p in points if p.way == way)
        if line:
            joined = "-" if way in (*_OWN, KNOB) else "none"
            xs, ys = zip(*line, strict=True)
            style = {"color": colour, "marker": marker, "ls": joined, "ms": 7, "lw": 1.8}
            axes.plot(xs, ys, label=way.replace("`", ""), **style)
    drawing.finish(axes, "peak memory, % of eager's", "step time, × eager's", grid="both")
    drawing.name_below(figure, axes, columns=4)
    return figure
