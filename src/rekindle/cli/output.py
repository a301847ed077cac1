"""Where results go: tables to standard output, JSON to a file, or to standard output instead."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

import rekindle
from rekindle.cli.options import STDOUT
from rekindle.core.files import write_at_once
from rekindle.report.data import JSON_SCHEMA
from rekindle.report.tables import PlainConsole


def new_console(json_target: str | None) -> Console:
    """The console for tables: standard output, silent if that is for JSON alone."""
    return PlainConsole(quiet=json_target == STDOUT)


@contextmanager
def working(model: str, json_target: str | None) -> Iterator[Callable[[str], None]]:
    """Show the current stage on standard error: call the function yielded with each stage.

    If standard output is for JSON alone, the output of a user's step goes to standard error, too.
    """
    with ExitStack() as stack:
        if json_target == STDOUT:
            stack.enter_context(redirect_stdout(sys.stderr))
        status = stack.enter_context(PlainConsole(stderr=True).status(Text(model)))
        yield lambda stage: status.update(Text(f"{model}: {stage}"))


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error; the function yielded takes what runs, and numbers done and left."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[left]} left"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=PlainConsole(stderr=True)) as bar:
        task = bar.add_task("", total=total, left=total)

        def tell(what: str, done: int, left: int) -> None:
            bar.update(task, description=what, completed=done, left=left)

        yield tell


def print_written(console: Console, *paths: str | None) -> None:
    """Print the paths of the files that were written."""
    written = [path for path in paths if path]
    if written:
        console.print(f"Written: {', '.join(written)}", soft_wrap=True, markup=False)


def write_json(target: str | None, content: dict[str, Any]) -> None:
    """Write a result with the versions of rekindle, torch and Python."""
    if target is None:
        return
    versions = {
        "rekindle": rekindle.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    text = json.dumps({"schema": JSON_SCHEMA, "versions": versions, **content}, indent=1)
    if target == STDOUT:
        print(text)
    else:
        write_at_once(Path(target), f"{text}\n".encode())
