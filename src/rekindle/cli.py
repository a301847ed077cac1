"""The command line: one function a command, which reads options, calls the library and prints.

Exit codes: 0 done, 1 a promise did not hold, 2 bad input: a line on standard error says what to do.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import rekindle
from rekindle import models
from rekindle.core.comparison import Comparison
from rekindle.errors import RekindleError
from rekindle.fx.compare import Parts, compare
from rekindle.report import terminal
from rekindle.report.data import SCHEMA, comparison_data

DEMO_MODELS = ("resnet-tiny", "bert-tiny")
STDOUT = "-"

# typer carries its own copy of click, and exports of its exceptions this one: its base's base is
# what everything raises that goes wrong while options are read.
ClickException: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _check_json(target: str | None) -> str | None:
    """Refuse a file that cannot be written before the work starts, not after."""
    if target is None or target == STDOUT:
        return target
    path = Path(target)
    if path.is_dir():
        raise typer.BadParameter(f"{target} is a folder: name a file, or - for standard output")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent} to write {path.name} into")
    return target


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="PATH",
        callback=_check_json,
        help="Write the result as JSON; - for standard output, and nothing else is printed there.",
    ),
]


@app.callback(invoke_without_command=True)
def entry(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Fit a PyTorch training step into the memory you have.

    Today: capture a whole step as one graph and replay it, with the same numbers.
    """
    if version:
        print(f"rekindle {rekindle.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command("models")
def list_models(json: JsonOption = None) -> None:
    """List the models of the zoo."""
    specs = models.available()
    _console(json).print(
        terminal.model_table((s.name, s.summary, s.default_batch, s.needs) for s in specs)
    )
    rows = [
        {
            "name": spec.name,
            "summary": spec.summary,
            "default_batch": spec.default_batch,
            "needs": spec.needs,
            "sizes": spec.sizes,
        }
        for spec in specs
    ]
    _write_json(json, {"models": rows})


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 5,
    json: JsonOption = None,
) -> None:
    """Train two small models on the CPU, plainly and with Rekindle, and compare every bit."""
    console = _console(json)
    found: dict[str, Comparison] = {}
    for spec in models.available():
        if spec.name in DEMO_MODELS:
            found[spec.name] = _compare_model(spec.name, steps)
            title = f"{spec.name}: {spec.summary}, batch {spec.default_batch}, fp32 on the CPU"
            console.print(terminal.comparison_summary(title, found[spec.name]))
    differing = [name for name, comparison in found.items() if not comparison.equal]
    console.print(terminal.conclusion(found, differing))
    rows = [{"model": name, **comparison_data(each)} for name, each in found.items()]
    _write_json(json, {"steps": steps, "equal": not differing, "models": rows})
    if differing:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: bad input is told in a line on standard error, without a traceback."""
    try:
        code = app(arguments, prog_name="rekindle", standalone_mode=False)
    except ClickException as error:
        problem = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        code = _refuse(f"{problem}. See rekindle --help.")
    except RekindleError as error:
        code = _refuse(str(error))
    sys.exit(code)


def _refuse(message: str) -> int:
    print(f"rekindle: {message}", file=sys.stderr)
    return 2


def _compare_model(name: str, steps: int) -> Comparison:
    def make() -> Parts:
        work = models.build(name)
        return work.train_step, work.model, work.optimizer, work.batch

    with Console(stderr=True).status(name) as status:
        return compare(
            make,
            rekindle.optimize,
            steps=steps,
            on_stage=lambda stage: status.update(f"{name}: {stage}"),
        )


def _console(json_target: str | None) -> Console:
    """Where tables go: standard output, unless that is for JSON alone."""
    return Console(quiet=json_target == STDOUT, highlight=False)


def _write_json(target: str | None, content: dict[str, Any]) -> None:
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
