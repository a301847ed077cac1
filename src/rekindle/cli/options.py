"""The options of the commands: their names, help texts and checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle.core.graph.serial import SAVED_SUFFIX
from rekindle.errors import PlanError
from rekindle.units import parse_budget, parse_bytes

STDOUT = "-"

Checks = Callable[[Any], str | None]
"""Raises for a bad value before the work starts, and returns a good one."""


def _check_file(target: str | None) -> str | None:
    """Raise for a file that cannot be written, before the work starts."""
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


def _check_folder(target: str) -> str:
    if target == STDOUT:
        raise typer.BadParameter("only --json can go to standard output: name a folder")
    path = Path(target)
    if path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{target} is no folder")
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent} to make {path.name} in")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{target} cannot be written to: name another folder")
    return target


def can_write_pages() -> bool:
    """True if plotly, which pages need, is installed."""
    return find_spec("plotly") is not None


def _check_page(target: str | None) -> str | None:
    if target is not None and not can_write_pages():
        raise typer.BadParameter('the page needs plotly: pip install "rekindle[report]"')
    return _check_file(target)


def _check_json(target: str | None) -> str | None:
    if target is None or target == STDOUT:
        return target
    if Path(target).is_dir():
        raise typer.BadParameter(f"{target} is a folder: name a file, or - for standard output")
    return _check_file(target)


def _check_saved(target: str | None) -> str | None:
    if target is not None and not target.endswith(SAVED_SUFFIX):
        raise typer.BadParameter(
            f"{target} must end in {SAVED_SUFFIX}, which marks a saved profile"
        )
    return _check_file(target)


def _check_plan_file(target: str | None) -> str | None:
    if target is not None and not target.endswith((".json", SAVED_SUFFIX)):
        raise typer.BadParameter(f"{target} must end in .json or {SAVED_SUFFIX}")
    return _check_file(target)


def _checked(parse: Callable[[str], object]) -> Checks:

    def check(value: str | None) -> str | None:
        if value is not None:
            parse(value)
        return value

    return check


def parse_sizes(sizes: str) -> list[int]:
    """The sizes in a text such as ``50,152``, sorted and without duplicates."""
    try:
        return sorted({int(size) for size in sizes.split(",")})
    except ValueError:
        message = f"{sizes!r} are no sizes: write 50,152,1001, for example"
        raise typer.BadParameter(message) from None


def parse_batches(batches: str) -> list[int]:
    """The batch sizes in a text such as ``32,64``, sorted and without duplicates."""
    parts = [part.strip() for part in batches.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{batches!r} are no batch sizes: write 32,64,128, for example")
    return sorted({int(part) for part in parts})


def _parse_budget(budget: str) -> int:
    return parse_budget(budget, plain_peak_bytes=1 << 62)  # the true peak is known only later


def parse_budgets(budgets: str) -> list[str]:
    """The budgets in a text such as ``80%,60%``, in order and without duplicates."""
    found = list(dict.fromkeys(part.strip() for part in budgets.split(",") if part.strip()))
    for budget in found:
        _parse_budget(budget)  # raises for a bad one
    return found


def _parse_cap(cap: str) -> int:
    nbytes = parse_bytes(cap)
    if nbytes < 1:
        raise typer.BadParameter(f"nothing fits into {cap}: give --cap 40GiB, for example")
    return nbytes


def parse_share(text: str | None) -> float | None:
    """A share of the plain step's speed: ``95%`` or ``0.95``."""
    if text is None:
        return None
    try:
        number = float(text.strip().removesuffix("%"))
    except ValueError:
        number = 0.0
    share = number / 100 if number > 1 or text.strip().endswith("%") else number
    if not 0 < share <= 1:
        raise PlanError(f"--at-least is a share of the plain step's speed, as in 95%, not {text!r}")
    return share


def _option(usage: str, text: str, check: Checks | None = None, **limit: Any) -> Any:
    """An option such as ``--png PATH``, or a flag; `text` is its help."""
    name, _, metavar = usage.partition(" ")
    return typer.Option(name, metavar=metavar or None, help=text, callback=check, **limit)


def _model(text: str) -> Any:
    return typer.Argument(metavar="MODEL", help=text)


JsonOption = Annotated[
    str | None,
    _option(
        "--json PATH",
        "Write the result as JSON; - for standard output, which then has nothing else.",
        _check_json,
    ),
]
ModelArgument = Annotated[
    str, _model(f"A model of the zoo, path/to/file.py:function, or a saved FILE{SAVED_SUFFIX}.")
]
RunModelArgument = Annotated[str, _model("A model of the zoo, or path/to/file.py:function.")]
BatchOption = Annotated[int | None, _option("--batch N", "The batch size.", min=1)]
PrecisionOption = Annotated[str | None, _option("--precision fp32|bf16", "The precision.")]
DeviceOption = Annotated[
    str | None,
    _option(
        "--device cpu|cuda|NAME",
        "Where the step runs; or the name of a GPU, such as H200, to forecast for it.",
    ),
]
SchemesModelArgument = Annotated[
    str,
    _model("resnet or lstm, in several sizes; or any MODEL of rekindle profile, in its one size."),
]
SizesOption = Annotated[
    str | None,
    _option(
        "--sizes N,M,…",
        "The depths of the resnet, or the lengths of the lstm.",
        _checked(parse_sizes),
    ),
]
MeasureOption = Annotated[
    bool, _option("--measure", "Also run the steps, on --device cpu (the default) or cuda.")
]
SchemesDeviceOption = Annotated[
    str | None,
    _option(
        "--device cpu|cuda|NAME",
        "The device to plan for, H200 by default; a GPU given by name need not be present.",
    ),
]
RunDeviceOption = Annotated[str | None, _option("--device cpu|cuda", "Where the step runs.")]
NeededBudgetOption = Annotated[
    str, _option("--budget B", "The memory that the step may take: 16GiB, or bytes.")
]
AtLeastOption = Annotated[
    str | None,
    _option(
        "--at-least P%",
        "Also find the largest batch that keeps this share of the plain step's speed.",
    ),
]
CheckOption = Annotated[
    bool, _option("--check", "Run the batches found once, and check that they fit.")
]
EngineOption = Annotated[
    str | None, _option("--engine E", "auto (the default), python, cudagraph or inductor.")
]
HtmlOption = Annotated[
    str | None, _option("--html PATH", "Write an interactive page.", _check_page)
]
PngOption = Annotated[str | None, _option("--png PATH", "Write a figure.", _check_file)]
CsvOption = Annotated[str | None, _option("--csv PATH", "Write a table of all ops.", _check_file)]
SaveOption = Annotated[
    str | None,
    _option(
        f"--save FILE{SAVED_SUFFIX}",
        "Save graph and profile to a file, which commands on any machine take as MODEL.",
        _check_saved,
    ),
]
RunsOption = Annotated[
    int | None, _option("--runs N", "How often each op is timed; 3 by default.", min=1)
]
NoCacheOption = Annotated[
    bool, _option("--no-cache", "Measure again, and do not cache the profile.")
]
BudgetOption = Annotated[
    str | None,
    _option(
        "--budget B",
        "The memory that the step may take: 8GiB, bytes, or 60% of the plain step's peak.",
        _checked(_parse_budget),
    ),
]
PlannerOption = Annotated[str | None, _option("--planner P", "The planner; auto by default.")]
ParetoOption = Annotated[
    bool, _option("--pareto", "Peak against added time at all budgets, instead of one plan.")
]
PlannersOption = Annotated[
    str | None, _option("--planners P,Q,…", "With --pareto: the planners to compare.")
]
PointsOption = Annotated[
    int | None, _option("--points N", "With --pareto: the number of budgets; 20 by default.", min=2)
]
SavePlanOption = Annotated[
    str | None,
    _option(
        "--save FILE.json",
        f"Save the plan; compressed if the name ends in {SAVED_SUFFIX}.",
        _check_plan_file,
    ),
]
StepsOption = Annotated[int, _option("--steps N", "The number of steps to run.", min=1)]
PlanFileOption = Annotated[
    str | None,
    _option("--plan FILE.json", "Use a plan saved by rekindle plan, instead of a budget."),
]
FolderOption = Annotated[
    str, _option("--out FOLDER", "Where the results are written.", _check_folder)
]
SweepModelArgument = Annotated[
    str | None, _model("A model of the zoo, or path/to/file.py:function with an argument batch.")
]
BatchesOption = Annotated[
    str | None, _option("--batches N,M,…", "The batch sizes to run.", _checked(parse_batches))
]
BudgetsOption = Annotated[
    str | None,
    _option(
        "--budget B,C,…",
        "The memory that planned steps may take: 8GiB, or 60% of the plain step's peak.",
        _checked(parse_budgets),
    ),
]
PeersOption = Annotated[
    bool,
    _option("--peers", "Also run checkpoints on every block, and torch.compile, for comparison."),
]
CapOption = Annotated[
    str | None,
    _option(
        "--cap BYTES",
        "Limit each case to this much of the GPU's memory, such as 40GiB.",
        _checked(_parse_cap),
    ),
]
AgainOption = Annotated[bool, _option("--again", "Run again the cases that have records already.")]
FiguresOnlyOption = Annotated[
    bool, _option("--figures-only", "Run nothing: draw the figures of sweep.json in --out.")
]
