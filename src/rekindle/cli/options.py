"""The options that commands share: how they are written, what they mean, what they refuse."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rekindle.core.graph.serial import SAVED_SUFFIX
from rekindle.errors import PlanError
from rekindle.units import parse_budget, parse_bytes

STDOUT = "-"


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
    """Whether the package is here that pages are made with."""
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
        raise typer.BadParameter(f"{target} must end in {SAVED_SUFFIX}, by which it is recognised")
    return _check_file(target)


def _check_plan_file(target: str | None) -> str | None:
    if target is not None and not target.endswith((".json", SAVED_SUFFIX)):
        raise typer.BadParameter(f"{target} must end in .json or {SAVED_SUFFIX}")
    return _check_file(target)


def _check_budget(budget: str | None) -> str | None:
    """Refuse what cannot be read before the work starts; what it comes to is known only later."""
    if budget is not None:
        parse_budget(budget, plain_peak_bytes=1 << 62)
    return budget


def _check_sizes(sizes: str | None) -> str | None:
    if sizes is not None:
        parse_sizes(sizes)
    return sizes


def parse_sizes(sizes: str) -> list[int]:
    """The sizes that a text names, each once, from the smallest up."""
    try:
        found = {int(size) for size in sizes.split(",")}
    except ValueError:
        raise typer.BadParameter(f"{sizes!r} are no sizes: write 50,152,1001, for one") from None
    return sorted(found)


def _check_batches(batches: str | None) -> str | None:
    if batches is not None:
        parse_batches(batches)
    return batches


def parse_batches(batches: str) -> list[int]:
    """The batch sizes that a text names, each once, from the smallest up."""
    try:
        found = {int(batch) for batch in batches.split(",")}
    except ValueError:
        found = {0}
    if min(found) < 1:
        raise typer.BadParameter(f"{batches!r} are no batch sizes: write 32,64,128, for one")
    return sorted(found)


def _check_budgets(budgets: str | None) -> str | None:
    for budget in parse_budgets(budgets or ""):
        _check_budget(budget)
    return budgets


def parse_budgets(budgets: str) -> list[str]:
    """The budgets that a text names, each once, as they come; a last comma is forgiven."""
    return list(dict.fromkeys(part.strip() for part in budgets.split(",") if part.strip()))


def _check_cap(cap: str | None) -> str | None:
    if cap is not None and parse_bytes(cap) < 1:
        raise typer.BadParameter(f"nothing fits into {cap}: give --cap 40GiB, for one")
    return cap


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
RunModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model of the zoo (rekindle models), or path/to/file.py:function."
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
SchemesModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="resnet or lstm, each in several sizes; or, in the one size it has, any MODEL that "
        "rekindle profile takes.",
    ),
]
SizesOption = Annotated[
    str | None,
    typer.Option(
        "--sizes",
        metavar="N,M,…",
        callback=_check_sizes,
        help="The depths of the resnet, or the lengths of the lstm.",
    ),
]
MeasureOption = Annotated[
    bool,
    typer.Option("--measure", help="Run the steps, too, on --device cpu or cuda: cpu unless told."),
]
SchemesDeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda|NAME",
        help="Whose operators and times to plan with; H200 unless told: no GPU is needed for that.",
    ),
]
RunDeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda", help="Where the step runs.")
]
NeededBudgetOption = Annotated[
    str,
    typer.Option(
        "--budget", metavar="B", help="What the step may take: bytes, or text such as 16GiB."
    ),
]
AtLeastOption = Annotated[
    str | None,
    typer.Option(
        "--at-least",
        metavar="P%",
        help="Also find the largest batch that keeps this share of the plain step's speed.",
    ),
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Run what was found once, and see whether it fits.")
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine", metavar="E", help="auto, python, cudagraph or inductor; auto unless told."
    ),
]
HtmlOption = Annotated[
    str | None,
    typer.Option("--html", metavar="PATH", callback=_check_page, help="Write an interactive page."),
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
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="B",
        callback=_check_budget,
        help="The memory that the step may take: 8GiB, 500MB, bytes, or 60% of the plain step's "
        "own peak.",
    ),
]
PlannerOption = Annotated[
    str | None, typer.Option("--planner", metavar="P", help="Who decides; auto unless told.")
]
ParetoOption = Annotated[
    bool,
    typer.Option("--pareto", help="Peak against added time at all budgets, in place of one plan."),
]
PlannersOption = Annotated[
    str | None,
    typer.Option("--planners", metavar="P,Q,…", help="With --pareto: the planners to compare."),
]
PointsOption = Annotated[
    int | None,
    typer.Option("--points", min=2, metavar="N", help="With --pareto: how many; 20 unless told."),
]
SavePlanOption = Annotated[
    str | None,
    typer.Option(
        "--save",
        metavar="FILE.json",
        callback=_check_plan_file,
        help=f"Save the plan; compressed if the name ends in {SAVED_SUFFIX}.",
    ),
]
StepsOption = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="How many steps to train.")
]
PlanFileOption = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="FILE.json",
        help="Train by a plan that rekindle plan has saved, in place of a budget.",
    ),
]
FolderOption = Annotated[
    str,
    typer.Option(
        "--out", metavar="FOLDER", callback=_check_folder, help="Where the pages are written."
    ),
]
SweepModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A model of the zoo (rekindle models), or path/to/file.py:function that takes batch.",
    ),
]
BatchesOption = Annotated[
    str | None,
    typer.Option(
        "--batches", metavar="N,M,…", callback=_check_batches, help="The batch sizes to run."
    ),
]
BudgetsOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="B,C,…",
        callback=_check_budgets,
        help="The memory that planned steps may take: 8GiB, or 60% of the plain step's own peak; "
        "several are separated by commas.",
    ),
]
SweepFolderOption = Annotated[
    str,
    typer.Option(
        "--out", metavar="FOLDER", callback=_check_folder, help="Where records and figures go."
    ),
]
PeersOption = Annotated[
    bool,
    typer.Option(
        "--peers", help="Run checkpoints on every block and torch.compile, too, for comparison."
    ),
]
CapOption = Annotated[
    str | None,
    typer.Option(
        "--cap",
        metavar="BYTES",
        callback=_check_cap,
        help="Let each case have so much of the GPU's memory only, 40GiB for one.",
    ),
]
TimedOption = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="How many steps to time in each case.")
]
AgainOption = Annotated[
    bool, typer.Option("--again", help="Run the cases again whose records are there already.")
]
FiguresOnlyOption = Annotated[
    bool, typer.Option("--figures-only", help="Run nothing: draw what --out has in sweep.json.")
]
