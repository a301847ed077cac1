"""Trains one model plainly and with Rekindle, without a budget and with two, and compares bits.

A cell's outcome is one of: "equal" (the same bits, and within the budget), "different", "over" (the
budget), "refused" (with an error of Rekindle's), "error" (any other), or "unstable" (two plain
trainings differ from each other).
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import rekindle
from benchmarks.matrix import BUDGETS, PLANNER
from benchmarks.matrix.zoo import Batch, Built, Case, build, train_step
from rekindle.core.cost.profile import Profile
from rekindle.errors import InfeasibleBudget, RekindleError
from rekindle.measuring.bitwise_compare import differences, state_of
from rekindle.measuring.meters import peak_bytes
from rekindle.measuring.timing import resident_tensors
from rekindle.pipeline import CapturedCosts, choose_form
from rekindle.planners.registry import find_planner

Json = dict[str, Any]

# Of libraries, and of this repository: results say nothing of the machine's folders.
_FOLDERS = re.compile(rf"/\S*/site-packages/|{re.escape(str(Path(__file__).parents[2]))}/")


class Training(NamedTuple):
    """What a training leaves: losses and state by name, and the peak of its last step, if asked."""

    state: dict[str, Any]
    peak_bytes: int


def run(case: Case, budgets: Sequence[str] = BUDGETS) -> dict[str, Json]:
    """The outcome of each cell of a model."""
    planned = [budget for budget in budgets if budget != "none"]
    cells: dict[str, Json] = {}
    try:
        plain = _trained(case, None, _masks_in_turn)
    except Exception as error:  # not Rekindle's, but nothing to compare with
        return {budget: _failure("plain", error) for budget in budgets}
    if "none" in budgets:
        start = time.perf_counter()
        cells["none"] = _cell(case, plain, {}, _masks_in_turn)
        cells["none"]["seconds"] = round(time.perf_counter() - start, 2)
        if cells["none"]["outcome"] in ("refused", "error"):
            return cells | {budget: dict(cells["none"]) for budget in planned}
    if not planned:
        return cells
    if _has_masks(case):
        plain = _trained(case, None, _one_mask)
    try:
        profile, plain_bytes, least_bytes = _range(case)
    except RekindleError as error:
        return cells | {budget: _failure("refused", error) for budget in planned}
    except Exception as error:
        return cells | {budget: _failure("error", error) for budget in planned}
    limits = {"halfway": (plain_bytes + least_bytes) // 2, "least": least_bytes}
    choose = _one_mask if _has_masks(case) else _masks_in_turn
    for budget in planned:
        start = time.perf_counter()
        options = {"budget": limits[budget], "profile": profile, "planner": PLANNER}
        cells[budget] = _cell(case, plain, options, choose)
        cells[budget] |= {"budget_bytes": limits[budget], "plain_bytes": plain_bytes}
        cells[budget]["seconds"] = round(time.perf_counter() - start, 2)
    return cells


def _masks_in_turn(batches: list[Batch]) -> list[Batch]:
    return batches


def _one_mask(batches: list[Batch]) -> list[Batch]:
    """The second batch is padded, and another step, with another least peak: leave it out."""
    return [batches[0], batches[2], batches[0]]


def _has_masks(case: Case) -> bool:
    return case.library == "transformers"


def _seeded(case: Case) -> Built:
    torch.manual_seed(0)
    built = build(case)
    torch.manual_seed(1)
    return built


def _trained(case: Case, options: Json | None, choose: Callable[..., list[Batch]]) -> Training:
    """Train a new model for three steps; with a budget, the last one is measured."""
    model, optimizer, batches = _seeded(case)
    batches = choose(batches)
    step: Callable[[Batch], torch.Tensor] = partial(train_step, model, optimizer)
    if options is not None:
        step = rekindle.optimize(train_step, model, optimizer, batches[0], **options)
    losses = [step(batch).detach().clone() for batch in batches[:-1]]

    def last() -> None:
        losses.append(step(batches[-1]).detach())

    peak = 0
    if options:
        resident = partial(resident_tensors, model, optimizer, batches[-1])
        peak = peak_bytes(last, torch.device("cpu"), resident)
    else:
        last()
    found = {f"loss {index}": loss.clone() for index, loss in enumerate(losses)}
    return Training({**found, **state_of(model, optimizer)}, peak)


def _cell(case: Case, plain: Training, options: Json, choose: Callable[..., list[Batch]]) -> Json:
    try:
        found = _trained(case, options, choose)
    except RekindleError as error:
        return _failure("refused", error)
    except Exception as error:
        return _failure("error", error)
    cell: Json = {"outcome": "equal"}
    if options:
        cell["peak_bytes"] = found.peak_bytes
    changed = differences(plain.state, found.state)
    if changed:
        again = _trained(case, None, choose)
        is_stable = not differences(plain.state, again.state)
        cell |= {"outcome": "different" if is_stable else "unstable", "reason": ", ".join(changed)}
        cell["reason"] = cell["reason"][:500]
    elif options and found.peak_bytes > options["budget"]:
        cell |= {"outcome": "over", "reason": f"by {found.peak_bytes - options['budget']} bytes"}
    return cell


class Range(NamedTuple):
    """A profile of the step, its plain peak, and the least peak that a plan reaches."""

    profile: Profile
    plain_bytes: int
    least_bytes: int


def _range(case: Case) -> Range:
    model, optimizer, batches = _seeded(case)
    captured = rekindle.capture(train_step, model, optimizer, batches[0])
    profile = rekindle.profile(captured, cache=False, runs=1)
    plain_bytes = rekindle.simulate(captured.graph, profile).peak_bytes
    costs = CapturedCosts(captured.graph, profile, budget_bytes=1, engine_bytes=0)
    try:  # as `optimize` would, for a budget of a byte
        choose_form(captured.first.recording, costs, find_planner(PLANNER), has_graphs=False)
    except InfeasibleBudget as error:
        return Range(profile, plain_bytes, error.least_peak_bytes)
    raise AssertionError("a byte is enough")


def _failure(outcome: str, error: Exception) -> Json:
    last = traceback.extract_tb(error.__traceback__)[-1]
    reason = _FOLDERS.sub("", f"{type(error).__name__}: {error}")[:600]
    place = _FOLDERS.sub("", f"{last.filename}:{last.lineno}")
    return {"outcome": outcome, "reason": reason, "at": place}
