"""Every planner at several budgets on one step: forecast and measured.

The step is profiled once, and planned in the form in which it runs. Equal plans, such as those of
planners that ignore the budget, are run once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isclose
from typing import Any, NamedTuple

import torch

import rekindle
from experiments.kinds.work import built, figures, parts_of, plainly, settle
from experiments.tasks import DONE, UNFINISHED
from rekindle import models
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.errors import InfeasibleBudget, PlanError
from rekindle.measuring.measure import device_name

_MARGIN_RATIO = 0.005  # that `optimize` leaves below a budget
NO_TIME = "no time was left"
PLANNED, INFEASIBLE, REFUSED = "planned", "infeasible", "refused"

Row = dict[str, Any]


class Planned(NamedTuple):
    """A step in the form in which it runs, with the costs of this form and of the captured one."""

    work: models.Workload
    graph: StepGraph
    costs: Profile
    profile: Profile


def compare_planners(
    settings: dict[str, Any],
    before: dict[str, Any] | None,
    save: Callable[[Row], None],
    *,
    same_time_ratio: float = 1e-5,
) -> dict[str, Any]:
    """Forecast all plans, then run the feasible ones while there is time.

    Results of `before` are kept where the plan is the same, by its recompute time to a ratio.
    """
    end = time.monotonic() + settings["limit_s"]
    work = built(settings)
    plain = plainly(work, settings["steps"])
    del work
    step = _prepared(built(settings))
    found: dict[str, Any] = {
        **{name: settings[name] for name in ("model", "batch", "precision")},
        "device": device_name(torch.device(step.work.device)),
        "plain": plain,
        "forecast": _forecast(step, None),
    }
    plans, rows = _planned(step, settings, plain["peak_bytes"])
    _take_over(rows, before, same_time_ratio)
    for row, plan in _to_run(plans, rows):
        if time.monotonic() < end:
            _run(step, row, plan, settings["steps"])
        else:
            row["not_run"] = NO_TIME
        save({**found, "rows": rows})
    is_whole = not any(row.get("not_run") == NO_TIME for row in rows)
    return {**found, "rows": rows, "status": DONE if is_whole else UNFINISHED}


def _prepared(work: models.Workload) -> Planned:
    """The step as `optimize` plans it, with the overhead of its engine."""
    parts = parts_of(work)
    captured = rekindle.capture(*parts)
    profile = rekindle.profile(captured)
    del captured
    settle()
    roomy = rekindle.optimize(*parts, budget="110%", profile=profile)
    assert roomy.profile is not None
    return Planned(work, roomy.graph, roomy.profile, profile)


def _planned(
    step: Planned, settings: dict[str, Any], plain_bytes: int
) -> tuple[dict[int, rekindle.Plan], list[Row]]:
    """A row for every planner and budget, and the plans by the indices of their rows."""
    rows: list[Row] = []
    plans: dict[int, rekindle.Plan] = {}
    for planner in settings["planners"]:
        for percent in settings["percents"]:
            within = plain_bytes * percent // 100
            row: Row = {"planner": planner, "percent": percent, "budget_bytes": within}
            start = time.perf_counter()
            outcome = _plan(step, planner, within)
            row["plan_s"] = round(time.perf_counter() - start, 3)
            if isinstance(outcome, rekindle.Plan):
                plans[len(rows)] = outcome
                row |= {"status": PLANNED, "forecast": _forecast(step, outcome)}
                row |= {"recompute_us": outcome.recompute_us, "bound_us": outcome.bound_us}
            else:
                row |= outcome
            rows.append(row)
    return plans, rows


def _plan(step: Planned, planner: str, within: int) -> rekindle.Plan | Row:
    """A plan for a budget, or why there is none."""
    try:
        asked = within - int(within * _MARGIN_RATIO)
        plan = rekindle.plan(step.graph, step.costs, budget=asked, planner=planner)
    except InfeasibleBudget as error:
        return {"status": INFEASIBLE, "least_peak_bytes": error.least_peak_bytes}
    except PlanError as error:
        return {"status": REFUSED, "message": str(error)}
    return replace(plan, budget_bytes=within)


def _forecast(step: Planned, plan: rekindle.Plan | None) -> dict[str, Any]:
    trace = rekindle.simulate(step.graph, step.costs, plan)
    return {"peak_bytes": trace.peak_bytes, "step_us": trace.step_us}


def _take_over(rows: list[Row], before: dict[str, Any] | None, ratio: float) -> None:
    """Keep what was measured before the task was stopped, where the plan is the same."""
    kept = {(row["planner"], row["percent"]): row for row in (before or {}).get("rows", ())}
    for row in rows:
        old = kept.get((row["planner"], row["percent"]), {})
        times = old.get("recompute_us", -1.0), row.get("recompute_us", 0.0)
        if isclose(*times, rel_tol=ratio) and "measured" in old:
            names = ("measured", "forecast", "same_as", "is_planned_again")
            row |= {name: old[name] for name in names if name in old}


def _to_run(
    plans: dict[int, rekindle.Plan], rows: list[Row]
) -> Iterator[tuple[Row, rekindle.Plan]]:
    """The rows to run; a row with the same plan as another takes its results."""
    first: dict[Any, Row] = {}
    for place, plan in plans.items():
        row = rows[place]
        other = first.setdefault((plan.planner, plan.schedule), row)
        if "measured" in row:
            continue
        if other is row:
            yield row, plan
        elif "measured" in other:
            row |= {"same_as": other["percent"], "measured": other["measured"]}
            row["forecast"] = other["forecast"]
        else:
            row["not_run"] = other.get("not_run", other.get("failed", ""))


def _run(step: Planned, row: Row, plan: rekindle.Plan, steps: int) -> None:
    """Run a plan, and add its measurements to the row."""
    settle()
    parts = parts_of(step.work)
    try:
        made = rekindle.optimize(*parts, plan=plan, planner=row["planner"], profile=step.profile)
        found = made.measure(step.work.batch, steps)
    except Exception as error:  # of any kind: the other plans are run
        row["failed"] = f"{type(error).__name__}: {error}"
        return
    trace = made.trace
    assert trace is not None
    row["forecast"] = {"peak_bytes": trace.peak_bytes, "step_us": trace.step_us}
    row["measured"] = figures(found)
    row["is_planned_again"] = made.plan is not plan
