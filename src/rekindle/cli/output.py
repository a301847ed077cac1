"""Where results go: tables to standard output, JSON to a file or there in their place."""

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
from rich.text import Text

import rekindle
from rekindle.cli.options import STDOUT
from rekindle.report.data import SCHEMA


def new_console(json_target: str | None) -> Console:
    """Where tables go: standard output, unless that is for JSON alone."""
    return Console(quiet=json_target == STDOUT, highlight=False)


@contextmanager
def working(model: str, json_target: str | None) -> Iterator[Callable[[str], None]]:
    """Show on standard error what is being done: call what is yielded with each stage.

    Where standard output is for JSON alone, what a user's step prints goes to standard error, too.
    """
    with ExitStack() as stack:
        if json_target == STDOUT:
            stack.enter_context(redirect_stdout(sys.stderr))
        # Text, not str: a model's name may hold brackets, which are markup in a str
        status = stack.enter_context(Console(stderr=True).status(Text(model)))
        yield lambda stage: status.update(Text(f"{model}: {stage}"))


def print_written(console: Console, *paths: str | None) -> None:
    """Say which files were written."""
    written = [path for path in paths if path]
    if written:
        console.print(f"Written: {', '.join(written)}", soft_wrap=True, markup=False)


def write_json(target: str | None, content: dict[str, Any]) -> None:
    """Write a result, with the versions it was made with."""
    if target is None:
        return
    versions = {
        "rekindle": rekindle.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    text = json.dumps({"schema": SCHEMA, "versions": versions, **content}, indent=1)
    if target == STDOUT:
        print(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")
