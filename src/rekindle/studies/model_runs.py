"""What commands do with a model: build it, profile it, train it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import rekindle
from rekindle import models
from rekindle.core.cost.devices import find_device
from rekindle.core.cost.profile import Profile
from rekindle.core.cost.roofline import analytic_profile
from rekindle.core.graph.comparison import Comparison
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.serial import SAVED_SUFFIX, load_profile
from rekindle.errors import ModelError, PlanError, RekindleError
from rekindle.measuring.bitwise_compare import Parts, compare
from rekindle.measuring.measure import device_name
from rekindle.pipeline import form_of
from rekindle.tracing import user_line

_IS_RANDOM = "does not have a deterministic implementation"
_NAMED_HERE = ("cpu", "cuda")  # any other device is a GPU's name

Tell = Callable[[str], None]


class Profiled(NamedTuple):
    """A step and its costs; `about` says what they are of: model, batch, precision."""

    graph: StepGraph
    profile: Profile
    about: dict[str, Any]


class Trained(NamedTuple):
    """A model trained plainly and with Rekindle; `about` says which: model, batch, precision."""

    comparison: Comparison
    about: dict[str, Any]
    device: str
    is_deterministic: bool  # whether torch was told to use deterministic algorithms


def is_named_gpu(device: str | None) -> bool:
    """Whether a device is meant by its name, for a forecast, and not one that is here."""
    return device is not None and device.partition(":")[0] not in _NAMED_HERE


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
    """Build a model twice and train it plainly and with what `optimize` makes of it."""
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
        if any(param.is_cuda for param in work.model.parameters()):
            _be_deterministic(strictly=strictly)
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

    with named(model), _determinism_put_back():
        try:
            comparison = compare(make, optimize, steps=steps, on_stage=tell, unplanned=unplanned)
        except RuntimeError as error:
            if _IS_RANDOM not in str(error):
                raise
            tell("an operator has no deterministic algorithm: starting again without")
            torch.use_deterministic_algorithms(False)
            strictly = False
            comparison = compare(make, optimize, steps=steps, on_stage=tell, unplanned=unplanned)
    return Trained(comparison, about, ", ".join(sorted(places)) or "cpu", all(modes))


def _be_deterministic(*, strictly: bool) -> None:
    """On a GPU, two plain trainings need not agree otherwise; what cannot be so is warned about.

    Attention has a deterministic algorithm that torch takes only where nothing else will do.
    """
    if not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=not strictly)


@contextmanager
def _determinism_put_back() -> Iterator[None]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def check_can_run(model: str, device: str | None) -> None:
    """Refuse what can be studied but not run, before the work starts."""
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
    """Read a saved profile, or build, capture and profile the model. `how` has what was asked."""
    asked = {name: value for name, value in how.items() if value is not None}
    if model.endswith(SAVED_SUFFIX):
        return _saved(model, asked, tell)
    device, runs = asked.pop("device", None), asked.pop("runs", 3)
    if is_named_gpu(device):
        find_device(device)  # an unknown name is refused before the work, not after
    tell("building")
    work = models.load(model, device=None if is_named_gpu(device) else device, **asked)
    return profiled_work(work, model, device, cache=cache, runs=runs, tell=tell)


def profiled_work(
    work: models.Workload, model: str, device: str | None, *, cache: bool, runs: int, tell: Tell
) -> Profiled:
    """Capture and profile what was built; `device` may be the name of a GPU, for a forecast."""
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
    """Let an error of the user's own step say whose it is."""
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
    """An error as people know it, and the user's own line that it comes from."""
    first, *_ = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    line = user_line.user_line(user_line.traceback_lines(error.__traceback__), user_line.NOWHERE)
    return f"{text} ({Path(line.filename).name}:{line.lineno})" if line.filename else text


def _saved(path: str, asked: dict[str, Any], tell: Tell) -> Profiled:
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
    return Profiled(graph, profile, about)
