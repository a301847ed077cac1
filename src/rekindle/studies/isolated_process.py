"""Runs one request in a Python process of its own, which leaves its answer as a JSON file.

A worker is started before its request is known, and does its imports meanwhile. The answer may be
written in parts: what a process has saved before it is stopped is its answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rekindle.core import files

Json = dict[str, Any]
Save = Callable[[Json], None]

_TAIL_BYTES = 4000  # of the output of a process without an answer


class Ended(NamedTuple):
    """The end of a process that left no answer: its exit code and the tail of its output."""

    code: int
    output: str


class Worker:
    """A Python process that waits for one request; `arguments` start its `serve`.

    A process that must be stopped is killed, after `patience_s` in which it may end by itself.
    `options` are those of `subprocess.Popen`.
    """

    def __init__(
        self, arguments: Sequence[str], *, patience_s: float = 0.0, **options: Any
    ) -> None:
        self._patience_s = patience_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        options |= {"stdin": subprocess.PIPE, "stdout": self._log, "stderr": self._log}
        self.process = subprocess.Popen([sys.executable, *arguments], **options)

    def perform(
        self, request: Mapping[str, Any], answer: Path, limit_s: float | None = None
    ) -> Json | Ended:
        """The answer to a request, which the process writes to the path `answer`."""
        stdin = self.process.stdin
        assert stdin is not None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "request.json"
            write_atomically(path, {"request": request, "answer": str(answer.absolute())})
            try:
                with suppress(BrokenPipeError):  # the process has ended; its output says why
                    stdin.write(f"{path}\n".encode())
                    stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(limit_s)
            finally:
                ended = self.end()
        found = read_json(answer)
        return ended if found is None else found

    def end(self) -> Ended:
        """Stop the process, if it has not ended by itself."""
        process = self.process
        if self._patience_s:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._patience_s)
        process.kill()
        code = process.wait()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        with self._log as log:
            log.seek(0)
            output = log.read()[-_TAIL_BYTES:].decode(errors="replace").strip()
        return Ended(code, output)


def serve(answer: Callable[[Json, Save], Json]) -> None:
    """In the process: wait for the request, and write its answer; `Save` writes a part of it."""
    path = sys.stdin.readline().strip()
    if not path:
        return  # the worker was ended without a request
    told = json.loads(Path(path).read_text(encoding="utf-8"))

    def save(found: Json) -> None:
        write_atomically(Path(told["answer"]), found)

    save(answer(told["request"], save))


def write_atomically(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that the file exists as a whole, or not at all."""
    files.write_at_once(path, f"{json.dumps(content, indent=1)}\n".encode())


def read_json(path: Path) -> Json | None:
    """The object in a JSON file; None if there is none."""
    try:
        found = files.read_json(path)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
