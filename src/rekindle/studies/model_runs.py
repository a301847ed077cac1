"""What commands do with a model: build it, profile it, train it, find its largest batch."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import rekindle
from rekindle import models
from rekindle.core.cost.batch_search import Fit, LargestBatch
from rekindle.core.cost.devices import find_device
from rekindle.core.cost.profile import Profile
from rekindle.core.cost.roofline import analytic_profile
from rekindle.core.graph.comparison import Comparison
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.serial import SAVED_SUFFIX, load_profile
from rekindle.errors import InfeasibleBudget, ModelError, PlanError, RekindleError
from rekindle.largest_batch import SIZES
from rekindle.measuring.bitwise_compare import Parts, compare
from rekindle.measuring.measure import device_name
from rekindle.pipeline import form_of
from rekindle.report.words import percent
from rekindle.tracing import user_line

_NOT_DETERMINISTIC = "does not have a deterministic implementation"
_LOCAL_DEVICES = ("cpu", "cuda")  # any other device is the name of a GPU to forecast for
_INITIALIZERS = frozenset(name for name in vars(nn.init) if name.endswith("_"))  # as in uniform_

Tell = Callable[[str], None]


class Profiled(NamedTuple):
    """A step and its costs; `about` has its model, batch and precision."""

    graph: StepGraph
    profile: Profile
    about: dict[str, Any]


class Trained(NamedTuple):
    """A model trained plainly and with Rekindle; `about` has its model, batch and precision."""

    comparison: Comparison
    about: dict[str, Any]
    device: str
    is_deterministic: bool  # True if torch was told to use deterministic algorithms


def is_named_gpu(device: str | None) -> bool:
    """True if a device is the name of a GPU to forecast for, and not a device of this machine."""
    return device is not None and device.partition(":")[0] not in _LOCAL_DEVICES


def trained(
    model: str,
    how: dict[str, Any],
    *,
    steps: int,
    tell: Tell,
    budget: str | None = None,
    planner: str = "auto",
    plan: Plan | None = None,
    engine: str = "auto",
) -> Trained:
    """Build a model twice, and train it plainly and with `rekindle.optimize`."""
    asked = {name: value for name, value in how.items() if value is not None}
    check_can_run(model, asked.get("device"))
    about: dict[str, Any] = {}
    places: set[str] = set()
    modes: set[bool] = set()
    strictly = True

    def make() -> Parts:
        random.seed(0)
        np.random.seed(0)
        work = models.load(model, **asked)
        about.update(model=work.name, batch=work.batch_size, precision=work.precision)
        places.update(device_name(param.device) for param in work.model.parameters())
        on_gpu = any(param.is_cuda for param in work.model.parameters())
        if on_gpu and not torch.are_deterministic_algorithms_enabled():
            # Two plain trainings may differ otherwise. Strict mode is tried first, since torch uses
            # the deterministic algorithm of attention only there; else it warns where it has none.
            torch.use_deterministic_algorithms(True, warn_only=not strictly)
        modes.add(torch.are_deterministic_algorithms_enabled())
        return work.train_step, work.model, work.optimizer, work.batch

    def unplanned(*parts: Any) -> rekindle.TrainStep:
        return rekindle.optimize(*parts, engine=engine, progress=tell)

    def optimize(*parts: Any) -> rekindle.TrainStep:
        if plan is None:
            if budget is not None:
                tell("capturing, profiling and planning a step")
            return rekindle.optimize(
                *parts, budget=budget, planner=planner, engine=engine, progress=tell
            )
        captured = rekindle.capture(*parts)
        if form_of(plan, captured.recording, captured.graph) is None:
            raise PlanError(
                f"the plan is of another step than {model}: give the --batch, --precision and "
                f"--device that it was made with, or rekindle plan {model} --budget B --save FILE."
            )
        tell("profiling")  # a plan comes without costs, and the forecast needs them
        costs = rekindle.profile(captured, progress=tell)
        return rekindle.optimize(*parts, plan=plan, profile=costs, engine=engine)

    with named(model), _determinism_restored():
        try:
            comparison = compare(make, optimize, steps=steps, on_stage=tell, unplanned=unplanned)
        except RuntimeError as error:
            if _NOT_DETERMINISTIC not in str(error):
                raise
            tell("an operator has no deterministic algorithm: starting again without")
            torch.use_deterministic_algorithms(False)
            strictly = False
            comparison = compare(make, optimize, steps=steps, on_stage=tell, unplanned=unplanned)
    return Trained(comparison, about, ", ".join(sorted(places)) or "cpu", all(modes))


@contextmanager
def _determinism_restored() -> Iterator[None]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its start
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def check_can_run(model: str, device: str | None) -> None:
    """Raise for saved profiles and names of GPUs, which can be studied but not run."""
    if model.endswith(SAVED_SUFFIX):
        raise ModelError(
            f"{model} is a saved profile, which cannot be run: name its model, or study it with "
            "rekindle plan."
        )
    if is_named_gpu(device):
        raise ModelError(
            f"{device!r} is no device of this machine: run with --device cpu or cuda, or see what "
            f"rekindle plan {model} --device NAME forecasts for a GPU by its name."
        )


def profiled(model: str, how: dict[str, Any], *, cache: bool, tell: Tell) -> Profiled:
    """Read a saved profile; or build, capture and profile a model, with the options in `how`."""
    asked = {name: value for name, value in how.items() if value is not None}
    if model.endswith(SAVED_SUFFIX):
        return _saved(model, asked, tell)
    device, runs = asked.pop("device", None), asked.pop("runs", 3)
    if is_named_gpu(device):
        find_device(device)  # refuses an unknown name before the work starts
    tell("building")
    work = models.load(model, device=None if is_named_gpu(device) else device, **asked)
    return profiled_work(work, model, device, cache=cache, runs=runs, tell=tell)


def profiled_work(
    work: models.Workload, model: str, device: str | None, *, cache: bool, runs: int, tell: Tell
) -> Profiled:
    """Capture and profile a workload; `device` may be the name of a GPU to forecast for."""
    is_forecast = is_named_gpu(device)
    tell("capturing")
    parts = (work.train_step, work.model, work.optimizer, work.batch)
    with named(model):
        captured = rekindle.capture(*parts, as_on_gpu=is_forecast)
    tell("profiling")
    profile = rekindle.profile(
        captured, device=device if is_forecast else None, cache=cache, runs=runs, progress=tell
    )
    about = {"model": work.name, "batch": work.batch_size, "precision": work.precision}
    return Profiled(captured.graph, profile, about)


@contextmanager
def named(model: str) -> Iterator[None]:
    """Name the model in an error of the user's own step."""
    try:
        yield
    except RekindleError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the step of {model} does not fit into this device's memory: give a smaller --batch"
        ) from error
    except Exception as error:
        raise ModelError(f"the step of {model} raises {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    """An error on one line, with the line of the user's code that it comes from."""
    first, *_ = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    line = user_line.user_line(user_line.traceback_lines(error.__traceback__), user_line.NOWHERE)
    return f"{text} ({Path(line.filename).name}:{line.lineno})" if line.filename else text


def _saved(path: str, asked: dict[str, Any], tell: Tell) -> Profiled:
    """A saved profile; with the name of another GPU, its graph with the costs there."""
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
    return Profiled(graph, profile, about)


class _WithoutInitialization(TorchFunctionMode):
    """Leaves parameters uninitialized, which saves most of the time of building a large model."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in _INITIALIZERS:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, nn.Parameter):
                return filled
        return func(*args, **kwargs)


def find_largest_batch(
    model: str,
    budget: str,
    *,
    device: str | None = None,
    precision: str | None = None,
    planner: str = "auto",
    at_least: float | None = None,
    check: bool = False,
    tell: Tell = lambda stage: None,
) -> tuple[LargestBatch, list[dict[str, Any]]]:
    """The largest batches that a budget holds, forecast; with `check`, also run once each."""
    is_forecast = is_named_gpu(device)
    if check and is_forecast:
        raise PlanError(f"{device} is not here, so that nothing can be checked: leave --check out.")
    if not is_forecast:
        check_can_run(model, device)
    how: dict[str, Any] = {"precision": precision, "device": None if is_forecast else device}

    def make_batch(size: int) -> Any:
        with _WithoutInitialization():
            return models.load(model, batch=size, **how).batch

    with named(model):
        tell("building the model")
        with _WithoutInitialization() if is_forecast else nullcontext():
            work = models.load(model, batch=SIZES[0], **how)
        objects = (work.train_step, work.model, work.optimizer)
        found = rekindle.max_batch(
            *objects,
            make_batch,
            budget=budget,
            device=device if is_forecast else None,
            planner=planner,
            at_least=at_least,
            progress=tell,
        )
        fits = dict.fromkeys(fit for fit in (found.quick, found.planned) if check and fit)
        checks = []
        for fit in fits:
            tell(f"running a batch of {fit.batch}")
            checks.append(_check_fit(fit, (*objects, make_batch(fit.batch)), budget, planner))
    return found, checks


def _check_fit(fit: Fit, parts: Parts, budget: str, planner: str) -> dict[str, Any]:
    """Run a batch that should fit: its measured peak, or the least peak of any plan."""
    row: dict[str, Any] = {"batch": fit.batch, "forecast_peak_bytes": fit.peak_bytes}
    try:
        step = rekindle.optimize(*parts, budget=budget, planner=planner)
        measured = step.measure(parts[3], steps=1)
    except (InfeasibleBudget, torch.OutOfMemoryError) as error:
        least = getattr(error, "least_peak_bytes", None)
        return {**row, "fits": False, "peak_bytes": None, "least_peak_bytes": least}
    assert step.budget_bytes is not None
    return {
        **row,
        "fits": measured.peak_bytes <= step.budget_bytes,
        "peak_bytes": measured.peak_bytes,
        "step_us": measured.step_us,
        "off": percent(measured.peak_bytes / fit.peak_bytes),
    }
