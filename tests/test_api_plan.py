"""`rekindle.plan` and `rekindle.simulate` as users call them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.square_step import square_step
from support.tiny_step import MIB, PEAK_BYTES, tiny_plan, tiny_step
from torch import nn

import rekindle
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.errors import UnitError
from rekindle.planners.registry import PLANNERS

GRAPH, PROFILE, PLAIN = tiny_step()


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        ("8MiB", 8 * MIB),
        (9_000_000, 9_000_000),
        ("100%", PEAK_BYTES),
        ("250%", PEAK_BYTES * 5 // 2),
    ],
)
def test_budgets(budget: str | int, nbytes: int) -> None:
    plan = rekindle.plan(GRAPH, PROFILE, budget=budget, planner="none")
    assert (plan.budget_bytes, plan.planner) == (nbytes, "none")
    assert rekindle.simulate(GRAPH, PROFILE, plan).peak_bytes == plan.peak_bytes <= nbytes


def test_a_budget_that_cannot_be_met_says_what_can() -> None:
    with pytest.raises(rekindle.InfeasibleBudget) as caught:
        rekindle.plan(GRAPH, PROFILE, budget="10%", planner="none")
    least = caught.value.least_peak_bytes
    plan = rekindle.plan(GRAPH, PROFILE, budget=least, planner="none")
    assert plan.peak_bytes == least


def test_what_makes_no_sense() -> None:
    with pytest.raises(UnitError, match="'lots' is not a budget"):
        rekindle.plan(GRAPH, PROFILE, budget="lots", planner="none")
    with pytest.raises(rekindle.PlanError, match="no planner named 'noone', did you mean 'none'"):
        rekindle.plan(GRAPH, PROFILE, budget="60%", planner="noone")
    other = dataclasses.replace(PROFILE, fingerprint="0" * 16)
    with pytest.raises(rekindle.ProfileError, match="another step"):
        rekindle.plan(GRAPH, other, budget="60%", planner="none")


def test_every_plan_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
        plan = tiny_plan(graph)
        return dataclasses.replace(plan, schedule=plan.schedule[:-1])

    monkeypatch.setitem(PLANNERS, "careless", careless)
    with pytest.raises(rekindle.InvalidSchedule, match="mm_1: is never freed"):
        rekindle.plan(GRAPH, PROFILE, budget="100%", planner="careless")


def test_a_planner_that_does_not_exist_is_refused_without_a_budget() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(rekindle.PlanError, match="no planner named 'foo'"):
        rekindle.optimize(square_step, model, optimizer, torch.ones(2, 4), planner="foo")
    step = rekindle.optimize(square_step, model, optimizer, torch.ones(2, 4))
    with pytest.raises(ValueError, match="at least one step"):
        step.measure(torch.ones(2, 4), steps=0)


# Arguments of wrong types


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def parts() -> tuple[Any, ...]:
    model = nn.Linear(4, 2)
    return train_step, model, torch.optim.AdamW(model.parameters()), torch.ones(8, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rekindle.plan(PROFILE, GRAPH, budget="60%"), r"order is plan\(graph, profile"),
        (lambda: rekindle.simulate(PROFILE, GRAPH), r"order is simulate\(graph, profile, plan"),
        (lambda: rekindle.simulate(GRAPH, PROFILE, "plan.json"), "plan must be a Plan"),
        (lambda: rekindle.layout(PROFILE), r"order is layout\(graph, plan"),
        (lambda: rekindle.layout(GRAPH, PROFILE), "plan must be a Plan"),
        (lambda: rekindle.profile(GRAPH), "profile takes what capture or optimize returns"),
        (lambda: rekindle.optimize(*parts(), plan="x.json"), r"with rekindle.load_plan\(path\)"),
        (lambda: rekindle.optimize(*parts(), budget="90%", profile="x"), "must be a Profile"),
    ],
)
def test_wrong_types_are_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


def test_the_parts_of_a_step_in_a_wrong_order() -> None:
    step, model, optimizer, batch = parts()
    with pytest.raises(TypeError, match=r"model must be a torch Module, and is of type AdamW"):
        rekindle.capture(step, optimizer, model, batch)
    with pytest.raises(TypeError, match="train_step must be a function"):
        rekindle.capture(model, model, optimizer, batch)


def test_a_profile_without_a_budget_is_refused() -> None:
    with pytest.raises(rekindle.PlanError, match="give a budget"):
        rekindle.optimize(*parts(), profile=PROFILE)


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_a_comparison_needs_a_step(steps: Any) -> None:
    step, model, optimizer, batch = parts()
    before = model.weight.clone()
    with pytest.raises(rekindle.RekindleError, match="steps must be a whole number of at least 1"):
        rekindle.verify(step, model, optimizer, batch, budget="100%", steps=steps)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [("auto", "the model is on the cpu"), ("python", 'engine="python" was asked for')],
)
def test_why_there_are_no_cuda_graphs(engine: str, reason: str) -> None:
    assert reason in rekindle.optimize(*parts(), engine=engine).engine_info.reason
