"""The tasks of a piece of an experiment, and the row of each in its results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DONE, OUT_OF_MEMORY, FAILED = "done", "out of memory", "failed"
UNFINISHED = "unfinished"
"""The status of a task. Out of memory is a result; failed and unfinished tasks are run again."""
FINAL = (DONE, OUT_OF_MEMORY)
_SHARED_RATIO = 0.15  # time that a task adds, relative to its own, if others prepare with it

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
"""Rows by the keys of their tasks."""
RowsOf = Callable[[str], Rows]
"""The rows of another piece, by its name."""


@dataclass(frozen=True)
class Task:
    """Work for a process of its own: the kind of work and its settings.

    `about_s` is the estimated time.
    """

    kind: str
    settings: Mapping[str, Any]
    about_s: float

    @property
    def key(self) -> str:
        """The identity of a task."""
        return f"{self.kind} {json.dumps(self.settings, sort_keys=True)}"

    @property
    def words(self) -> str:
        """The task in a few words: ``case resnet152 128 planned 38.8GiB``."""
        facts = {**self.settings, **self.settings.get("case", {})}
        names = ("family", "model", "batch", "of", "way", "budget", "cap")
        told = (str(facts[name]) for name in names if facts.get(name))
        return " ".join(dict.fromkeys([self.kind, *told]))


@dataclass(frozen=True)
class Piece:
    """Tasks that are collected together, and written into one file.

    `tasks` yields them one after the other: the results of one may decide the next. Its arguments
    are the rows of this piece, which grow meanwhile, and a function that reads those of others. A
    tuple of tasks is prepared at the same time, and measured one after the other.
    """

    name: str
    about: str
    needs_gpu: bool
    tasks: Callable[[Rows, RowsOf], Iterator[Task | tuple[Task, ...]]]


def several(asked: Task | tuple[Task, ...]) -> tuple[Task, ...]:
    """One or several tasks as a tuple."""
    return (asked,) if isinstance(asked, Task) else asked


def together_s(tasks: Sequence[Task]) -> float:
    """The estimated time of tasks that prepare at the same time, on the same cores."""
    return max(task.about_s for task in tasks) + _SHARED_RATIO * sum(
        sorted(t.about_s for t in tasks)[:-1]
    )


def key_of(row: Row) -> str:
    """The key of the task that left a row."""
    return Task(row["kind"], row["settings"], 0.0).key


def is_final(row: Row | None) -> bool:
    """True if a task need not be run again."""
    return row is not None and row["status"] in FINAL
