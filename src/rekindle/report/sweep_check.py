"""What a sweep from a file must satisfy before it is shown."""

from __future__ import annotations

from typing import Any

from rekindle.core.checks import MAX_BYTES, number, real, require, text
from rekindle.report.sweep_report import DONE, FAILED, OUT_OF_MEMORY, WAY_NAMES

MAX_BATCH = 1 << 40


def check_sweep(data: Any) -> None:
    """Raise ValueError unless a sweep has all that its table and its figures show."""
    text(data["model"], "its model")
    for name in ("precision", "device", "engine"):
        _optional_text(data[name], f"its {name}")
    _optional_bytes(data["cap_bytes"], "its cap")
    require(isinstance(data["cases"], list), "its cases are no list")
    for record in data["cases"]:
        check_record(record)


def check_record(record: Any) -> None:
    """Raise ValueError, KeyError or TypeError unless a case's record is complete."""
    case = record["case"]
    number(case["batch"], 1, MAX_BATCH, "a batch size")
    require(case["way"] in WAY_NAMES, "a case ran in an unknown way")
    _optional_text(case["budget"], "a budget")
    if case["share"] is not None:
        real(case["share"], "a share")
    require(record["status"] in (DONE, OUT_OF_MEMORY, FAILED), "a status is unknown")
    _optional_text(record["kind"], "a kind of error")
    is_message = record["message"] is None or isinstance(record["message"], str)
    require(is_message, "a message is no text")
    if record["status"] == DONE:
        _check_measured(record)


def _check_measured(record: dict[str, Any]) -> None:
    text(record["device"], "a device")
    text(record["precision"], "a precision")
    number(record["peak_bytes"], 1, MAX_BYTES, "a peak")
    _optional_bytes(record["reserved_bytes"], "the reserved bytes")
    _optional_bytes(record["budget_bytes"], "a budget")
    for name in ("step_us", "samples_per_s", "setup_s"):
        real(record[name], name)
    require(record["step_us"] > 0, "a step takes no time")
    verdict = record["is_within_budget"]
    require(verdict is None or type(verdict) is bool, "a verdict is none")
    if verdict is False:
        number(record["budget_bytes"], 0, MAX_BYTES, "a budget")
    if record["forecast"] is not None:
        number(record["forecast"]["peak_bytes"], 0, MAX_BYTES, "a forecast")


def _optional_text(value: Any, what: str) -> None:
    if value is not None:
        text(value, what)


def _optional_bytes(value: Any, what: str) -> None:
    if value is not None:
        number(value, 0, MAX_BYTES, what)
