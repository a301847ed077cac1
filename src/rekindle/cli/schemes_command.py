"""`rekindle schemes`: what each scheme of memory optimisation makes of a model as it grows."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rekindle
from rekindle import models
from rekindle.captured_step import CapturedStep
from rekindle.cli.options import (
    SAVED_SUFFIX,
    BatchOption,
    JsonOption,
    MeasureOption,
    PngOption,
    PrecisionOption,
    SchemesDeviceOption,
    SchemesModelArgument,
    SizesOption,
    parse_sizes,
)
from rekindle.cli.output import new_console, print_written, working, write_json
from rekindle.core.cost.devices import find_device
from rekindle.core.cost.profile import Profile
from rekindle.errors import ModelError
from rekindle.measuring.meters import peak_bytes
from rekindle.models.zoo.catalog import MODELS, did_you_mean
from rekindle.models.zoo.families import FAMILIES, Family
from rekindle.report import schemes_figures, schemes_report
from rekindle.studies.model_runs import (
    Profiled,
    Tell,
    check_can_run,
    is_named_gpu,
    named,
    profiled,
    profiled_work,
)
from rekindle.studies.schemes import (
    SCHEMES,
    Measured,
    SizeResult,
    Study,
    estimate,
    forecast_bytes,
    least_plan,
)

_FORECAST = "H200"
_ROOM = 1.25  # a step is run where so many times its peak is free


def compare_schemes(
    model: SchemesModelArgument,
    sizes: SizesOption = None,
    measure: MeasureOption = False,
    batch: BatchOption = None,
    precision: PrecisionOption = None,
    device: SchemesDeviceOption = None,
    png: PngOption = None,
    json: JsonOption = None,
) -> None:
    """Compare seven schemes of memory optimisation on a model that grows deeper or longer.

    Bytes of feature maps with nothing optimised, written in place, shared, and checkpointed.
    """
    asked = {"batch": batch, "precision": precision, "device": device}
    how = {name: value for name, value in asked.items() if value is not None}
    if measure:
        check_can_run(model, device)
        how.setdefault("device", "cpu")
    family = _family(model)
    if sizes is not None and family is None:
        raise ModelError(
            f"{model} has one size only: leave --sizes out, or name {' or '.join(FAMILIES)}"
        )
    wanted = parse_sizes(sizes) if sizes is not None else None
    with working(model, json) as tell:
        if family is not None:
            study = _grown(family, how, wanted, measure, tell)
        else:
            study = _single(model, how, measure, tell)
        tell("writing")
        if png:
            schemes_figures.write_schemes_png(Path(png), study)
    console = new_console(json)
    console.print(schemes_report.schemes_table(study))
    print_written(console, png)
    write_json(json, schemes_report.schemes_data(study))


def _family(model: str) -> Family | None:
    """The family of that name; None for a model of one size."""
    is_plain_name = ":" not in model and not model.endswith((".py", SAVED_SUFFIX))
    if is_plain_name and model not in FAMILIES and model not in MODELS:
        known = dict.fromkeys((*FAMILIES, *MODELS))
        raise ModelError(
            f"no model named {model!r}{did_you_mean(model, known)};"
            " or path/to/file.py:function for one of your own"
        )
    return FAMILIES.get(model)


def _grown(
    family: Family, how: dict[str, Any], sizes: list[int] | None, measure: bool, tell: Tell
) -> Study:
    """All schemes on the sizes asked for, or on the usual ones: fewer and smaller on a CPU."""
    device = how.pop("device", _FORECAST)
    if is_named_gpu(device):
        find_device(device)  # an unknown name is refused before the work, not after
    else:
        how["device"] = device
    for size in sizes or ():
        family.check(size)
    is_slow = measure and device == "cpu"
    extent = family.cpu_extent if is_slow else {}
    if is_slow:
        how.setdefault("batch", family.cpu_batch)

    results, steps = [], []
    for size in sizes or (family.cpu_sizes if is_slow else family.sizes):

        def make(size: int = size) -> models.Workload:
            return family.build(size, **how, **extent)

        def tell_size(stage: str, size: int = size) -> None:
            tell(f"{family.size_name} {size}: {stage}")

        step, taken = _profiled(make, family.name, device, measure, tell_size)
        results.append(_result(step, taken, size, tell_size))
        steps.append(step)
    title = family.title(**extent)
    first = next((step for step in steps if _has_measured_times(step)), steps[0])
    return _study(first, results, family.name, title, family.size_name)


def _single(model: str, how: dict[str, Any], measure: bool, tell: Tell) -> Study:
    """All schemes on a model in the one size that it has."""
    taken: dict[str, Measured] = {}
    if measure:
        make = partial(models.load, model, **how)
        step, taken = _profiled(make, model, how["device"], measure, tell)
    else:
        if not model.endswith(SAVED_SUFFIX):
            how.setdefault("device", _FORECAST)
        step = profiled(model, how, cache=True, tell=tell)
    name = step.about.get("model") or model
    return _study(step, [_result(step, taken, None, tell)], name, name, "")


def _profiled(
    make: Callable[[], models.Workload], name: str, device: str, measure: bool, tell: Tell
) -> tuple[Profiled, dict[str, Measured]]:
    """A step and its costs; and what it takes where it is to be run, and fits."""
    tell("building")
    work = make()
    if not measure:
        return profiled_work(work, name, device, cache=True, runs=3, tell=tell), {}
    tell("capturing")
    with named(name):
        captured = rekindle.capture(work.train_step, work.model, work.optimizer, work.batch)
    about = {"model": work.name, "batch": work.batch_size, "precision": work.precision}
    forecast = rekindle.profile(captured, device=_FORECAST)
    if _ROOM * forecast_bytes(captured.graph, forecast) > _free_bytes(captured.device):
        return Profiled(captured.graph, forecast, about), {}
    tell("profiling")
    with named(name):
        profile = rekindle.profile(captured, progress=tell)
        taken = _measured(work, captured, profile, tell)
    return Profiled(captured.graph, profile, about), taken


def _measured(
    work: models.Workload, captured: CapturedStep, profile: Profile, tell: Tell
) -> dict[str, Measured]:
    """What steps take under the schemes that can be run: as torch runs them, and as planned."""
    parts = (work.train_step, work.model, work.optimizer, work.batch)
    found = {}
    for scheme in SCHEMES:
        if not scheme.runs:
            continue
        tell(f"running with {scheme.label}")
        plan = None
        step = partial(work.train_step, *parts[1:])
        if scheme.planner is not None:
            plan = least_plan(captured.graph, profile, scheme.planner)
            planned = rekindle.optimize(*parts, plan=plan, engine="python")
            step = partial(planned, work.batch)
        step()
        before = 0  # on the CPU, the allocator is watched from the step's start on
        if captured.device.type == "cuda":
            before = torch.cuda.memory_allocated(captured.device)
        peak = peak_bytes(step, captured.device, tuple)
        forecast = forecast_bytes(captured.graph, profile, plan)
        found[scheme.name] = Measured(peak - before, forecast)
    return found


def _free_bytes(device: torch.device) -> int:
    """The memory that is free now; all there is where that is not told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    told = Path("/proc/meminfo")
    if told.exists():
        rows = dict(line.split(":") for line in told.read_text(encoding="ascii").splitlines())
        return int(rows["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _result(step: Profiled, taken: dict[str, Measured], size: int | None, tell: Tell) -> SizeResult:
    estimates = estimate(step.graph, step.profile, tell)
    return SizeResult(size, len(step.graph.ops), step.profile.step_us, estimates, taken)


def _study(
    step: Profiled, results: list[SizeResult], model: str, title: str, size_name: str
) -> Study:
    return Study(
        model=model,
        title=title,
        size_name=size_name,
        batch=step.about.get("batch"),
        precision=step.about.get("precision") or "",
        device=step.profile.device,
        is_measured=_has_measured_times(step),
        results=tuple(results),
    )


def _has_measured_times(step: Profiled) -> bool:
    return any(cost.is_measured for cost in step.profile.costs)
