"""Decisions: one for every activation, with bytes, time and a reason that is true."""

from __future__ import annotations

import random
from functools import cache

import pytest
from support.chains import chain
from support.diamonds import diamond
from support.hand_made import BACKWARD, FORWARD, LOSS, Costed, costed_step
from support.random_steps import random_step
from support.reading import recomputed

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Role, StepGraph
from rekindle.core.graph.schedule import Decision, Free, Plan
from rekindle.errors import InfeasibleBudget
from rekindle.planners.finish import finish
from rekindle.planners.lowering import choices, keep_all, lower
from rekindle.planners.problem import Problem, problem_of
from rekindle.planners.registry import PLANNERS


def decide(problem: Problem, kept: list[int]) -> dict[int, Decision]:
    """The decisions by storage, where just these cells are kept."""
    plan = finish(problem, choices(problem, kept), planner="by hand", budget_bytes=2**60)
    return {decision.storage: decision for decision in plan.decisions}


@cache
def plans() -> list[tuple[StepGraph, Problem, Plan]]:
    """Plans of every planner, each for a random step of its own; some planners need more room."""
    found = []
    for number, name in enumerate(20 * list(PLANNERS)):
        rng = random.Random(number)
        graph, profile = random_step(rng, rng.randint(2, 9), micro_batches=1 + number % 2)
        problem = problem_of(graph, profile)
        most = lower(problem, keep_all(problem)).peak_bytes
        try:
            plan = PLANNERS[name](graph, profile, most - rng.choice((0, 1, 3, 6)))
        except InfeasibleBudget as error:
            plan = PLANNERS[name](graph, profile, error.least_peak_bytes)
        found.append((graph, problem, plan))
    return found


def test_of_a_dropped_cell_the_bytes_the_time_and_its_reader_are_told() -> None:
    """Cell 1 (5 bytes, 7 µs) is idle from the end of op 2 to the start of op 5: ops 3 and 4."""
    problem = problem_of(*chain(3, [3, 5, 7], [2.0, 7.0, 4.0]))
    decisions = decide(problem, [0, 2])
    dropped = decisions[problem.storage[1]]
    assert not dropped.is_kept
    assert dropped.freed_bytes == 5
    assert dropped.added_us == 7.0
    assert "idle for 2.00 µs" in dropped.reason
    assert "computed again just before op5" in dropped.reason


def test_of_a_kept_cell_it_is_told_what_it_would_cost() -> None:
    problem = problem_of(*chain(3, [3, 5, 7], [2.0, 7.0, 4.0]))
    kept = decide(problem, [0, 2])[problem.storage[2]]
    assert kept.is_kept
    assert (kept.freed_bytes, kept.added_us) == (0, 0.0)
    assert "7 B" in kept.reason
    assert "4.00 µs" in kept.reason


def test_the_time_of_an_op_that_leads_to_a_cell_is_the_cells() -> None:
    """Both sides of the diamond are computed from cell 0, which then belongs to itself.

    Where the backward pass does not read it, its time belongs to what is computed from it first.
    """
    problem = problem_of(*diamond())
    added = {storage: d.added_us for storage, d in decide(problem, []).items()}
    assert added == {1: 10.0, 2: 2.0, 3: 3.0}
    unread = problem_of(*leading_to_two())
    added = {storage: d.added_us for storage, d in decide(unread, []).items()}
    assert sum(added.values()) == 15.0
    assert sorted(added.values()) == [3.0, 12.0]


def leading_to_two() -> tuple[StepGraph, Profile]:
    """Cell 0 leads to cells 1 and 2, which one backward op reads."""
    return costed_step(
        Costed(FORWARD, [0], [4], us=10.0),
        Costed(FORWARD, [1], [8], us=2.0),
        Costed(FORWARD, [1], [8], us=3.0),
        Costed(LOSS, [2, 3], [0]),
        Costed(BACKWARD, [4], [1]),
        Costed(BACKWARD, [2, 3, 5]),
    )


def test_every_activation_has_one_decision() -> None:
    for graph, problem, plan in plans():
        found = [decision.storage for decision in plan.decisions]
        assert len(found) == len(set(found))
        assert set(found) == {problem.storage[cell] for cell in problem.activations}
        for storage in found:
            assert graph.storages[storage].role is not Role.PARAM


def test_the_added_times_add_up_to_the_plans() -> None:
    """Views take no time in these steps: those that are made again belong to no activation."""
    n_costly = 0
    for _, _, plan in plans():
        assert sum(d.added_us for d in plan.decisions) == pytest.approx(plan.recompute_us)
        n_costly += plan.recompute_us > 0
    assert n_costly > 60


def test_what_is_told_of_each_cell_is_what_the_schedule_does() -> None:
    """A kept one is never computed again for its own sake, and freed once; a dropped one is."""
    n_dropped = 0
    for graph, problem, plan in plans():
        n_freed = {d.storage: 0 for d in plan.decisions}
        for instruction in plan.schedule:
            if isinstance(instruction, Free) and instruction.storage in n_freed:
                n_freed[instruction.storage] += 1
        computed = {problem.storage[c] for op in recomputed(plan) for c in problem.writes[op]}
        for decision in plan.decisions:
            assert decision.reason
            if decision.is_kept:
                assert (decision.freed_bytes, decision.added_us) == (0, 0.0)
            else:
                n_dropped += 1
                assert decision.storage in computed
                assert n_freed[decision.storage] > 1
                nbytes = graph.storages[decision.storage].nbytes
                elsewhere = graph.storages[decision.storage].device == "elsewhere"
                assert decision.freed_bytes == (0 if elsewhere else nbytes)
    assert n_dropped > 150


def test_what_cannot_be_computed_again_is_kept_and_the_op_is_named() -> None:
    """Op 0 counts up a buffer; what it makes is read in the backward pass."""
    graph, profile = costed_step(
        Costed(FORWARD, [0, 1], [8], mutates=[1]),
        Costed(LOSS, [2], [0]),
        Costed(BACKWARD, [3], [1]),
        Costed(BACKWARD, [2, 4]),
        buffers=[1],
    )
    (decision,) = decide(problem_of(graph, profile), []).values()
    assert decision.is_kept
    assert decision.reason == "cannot be computed again: op0 changes state (in1)"


def test_what_is_computed_from_something_that_is_gone_is_kept() -> None:
    """Op 1 makes cell 1 of what op 2 then overwrites, and op 0, which changes state, made."""
    graph, profile = costed_step(
        Costed(FORWARD, [0, 1], [8], mutates=[1]),
        Costed(FORWARD, [2], [8]),
        Costed(FORWARD, [2], mutates=[2]),
        Costed(LOSS, [2, 3], [0]),
        Costed(BACKWARD, [4], [1]),
        Costed(BACKWARD, [3, 5]),
        buffers=[1],
    )
    (decision,) = decide(problem_of(graph, profile), []).values()
    assert decision.is_kept
    assert decision.reason.startswith("cannot be computed again: what it is computed from is gone")


def test_reasons_name_the_op_that_must_not_run_again() -> None:
    """In random steps: ops that change a counter (count_…), and batch norms' statistics."""
    n_named = 0
    for graph, problem, plan in plans():
        of_storage = {problem.storage[cell]: cell for cell in problem.activations}
        for decision in plan.decisions:
            cell = of_storage[decision.storage]
            name = graph.ops[problem.writer[cell]].name
            if problem.must_keep[cell]:
                assert decision.is_kept
                assert decision.reason.startswith("cannot be computed again: ")
                n_named += name in decision.reason
                assert not name.startswith("count") or name in decision.reason
            else:
                assert "cannot" not in decision.reason
    assert n_named > 5


def test_ops_that_change_state_never_run_again_and_random_ones_may() -> None:
    counted, drawn = [], []
    for graph, _, plan in plans():
        names = [graph.ops[op].name for op in recomputed(plan)]
        counted += [name for name in names if name.startswith("count")]
        drawn += [op for op in recomputed(plan) if graph.ops[op].is_random]
    assert not counted
    assert len(drawn) > 5


def test_a_cell_without_bytes_is_kept_for_nothing() -> None:
    problem = problem_of(*chain(3, [3, 0, 7]))
    kept = decide(problem, [])[problem.storage[1]]
    assert kept.is_kept
    assert kept.reason == "takes no memory of the device"


def test_one_that_is_let_go_between_two_reads_is_dropped() -> None:
    """Op 2 and op 4 read cell 0; op 3 between them needs the room."""
    graph, profile = costed_step(
        Costed(FORWARD, [0], [10], us=6.0),
        Costed(LOSS, [1], [0]),
        Costed(BACKWARD, [1, 2], [1]),
        Costed(BACKWARD, [3], [1], us=8.0, workspace=20),
        Costed(BACKWARD, [1, 4], [1]),
    )
    plan = PLANNERS["ilp"](graph, profile, 22)
    (decision,) = plan.decisions
    assert plan.recompute_us == decision.added_us == 6.0
    assert not decision.is_kept
    assert decision.freed_bytes == 10
    assert "idle for 8.00 µs; computed again just before op4" in decision.reason


def test_a_plan_over_the_budget_is_refused_with_its_peak() -> None:
    problem = problem_of(*diamond())
    with pytest.raises(InfeasibleBudget) as raised:
        finish(problem, keep_all(problem), planner="by hand", budget_bytes=50)
    assert raised.value.least_peak_bytes == 51
    assert finish(problem, keep_all(problem), planner="by hand", budget_bytes=51).peak_bytes == 51
