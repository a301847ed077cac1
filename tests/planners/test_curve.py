"""Trade-off curves: even budgets, no more time with more memory, and bounds that stay valid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_step import PEAK_BYTES, tiny_plan, tiny_step

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.serial import load_profile
from rekindle.core.graph.simulate import simulate
from rekindle.errors import InfeasibleBudget, PlanError
from rekindle.planners.curve import Curve, bound_at, trade_offs
from rekindle.planners.finish import finish
from rekindle.planners.lowering import choices
from rekindle.planners.problem import problem_of
from rekindle.planners.registry import PLANNERS, find_planner

MEASURED = Path(__file__).parents[2] / "benchmarks" / "profiles"


def costing(table: dict[int, tuple[float, float | None]], least: int) -> Callable[..., Plan]:
    """A planner that says at each budget what the table has for it: time, and bound."""

    def make(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
        if budget_bytes < least:
            raise InfeasibleBudget(budget_bytes=budget_bytes, least_peak_bytes=least)
        recompute_us, bound_us = table[budget_bytes]
        plan = tiny_plan(graph)
        return Plan(
            "table",
            plan.fingerprint,
            budget_bytes,
            plan.schedule,
            plan.decisions,
            budget_bytes,
            recompute_us,
            bound_us,
        )

    return make


def by_size(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
    """Drop the largest activations, a tenth more at a time, until the rest fits."""
    problem = problem_of(graph, profile)
    cells = sorted(problem.droppable, key=lambda cell: problem.bytes[cell])
    least = None
    for tenth in range(10, -1, -1):
        try:
            kept = choices(problem, cells[: len(cells) * tenth // 10])
            return finish(problem, kept, planner="by-size", budget_bytes=budget_bytes)
        except InfeasibleBudget as error:
            least = min(least or error.least_peak_bytes, error.least_peak_bytes)
    assert least is not None
    raise InfeasibleBudget(budget_bytes=budget_bytes, least_peak_bytes=least)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Plan]], None]:
    """Registers a planner for the duration of a test."""
    return lambda name, make: monkeypatch.setitem(PLANNERS, name, make)


@pytest.mark.parametrize("name", ["none", "all"])
def test_a_planner_that_ignores_the_budget_has_one_point(name: str) -> None:
    graph, profile, _ = tiny_step()
    (plan,) = trade_offs(graph, profile, [name])[0].plans
    assert plan.planner == name
    assert plan.peak_bytes == plan.budget_bytes


def test_cheaper_plans_and_higher_bounds_go_their_ways(
    planner: Callable[[str, Callable[..., Plan]], None],
) -> None:
    """At 3 quarters the planner does worse than with less memory, and its bound at the least is
    below the one it gave for more."""
    graph, profile, _ = tiny_step()
    least = PEAK_BYTES - 4000
    table = {
        least: (50.0, 10.0),
        least + 1000: (30.0, 20.0),
        least + 2000: (40.0, 15.0),
        least + 3000: (25.0, None),
        PEAK_BYTES: (0.0, 0.0),
    }
    planner("table", costing(table, least))
    plans = trade_offs(graph, profile, ["table"], points=5)[0].plans
    assert [plan.budget_bytes - least for plan in plans] == [4000, 3000, 2000, 1000, 0]
    assert [plan.recompute_us for plan in plans] == [0.0, 25.0, 30.0, 30.0, 50.0]
    assert [plan.bound_us for plan in plans] == [0.0, 0.0, 15.0, 20.0, 20.0]
    assert [plan.peak_bytes - least for plan in plans] == [4000, 3000, 1000, 1000, 0]


def test_a_real_step(planner: Callable[[str, Callable[..., Plan]], None]) -> None:
    graph, profile, _ = load_profile(MEASURED / "vit_b128_bf16_h200.json.gz")
    planner("by-size", by_size)
    told: list[str] = []
    sized, everything = trade_offs(graph, profile, ["by-size", "all"], 6, told.append)
    assert told == ["by-size", "all"] * 2
    assert [curve.planner for curve in (sized, everything)] == ["by-size", "all"]
    plans = sized.plans
    budgets = [plan.budget_bytes for plan in plans]
    assert len(plans) == 6
    assert budgets[0] == simulate(graph, profile).peak_bytes
    assert budgets == sorted(budgets, reverse=True)
    assert plans[-1].peak_bytes == plans[-1].budget_bytes
    costs = [plan.recompute_us for plan in plans]
    assert costs == sorted(costs)
    assert costs[0] == 0.0 < costs[-1]
    for plan in plans:
        assert plan.peak_bytes <= plan.budget_bytes
        assert simulate(graph, profile, plan).peak_bytes == plan.peak_bytes
    assert len(everything.plans) == 1
    assert min(curve.seconds for curve in (sized, everything)) > 0


def test_what_a_curve_says_of_a_budget() -> None:
    def point(budget: int, peak: int, us: float, bound: float | None) -> Plan:
        return Plan("x", "f", budget, (), (), peak, us, bound)

    curve = Curve("x", (point(100, 90, 0.0, 0.0), point(80, 79, 5.0, 4.0)), 1.0)
    other = Curve("y", (point(85, 70, 9.0, None),), 1.0)
    found = [curve.at(budget) for budget in (95, 90, 89, 79, 78)]
    assert [plan and plan.recompute_us for plan in found] == [0.0, 0.0, 5.0, 5.0, None]
    bounds = [bound_at([other, curve], budget) for budget in (101, 100, 81, 80, 1)]
    assert bounds == [None, 0.0, 0.0, 4.0, 4.0]
    assert bound_at([other], 1) is None


def test_what_cannot_be_asked_for() -> None:
    graph, profile, _ = tiny_step()
    with pytest.raises(PlanError, match="at least 2 points"):
        trade_offs(graph, profile, ["none"], points=1)
    with pytest.raises(PlanError, match=r"no planner named 'nope'.*There are none, all"):
        trade_offs(graph, profile, ["nope"])
    assert find_planner("none") is PLANNERS["none"]
