"""The options that commands share: how they are written, what they mean, what they refuse."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

STDOUT = "-"
SAVED_SUFFIX = ".json.gz"


def _check_file(target: str | None) -> str | None:
    """Refuse a file that cannot be written before the work starts, not after."""
    if target is None:
        return target
    if target == STDOUT:
        raise typer.BadParameter("only --json can go to standard output: name a file")
    path = Path(target)
    if path.is_dir():
        raise typer.BadParameter(f"{target} is a folder: name a file")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent} to write {path.name} into")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{target} cannot be written to")
    return target


def _check_json(target: str | None) -> str | None:
    if target is None or target == STDOUT:
        return target
    if Path(target).is_dir():
        raise typer.BadParameter(f"{target} is a folder: name a file, or - for standard output")
    return _check_file(target)


def _check_saved(target: str | None) -> str | None:
    if target is not None and not target.endswith(SAVED_SUFFIX):
        raise typer.BadParameter(f"{target} must end in {SAVED_SUFFIX}, by which it is recognised")
    return _check_file(target)


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="PATH",
        callback=_check_json,
        help="Write the result as JSON; - for standard output, and nothing else is printed there.",
    ),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model of the zoo (rekindle models), path/to/file.py:function, or a saved profile "
        f"(FILE{SAVED_SUFFIX}).",
    ),
]
BatchOption = Annotated[
    int | None, typer.Option("--batch", min=1, metavar="N", help="The batch size.")
]
PrecisionOption = Annotated[
    str | None, typer.Option("--precision", metavar="fp32|bf16", help="The precision.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda|NAME",
        help="Where the step runs and is measured; or the name of a GPU, H200 for one, whose times "
        "are estimated: no GPU is needed for that.",
    ),
]
HtmlOption = Annotated[
    str | None,
    typer.Option("--html", metavar="PATH", callback=_check_file, help="Write an interactive page."),
]
PngOption = Annotated[
    str | None,
    typer.Option("--png", metavar="PATH", callback=_check_file, help="Write a figure."),
]
CsvOption = Annotated[
    str | None,
    typer.Option("--csv", metavar="PATH", callback=_check_file, help="Write a table of all ops."),
]
SaveOption = Annotated[
    str | None,
    typer.Option(
        "--save",
        metavar=f"FILE{SAVED_SUFFIX}",
        callback=_check_saved,
        help="Save graph and profile, to be studied anywhere; commands take it as their MODEL.",
    ),
]
RunsOption = Annotated[
    int | None,
    typer.Option("--runs", min=1, metavar="N", help="How often each op is timed, 3 unless told."),
]
NoCacheOption = Annotated[
    bool, typer.Option("--no-cache", help="Measure anew, and keep nothing for the next time.")
]
