"""Peak memory and step time against the batch size, plain and planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.config import Range
from experiments.page import ABSENT, Page, not_measured, paragraphs, table, times, title_of
from experiments.pieces import half_name, sweep_name
from rekindle.report import sweep_report
from rekindle.report.sweep_report import (
    DONE,
    INFEASIBLE,
    PLAIN,
    Record,
    Series,
    batches_of,
    series_of,
    sweep_data,
)
from rekindle.units import format_bytes, format_us, parse_bytes

Data = dict[str, Any]
Cell = Callable[[Record, Record | None], str]


def memory(page: Page) -> str:
    """Peak memory against batch size: bars, and the same as a table."""
    return _for_each(page, _memory)


def latency(page: Page) -> str:
    """Step time against batch size, and samples per second."""
    return _for_each(page, _latency)


def data_of(page: Page, sweep: Range) -> Data:
    """All cases of a model, from any piece, in the form that the figures take."""
    pieces = (sweep_name(sweep.model), half_name(sweep.model))
    records = [found for piece in pieces for found in page.results.found(piece)]
    settings = {
        "model": title_of(sweep.model),
        "precision": page.config.precision,
        "device": page.config.device,
        "engine": "auto",
        "planner": "auto",
        "steps": page.config.steps,
        "cap_bytes": parse_bytes(page.config.sweep_cap),
    }
    return sweep_data(settings, records)


def _for_each(page: Page, write: Callable[[Page, Range, Data], str]) -> str:
    parts = []
    for sweep in page.config.sweeps:
        data = data_of(page, sweep)
        has_run = any(record["status"] == DONE for record in data["cases"])
        missing = f"**{title_of(sweep.model)}**: {not_measured(sweep_name(sweep.model))}"
        parts.append(write(page, sweep, data) if has_run else missing)
    return paragraphs(*parts)


def _memory(page: Page, sweep: Range, data: Data) -> str:
    about = f"Peak memory of {title_of(sweep.model)} against batch size"
    figure = sweep_report.memory_figure(data)
    picture = page.picture(f"memory-{sweep.model}", about, figure)

    def peak(record: Record, plain: Record | None) -> str:
        return format_bytes(record["peak_bytes"])

    def forecast(record: Record, plain: Record | None) -> str:
        told = record["forecast"]
        return ABSENT if told is None else times(told["peak_bytes"] / record["peak_bytes"], 3)

    return paragraphs(picture, _table(data, {"": peak, "forecast of measured": forecast}))


def _latency(page: Page, sweep: Range, data: Data) -> str:
    name = title_of(sweep.model)
    pictures = [
        page.picture(f"{kind}-{sweep.model}", f"{about} of {name} against batch size", draw(data))
        for kind, about, draw in (
            ("latency", "Step time", sweep_report.latency_figure),
            ("throughput", "Throughput", sweep_report.throughput_figure),
        )
    ]

    def time(record: Record, plain: Record | None) -> str:
        return format_us(record["step_us"])

    def of_plain(record: Record, plain: Record | None) -> str:
        return ABSENT if plain is None else times(record["step_us"] / plain["step_us"])

    def rate(record: Record, plain: Record | None) -> str:
        return f"{record['samples_per_s']:,.4g}"

    cells: dict[str, Cell] = {"": time, "of plain": of_plain, "samples/s": rate}
    return paragraphs(*pictures, _table(data, cells))


def _table(data: Data, cells: dict[str, Cell]) -> str:
    """One row per batch size, and columns for each way to run the step."""
    every = series_of(data)
    plain = next((series for series in every if series.way == PLAIN), None)
    columns = [
        (series, label, cell)
        for series in every
        for label, cell in cells.items()
        if not (series.way == PLAIN and label in ("of plain", "forecast of measured"))
    ]
    head = ["batch", *(label or series.label for series, label, _ in columns)]
    rows = []
    for batch in batches_of(data):
        base = plain.done(batch) if plain is not None else None
        rows.append([f"{batch:,}", *(_cell(*column, batch, base) for column in columns)])
    return table(head, rows)


def _cell(series: Series, label: str, cell: Cell, batch: int, plain: Record | None) -> str:
    record = series.records.get(batch)
    if record is None:
        return ABSENT
    if record["status"] == DONE:
        return cell(record, plain)
    if label:
        return ABSENT
    return "no plan fits" if record["kind"] == INFEASIBLE else str(record["status"])
