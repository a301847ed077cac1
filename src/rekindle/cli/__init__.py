"""The command line: one function a command, which reads options, calls the library and prints.

Exit codes: 0 done, 1 a promise did not hold, 2 bad input: a line on standard error says what to do.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console, RenderableType

import rekindle
from rekindle import models
from rekindle.core.comparison import Comparison
from rekindle.core.cost import Profile
from rekindle.core.devices import find_device
from rekindle.core.ir import StepGraph
from rekindle.core.roofline import analytic_profile
from rekindle.core.serial import load_profile, save_plan, save_profile
from rekindle.errors import InfeasibleBudget, ModelError, PlanError, RekindleError
from rekindle.fx.compare import Parts, compare
from rekindle.options import (
    SAVED_SUFFIX,
    STDOUT,
    BatchOption,
    BudgetOption,
    CsvOption,
    DeviceOption,
    HtmlOption,
    JsonOption,
    ModelArgument,
    NoCacheOption,
    ParetoOption,
    PlannerOption,
    PlannersOption,
    PngOption,
    PointsOption,
    PrecisionOption,
    RunsOption,
    SaveOption,
    SavePlanOption,
)
from rekindle.plan.curve import trade_offs
from rekindle.plan.named import find_planner
from rekindle.report import (
    figures,
    html,
    plan_data,
    plan_figures,
    plan_html,
    plan_terminal,
    tables,
    terminal,
)
from rekindle.report.data import SCHEMA, comparison_data
from rekindle.report.plan_summary import summarize_plan
from rekindle.report.summary import summarize
from rekindle.units import format_budget

DEMO_MODELS = ("resnet-tiny", "bert-tiny")
_NAMED_HERE = ("cpu", "cuda")  # any other device is a GPU's name

# typer carries its own copy of click, and exports of its exceptions this one: its base's base is
# what everything raises that goes wrong while options are read.
ClickException: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def entry(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Fit a PyTorch training step into the memory you have.

    Today: see where a step's memory and time go, plan what to drop and compute again under a
    budget, and replay a step as one graph, with the same numbers.
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


@app.command("profile")
def profile_model(
    model: ModelArgument,
    batch: BatchOption = None,
    precision: PrecisionOption = None,
    device: DeviceOption = None,
    html_path: HtmlOption = None,
    png: PngOption = None,
    csv: CsvOption = None,
    json: JsonOption = None,
    save: SaveOption = None,
    runs: RunsOption = None,
    no_cache: NoCacheOption = False,
) -> None:
    """Show where the memory and the time of a training step go."""
    how = {"batch": batch, "precision": precision, "device": device, "runs": runs}
    with Console(stderr=True).status(model) as status:

        def tell(stage: str) -> None:
            status.update(f"{model}: {stage}")

        graph, profile, about = _profiled(model, how, cache=not no_cache, tell=tell)
        tell("simulating")
        trace = rekindle.simulate(graph, profile)
        step = (graph, profile, trace)
        tell("writing")
        if save:
            save_profile(Path(save), graph, profile, about)
        if html_path:
            html.write_html(Path(html_path), *step, about)
        if png:
            figures.write_png(Path(png), *step, about)
        if csv:
            tables.write_csv(Path(csv), *step)
    console = _console(json)
    console.print(terminal.profile_summary(summarize(*step, about)))
    _print_written(console, html_path, png, csv, save)
    if json:
        _write_json(json, tables.profile_data(*step, about))


@app.command("plan")
def plan_model(
    model: ModelArgument,
    budget: BudgetOption = None,
    planner: PlannerOption = None,
    pareto: ParetoOption = False,
    planners: PlannersOption = None,
    points: PointsOption = None,
    batch: BatchOption = None,
    precision: PrecisionOption = None,
    device: DeviceOption = None,
    html_path: HtmlOption = None,
    png: PngOption = None,
    json: JsonOption = None,
    save: SavePlanOption = None,
    runs: RunsOption = None,
    no_cache: NoCacheOption = False,
) -> None:
    """Decide what to keep and what to compute again, so that a step fits into a budget."""
    one_plan = {"budget": budget, "html": html_path, "save": save}
    _check_plan_options(pareto, one_plan, planner, {"planners": planners, "points": points})
    names = [name.strip() for name in (planners or planner or "auto").split(",")]
    for name in names:
        find_planner(name)  # an unknown name is refused before the work, not after
    how = {"batch": batch, "precision": precision, "device": device, "runs": runs}
    with Console(stderr=True).status(model) as status:

        def tell(stage: str) -> None:
            status.update(f"{model}: {stage}")

        profiled = _profiled(model, how, cache=not no_cache, tell=tell)
        if pareto:
            show = _plan_curves(profiled, names, points or 20, png, tell)
        else:
            assert budget is not None
            show = _plan_one(profiled, budget, names[0], html_path, png, save, tell)
    console = _console(json)
    console.print(show.table)
    _print_written(console, html_path, png, save)
    if json:
        _write_json(json, show.data)


class _Profiled(NamedTuple):
    """A step and its costs; `about` says what they are of: model, batch, precision."""

    graph: StepGraph
    profile: Profile
    about: dict[str, Any]


class _Shown(NamedTuple):
    """What a command shows: for people, and as JSON."""

    table: RenderableType
    data: dict[str, Any]


def _plan_one(
    profiled: _Profiled,
    budget: str,
    planner: str,
    html_path: str | None,
    png: str | None,
    save: str | None,
    tell: Callable[[str], None],
) -> _Shown:
    graph, profile, about = profiled
    tell("planning")
    started = perf_counter()
    plan = rekindle.plan(graph, profile, budget=budget, planner=planner)
    seconds = perf_counter() - started
    plain, planned = rekindle.simulate(graph, profile), rekindle.simulate(graph, profile, plan)
    summary = summarize_plan(graph, profile, plain, plan, planned, about, seconds)
    tell("writing")
    if save:
        save_plan(Path(save), plan)
    if html_path:
        plan_html.write_plan_html(Path(html_path), graph, profile, plain, planned, summary)
    if png:
        plan_figures.write_plan_png(Path(png), graph, plain, planned, summary)
    return _Shown(plan_terminal.plan_summary(summary), plan_data.plan_data(summary))


def _plan_curves(
    profiled: _Profiled,
    planners: list[str],
    points: int,
    png: str | None,
    tell: Callable[[str], None],
) -> _Shown:
    graph, profile, about = profiled
    plain = summarize(graph, profile, rekindle.simulate(graph, profile), about)
    curves = trade_offs(
        graph, profile, planners, points, tell=lambda name: tell(f"planning with {name}")
    )
    if png:
        plan_figures.write_curve_png(Path(png), plain, curves)
    return _Shown(plan_terminal.curve_table(plain, curves), plan_data.curve_data(plain, curves))


def _check_plan_options(
    pareto: bool, one_plan: dict[str, Any], planner: str | None, many: dict[str, Any]
) -> None:
    """Refuse options that do not go together, before the work starts."""
    if pareto:
        given = [name for name, value in one_plan.items() if value is not None]
        if given:
            raise PlanError(
                f"--pareto goes through all budgets, and --{given[0]} is for one: leave one out."
            )
        if planner is not None and many["planners"] is not None:
            raise PlanError("--planner names one planner and --planners several: leave one out.")
        return
    given = [name for name, value in many.items() if value is not None]
    if given:
        raise PlanError(f"--{given[0]} is for the trade-off curve: add --pareto, or leave it out.")
    if one_plan["budget"] is None:
        raise PlanError(
            "how much memory may the step take? Give --budget 8GiB, --budget 60% (of the plain "
            "step's own peak) or a number of bytes; or --pareto for all budgets."
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: bad input is told in a line on standard error, without a traceback."""
    try:
        code = app(arguments, prog_name="rekindle", standalone_mode=False)
    except ClickException as error:
        problem = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        code = _refuse(f"{problem}. See rekindle --help.")
    except InfeasibleBudget as error:
        advice = f"give --budget {format_budget(error.least_peak_bytes)} or more"
        code = _refuse(f"{str(error).rstrip('.')}; {advice}.")
    except RekindleError as error:
        code = _refuse(str(error))
    except OSError as error:
        code = _refuse(f"cannot write: {error}")
    sys.exit(code)


def _refuse(message: str) -> int:
    print(f"rekindle: {message}", file=sys.stderr)
    return 2


def _profiled(
    model: str, how: dict[str, Any], *, cache: bool, tell: Callable[[str], None]
) -> _Profiled:
    """Read a saved profile, or build, capture and profile the model. `how` has what was asked."""
    asked = {name: value for name, value in how.items() if value is not None}
    if model.endswith(SAVED_SUFFIX):
        return _saved(model, asked, tell)
    device, runs = asked.pop("device", None), asked.pop("runs", 3)
    is_forecast = device is not None and device.partition(":")[0] not in _NAMED_HERE
    if is_forecast:
        find_device(device)  # an unknown name is refused before the work, not after
    tell("building")
    work = models.load(model, device=None if is_forecast else device, **asked)
    tell("capturing")
    parts = (work.train_step, work.model, work.optimizer, work.batch)
    try:
        captured = rekindle.capture(*parts, as_on_gpu=is_forecast)
    except RekindleError:
        raise
    except Exception as error:  # the user's own
        raise ModelError(f"the step of {model} raises {type(error).__name__}: {error}") from error
    tell("profiling")
    profile = rekindle.profile(
        captured, device=device if is_forecast else None, cache=cache, runs=runs, progress=tell
    )
    about = {"model": work.name, "batch": work.batch_size, "precision": work.precision}
    return _Profiled(captured.graph, profile, about)


def _saved(path: str, asked: dict[str, Any], tell: Callable[[str], None]) -> _Profiled:
    """A saved profile; with the name of another GPU, its graph and what it would cost there."""
    name = asked.pop("device", None)
    if asked:
        raise ModelError(
            f"{path} is a saved profile, which --{next(iter(asked))} cannot change: "
            "leave it out, or name the model"
        )
    device = find_device(name) if name is not None else None
    tell("reading")
    graph, profile, about = load_profile(Path(path))
    if device is not None:
        profile = analytic_profile(graph, device)
    return _Profiled(graph, profile, about)


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


def _print_written(console: Console, *paths: str | None) -> None:
    written = [path for path in paths if path]
    if written:
        console.print(f"Written: {', '.join(written)}", soft_wrap=True, markup=False)


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
