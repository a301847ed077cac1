"""One case of a sweep over batch sizes, as `rekindle sweep` runs it."""

from __future__ import annotations

from typing import Any

from rekindle.cli.sweep_case import Case, run_case

_LEFT_OUT = ("environment", "traceback")  # one is the file's, the other is long


def run_one_case(settings: dict[str, Any], before: object, save: object) -> dict[str, Any]:
    """The record of a case; memory that does not suffice is a result."""
    record = run_case(Case(**settings["case"]))
    return {key: value for key, value in record.items() if key not in _LEFT_OUT}
