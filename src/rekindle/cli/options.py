"""The options of the commands: their names, help texts and checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rekindle.core.graph.serial import SAVED_SUFFIX
from rekindle.errors import PlanError
from rekindle.units import parse_budget, parse_bytes

STDOUT = "-"


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


def _checked(parse: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """A callback that parses a value, to raise for a bad one before the work starts."""

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


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="PATH",
        callback=_check_json,
        help="Write the result as JSON; - for standard output, which then has nothing else.",
    ),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=f"A model of the zoo, path/to/file.py:function, or a saved FILE{SAVED_SUFFIX}.",
    ),
]
RunModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model of the zoo, or path/to/file.py:function.")
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
        help="Where the step runs; or the name of a GPU, such as H200, to forecast for it.",
    ),
]
SchemesModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="resnet or lstm, in several sizes; or any MODEL of rekindle profile, in its one size.",
    ),
]
SizesOption = Annotated[
    str | None,
    typer.Option(
        "--sizes",
        metavar="N,M,…",
        callback=_checked(parse_sizes),
        help="The depths of the resnet, or the lengths of the lstm.",
    ),
]
MeasureOption = Annotated[
    bool,
    typer.Option("--measure", help="Also run the steps, on --device cpu (the default) or cuda."),
]
SchemesDeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda|NAME",
        help="The device to plan for, H200 by default; a GPU given by name need not be present.",
    ),
]
RunDeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda", help="Where the step runs.")
]
NeededBudgetOption = Annotated[
    str,
    typer.Option(
        "--budget", metavar="B", help="The memory that the step may take: 16GiB, or bytes."
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
    bool, typer.Option("--check", help="Run the batches found once, and check that they fit.")
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine", metavar="E", help="auto (the default), python, cudagraph or inductor."
    ),
]
HtmlOption = Annotated[
    str | None,
    typer.Option("--html", metavar="PATH", callback=_check_page, help="Write an interactive page."),
]
PngOption = Annotated[
    str | None, typer.Option("--png", metavar="PATH", callback=_check_file, help="Write a figure.")
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
        help="Save graph and profile to a file, which commands on any machine take as MODEL.",
    ),
]
RunsOption = Annotated[
    int | None,
    typer.Option("--runs", min=1, metavar="N", help="How often each op is timed; 3 by default."),
]
NoCacheOption = Annotated[
    bool, typer.Option("--no-cache", help="Measure again, and do not cache the profile.")
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="B",
        callback=_checked(_parse_budget),
        help="The memory that the step may take: 8GiB, bytes, or 60% of the plain step's peak.",
    ),
]
PlannerOption = Annotated[
    str | None, typer.Option("--planner", metavar="P", help="The planner; auto by default.")
]
ParetoOption = Annotated[
    bool,
    typer.Option("--pareto", help="Peak against added time at all budgets, instead of one plan."),
]
PlannersOption = Annotated[
    str | None,
    typer.Option("--planners", metavar="P,Q,…", help="With --pareto: the planners to compare."),
]
PointsOption = Annotated[
    int | None,
    typer.Option(
        "--points", min=2, metavar="N", help="With --pareto: the number of budgets; 20 by default."
    ),
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
    int, typer.Option("--steps", min=1, metavar="N", help="The number of steps to run.")
]
PlanFileOption = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="FILE.json",
        help="Use a plan saved by rekindle plan, instead of a budget.",
    ),
]
FolderOption = Annotated[
    str,
    typer.Option(
        "--out", metavar="FOLDER", callback=_check_folder, help="Where the results are written."
    ),
]
SweepModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A model of the zoo, or path/to/file.py:function with an argument batch.",
    ),
]
BatchesOption = Annotated[
    str | None,
    typer.Option(
        "--batches",
        metavar="N,M,…",
        callback=_checked(parse_batches),
        help="The batch sizes to run.",
    ),
]
BudgetsOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="B,C,…",
        callback=_checked(parse_budgets),
        help="The memory that planned steps may take: 8GiB, or 60% of the plain step's peak.",
    ),
]
PeersOption = Annotated[
    bool,
    typer.Option(
        "--peers", help="Also run checkpoints on every block, and torch.compile, for comparison."
    ),
]
CapOption = Annotated[
    str | None,
    typer.Option(
        "--cap",
        metavar="BYTES",
        callback=_checked(_parse_cap),
        help="Limit each case to this much of the GPU's memory, such as 40GiB.",
    ),
]
AgainOption = Annotated[
    bool, typer.Option("--again", help="Run again the cases that have records already.")
]
FiguresOnlyOption = Annotated[
    bool,
    typer.Option("--figures-only", help="Run nothing: draw the figures of sweep.json in --out."),
]
