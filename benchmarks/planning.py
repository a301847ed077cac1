"""Shared by the benchmarks of planners: steps to plan, and runs of planners as figures."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any

from common import ROOT

sys.path.insert(0, str(ROOT / "src"))

import rekindle
from rekindle import models
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.serial import load_profile
from rekindle.errors import InfeasibleBudget, PlanError
from rekindle.planners.registry import Planner

Load = Callable[[], tuple[StepGraph, Profile]]
Case = dict[str, Any]

PROFILES = ROOT / "benchmarks" / "profiles"


def from_file(name: str) -> Load:
    def load() -> tuple[StepGraph, Profile]:
        saved = load_profile(PROFILES / f"{name}_bf16_h200.json.gz")
        return saved.graph, saved.profile

    return load


def from_zoo(name: str, batch: int) -> Load:
    def load() -> tuple[StepGraph, Profile]:
        work = models.build(name, batch=batch, precision="bf16")
        captured = rekindle.capture(
            work.train_step, work.model, work.optimizer, work.batch, as_on_gpu=True
        )
        return captured.graph, rekindle.profile(captured, device="H200")

    return load


def asked(make: Planner, graph: StepGraph, profile: Profile, budget_bytes: int) -> Case:
    """A planner's plan for a budget, as figures, and the seconds it took.

    On a machine that others use as well, the time on the CPU is the steadier of the two.
    """
    started, started_cpu = time.perf_counter(), time.process_time()
    try:
        found = figures(make(graph, profile, budget_bytes))
    except InfeasibleBudget as error:
        found = {"least_peak_bytes": error.least_peak_bytes}
    cpu_s = round(time.process_time() - started_cpu, 3)
    return {**found, "seconds": round(time.perf_counter() - started, 3), "cpu_s": cpu_s}


def figures(plan: Plan) -> Case:
    bound_us = None if plan.bound_us is None else round(float(plan.bound_us), 3)
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "added_us": round(plan.recompute_us, 3),
        "bound_us": bound_us,
    }


def in_percent(run: Case, plain: Case) -> dict[str, float]:
    """Peak in % of the plain peak; added time and bound in % of the step."""
    if "least_peak_bytes" in run:
        return {"least": 100 * run["least_peak_bytes"] / plain["peak_bytes"]}
    found = {
        "peak": 100 * run["peak_bytes"] / plain["peak_bytes"],
        "added": 100 * run["added_us"] / plain["step_us"],
    }
    if run["bound_us"] is not None:
        found["bound"] = 100 * run["bound_us"] / plain["step_us"]
    return found


def capped(cap_s: float, run: Callable[..., Case], *arguments: Any) -> Case:
    """The result of a function that runs in its own process, or its error."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def send() -> None:
        try:
            theirs.send(run(*arguments))
        except PlanError as error:
            theirs.send({"error": str(error)})

    process = context.Process(target=send)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(cap_s) else {"error": f"not done within {cap_s:.0f} s"}
    except EOFError:
        return {"error": "its process ended, see above"}
    finally:
        process.kill()
        process.join()


def timed(run: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """The same function, which adds the seconds it takes to those spent under its name."""

    def around(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return run(*arguments, **options)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - started

    return around
