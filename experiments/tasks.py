"""What a piece of an experiment consists of: tasks, and the row that each leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DONE, OUT_OF_MEMORY, FAILED = "done", "out of memory", "failed"
UNFINISHED = "unfinished"
"""What becomes of a task. Memory that does not suffice is a result; the last two are run again."""
FINAL = (DONE, OUT_OF_MEMORY)
_SHARED = 0.15  # of the time of a task, where another is prepared at the same time

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
"""Rows by the keys of their tasks."""
RowsOf = Callable[[str], Rows]
"""The rows of another piece, by its name."""


@dataclass(frozen=True)
class Task:
    """Something to be done in a process of its own: what kind of thing, and with what settings.

    `about_s` is about how long it takes.
    """

    kind: str
    settings: Mapping[str, Any]
    about_s: float

    @property
    def key(self) -> str:
        """What tells a task from all others."""
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
    """Tasks that are asked for together, and written into one file.

    `tasks` makes them one after the other: what a task has found may decide what comes next. It is
    given the rows of this piece, which grow meanwhile, and a way to read those of others. Several
    at once are prepared at the same time, and measured one after the other.
    """

    name: str
    about: str
    needs_gpu: bool
    tasks: Callable[[Rows, RowsOf], Iterator[Task | tuple[Task, ...]]]


def several(asked: Task | tuple[Task, ...]) -> tuple[Task, ...]:
    """Tasks that are done at once: often one."""
    return (asked,) if isinstance(asked, Task) else asked


def together_s(tasks: Sequence[Task]) -> float:
    """About how long tasks take that are done at once, and share a machine's cores."""
    return max(task.about_s for task in tasks) + _SHARED * sum(
        sorted(t.about_s for t in tasks)[:-1]
    )


def key_of(row: Row) -> str:
    """The key of the task that left a row."""
    return Task(row["kind"], row["settings"], 0.0).key


def is_final(row: Row | None) -> bool:
    """Whether a task need not be run again."""
    return row is not None and row["status"] in FINAL
