"""One case of a sweep over batch sizes, as `rekindle sweep` runs it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from experiments.tasks import FAILED
from experiments.turns import take_turn
from rekindle.studies.sweep import Case, run_case

UNCOMPILED = "running without the compiler"
"""The start of the warning that a step runs uncompiled."""
_LEFT_OUT = ("environment", "traceback")  # the file has the environment; tracebacks are long


def run_one_case(settings: dict[str, Any], before: object, save: object) -> dict[str, Any]:
    """The record of a case; out of memory is a result.

    A case that should be compiled, but ran uncompiled, has failed.
    """
    case = Case(**settings["case"])
    with _warnings() as told:
        record = run_case(case, take_turn)
    without = [text for text in told if text.startswith(UNCOMPILED)]
    if without and case.engine == "inductor":
        record |= {"status": FAILED, "kind": "not compiled", "message": without[0]}
    return {key: value for key, value in record.items() if key not in _LEFT_OUT}


class _Listener(logging.Handler):
    """Keeps log messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """The warnings that Rekindle logs meanwhile."""
    log, listener = logging.getLogger("rekindle"), _Listener()
    log.addHandler(listener)
    try:
        yield listener.told
    finally:
        log.removeHandler(listener)
