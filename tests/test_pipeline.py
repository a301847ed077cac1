"""How a captured step gets its plan: a margin below the budget, and a second plan if that fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle import models
from rekindle.engines.select_engine import EngineFactory
from rekindle.errors import InfeasibleBudget, PlanError, ProfileError
from rekindle.measuring.bitwise_compare import compare
from rekindle.pipeline import PlannedStep, PlanRequest, prepare_step
from rekindle.planners.registry import find_planner
from rekindle.units import format_bytes

CPU = torch.device("cpu")


def parts(name: str = "resnet-tiny", **sizes: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    work = models.build(name, **{"batch": 16, **sizes})
    return work.train_step, work.model, work.optimizer, work.batch


class Holding(EngineFactory):
    """Engines whose graphs hold so many bytes beside a step."""

    has_graphs = True  # type: ignore[assignment]

    def __init__(self, extra: int) -> None:
        super().__init__("python", CPU)
        self.extra = extra

    def extra_bytes(self, batch: list[torch.Tensor]) -> int:
        return self.extra


@pytest.fixture(scope="module")
def profile() -> Any:
    return rekindle.profile(rekindle.capture(*parts()), cache=False, runs=1)


def test_a_plan_stays_a_little_below_its_budget(profile: Any) -> None:
    step = rekindle.optimize(*parts(), budget="70%", profile=profile)
    plain = rekindle.simulate(step.captured.graph, profile).peak_bytes
    assert step.plan is not None
    assert step.budget_bytes == int(plain * 0.7)
    assert step.plan.budget_bytes == step.budget_bytes - int(step.budget_bytes * 0.0005)
    assert step.plan.peak_bytes <= step.plan.budget_bytes


@pytest.mark.slow
def test_the_least_peak_can_be_had_without_a_margin(profile: Any) -> None:
    with pytest.raises(InfeasibleBudget) as raised:
        rekindle.optimize(*parts(), budget="30%", profile=profile)
    least = raised.value.least_peak_bytes
    step = rekindle.optimize(*parts(), budget=least, profile=profile)
    assert step.plan is not None
    assert step.plan.peak_bytes == step.budget_bytes == least
    with pytest.raises(InfeasibleBudget) as raised:
        rekindle.optimize(*parts(), budget=least - 1, profile=profile)
    assert (raised.value.budget_bytes, raised.value.least_peak_bytes) == (least - 1, least)


def test_a_step_that_takes_more_than_its_budget_is_planned_once_more(
    profile: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As if the first step had needed 2% more than was forecast."""
    left_free: list[str] = []

    def optimize(*given: Any) -> rekindle.TrainStep:
        step = rekindle.optimize(*given, budget="75%", profile=profile)
        assert step.plan is not None
        assert step.budget_bytes is not None
        first, captured = step.plan, step.captured
        forecast = first.peak_bytes
        captured.hold_to_budget(captured.first, step.budget_bytes)
        assert step.plan is first  # within the budget: nothing to do
        measured = step.budget_bytes + 100_000
        captured.hold_to_budget(captured.first, measured)
        left_free.append(format_bytes(measured - forecast))
        assert step.plan is not first
        assert step.plan.peak_bytes <= step.budget_bytes
        assert step.profile is not None  # what was not forecast is taken to be there all the time
        assert step.profile.overhead_bytes == profile.overhead_bytes + measured - forecast
        assert step.plan.recompute_us >= first.recompute_us
        return step

    with caplog.at_level(logging.WARNING, logger="rekindle"):
        assert compare(parts, optimize, steps=3).differences == ()
    assert "the step took" in caplog.text
    assert f"planned again, with {left_free[0]} left free" in caplog.text


def test_where_there_is_no_other_plan_the_first_stays(
    profile: Any, caplog: pytest.LogCaptureFixture
) -> None:
    step = rekindle.optimize(*parts(), budget="70%", profile=profile)
    first = step.plan
    step.captured.hold_to_budget(step.captured.first, 10**9)
    assert step.plan is first
    assert "no plan leaves room for that" in caplog.text


def test_a_plan_or_profile_is_for_what_is_captured_first(profile: Any) -> None:
    """A batch of another size is measured and planned anew, for the same budget."""
    first = rekindle.optimize(*parts(), budget="75%", profile=profile)
    given = parts()
    step = rekindle.optimize(*given, plan=first.plan)
    assert step.plan is first.plan
    assert (step.profile, step.trace) == (None, None)
    step(given[3])
    step(parts(batch=12)[3])
    assert step.n_captures == 2
    other = step.captured.variants[-1].planned
    assert other is not None
    assert other.profile is not None
    assert other.budget_bytes == first.plan.budget_bytes  # type: ignore[union-attr]


def test_what_belongs_to_another_step_is_refused(profile: Any) -> None:
    with pytest.raises(ProfileError):
        rekindle.optimize(*parts(batch=8), budget="75%", profile=profile)
    plan = rekindle.optimize(*parts(), budget="75%", profile=profile).plan
    with pytest.raises(PlanError):
        rekindle.optimize(*parts(batch=8), plan=plan)
    with pytest.raises(PlanError, match="not both"):
        rekindle.optimize(*parts(), plan=plan, budget="75%")
    with pytest.raises(PlanError, match="planner"):
        rekindle.optimize(*parts(), budget="75%", planner="no such planner")


def test_bytes_that_an_engine_holds_count(profile: Any) -> None:
    """CUDA graphs have a copy of the batch: the plan makes room for it."""
    captured = rekindle.capture(*parts())
    budget = int(0.75 * rekindle.simulate(captured.graph, profile).peak_bytes)
    found = [
        prepare_step(*parts(), Holding(extra), PlanRequest(budget, profile=profile)).planned
        for extra in (0, 500_000)
    ]
    assert all(each.plan.peak_bytes <= budget for each in found)
    assert found[1].profile is not None
    assert found[1].profile.overhead_bytes == 500_000
    assert found[1].plan.recompute_us > found[0].plan.recompute_us
    request = PlanRequest(budget, profile=profile, plan=found[1].plan)
    given = prepare_step(*parts(), Holding(500_000), request).planned
    assert given is not None
    assert given.profile == found[1].profile  # so that its forecast is the same


def test_what_graphs_hold_does_not_count_where_there_are_none() -> None:
    """Steps that update parameters as their gradients come do not run from CUDA graphs."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = torch.randn(8, 256)
    captured = rekindle.capture(train_step, model, optimizer, batch)
    profile = rekindle.profile(captured, cache=False, runs=1)

    def planned(budget: int, extra: int, plan: rekindle.Plan | None = None) -> PlannedStep:
        request = PlanRequest(budget, profile=profile, plan=plan)
        found = prepare_step(train_step, model, optimizer, batch, Holding(extra), request)
        assert found.planned is not None
        return found.planned

    with pytest.raises(InfeasibleBudget) as raised:
        planned(1, 0)
    least = raised.value.least_peak_bytes
    for extra in (0, 10 * least):
        found = planned(least, extra)
        assert found.graph.early_updates
        assert found.plan.peak_bytes == least
        given = planned(least, extra, found.plan)
        assert given.profile == found.profile
    with pytest.raises(InfeasibleBudget):
        planned(least - 1, 0)


@pytest.mark.parametrize(
    "error", [PlanError("no"), InfeasibleBudget(budget_bytes=1, least_peak_bytes=2)]
)
def test_a_form_that_cannot_be_planned_leaves_the_others(
    error: PlanError, profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a planner raises about early updates, a good plan without them is taken."""
    made = find_planner("auto")

    def no_early_updates(graph: Any, costs: Any, budget_bytes: int) -> Any:
        if graph.early_updates:
            raise error
        return made(graph, costs, budget_bytes)

    monkeypatch.setattr("rekindle.pipeline.find_planner", lambda name: no_early_updates)
    monkeypatch.setattr("rekindle.pipeline._gradients_matter", lambda planned: True)
    step = rekindle.optimize(*parts(), budget="75%", profile=profile)
    assert not step.graph.early_updates
