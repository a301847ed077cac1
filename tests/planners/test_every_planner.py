"""What holds for every planner, on random steps with all kinds of ops, and for the best of them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.asking import ask
from support.chains import chain
from support.diamonds import DIAMOND_LEAST_PEAK, DIAMOND_OPTIMA, diamond
from support.random_steps import random_step, steps
from support.reading import dropped, n_recomputed

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import simulate
from rekindle.errors import InfeasibleBudget
from rekindle.planners.curve import trade_offs
from rekindle.planners.exact.ilp import optimum
from rekindle.planners.lowering import keep_all, lower
from rekindle.planners.problem import problem_of
from rekindle.planners.registry import PLANNERS

# The others have one plan for a step, at any budget.
MIND_THE_BUDGET = ("mutwo", "mincut", "ilp", "auto")


def verify(graph: StepGraph, profile: Profile, plan: Plan, budget_bytes: int) -> None:
    """The plan is valid, says the truth about itself, and stays within the budget."""
    plan.check(graph)
    trace = simulate(graph, profile, plan)
    assert trace.peak_bytes == plan.peak_bytes <= budget_bytes == plan.budget_bytes
    assert trace.recompute_us == pytest.approx(plan.recompute_us)
    assert plan.bound_us is None or plan.bound_us <= plan.recompute_us + 1e-6


def planned(name: str, graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
    """The plan for a budget, or for the least peak that the planner says it reaches."""
    answer = ask(name, graph, profile, budget_bytes)
    if isinstance(answer, InfeasibleBudget):
        least = answer.least_peak_bytes
        assert answer.budget_bytes == budget_bytes < least
        answer = PLANNERS[name](graph, profile, least)
        assert answer.peak_bytes == least
        budget_bytes = least
    verify(graph, profile, answer, budget_bytes)
    return answer


@pytest.mark.parametrize("name", PLANNERS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=steps(max_forward=12), share=st.floats(0, 1))
def test_plans_are_valid_and_fit_or_say_what_would(
    name: str, made: tuple[StepGraph, Profile], share: float
) -> None:
    """At a share of the plain step's peak, and at the least peak that the planner reaches."""
    graph, profile = made
    planned(name, graph, profile, int(share * simulate(graph, profile).peak_bytes))
    least = planned(name, graph, profile, 0)
    assert least.peak_bytes == least.budget_bytes


@pytest.mark.parametrize("name", ["none", *MIND_THE_BUDGET])
def test_with_room_for_everything_nothing_is_computed_again(name: str) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        graph, profile = random_step(rng, rng.randint(1, 12), micro_batches=1 + seed % 2)
        plan = PLANNERS[name](graph, profile, simulate(graph, profile).peak_bytes)
        assert plan.recompute_us == 0
        assert all(decision.is_kept for decision in plan.decisions)


@pytest.mark.parametrize("name", PLANNERS)
def test_more_memory_never_costs_more_time(name: str) -> None:
    n_points = 0
    for seed in range(6):
        rng = random.Random(seed)
        graph, profile = random_step(rng, rng.randint(6, 10), micro_batches=1 + seed % 2)
        plans = trade_offs(graph, profile, [name], points=6)[0].plans
        n_points += len(plans)
        for more, less in pairwise(plans):
            assert more.budget_bytes > less.budget_bytes
            assert more.recompute_us <= less.recompute_us
            if more.bound_us is not None and less.bound_us is not None:
                assert more.bound_us <= less.bound_us
        for plan in plans:
            verify(graph, profile, plan, plan.budget_bytes)
    assert n_points > 12 if name in MIND_THE_BUDGET else n_points == 6


@pytest.mark.parametrize("name", PLANNERS)
def test_none_is_better_than_the_optimum(name: str) -> None:
    """Neither in time, at the peak it reaches, nor in the least peak."""
    n_costly = 0
    for seed in range(16):
        rng = random.Random(seed)
        graph, profile = random_step(rng, rng.randint(2, 9), micro_batches=1 + seed % 2)
        problem = problem_of(graph, profile)
        least = optimum(problem, None).peak_bytes
        most = lower(problem, keep_all(problem)).peak_bytes
        for budget in (0, (least + most) // 2):
            plan = planned(name, graph, profile, budget)
            best_us = optimum(problem, plan.budget_bytes).recompute_us
            assert plan.peak_bytes >= least
            assert plan.recompute_us >= best_us - 1e-6
            assert plan.bound_us is None or plan.bound_us <= best_us + 1e-6
            n_costly += plan.recompute_us > 0
    assert n_costly > 8 or name == "none"


# Steps worked out by hand


@pytest.mark.parametrize("name", ["ilp", "auto"])
def test_a_chain_drops_what_is_cheapest_to_compute_again(name: str) -> None:
    """Four cells and gradients of 1 byte each: two gradients are live with the cell that is read.

    In 4 bytes, when cell 2 is read, there is room for one of 0 and 1. In 3 bytes there is room for
    nothing else from then on: cell 1 is computed from the start, and then cell 0.
    """
    graph, profile = chain(4, times_us=[5.0, 3.0, 2.0, 4.0])
    for budget, again in ((5, [0, 0, 0, 0]), (4, [0, 1, 0, 0]), (3, [2, 1, 0, 0])):
        assert n_recomputed(graph, PLANNERS[name](graph, profile, budget)) == again
    with pytest.raises(InfeasibleBudget) as raised:
        PLANNERS[name](graph, profile, 2)
    assert raised.value.least_peak_bytes == 3


@pytest.mark.parametrize("name", ["mincut", "ilp", "auto"])
def test_a_diamond_drops_the_cheaper_side_then_both_then_their_source(name: str) -> None:
    graph, profile = diamond()
    for budget, cells, us in DIAMOND_OPTIMA:
        plan = PLANNERS[name](graph, profile, budget)
        assert dropped(plan) == [1 + cell for cell in cells]
        assert plan.recompute_us == us
        assert plan.peak_bytes <= budget
    with pytest.raises(InfeasibleBudget) as raised:
        PLANNERS[name](graph, profile, DIAMOND_LEAST_PEAK - 1)
    assert raised.value.least_peak_bytes == DIAMOND_LEAST_PEAK
