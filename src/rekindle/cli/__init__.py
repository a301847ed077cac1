"""The command line: one function per command, which reads options, calls the library and prints.

Exit codes: 0 done, 1 a promise did not hold, 2 bad input, with a line on standard error that says
what to do, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import RenderableType

import rekindle
from rekindle import models
from rekindle.cli import options
from rekindle.cli.output import new_console, print_written, progress_bar, working, write_json
from rekindle.core.graph.serial import load_plan, save_plan, save_profile
from rekindle.engines.select_engine import check_engine
from rekindle.errors import InfeasibleBudget, ModelError, PlanError, RekindleError, ReportError
from rekindle.planners.curve import trade_offs
from rekindle.planners.registry import find_planner
from rekindle.report import data, figures, fit_report, run_report, schemes_report, sweep_report
from rekindle.report.html import write_html
from rekindle.report.summary import summarize
from rekindle.report.tables import printable
from rekindle.report.terminal import curve_table, model_table, step_summary
from rekindle.studies import model_runs, schemes, sweep
from rekindle.studies.model_runs import Profiled, Tell, Trained
from rekindle.units import format_budget, parse_bytes

DEMO_MODELS = ("resnet-tiny", "bert-tiny")
DEMO_BUDGET = "60%"
INTERRUPTED = 128 + signal.SIGINT

# typer has its own copy of click and does not export click's base exception, which all errors in
# reading options derive from: it is the base of the base of this one.
ClickException: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def entry(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Fit a PyTorch training step into the memory you have.

    See where memory and time go, plan what to recompute, and train with the same numbers.
    """
    if version:
        print(f"rekindle {rekindle.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command("models")
def list_models(json: options.JsonOption = None) -> None:
    """List the models of the zoo."""
    specs = models.available()
    new_console(json).print(
        model_table((s.name, s.summary, s.default_batch, s.needs) for s in specs)
    )
    keys = ("name", "summary", "default_batch", "needs", "sizes")
    write_json(json, {"models": [{key: getattr(spec, key) for key in keys} for spec in specs]})


@app.command()
def demo(
    steps: options.StepsOption = 5,
    out: options.FolderOption = "rekindle-demo",
    json: options.JsonOption = None,
) -> None:
    """Train two small models on the CPU within 60% of their memory, and compare every bit."""
    console = new_console(json)
    specs = [spec for spec in models.available() if spec.name in DEMO_MODELS]
    pages: dict[str, str] = {}
    if options.can_write_pages():
        _make_folder(out)  # before the work starts
        pages = {spec.name: str(Path(out) / f"{spec.name}.html") for spec in specs}
    rows: list[dict[str, Any]] = []
    for spec in specs:
        with working(spec.name, json) as tell:
            found = model_runs.trained(spec.name, {}, steps=steps, tell=tell, budget=DEMO_BUDGET)
            tell("writing")
            shown = _shown_run(found, f"{spec.summary}, on the CPU", pages.get(spec.name))
        console.print(shown.table)
        rows.append(shown.data)
    console.print(run_report.run_conclusion(rows))
    if not pages:
        console.print('No pages: they need plotly (pip install "rekindle[report]").', markup=False)
    print_written(console, *pages.values())
    write_json(json, {"steps": steps, "equal": all(r["equal"] for r in rows), "models": rows})
    _exit_unless_held(rows)


def _make_folder(path: str) -> None:
    try:
        Path(path).mkdir(exist_ok=True)
    except OSError as error:
        problem = f"{path} cannot be made ({error.strerror})"
        raise ReportError(f"{problem}: name another folder with --out.") from error


@app.command("run")
def run_model(
    model: options.RunModelArgument,
    budget: options.BudgetOption = None,
    planner: options.PlannerOption = None,
    plan_file: options.PlanFileOption = None,
    steps: options.StepsOption = 5,
    batch: options.BatchOption = None,
    precision: options.PrecisionOption = None,
    device: options.RunDeviceOption = None,
    engine: options.EngineOption = None,
    html_path: options.HtmlOption = None,
    json: options.JsonOption = None,
) -> None:
    """Train a model plainly and within a budget, and compare every bit, the peak and the time.

    Without a budget, the step is captured and replayed as it is, and compared in the same way. With
    --engine inductor, the step is compared with the same compiled step without a budget.

    On a GPU, torch uses deterministic algorithms: two plain trainings may differ otherwise.
    """
    _check_run_options(budget, planner, plan_file, html_path)
    check_engine(engine or "auto")
    how = {"batch": batch, "precision": precision, "device": device}
    within: dict[str, Any] = {"budget": budget, "planner": planner or "auto"}
    if plan_file is not None:
        within = {"plan": load_plan(plan_file)}
    within["engine"] = engine or "auto"
    with working(model, json) as tell:
        found = model_runs.trained(model, how, steps=steps, tell=tell, **within)
        tell("writing")
        mode = ", deterministic" if found.is_deterministic else ""
        shown = _shown_run(found, f"on {found.device}{mode}", html_path)
    console = new_console(json)
    console.print(shown.table)
    console.print(run_report.run_conclusion([shown.data]))
    print_written(console, html_path)
    write_json(json, shown.data)
    _exit_unless_held([shown.data])


def _check_run_options(
    budget: str | None, planner: str | None, plan_file: str | None, html_path: str | None
) -> None:
    """Raise for options that cannot be combined, before the work starts."""
    if plan_file is not None:
        if budget is not None:
            raise PlanError("a plan has its own budget: give --budget or --plan, not both.")
        if planner is not None:
            raise PlanError("a plan is made already: give --planner or --plan, not both.")
    elif budget is None and (planner is not None or html_path is not None):
        option = "--html" if planner is None else "--planner"
        raise PlanError(
            f"{option} is for a plan, which needs a budget: add --budget 60%, for example."
        )
    find_planner(planner or "auto")  # refuses an unknown name before the work starts


def _shown_run(found: Trained, where: str, html_path: str | None) -> _Shown:
    """A training next to the plain one, for people and as JSON; and the page, if it has a path."""
    comparison, about = found.comparison, found.about
    batch = f"batch {about['batch']}, " if about["batch"] is not None else ""
    title = f"{about['model']}: {batch}{about['precision']}, {where}"
    graph, profile, plan = comparison.graph, comparison.profile, comparison.plan
    mode = {"is_deterministic": found.is_deterministic}
    if plan is None or profile is None:
        content = {**about, "device": found.device, **mode, **run_report.run_data(comparison)}
        return _Shown(run_report.run_summary(title, comparison), content)
    summary = summarize(
        graph,
        profile,
        comparison.trace or rekindle.simulate(graph, profile, plan),
        about,
        plan=plan,
        plain=comparison.plain_trace,
        plain_profile=comparison.plain_profile,
    )
    if html_path:
        write_html(Path(html_path), summary, layout=rekindle.layout(graph, plan))
    table = run_report.run_summary(title, comparison, summary)
    return _Shown(table, {**run_report.run_data(comparison, summary), **mode})


def _exit_unless_held(rows: list[dict[str, Any]]) -> None:
    if any(row["equal"] is False or not row["is_within_budget"] for row in rows):
        raise typer.Exit(1)


@app.command("profile")
def profile_model(
    model: options.ModelArgument,
    batch: options.BatchOption = None,
    precision: options.PrecisionOption = None,
    device: options.DeviceOption = None,
    html_path: options.HtmlOption = None,
    png: options.PngOption = None,
    csv: options.CsvOption = None,
    json: options.JsonOption = None,
    save: options.SaveOption = None,
    runs: options.RunsOption = None,
    no_cache: options.NoCacheOption = False,
) -> None:
    """Show where the memory and the time of a training step go."""
    how = {"batch": batch, "precision": precision, "device": device, "runs": runs}
    with working(model, json) as tell:
        graph, profile, about = model_runs.profiled(model, how, cache=not no_cache, tell=tell)
        tell("simulating")
        summary = summarize(graph, profile, rekindle.simulate(graph, profile), about)
        tell("writing")
        if save:
            save_profile(Path(save), graph, profile, about)
        if html_path:
            write_html(Path(html_path), summary, layout=rekindle.layout(graph))
        if png:
            figures.write_png(Path(png), summary)
        if csv:
            data.write_csv(Path(csv), summary)
    console = new_console(json)
    console.print(step_summary(summary))
    print_written(console, html_path, png, csv, save)
    if json:
        write_json(json, data.step_data(summary))


@app.command("plan")
def plan_model(
    model: options.ModelArgument,
    budget: options.BudgetOption = None,
    planner: options.PlannerOption = None,
    pareto: options.ParetoOption = False,
    planners: options.PlannersOption = None,
    points: options.PointsOption = None,
    batch: options.BatchOption = None,
    precision: options.PrecisionOption = None,
    device: options.DeviceOption = None,
    html_path: options.HtmlOption = None,
    png: options.PngOption = None,
    json: options.JsonOption = None,
    save: options.SavePlanOption = None,
    runs: options.RunsOption = None,
    no_cache: options.NoCacheOption = False,
) -> None:
    """Decide what to keep and what to recompute, so that a step fits into a budget."""
    one_plan = {"budget": budget, "html": html_path, "save": save}
    _check_plan_options(pareto, one_plan, planner, {"planners": planners, "points": points})
    names = [name.strip() for name in (planners or planner or "auto").split(",")]
    for name in names:
        find_planner(name)  # refuses an unknown name before the work starts
    how = {"batch": batch, "precision": precision, "device": device, "runs": runs}
    with working(model, json) as tell:
        found = model_runs.profiled(model, how, cache=not no_cache, tell=tell)
        if pareto:
            show = _plan_curves(found, names, points or 20, png, tell)
        else:
            assert budget is not None
            show = _plan_one(found, budget, names[0], html_path, png, save, tell)
    console = new_console(json)
    console.print(show.table)
    print_written(console, html_path, png, save)
    if json:
        write_json(json, show.data)


class _Shown(NamedTuple):
    """The result of a command: for people, and as JSON."""

    table: RenderableType
    data: dict[str, Any]


def _plan_one(
    found: Profiled,
    budget: str,
    planner: str,
    html_path: str | None,
    png: str | None,
    save: str | None,
    tell: Tell,
) -> _Shown:
    graph, profile, about = found
    tell("planning")
    started = perf_counter()
    try:
        plan = rekindle.plan(graph, profile, budget=budget, planner=planner)
    except InfeasibleBudget as error:
        least = format_budget(error.least_peak_bytes)
        raise PlanError(
            f"{error}; give --budget {least} or more. rekindle run may do with less: it also "
            "writes results in place and updates parameters early, which are not planned here."
        ) from None
    seconds = perf_counter() - started
    planned = rekindle.simulate(graph, profile, plan)
    summary = summarize(graph, profile, planned, about, plan=plan, plan_seconds=seconds)
    tell("writing")
    if save:
        save_plan(Path(save), plan)
    if html_path:
        write_html(Path(html_path), summary, layout=rekindle.layout(graph, plan))
    if png:
        figures.write_png(Path(png), summary)
    return _Shown(step_summary(summary), data.step_data(summary))


def _plan_curves(
    found: Profiled, planners: list[str], points: int, png: str | None, tell: Tell
) -> _Shown:
    graph, profile, about = found
    plain = summarize(graph, profile, rekindle.simulate(graph, profile), about)
    curves = trade_offs(
        graph, profile, planners, points, tell=lambda name: tell(f"planning with {name}")
    )
    if png:
        figures.write_curve_png(Path(png), plain, curves)
    return _Shown(curve_table(plain, curves), data.curve_data(plain, curves))


def _check_plan_options(
    pareto: bool, one_plan: dict[str, Any], planner: str | None, many: dict[str, Any]
) -> None:
    """Raise for options that cannot be combined, before the work starts."""
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


@app.command("schemes")
def show_schemes(
    model: options.SchemesModelArgument,
    sizes: options.SizesOption = None,
    measure: options.MeasureOption = False,
    batch: options.BatchOption = None,
    precision: options.PrecisionOption = None,
    device: options.SchemesDeviceOption = None,
    png: options.PngOption = None,
    json: options.JsonOption = None,
) -> None:
    """Compare seven schemes of memory optimisation on a model that grows deeper or longer.

    Bytes of feature maps with nothing optimised, written in place, shared, and checkpointed.
    """
    how = {"batch": batch, "precision": precision, "device": device}
    wanted = options.parse_sizes(sizes) if sizes is not None else None
    with working(model, json) as tell:
        study = schemes.compare_schemes(model, wanted, measure=measure, how=how, tell=tell)
        tell("writing")
        if png:
            schemes_report.write_schemes_png(Path(png), study)
    console = new_console(json)
    console.print(schemes_report.schemes_table(study))
    print_written(console, png)
    write_json(json, schemes_report.schemes_data(study))


@app.command("max-batch")
def find_max_batch(
    model: options.RunModelArgument,
    budget: options.NeededBudgetOption,
    at_least: options.AtLeastOption = None,
    check: options.CheckOption = False,
    planner: options.PlannerOption = None,
    precision: options.PrecisionOption = None,
    device: options.DeviceOption = None,
    json: options.JsonOption = None,
) -> None:
    """Find the largest batch that a budget holds, plain and planned, and how fast each is.

    All of it is forecast, so that nothing runs out of memory. --device "RTX 4090", or the name of
    another GPU, forecasts for a GPU that this machine does not have.
    """
    share = options.parse_share(at_least)
    with working(model, json) as tell:
        found, checks = model_runs.find_largest_batch(
            model,
            budget,
            device=device,
            precision=precision,
            planner=planner or "auto",
            at_least=share,
            check=check,
            tell=tell,
        )
    console = new_console(json)
    console.print(fit_report.fit_summary(model, found))
    for each in checks:
        console.print(f"  checked: {fit_report.check_in_words(each)}")
    write_json(json, {"model": model, **fit_report.fit_data(found), "checks": checks})
    if not all(each["fits"] for each in checks):
        raise typer.Exit(1)


@app.command("sweep")
def sweep_batches(
    out: options.FolderOption,
    model: options.SweepModelArgument = None,
    batches: options.BatchesOption = None,
    budget: options.BudgetsOption = None,
    peers: options.PeersOption = False,
    engine: options.EngineOption = None,
    planner: options.PlannerOption = None,
    precision: options.PrecisionOption = None,
    device: options.RunDeviceOption = None,
    cap: options.CapOption = None,
    steps: options.StepsOption = 10,
    again: options.AgainOption = False,
    figures_only: options.FiguresOnlyOption = False,
    json: options.JsonOption = None,
) -> None:
    """Measure memory and time at several batch sizes, plain and planned, and draw the figures.

    Each case runs in a process of its own; running out of memory is recorded as a result. A sweep
    that was interrupted continues where it stopped: call it again.
    """
    folder = Path(out)
    if figures_only:
        _show_sweep(sweep.read_sweep(folder), folder, json, draws=True)
        return
    if model is None or batches is None:
        missing = "a MODEL" if model is None else "--batches 32,64,128, for example"
        raise ModelError(f"what is to be run? Give {missing}; or --figures-only to draw only.")
    sizes, budgets = options.parse_batches(batches), options.parse_budgets(budget or "")
    if not budgets:
        raise PlanError(
            "how much memory may planned steps take? Give --budget 8GiB, --budget 60% (of the "
            "plain step's own peak), or several, as in 80%,60%,40%."
        )
    settings: dict[str, Any] = {
        "model": model,
        "precision": precision,
        "device": device,
        "engine": engine or "auto",
        "planner": planner or "auto",
        "steps": steps,
        "cap_bytes": None if cap is None else parse_bytes(cap),
        "batches": sizes,
        "budgets": budgets,
    }
    cases = sweep.sweep_cases(model, sizes, budgets, with_peers=peers, settings=settings)
    with progress_bar(len(cases)) as tell:
        is_whole = sweep.run_sweep(
            cases, settings, folder, again=again, tell=tell, run=sweep.run_alone
        )
    found = sweep.read_sweep(folder)
    _show_sweep(found, folder, json, draws=find_spec("matplotlib") is not None)
    if not is_whole:
        raise typer.Exit(INTERRUPTED)
    if sweep_report.failed_cases(found) or sweep_report.over_budget(found):
        raise typer.Exit(1)


def _show_sweep(found: Mapping[str, Any], folder: Path, json: str | None, *, draws: bool) -> None:
    """Draw the figures of a sweep, and print its table."""
    written = sweep_report.write_sweep_pngs(folder, found) if draws else []
    console = new_console(json)
    console.print(sweep_report.sweep_table(found))
    if not draws:
        missing = 'No figures: they need matplotlib (pip install "rekindle[report]").'
        console.print(missing, markup=False)
    print_written(console, str(folder / sweep.SWEEP_FILE), *(str(path) for path in written))
    write_json(json, {key: value for key, value in found.items() if key != "schema"})


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point; bad input is answered by one line on standard error, not a traceback."""
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
    print(f"rekindle: {printable(message)}", file=sys.stderr)
    return 2
