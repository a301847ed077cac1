"""`rekindle.plan` and `rekindle.simulate` as users call them."""

from __future__ import annotations

import dataclasses

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
