"""Schemes of memory optimisation beside one another, on the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rekindle.report.pieces import Fitted, indented, new_table
from rekindle.report.words import percent
from rekindle.studies.schemes import SCHEMES, Scheme, SizeResult, Study
from rekindle.units import format_bytes

ABSENT = "–"
_ROOM_FOR_NAMES = 27  # columns
_ROOM_FOR_NUMBERS = 11
_ROOM_FOR_GROWTH = 7

Cell = Callable[[Scheme, SizeResult], str]


def schemes_title(study: Study) -> str:
    """What was studied: ``ResNet on 224x224 images: batch 32, fp32, estimated for H200``."""
    batch = "" if study.batch is None else f"batch {study.batch}"
    where = f"{'on' if study.is_measured else 'estimated for'} {study.device}"
    facts = [fact for fact in (batch, study.precision, where) if fact]
    return f"{study.title}: {', '.join(facts)}"


def growth_in_words(exponent: float) -> str:
    """An exponent of the size: ``n^0.50``."""
    return f"n^{round(exponent, 2) + 0.0:.2f}"  # adding zero turns -0.0 into 0.0


def schemes_table(study: Study) -> RenderableType:
    """Bytes of feature maps by scheme and size, the time that is added, and what was measured."""
    parts: list[RenderableType] = [Text(schemes_title(study), style="bold")]
    parts += _section("Feature maps, estimated by laying the step out", study, _feature_cell, True)
    planned = [scheme for scheme in SCHEMES if scheme.planner]
    parts += _section("Time added, of the plain step", study, _time_cell, False, planned)
    if any(result.measured for result in study.results):
        title = "All that the step takes, weights' gradients included, measured"
        parts += _section(title, study, _measured_cell, False)
        parts += [indented(_forecast_line(study)), ""]
    return Group(*parts)


def schemes_data(study: Study) -> dict[str, Any]:
    """The same, and times in microseconds."""
    return {
        "model": study.model,
        "title": study.title,
        "size_name": study.size_name,
        "batch": study.batch,
        "precision": study.precision,
        "device": study.device,
        "is_measured": study.is_measured,
        "schemes": [
            {"name": scheme.name, "label": scheme.label, "planner": scheme.planner}
            for scheme in SCHEMES
        ],
        "sizes": [_size_data(result) for result in study.results],
        "growth": study.growths,
    }


def _size_data(result: SizeResult) -> dict[str, Any]:
    rows = {}
    for name, estimate in result.estimates.items():
        row: dict[str, Any] = {
            "feature_bytes": estimate.feature_bytes,
            "added_us": estimate.added_us,
            "measured": None,
        }
        if name in result.measured:
            taken = result.measured[name]
            row["measured"] = {
                "peak_bytes": taken.peak_bytes,
                "forecast_bytes": taken.forecast_bytes,
            }
        rows[name] = row
    return {
        "size": result.size,
        "ops": result.n_ops,
        "step_us": result.step_us,
        "schemes": rows,
    }


def _section(
    title: str,
    study: Study,
    cell: Cell,
    with_growth: bool,
    schemes: Sequence[Scheme] = SCHEMES,
) -> Iterator[RenderableType]:
    yield ""
    yield Text(title)

    def make(width: int) -> RenderableType:
        is_narrow = width < _ROOM_FOR_NAMES + _ROOM_FOR_NUMBERS + _ROOM_FOR_GROWTH
        growths = study.growths if with_growth and not is_narrow else {}
        room = width - _ROOM_FOR_NAMES - (_ROOM_FOR_GROWTH if growths else 0)
        each, results = max(1, room // _ROOM_FOR_NUMBERS), study.results
        groups = [results[at : at + each] for at in range(0, len(results), each)]
        tables = [_table(study, schemes, group, cell, {}) for group in groups[:-1]]
        return Group(*tables, _table(study, schemes, groups[-1], cell, growths))

    yield indented(Fitted(make))


def _table(
    study: Study,
    schemes: Sequence[Scheme],
    results: Sequence[SizeResult],
    cell: Cell,
    growths: dict[str, float],
) -> Table:
    table = new_table()
    table.show_header = bool(study.size_name)
    table.add_column(study.size_name, no_wrap=True)
    for result in results:
        head = "" if result.size is None else f"{result.size:,}"
        table.add_column(head, justify="right", no_wrap=True)
    if growths:
        table.add_column("growth", justify="right", no_wrap=True)
    for scheme in schemes:
        row = [cell(scheme, result) for result in results]
        row += [growth_in_words(growths[scheme.name])] if growths else []
        table.add_row(scheme.label, *row)
    return table


def _feature_cell(scheme: Scheme, result: SizeResult) -> str:
    return format_bytes(result.estimates[scheme.name].feature_bytes)


def _time_cell(scheme: Scheme, result: SizeResult) -> str:
    return percent(result.estimates[scheme.name].added_us / (result.step_us or 1.0))


def _measured_cell(scheme: Scheme, result: SizeResult) -> str:
    taken = result.measured.get(scheme.name)
    if taken is None:
        return ABSENT
    return format_bytes(taken.peak_bytes)


def _forecast_line(study: Study) -> str:
    """How far the simulator was from what was measured."""
    ratios = [
        taken.forecast_bytes / taken.peak_bytes
        for result in study.results
        for taken in result.measured.values()
        if taken.peak_bytes
    ]
    forecast = f"{min(ratios):.3f} to {max(ratios):.3f} of what was measured"
    return f"sharing is what torch does by itself; the forecast was {forecast}"
