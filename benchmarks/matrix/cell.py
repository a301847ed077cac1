"""Trains one model plainly and with Rekindle, without a budget and with two, and compares bits.

A cell's outcome is one of: "equal" (the same bits, and within the budget), "different", "over" (the
budget), "refused" (with an error of Rekindle's), "error" (any other), or "unstable" (two plain
trainings differ from each other).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import rekindle
from benchmarks.matrix import BUDGETS
from benchmarks.matrix.zoo import Batch, Built, Case, build, train_step
from rekindle.core.cost.profile import Profile
from rekindle.errors import InfeasibleBudget, RekindleError
from rekindle.measuring.bitwise_compare import differences, state_of
from rekindle.measuring.meters import peak_bytes
from rekindle.measuring.timing import resident_tensors

Json = dict[str, Any]


class Training(NamedTuple):
    """What a training leaves: losses and state by name, and the peak of its last step."""

    state: dict[str, Any]
    peak_bytes: int


def run(case: Case, budgets: Sequence[str] = BUDGETS) -> dict[str, Json]:
    """The outcome of each cell of a model."""
    try:
        plain = _trained(case, None, _masks_in_turn)
    except Exception as error:  # not Rekindle's, but nothing to compare with
        return {budget: _failure("plain", error) for budget in budgets}
    cells: dict[str, Json] = {}
    start = time.perf_counter()
    cells["none"] = _cell(case, plain, {}, _masks_in_turn)
    cells["none"]["seconds"] = round(time.perf_counter() - start, 2)
    others = [budget for budget in budgets if budget != "none"]
    if not others or cells["none"]["outcome"] in ("refused", "error"):
        return cells | {budget: dict(cells["none"]) for budget in others}
    plain = _trained(case, None, _one_mask)
    profile, plain_bytes, least_bytes = _range(case)
    limits = {"halfway": (plain_bytes + least_bytes) // 2, "least": least_bytes}
    for budget in others:
        start = time.perf_counter()
        options = {"budget": limits[budget], "profile": profile}
        cells[budget] = _cell(case, plain, options, _one_mask)
        cells[budget] |= {"budget_bytes": limits[budget], "plain_bytes": plain_bytes}
        cells[budget]["seconds"] = round(time.perf_counter() - start, 2)
    return cells


def _masks_in_turn(batches: list[Batch]) -> list[Batch]:
    return batches


def _one_mask(batches: list[Batch]) -> list[Batch]:
    """The second batch is padded, and another step, with another least peak: leave it out."""
    return [batches[0], batches[2], batches[0]]


def _seeded(case: Case) -> Built:
    torch.manual_seed(0)
    built = build(case)
    torch.manual_seed(1)
    return built


def _trained(case: Case, options: Json | None, choose: Callable[..., list[Batch]]) -> Training:
    model, optimizer, batches = _seeded(case)
    batches = choose(batches)
    step = partial(train_step, model, optimizer)
    if options is not None:
        step = rekindle.optimize(train_step, model, optimizer, batches[0], **options)
    found = {f"loss {i}": step(batch).detach().clone() for i, batch in enumerate(batches[:-1])}
    losses: list[torch.Tensor] = []
    resident = partial(resident_tensors, model, optimizer, batches[-1])
    peak = peak_bytes(
        lambda: losses.append(step(batches[-1]).detach()), torch.device("cpu"), resident
    )
    found["last loss"] = losses[0].clone()
    return Training({**found, **state_of(model, optimizer)}, peak)


def _cell(case: Case, plain: Training, options: Json, choose: Callable[..., list[Batch]]) -> Json:
    try:
        found = _trained(case, options, choose)
    except RekindleError as error:
        return _failure("refused", error)
    except Exception as error:
        return _failure("error", error)
    cell = {"outcome": "equal", "peak_bytes": found.peak_bytes}
    changed = differences(plain.state, found.state)
    if changed:
        again = _trained(case, None, choose)
        is_stable = not differences(plain.state, again.state)
        cell |= {"outcome": "different" if is_stable else "unstable", "reason": ", ".join(changed)}
        cell["reason"] = cell["reason"][:500]
    elif options and found.peak_bytes > options["budget"]:
        cell |= {"outcome": "over", "reason": f"by {found.peak_bytes - options['budget']} bytes"}
    return cell


def _range(case: Case) -> tuple[Profile, int, int]:
    """A profile of the step, its plain peak, and the least peak that a plan reaches."""
    model, optimizer, batches = _seeded(case)
    captured = rekindle.capture(train_step, model, optimizer, batches[0])
    profile = rekindle.profile(captured, cache=False, runs=1)
    plain_bytes = rekindle.simulate(captured.graph, profile).peak_bytes
    try:
        rekindle.optimize(train_step, model, optimizer, batches[0], budget=1, profile=profile)
    except InfeasibleBudget as error:
        return profile, plain_bytes, error.least_peak_bytes
    raise AssertionError("a byte is enough")


def _failure(outcome: str, error: Exception) -> Json:
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{last.filename.partition('site-packages/')[2] or last.filename}:{last.lineno}"
    reason = f"{type(error).__name__}: {error}"[:600]
    return {"outcome": outcome, "reason": reason, "at": place}
