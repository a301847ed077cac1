"""A sweep over batch sizes: its cases as series, and the table of all on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rekindle.report.names import shorten
from rekindle.report.tables import ABSENT, ForWidth, indented, new_table
from rekindle.report.words import percent
from rekindle.units import format_bytes, format_us

PLAIN, PLANNED, CHECKPOINT, COMPILE = "plain", "planned", "checkpoint", "compile"
"""The ways to run a step."""
DONE, OUT_OF_MEMORY, FAILED = "done", "out of memory", "failed"
"""The status of a case."""
INFEASIBLE = "InfeasibleBudget"

_NAMES = {
    PLAIN: "plain",
    PLANNED: "Rekindle",
    CHECKPOINT: "checkpoint every block",
    COMPILE: "torch.compile",
}
_OPTIONAL_COLUMNS = ("setup", "reserved", "forecast", "of plain", "samples/s")  # first to go
_COLUMN_GAP = 3  # characters

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
    return _NAMES[way] if setting is None else f"{_NAMES[way]}, {setting}"


def setting_of(case: Mapping[str, Any]) -> str | float | None:
    """The setting of a case: its budget, or its share of activations."""
    setting: str | float | None = case["budget"] if case["way"] == PLANNED else case["share"]
    return setting


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
    plain = next((series for series in every if series.way == PLAIN), None)
    for batch in batches_of(data):
        base = plain.done(batch) if plain is not None else None
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


def _reserved(record: Record, base: Record | None) -> str:
    found = record["reserved_bytes"]
    return ABSENT if found is None else format_bytes(found)


def _forecast(record: Record, base: Record | None) -> str:
    found = record["forecast"]
    return ABSENT if found is None else format_bytes(found["peak_bytes"])


_CELLS: dict[str, Callable[[Record, Record | None], str]] = {
    "peak": lambda record, base: format_bytes(record["peak_bytes"]),
    "forecast": _forecast,
    "reserved": _reserved,
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
