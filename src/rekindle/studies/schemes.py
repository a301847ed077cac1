"""The schemes of memory optimisation side by side: the bytes of feature maps under each.

**Feature maps** are the tensors of the forward and the backward pass, but for those of weights:
gradients, their terms, and the optimizer's temporaries. Their bytes are those of a static arena. A
scheme that recomputes uses the plan with the fewest bytes that its planner finds, at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rekindle
from rekindle import models
from rekindle.captured_step import CapturedStep
from rekindle.core.cost.devices import find_device
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Phase, Role, StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.serial import SAVED_SUFFIX
from rekindle.core.graph.simulate import simulate
from rekindle.core.memory.layout import layout
from rekindle.errors import InfeasibleBudget, ModelError
from rekindle.measuring.meters import peak_bytes
from rekindle.models.zoo.catalog import FAMILIES, MODELS, Family, did_you_mean
from rekindle.planners.registry import find_planner
from rekindle.report.schemes_report import SCHEMES, Estimate, Measured, Scheme, SizeResult, Study
from rekindle.studies.model_runs import (
    Profiled,
    Tell,
    check_can_run,
    is_named_gpu,
    named,
    profiled,
    profiled_work,
)

FEATURE_ROLES = (Role.ACTIVATION, Role.GRAD_MAP, Role.TEMP, Role.OUTPUT)
_FORECAST_DEVICE = "H200"
_FREE_MEMORY_RATIO = 1.25  # a step is run where its peak, times this, is free

# Operators that make a weight's gradient from its terms: a sum, or a cast to another precision.
_SUMMING = frozenset({"aten.add.Tensor", "aten.add_.Tensor", "aten._to_copy.default"})

FreeBytes = Callable[[torch.device], int]


def free_bytes(device: torch.device) -> int:
    """The free memory of a device; all memory where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    if info.exists():
        rows = dict(line.split(":") for line in info.read_text(encoding="ascii").splitlines())
        return int(rows["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def compare_schemes(
    model: str,
    sizes: Sequence[int] | None = None,
    *,
    measure: bool = False,
    how: Mapping[str, Any] | None = None,
    tell: Tell = lambda stage: None,
    free_bytes: FreeBytes = free_bytes,
) -> Study:
    """All schemes on a family of models in several sizes, or on one model in the size it has.

    `how` has batch, precision and device, where they are given. With `measure`, steps for which
    `free_bytes` leaves room are run, too.
    """
    asked = {name: value for name, value in (how or {}).items() if value is not None}
    if measure:
        check_can_run(model, asked.get("device"))
        asked.setdefault("device", "cpu")
    family = _family(model)
    if sizes is not None and family is None:
        raise ModelError(
            f"{model} has one size only: leave --sizes out, or name {' or '.join(FAMILIES)}"
        )
    free = free_bytes if measure else None
    if family is not None:
        return _grown(family, asked, sizes, free, tell)
    return _single(model, asked, free, tell)


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
    family: Family,
    how: dict[str, Any],
    sizes: Sequence[int] | None,
    free: FreeBytes | None,
    tell: Tell,
) -> Study:
    """All schemes on the given sizes, or on the default ones: fewer and smaller on a CPU."""
    device = how.pop("device", _FORECAST_DEVICE)
    if is_named_gpu(device):
        find_device(device)  # refuses an unknown name before the work starts
    else:
        how["device"] = device
    for size in sizes or ():
        family.check(size)
    is_slow = free is not None and device == "cpu"
    extent = family.cpu_extent if is_slow else family.extent
    if is_slow:
        how.setdefault("batch", family.cpu_batch)

    results, steps = [], []
    for size in sizes or (family.cpu_sizes if is_slow else family.sizes):

        def make(size: int = size) -> models.Workload:
            return family.build(size, **how, **extent)

        def tell_size(stage: str, size: int = size) -> None:
            tell(f"{family.size_name} {size}: {stage}")

        step, taken = _profiled(make, family.name, device, free, tell_size)
        results.append(_result(step, taken, size, tell_size))
        steps.append(step)
    title = family.title.format(**extent)
    first = next((step for step in steps if _has_measured_times(step)), steps[0])
    return _study(first, results, family.name, title, family.size_name)


def _single(model: str, how: dict[str, Any], free: FreeBytes | None, tell: Tell) -> Study:
    """All schemes on a model with one size."""
    taken: dict[str, Measured] = {}
    if free is not None:
        make = partial(models.load, model, **how)
        step, taken = _profiled(make, model, how["device"], free, tell)
    else:
        if not model.endswith(SAVED_SUFFIX):
            how.setdefault("device", _FORECAST_DEVICE)
        step = profiled(model, how, cache=True, tell=tell)
    name = step.about.get("model") or model
    return _study(step, [_result(step, taken, None, tell)], name, name, "")


def _profiled(
    make: Callable[[], models.Workload], name: str, device: str, free: FreeBytes | None, tell: Tell
) -> tuple[Profiled, dict[str, Measured]]:
    """A step and its costs; and its measured peaks, if it is to be run and fits."""
    tell("building")
    work = make()
    if free is None:
        return profiled_work(work, name, device, cache=True, runs=3, tell=tell), {}
    tell("capturing")
    with named(name):
        captured = rekindle.capture(work.train_step, work.model, work.optimizer, work.batch)
    about = {"model": work.name, "batch": work.batch_size, "precision": work.precision}
    forecast = rekindle.profile(captured, device=_FORECAST_DEVICE)
    if _FREE_MEMORY_RATIO * forecast_bytes(captured.graph, forecast) > free(captured.device):
        return Profiled(captured.graph, forecast, about), {}
    tell("profiling")
    with named(name):
        profile = rekindle.profile(captured, progress=tell)
        taken = _measured(work, captured, profile, tell)
    return Profiled(captured.graph, profile, about), taken


def _measured(
    work: models.Workload, captured: CapturedStep, profile: Profile, tell: Tell
) -> dict[str, Measured]:
    """The measured peaks of the schemes that can be run: as torch runs them, and as planned."""
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
        before = 0  # on the CPU, the allocator is watched from the start of the step
        if captured.device.type == "cuda":
            before = torch.cuda.memory_allocated(captured.device)
        peak = peak_bytes(step, captured.device, tuple)
        forecast = forecast_bytes(captured.graph, profile, plan)
        found[scheme.name] = Measured(peak - before, forecast)
    return found


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


def estimate(
    graph: StepGraph,
    profile: Profile,
    tell: Tell = lambda label: None,
    schemes: Sequence[Scheme] = SCHEMES,
) -> dict[str, Estimate]:
    """The bytes of a step's feature maps under each scheme; `tell` gets the name of the next."""
    whole = mark_weight_tensors(graph)
    features, costs = _features_alone(whole, profile)
    found = {}
    for scheme in schemes:
        tell(scheme.label)
        plan = least_plan(features, costs, scheme.planner) if scheme.planner else None
        options = {"in_place": scheme.in_place, "sharing": scheme.sharing}
        arena = layout(whole, plan, roles=FEATURE_ROLES, **options)
        found[scheme.name] = Estimate(arena.arena_bytes, plan.recompute_us if plan else 0.0)
    return found


def least_plan(graph: StepGraph, profile: Profile, planner: str) -> Plan:
    """The plan of least peak that a planner finds."""
    make = find_planner(planner)
    try:
        plan = make(graph, profile, 1)  # infeasible: the error has the least peak
    except InfeasibleBudget as error:
        plan = make(graph, profile, error.least_peak_bytes)
    plan.check(graph)
    return plan


def forecast_bytes(graph: StepGraph, profile: Profile, plan: Plan | None = None) -> int:
    """The peak of a step above the memory before it, gradients of weights included."""
    trace = simulate(graph, profile, plan)
    resident = trace.sizes_bytes[trace.liveness.is_resident].sum()
    return trace.peak_bytes - trace.overhead_bytes - int(resident)


def mark_weight_tensors(graph: StepGraph) -> StepGraph:
    """The same step, with the role of a gradient for all tensors that belong to weights."""
    storage_of = [value.storage for value in graph.values]
    made_in: dict[int, Phase] = {}
    for op in graph.ops:
        for value in op.outputs:
            made_in.setdefault(storage_of[value], op.phase)
    of_weights = {s.index for s in graph.storages if s.role is Role.GRAD}
    of_weights |= {storage for storage, phase in made_in.items() if phase is Phase.OPTIMIZER}
    for op in reversed(graph.ops):
        results = {storage_of[value] for value in (*op.outputs, *op.mutates)}
        if op.phase is Phase.BACKWARD and op.target in _SUMMING and results & of_weights:
            parts = {storage_of[value] for value in op.inputs}
            of_weights |= {p for p in parts if graph.storages[p].role is Role.GRAD_MAP}
    storages = (
        replace(storage, role=Role.GRAD)
        if storage.index in of_weights and not storage.role.is_resident
        else storage
        for storage in graph.storages
    )
    return replace(graph, storages=tuple(storages))


def _features_alone(graph: StepGraph, profile: Profile) -> tuple[StepGraph, Profile]:
    """The step as if gradients of weights and workspaces of ops took no memory.

    Planners minimise the peak of the whole step. If gradients make that peak, at the end of the
    backward pass, saving feature maps earlier would not pay.
    """
    storages = [replace(s, nbytes=0) if s.role is Role.GRAD else s for s in graph.storages]
    features = replace(graph, storages=tuple(storages))
    costs = tuple(replace(cost, workspace_bytes=0) for cost in profile.costs)
    return features, replace(profile, costs=costs, fingerprint=features.fingerprint)
