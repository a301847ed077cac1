"""Runs tasks one after the other, each in a process of its own and within a time limit.

While one process works, the next has done its imports already: time on a GPU is expensive.
"""

from __future__ import annotations

import importlib
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from experiments import ROOT
from experiments.tasks import DONE, FAILED, UNFINISHED, Row, Task
from experiments.turns import as_one_of_several
from rekindle.studies.isolated_process import Ended, Json, Save, Worker, serve

WORKER = ("-m", "experiments.runner")
"""The arguments that start the process of a task."""
_IMPORTED = (
    "experiments.kinds",
    "torchvision.models",
    "transformers.models.bert.modeling_bert",
)
_TAIL_CHARACTERS = 1500  # of the output of a process that failed


class Runner:
    """Runs tasks: each in a process of its own, or all in this one."""

    def __init__(self, *, alone: bool = True, command: Sequence[str] = WORKER) -> None:
        self._alone = alone
        self._command = command
        self.waiting: Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.waiting is not None:
            self.waiting.end()

    def perform(self, task: Task, before: Row | None, limit_s: float) -> Json:
        """The answer of a task, and the seconds it took."""
        request = _request(task, before)
        if not self._alone:
            return _timed(lambda: answer_task(request, lambda found: None))
        worker, self.waiting = self.waiting or self._start(), self._start()
        return _timed(lambda: _apart(worker, request, limit_s))

    def perform_together(
        self, tasks: Sequence[Task], befores: Sequence[Row | None], limit_s: float
    ) -> Iterator[Json]:
        """The answers of tasks that prepare at the same time, and measure one by one."""
        if not self._alone or len(tasks) == 1:
            for task, before in zip(tasks, befores, strict=True):
                yield self.perform(task, before, limit_s)
            return
        with tempfile.NamedTemporaryFile() as turns:
            with ExitStack() as stack:  # closes the files here once the processes have them
                files = [stack.enter_context(Path(turns.name).open("rb")) for _ in tasks]
                workers = [self._start(**as_one_of_several(file)) for file in files]

            def perform(worker: Worker, task: Task, before: Row | None) -> Json:
                return _timed(lambda: _apart(worker, _request(task, before), limit_s))

            with ThreadPoolExecutor(len(tasks)) as threads:
                yield from threads.map(perform, workers, tasks, befores)

    def _start(self, **options: Any) -> Worker:
        return Worker(self._command, cwd=ROOT, **options)


def _timed(perform: Callable[[], Json]) -> Json:
    """An answer, and the seconds it took."""
    start = time.perf_counter()
    return {**perform(), "seconds": round(time.perf_counter() - start, 1)}


def _request(task: Task, before: Row | None) -> Json:
    kept = before["found"] if before and before["status"] == UNFINISHED else None
    return {"kind": task.kind, "settings": dict(task.settings), "before": kept}


def _apart(worker: Worker, request: Json, limit_s: float) -> Json:
    with tempfile.TemporaryDirectory() as folder:
        found = worker.perform(request, Path(folder) / "answer.json", limit_s)
    if isinstance(found, Ended):
        said = found.output[-_TAIL_CHARACTERS:]
        return {"status": FAILED, "message": f"ended with code {found.code}: {said}"}
    return found


def answer_task(request: Json, save: Save) -> Json:
    """What a task finds, or what went wrong."""
    from experiments.kinds import KINDS  # not above: the process that waits needs none of it

    def save_part(found: Json) -> None:
        save({"status": UNFINISHED, "found": found})

    try:
        found = KINDS[request["kind"]](request["settings"], request["before"], save_part)
    except Exception as error:
        said = "".join(traceback.format_exception(error))[-_TAIL_CHARACTERS:]
        return {"status": FAILED, "message": f"{type(error).__name__}: {error}", "traceback": said}
    return {"status": found.get("status", DONE), "found": found}


def main() -> None:
    """The process of a task: import everything, then answer the request."""
    for module in _IMPORTED:
        with suppress(ImportError):
            importlib.import_module(module)
    serve(answer_task)


if __name__ == "__main__":
    main()
