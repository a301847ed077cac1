"""Runs each task in a process of its own, for so long and no longer.

A process gets what is asked for in a file and leaves its answer in another; what it has found so
far is there, too, should it be stopped. While one works, the next has its imports done already: a
GPU's time is dear.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from experiments import ROOT
from experiments.tasks import DONE, FAILED, UNFINISHED, Row, Task
from experiments.turns import as_one_of_several
from rekindle.studies.sweep_case import write_atomically

Answer = dict[str, Any]
_REQUEST, _ANSWER = "request.json", "answer.json"
_IMPORTED = (
    "experiments.kinds",
    "torchvision.models",
    "transformers.models.bert.modeling_bert",
)
_TAIL = 1500  # characters of what a process said that is kept where it failed


class _Worker(NamedTuple):
    """A process that waits for a task, and what it says."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def end(self) -> str:
        """Stop the process, if it has not ended by itself; its exit code and last words."""
        assert self.process.stdin is not None
        self.process.kill()
        code = self.process.wait()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with self.log:
            self.log.seek(0)
            said = self.log.read()[-_TAIL:].decode(errors="replace").strip()
        return f"ended with code {code}: {said}"


class Runner:
    """Does tasks, one after the other: each in a process of its own, or all in this one."""

    def __init__(self, *, alone: bool = True) -> None:
        self._alone = alone
        self._next: _Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._next is not None:
            self._next.end()

    def perform(self, task: Task, before: Row | None, limit_s: float) -> Answer:
        """What came of a task, and the seconds it took."""
        request = _request(task, before)
        if not self._alone:
            return _timed(lambda: _answer(request, lambda found: None))
        worker, self._next = self._next or _start(), _start()
        return _timed(lambda: _apart(worker, request, limit_s))

    def perform_together(
        self, tasks: Sequence[Task], befores: Sequence[Row | None], limit_s: float
    ) -> Iterator[Answer]:
        """What came of tasks that are prepared at the same time, and measured one by one."""
        if not self._alone or len(tasks) == 1:
            for task, before in zip(tasks, befores, strict=True):
                yield self.perform(task, before, limit_s)
            return
        with tempfile.NamedTemporaryFile() as turns:
            with ExitStack() as stack:  # files are closed here as soon as the processes have them
                files = [stack.enter_context(Path(turns.name).open("rb")) for _ in tasks]
                ways = [as_one_of_several(file) for file in files]
                workers = [_start(**way) for way in ways]

            def perform(worker: _Worker, task: Task, before: Row | None) -> Answer:
                return _timed(lambda: _apart(worker, _request(task, before), limit_s))

            with ThreadPoolExecutor(len(tasks)) as threads:
                yield from threads.map(perform, workers, tasks, befores)


def _timed(perform: Callable[[], Answer]) -> Answer:
    """An answer, and the seconds it took."""
    start = time.perf_counter()
    return {**perform(), "seconds": round(time.perf_counter() - start, 1)}


def _request(task: Task, before: Row | None) -> dict[str, Any]:
    kept = before["found"] if before and before["status"] == UNFINISHED else None
    return {"kind": task.kind, "settings": dict(task.settings), "before": kept}


def _apart(worker: _Worker, request: dict[str, Any], limit_s: float) -> Answer:
    """What a process answers, which is ended then."""
    with tempfile.TemporaryDirectory() as text:
        write_atomically(Path(text) / _REQUEST, request)
        try:
            _hand_over(worker, text, limit_s)
        finally:
            how = worker.end()
        answer = Path(text) / _ANSWER
        if answer.exists():
            return dict(json.loads(answer.read_text(encoding="utf-8")))
    return {"status": FAILED, "message": how}


def _start(**how: Any) -> _Worker:
    log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
    command = [sys.executable, "-m", "experiments.alone"]
    said: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
    return _Worker(subprocess.Popen(command, cwd=ROOT, **said, **how), log)


def _hand_over(worker: _Worker, folder: str, limit_s: float) -> None:
    """Tell a process where its task is, and wait until it is done or its time is over."""
    assert worker.process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, and has said why
        worker.process.stdin.write(f"{folder}\n".encode())
        worker.process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        worker.process.wait(limit_s)


def _answer(request: dict[str, Any], save: Callable[[Answer], None]) -> Answer:
    """What a task finds, or what went wrong."""
    from experiments.kinds import KINDS  # not above: the process that waits needs none of it

    def save_part(found: dict[str, Any]) -> None:
        save({"status": UNFINISHED, "found": found})

    try:
        found = KINDS[request["kind"]](request["settings"], request["before"], save_part)
    except Exception as error:
        said = "".join(traceback.format_exception(error))[-_TAIL:]
        return {"status": FAILED, "message": f"{type(error).__name__}: {error}", "traceback": said}
    return {"status": found.get("status", DONE), "found": found}


def main() -> None:
    """Have all imports done, and answer the request in the folder that the first line names."""
    for module in _IMPORTED:
        with suppress(ImportError):
            importlib.import_module(module)
    told = sys.stdin.readline().strip()
    if not told:
        return  # nobody needs this process any more
    folder = Path(told)
    request = json.loads((folder / _REQUEST).read_text(encoding="utf-8"))

    def save(answer: Answer) -> None:
        write_atomically(folder / _ANSWER, answer)

    save(_answer(request, save))


if __name__ == "__main__":
    main()
