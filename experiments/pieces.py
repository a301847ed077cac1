"""The pieces that can be collected, each a few minutes long: their tasks, in order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from experiments.config import Budgeted, Cap, Compiled, Config, Range, Step
from experiments.tasks import DONE, OUT_OF_MEMORY, Piece, Row, Rows, RowsOf, Task
from rekindle.report.sweep_report import COMPILE, PLAIN, PLANNED
from rekindle.studies.sweep import Case
from rekindle.units import format_budget, parse_bytes

FITS = "fits"

# The estimated seconds of a task, with the start of its process: on an H200, and for forecasts.
_STATISTICS_S = 22.0
_CASE_S = {PLAIN: 10.0, PLANNED: 33.0}
_HALF_S = 21.0  # with a cached profile
_PLANNERS_S = 230.0
_SCHEMES_S = {"resnet": 75.0, "lstm": 40.0}
_CHECK_S = {"plain": 10.0, "quick": 40.0, "planned": 100.0}
_COMPILED_S = {
    "resnet152": {COMPILE: 110.0, PLANNED: 60.0},
    "bert-large": {COMPILE: 75.0, PLANNED: 45.0},
    "resnet-tiny": {COMPILE: 60.0, PLANNED: 60.0},
}
_BEYOND_RATIO = 1.02  # of the largest batch
_FORECAST_S = {"shares": 20.0, "fits": 60.0, "schemes": 90.0}


def pieces(config: Config) -> dict[str, Piece]:
    """All pieces by name, in the order in which to collect them."""
    every = [
        Piece("shares", "what the peak is made of, by batch", False, partial(_shares, config)),
        Piece(FITS, "the largest batches, forecast", False, partial(_fits, config)),
        Piece("schemes-estimated", "schemes, estimated", False, partial(_estimates, config)),
        Piece("statistics", "ops, times, idle activations", True, partial(_statistics, config)),
    ]
    for sweep in config.sweeps:
        about = f"plain and planned, capped at {config.sweep_cap}"
        every.append(Piece(sweep_name(sweep.model), about, True, partial(_sweep, config, sweep)))
    for planned in config.planned:
        about = "every planner at every budget"
        name = planners_name(planned.step)
        every.append(Piece(name, about, True, partial(_planners, config, planned)))
    for cap in config.caps:
        about = f"the largest batches under {cap.memory}, run"
        every.append(Piece(check_name(cap), about, True, partial(_checks, config, cap)))
    about = f"compiled, planned and by torch.compile, under {config.compiled_cap}"
    every.append(Piece(compiled_name(config), about, True, partial(_compiled, config)))
    every.append(Piece("schemes", "schemes, run", True, partial(_schemes, config)))
    for half in config.halves:
        about = f"planned for {config.half} of the plain peak"
        every.append(Piece(half_name(half.model), about, True, partial(_half, config, half)))
    return {piece.name: piece for piece in every}


def sweep_name(model: str) -> str:
    """The piece that sweeps over batch sizes of a model."""
    return f"sweep-{model}"


def half_name(model: str) -> str:
    """The piece with a share of the plain peak as the budget."""
    return f"halves-{model}"


def planners_name(step: Step) -> str:
    """The piece that compares planners on a step."""
    return f"planners-{step.model}"


def check_name(cap: Cap) -> str:
    """The piece that runs the largest batches under a cap."""
    return f"max-batch-{cap.memory}"


def compiled_name(config: Config) -> str:
    """The piece that compares compiled steps under a cap."""
    return f"compiled-{config.compiled_cap}"


def budget_under(config: Config, cap: str) -> str:
    """The budget of a planned step under a cap."""
    return format_budget(int(config.below_cap * parse_bytes(cap)))


def _where(config: Config) -> dict[str, Any]:
    return {"precision": config.precision, "device": config.device}


def _shares(config: Config, done: Rows, rows_of: RowsOf) -> Iterator[Task]:
    for model, batches in config.shares:
        settings = {"model": model, "batches": list(batches)}
        settings |= {"precision": config.precision, "gpu": config.gpu}
        yield Task("shares", settings, _FORECAST_S["shares"])


def _fits(config: Config, done: Rows, rows_of: RowsOf) -> Iterator[Task]:
    for cap in config.caps:
        for model in config.fits:
            yield fit_task(config, model, cap.memory)


def fit_task(config: Config, model: str, cap: str) -> Task:
    """The task that forecasts the largest batches of a model under a cap."""
    settings: dict[str, Any] = {"model": model, "cap": cap, "budget": budget_under(config, cap)}
    settings |= {"precision": config.precision, "gpu": config.gpu, "at_least": config.quick}
    return Task("fits", settings, _FORECAST_S["fits"])


def _estimates(config: Config, done: Rows, rows_of: RowsOf) -> Iterator[Task]:
    for family in config.families:
        settings = {"family": family.name, "sizes": list(family.estimated), "measure": False}
        settings |= {"batch": config.family_batch, "device": config.gpu}
        yield Task("schemes", settings, _FORECAST_S["schemes"])


def _schemes(config: Config, done: Rows, rows_of: RowsOf) -> Iterator[Task]:
    for family in config.families:
        settings = {"family": family.name, "sizes": list(family.measured), "measure": True}
        settings |= {"batch": config.family_batch, "device": config.device}
        yield Task("schemes", settings, _SCHEMES_S[family.name])


def _statistics(config: Config, done: Rows, rows_of: RowsOf) -> Iterator[Task]:
    for model, batch in config.statistics:
        settings = {"model": model, "batch": batch, "steps": config.steps, **_where(config)}
        yield Task("statistics", settings, _STATISTICS_S)


def _case(config: Config, cap: str, **more: Any) -> dict[str, Any]:
    """A case of a sweep, which runs under a cap."""
    how = {"steps": config.steps, "cap_bytes": parse_bytes(cap), **_where(config)}
    if more["way"] == PLANNED:
        how |= {"engine": "auto", "planner": "auto"}
    return asdict(Case(**{**how, **more}))


def _sweep(config: Config, sweep: Range, done: Rows, rows_of: RowsOf) -> Iterator[Task]:
    budget = budget_under(config, config.sweep_cap)
    ways: list[dict[str, Any]] = [{"way": PLAIN}, {"way": PLANNED, "budget": budget}]
    for batch in sweep.batches:
        for way in ways:
            case = _case(config, config.sweep_cap, model=sweep.model, batch=batch, **way)
            yield Task("case", {"case": case}, _CASE_S[way["way"]])


def _half(config: Config, half: Range, done: Rows, rows_of: RowsOf) -> Iterator[Task]:
    way = {"way": PLANNED, "budget": config.half}
    for batch in half.batches:
        case = _case(config, config.sweep_cap, model=half.model, batch=batch, **way)
        yield Task("case", {"case": case}, _HALF_S)


def _planners(config: Config, planned: Budgeted, done: Rows, rows_of: RowsOf) -> Iterator[Task]:
    settings = {**planned.step._asdict(), "percents": list(planned.percents)}
    settings |= {"planners": list(config.planners), "limit_s": config.planners_limit_s}
    yield Task("planners", {**settings, "steps": config.steps, **_where(config)}, _PLANNERS_S)


def _checks(config: Config, cap: Cap, done: Rows, rows_of: RowsOf) -> Iterator[Task]:
    """The largest batches forecast; if one does not fit, smaller ones, else one beyond it."""
    fits = rows_of(FITS)
    for model in config.checked:
        fit = fits.get(fit_task(config, model, cap.memory).key)
        if fit is None:
            print(f"{model} under {cap.memory}: collect the piece {FITS} first", flush=True)
        for way in cap.ways:
            batch = _forecast_batch(fit, way)
            for share in config.retries if batch else ():
                task = check_task(config, cap.memory, model, way, max(1, int(batch * share)))
                yield task
                if done.get(task.key, {}).get("status") == DONE:
                    if share == 1.0 and way in cap.beyond:
                        yield beyond_task(config, cap.memory, model, way, batch)
                    break


def _forecast_batch(fit: Row | None, way: str) -> int:
    """The batch that was forecast for a way; 0 if there is none."""
    found = fit["found"][way] if fit is not None and fit["status"] == DONE else None
    return int(found["batch"]) if found else 0


def check_task(config: Config, cap: str, model: str, way: str, batch: int) -> Task:
    """A batch that is run under a cap: plain, or within what the cap leaves for a plan."""
    how: dict[str, Any] = {"way": PLAIN}
    if way != "plain":
        how = {"way": PLANNED, "budget": budget_under(config, cap)}
    case = _case(config, cap, model=model, batch=batch, **how)
    return Task("case", {"of": way, "case": case}, _CHECK_S[way])


def beyond_task(config: Config, cap: str, model: str, way: str, batch: int) -> Task:
    """A batch that is larger by 2% than the largest that was found, and by one at least."""
    larger = max(batch + 1, math.ceil(batch * _BEYOND_RATIO))
    task = check_task(config, cap, model, way, larger)
    return replace(task, settings={**task.settings, "of": beyond(way)})


def beyond(way: str) -> str:
    """The name of the rows of batches beyond the largest."""
    return f"beyond {way}"


def _compiled(config: Config, done: Rows, rows_of: RowsOf) -> Iterator[Task | tuple[Task, ...]]:
    """All batches of `torch.compile` at once; then the plans one by one, which measure costs."""
    yield tuple(
        compiled_task(config, asked.model, COMPILE, batch)
        for asked in config.compiled
        for batch in asked.peer
    )
    for asked in config.compiled:
        if _does_not_fit(compiled_task(config, asked.model, COMPILE, asked.peer[0]), done):
            yield _smaller(config, asked.model, COMPILE, asked.peer[0])
        yield from _rising(config, asked, done)


def _rising(config: Config, asked: Compiled, done: Rows) -> Iterator[Task]:
    """Batches up to the first that does not fit; if that is the smallest, a smaller one."""
    for place, batch in enumerate(asked.planned):
        task = compiled_task(config, asked.model, PLANNED, batch)
        yield task
        if _does_not_fit(task, done):
            if place == 0:
                yield _smaller(config, asked.model, PLANNED, batch)
            return


def _does_not_fit(task: Task, done: Rows) -> bool:
    return done.get(task.key, {}).get("status") == OUT_OF_MEMORY


def _smaller(config: Config, model: str, way: str, batch: int) -> Task:
    return compiled_task(config, model, way, max(1, int(batch * config.compiled_retry)))


def compiled_task(config: Config, model: str, way: str, batch: int) -> Task:
    """A compiled step under the cap: planned within what that leaves, or by `torch.compile`."""
    cap = config.compiled_cap
    how: dict[str, Any] = {"way": way}
    if way == PLANNED:
        how |= {"engine": "inductor", "budget": budget_under(config, cap)}
    case = _case(config, cap, model=model, batch=batch, **how)
    return Task("case", {"of": "compiled", "case": case}, _COMPILED_S[model][way])
