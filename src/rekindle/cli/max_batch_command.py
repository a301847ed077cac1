"""`rekindle max-batch`: the largest batch that a budget holds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import rekindle
from rekindle import models
from rekindle.cli.options import (
    AtLeastOption,
    CheckOption,
    DeviceOption,
    JsonOption,
    NeededBudgetOption,
    PlannerOption,
    PrecisionOption,
    RunModelArgument,
)
from rekindle.cli.output import new_console, working, write_json
from rekindle.core.cost.batch_search import Fit
from rekindle.errors import PlanError
from rekindle.largest_batch import SIZES, Parts
from rekindle.report.fit_report import fit_data, fit_summary
from rekindle.report.words import percent
from rekindle.studies.model_runs import Tell, check_can_run, is_named_gpu, named
from rekindle.units import format_bytes

_FILLS = frozenset(name for name in vars(nn.init) if name.endswith("_"))  # as in uniform_


class _Undrawn(TorchFunctionMode):
    """Leaves weights as they are allocated, where only their sizes or a batch are asked for.

    Drawing the weights of a large model takes longer than all the rest of building it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in _FILLS:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, nn.Parameter):
                return filled
        return func(*args, **kwargs)


def find_max_batch(
    model: RunModelArgument,
    budget: NeededBudgetOption,
    at_least: AtLeastOption = None,
    check: CheckOption = False,
    planner: PlannerOption = None,
    precision: PrecisionOption = None,
    device: DeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Find the largest batch that a budget holds, plain and planned, and how fast each is.

    All of it on paper: nothing runs out of memory on the way. With --device "RTX 4090", or another
    GPU's name, for a GPU that is not here.
    """
    on_paper = is_named_gpu(device)
    if check and on_paper:
        raise PlanError(f"{device} is not here, so that nothing can be checked: leave --check out.")
    if not on_paper:
        check_can_run(model, device)
    share = _share(at_least)
    how: dict[str, Any] = {"precision": precision, "device": None if on_paper else device}

    def make_batch(size: int) -> Any:
        with _Undrawn():
            return models.load(model, batch=size, **how).batch

    with working(model, json) as tell, named(model):
        tell("building the model")
        with _Undrawn() if on_paper else nullcontext():
            work = models.load(model, batch=SIZES[0], **how)
        objects = (work.train_step, work.model, work.optimizer)
        found = rekindle.max_batch(
            *objects,
            make_batch,
            budget=budget,
            device=device if on_paper else None,
            planner=planner or "auto",
            at_least=share,
            progress=tell,
        )
        fits = dict.fromkeys(fit for fit in (found.quick, found.planned) if check and fit)
        checks = [
            _check(fit, (*objects, make_batch(fit.batch)), budget, planner or "auto", tell)
            for fit in fits
        ]
    console = new_console(json)
    console.print(fit_summary(model, found))
    for each in checks:
        verdict = "fits" if each["fits"] else "does not fit"
        console.print(f"  checked: a batch of {each['batch']:,} {verdict}: {_reason(each)}")
    write_json(json, {"model": model, **fit_data(found), "checks": checks})
    if not all(each["fits"] for each in checks):
        raise SystemExit(1)


def _share(text: str | None) -> float | None:
    """What `95%` means, or `0.95`."""
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


def _check(fit: Fit, parts: Parts, budget: str, planner: str, tell: Tell) -> dict[str, Any]:
    tell(f"running a batch of {fit.batch}")
    row: dict[str, Any] = {"batch": fit.batch, "forecast_peak_bytes": fit.peak_bytes}
    try:
        step = rekindle.optimize(*parts, budget=budget, planner=planner)
        measured = step.measure(parts[3], steps=1)
    except (rekindle.InfeasibleBudget, torch.OutOfMemoryError) as error:
        least = getattr(error, "least_peak_bytes", None)
        return {**row, "fits": False, "peak_bytes": None, "least_peak_bytes": least}
    assert step.budget_bytes is not None
    within = measured.peak_bytes <= step.budget_bytes
    return {
        **row,
        "fits": within,
        "peak_bytes": measured.peak_bytes,
        "step_us": measured.step_us,
        "off": percent(measured.peak_bytes / fit.peak_bytes),
    }


def _reason(checked: dict[str, Any]) -> str:
    """Why a batch fits, or does not."""
    if checked["peak_bytes"] is not None:
        return f"its peak is {format_bytes(checked['peak_bytes'])}"
    if checked["least_peak_bytes"] is not None:
        return f"the least peak found is {format_bytes(checked['least_peak_bytes'])}"
    return "it ran out of memory"
