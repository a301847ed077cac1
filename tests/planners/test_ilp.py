"""The integer program against a search that tries everything, and on steps worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from support.brute_force import least_added_us, least_peak_bytes
from support.chains import chain
from support.diamonds import diamond_of
from support.hand_made import BACKWARD, FORWARD, LOSS, Costed, costed_step
from support.random_steps import random_step, steps
from support.reading import n_recomputed

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.simulate import simulate
from rekindle.errors import InfeasibleBudget, PlanError
from rekindle.planners.exact import ilp
from rekindle.planners.exact.ilp import optimum, plan_ilp
from rekindle.planners.exact.milp import IntegerProgram
from rekindle.planners.lowering import Choices, choices, keep_all, lower
from rekindle.planners.problem import Problem, problem_of

MOST_CELLS = 9


def small_problems(seeds: range) -> Iterator[tuple[StepGraph, Profile, Problem]]:
    """Random steps of up to 8 forward ops: every third plain, every fifth in two micro-batches.

    Those with more cells than brute force takes are left out.
    """
    for seed in seeds:
        rng = random.Random(seed)
        n_forward, micro_batches = rng.randint(1, 8), 1 + (seed % 5 == 4)
        graph, profile = random_step(
            rng, n_forward, plain=seed % 3 == 0, micro_batches=micro_batches
        )
        problem = problem_of(graph, profile)
        if len([c for c in range(problem.n_cells) if problem.can_keep[c]]) <= MOST_CELLS:
            yield graph, profile, problem


def budgets_between(least: int, most: int) -> list[int]:
    """From the least peak to just below the most."""
    return sorted({b for b in (least, (least + most) // 2, (least + 3 * most) // 4) if b < most})


@pytest.fixture
def never_over_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program counts every byte: no solution of it turns out to need more than the budget."""

    def forbid(self: IntegerProgram, solution: Sequence[bool]) -> None:
        raise AssertionError("a solution of the integer program is over the budget")

    monkeypatch.setattr(IntegerProgram, "forbid", forbid)


@pytest.mark.usefixtures("never_over_budget")
@pytest.mark.parametrize("block", range(10))
def test_it_equals_brute_force(block: int) -> None:
    n_costly = 0
    for graph, profile, problem in small_problems(range(40 * block, 40 * block + 40)):
        least = least_peak_bytes(problem)
        assert optimum(problem, None).peak_bytes == least
        for budget in budgets_between(least, lower(problem, keep_all(problem)).peak_bytes):
            plan = plan_ilp(graph, profile, budget)
            assert plan.recompute_us == least_added_us(problem, budget)
            n_costly += plan.recompute_us > 0
    assert n_costly > 20


def test_no_choices_are_better() -> None:
    """Every way to keep and to hold from, of small problems, against the optimum."""
    n_compared = 0
    for _, _, problem in small_problems(range(200)):
        ways = list(all_choices(problem))
        if len(ways) > 300:
            continue
        lowered = [lower(problem, chosen) for chosen in ways]
        for budget in {way.peak_bytes for way in lowered}:
            best = min(way.recompute_us for way in lowered if way.peak_bytes <= budget)
            assert optimum(problem, budget).recompute_us <= best
            n_compared += 1
    assert n_compared > 100


def all_choices(problem: Problem) -> Iterator[Choices]:
    """Keep, drop, or drop and free after the first reader, for every droppable cell."""
    always = choices(problem, ()).keep
    open_cells = [c for c, kept in enumerate(always) if not kept and problem.can_keep[c]]
    for fates in product(range(3), repeat=len(open_cells)):
        keep, hold_from = list(always), [0] * problem.n_cells
        for cell, fate in zip(open_cells, fates, strict=True):
            keep[cell] = fate == 0
            hold_from[cell] = problem.first_need[cell] + 1 if fate == 2 else 0
        yield Choices(keep, hold_from)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps(max_forward=10))
def test_plans_are_valid_and_do_what_they_say(made: tuple[StepGraph, Profile]) -> None:
    graph, profile = made
    with pytest.raises(InfeasibleBudget) as raised:
        plan_ilp(graph, profile, 0)
    least = raised.value.least_peak_bytes
    with pytest.raises(InfeasibleBudget):
        plan_ilp(graph, profile, least - 1)
    most = lower(problem_of(graph, profile), keep_all(problem_of(graph, profile))).peak_bytes
    last = float("inf")
    for budget in (least, (least + most) // 2, most):
        plan = plan_ilp(graph, profile, budget)
        plan.check(graph)
        trace = simulate(graph, profile, plan)
        assert trace.peak_bytes == plan.peak_bytes <= budget
        assert trace.recompute_us == plan.recompute_us == plan.bound_us
        assert plan.recompute_us <= last
        last = plan.recompute_us
    assert plan.recompute_us == 0
    assert all(decision.is_kept for decision in plan.decisions)


def n_computed(graph: StepGraph, profile: Profile, budget: int) -> list[int]:
    """How often each op of the forward pass runs again in the best plan."""
    return n_recomputed(graph, plan_ilp(graph, profile, budget))


def test_decisions_say_what_survives_until_it_is_read() -> None:
    graph, profile = chain(4, times_us=[5.0, 3.0, 2.0, 4.0])
    decisions = plan_ilp(graph, profile, 3).decisions
    assert [each.is_kept for each in decisions] == [False, False, True, True]
    assert sum(each.added_us for each in decisions) == 13.0
    assert "2 times" in decisions[0].reason


def test_where_nothing_can_be_held_every_cell_is_computed_from_the_start() -> None:
    """Of seven cells, the last two are live when they are read; then 5 + 4 + 3 + 2 + 1 ops."""
    graph, profile = chain(7)
    plan = plan_ilp(graph, profile, optimum(problem_of(graph, profile), None).peak_bytes)
    assert plan.peak_bytes == 3
    assert plan.recompute_us == 15.0
    assert n_computed(graph, profile, 3) == [5, 4, 3, 2, 1, 0, 0]


def test_a_diamond() -> None:
    """0 (4 bytes) → 1 and 2 → 3 (2 bytes each); the backward pass reads 3, 2, 1 and 0.

    With everything kept, 11 bytes at the first backward op, and 10 where cell 3 is made. In 10
    bytes one side is dropped, the cheaper one. Less is had only by dropping cell 0 before cell 3 is
    made; then the most is where 1 and 2 are made of it, 8 bytes.
    """
    graph, profile = diamond_of(
        [4, 2, 2, 2],
        [10.0, 1.0, 2.0, 1.0],
        backward=[
            Costed(BACKWARD, [4], [1]),
            Costed(BACKWARD, [3, 6], [1]),
            Costed(BACKWARD, [2, 7], [1]),
            Costed(BACKWARD, [1, 8], [1]),
        ],
    )
    assert n_computed(graph, profile, 11) == [0, 0, 0, 0]
    assert n_computed(graph, profile, 10) == [0, 1, 0, 0]
    assert n_computed(graph, profile, 9) == [1, 0, 0, 0]
    assert n_computed(graph, profile, 8) == [1, 0, 0, 0]
    with pytest.raises(InfeasibleBudget) as raised:
        plan_ilp(graph, profile, 7)
    assert raised.value.least_peak_bytes == 8


def test_a_cell_that_nobody_reads_again_is_kept_where_it_is_a_cheap_source() -> None:
    """Cell 1 is tiny and slow to compute; the large cell 2, made of it, is the activation."""
    graph, profile = costed_step(
        Costed(FORWARD, [0], [1], us=50.0),
        Costed(FORWARD, [1], [10], us=2.0),
        Costed(FORWARD, [2], [10]),
        Costed(LOSS, [3], [0], workspace=9),
        Costed(BACKWARD, [4], [1]),
        Costed(BACKWARD, [2, 5], [1]),
    )
    assert n_computed(graph, profile, 29) == [0, 0, 0]
    assert n_computed(graph, profile, 28) == [0, 1, 0]
    assert plan_ilp(graph, profile, 28).peak_bytes == 21


def test_what_a_later_forward_pass_still_uses_is_there_for_nothing() -> None:
    """Cell 1 stays for the second micro-batch, so the first one's backward pass reads it freely.

    Op 3 needs a workspace: 4 + 3 + 1 + 5 bytes with cell 2 there, 3 less without.
    """
    graph, profile = costed_step(
        Costed(FORWARD, [0], [4], us=10.0),
        Costed(FORWARD, [1], [3]),
        Costed(LOSS, [2], [0]),
        Costed(BACKWARD, [3], [1], workspace=5),
        Costed(BACKWARD, [2, 4], [1]),
        Costed(FORWARD, [1], [3]),
        Costed(LOSS, [6], [0]),
    )
    assert n_computed(graph, profile, 13) == [0, 0, 0]
    assert n_computed(graph, profile, 10) == [0, 1, 0]
    assert optimum(problem_of(graph, profile), None).peak_bytes == 10


def test_large_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, profile = chain(12)
    monkeypatch.setattr(ilp, "MAX_DECISIONS", 10)
    with pytest.raises(PlanError, match=r"for small steps.*Use the planner auto"):
        plan_ilp(graph, profile, 5)


def test_bytes_of_real_sizes_are_solved_exactly() -> None:
    """The budget is one byte short of keeping everything, at hundreds of gigabytes."""
    size = 2**36 + 1
    graph, profile = chain(6, [size, size + 512, size, size - 512, size, size])
    most = lower(problem_of(graph, profile), keep_all(problem_of(graph, profile))).peak_bytes
    assert plan_ilp(graph, profile, most).recompute_us == 0
    plan = plan_ilp(graph, profile, most - 1)
    assert plan.recompute_us == 1
    assert plan.peak_bytes <= most - 1
