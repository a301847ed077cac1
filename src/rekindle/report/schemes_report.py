"""Schemes of memory optimisation side by side: the results as data, on the terminal, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rekindle.report.tables import ABSENT, ForWidth, add_numbers, indented, new_table
from rekindle.report.words import percent
from rekindle.units import format_bytes

_NAME_COLUMNS = 27  # of the terminal
_NUMBER_COLUMNS = 11
_GROWTH_COLUMNS = 7


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
    """The exponent with which bytes grow with size: 1 if twice the size takes twice the bytes.

    >>> round(growth([1, 4, 16], [10, 20, 40]), 3)
    0.5
    """
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(nbytes, 1)), 1)[0])


Cell = Callable[[Scheme, SizeResult], str]


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

    def feature_cell(scheme: Scheme, result: SizeResult) -> str:
        return format_bytes(result.feature_bytes(scheme))

    def time_cell(scheme: Scheme, result: SizeResult) -> str:
        return percent(result.added_share(scheme))

    def measured_cell(scheme: Scheme, result: SizeResult) -> str:
        nbytes = result.measured_bytes(scheme)
        return ABSENT if nbytes is None else format_bytes(nbytes)

    parts += _section("Feature maps, estimated by laying the step out", study, feature_cell, True)
    planned = [scheme for scheme in SCHEMES if scheme.planner]
    parts += _section("Time added, of the plain step", study, time_cell, False, planned)
    if any(result.measured for result in study.results):
        title = "All that the step takes, weights' gradients included, measured"
        parts += _section(title, study, measured_cell, False)
        parts += [indented(_forecast_line(study)), ""]
    return Group(*parts)


def schemes_data(study: Study) -> dict[str, Any]:
    """A study as data, in bytes and microseconds."""
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
        is_narrow = width < _NAME_COLUMNS + _NUMBER_COLUMNS + _GROWTH_COLUMNS
        growths = study.growths if with_growth and not is_narrow else {}
        room = width - _NAME_COLUMNS - (_GROWTH_COLUMNS if growths else 0)
        each, results = max(1, room // _NUMBER_COLUMNS), study.results
        groups = [results[at : at + each] for at in range(0, len(results), each)]
        tables = [_table(study, schemes, group, cell, {}) for group in groups[:-1]]
        return Group(*tables, _table(study, schemes, groups[-1], cell, growths))

    yield indented(ForWidth(make))


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
    add_numbers(table, *("" if each.size is None else f"{each.size:,}" for each in results))
    add_numbers(table, *(["growth"] if growths else []))
    for scheme in schemes:
        row = [cell(scheme, result) for result in results]
        row += [growth_in_words(growths[scheme.name])] if growths else []
        table.add_row(scheme.label, *row)
    return table


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
