"""μ-TWO's greedy: its book-keeping worked out by hand and against a literal second version."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.chains import chain
from support.diamonds import diamond_of
from support.hand_made import BACKWARD, FORWARD, LOSS, Call, Costed, profile_of, step, storages
from support.random_steps import random_step

from rekindle.core.graph.graph import Role
from rekindle.core.graph.schedule import check
from rekindle.core.graph.serial import load_profile
from rekindle.errors import InfeasibleBudget
from rekindle.planners.baselines.mutwo import Greedy, peak_floors, plan_mutwo
from rekindle.planners.lowering import choices, lower
from rekindle.planners.problem import Problem, problem_of
from rekindle.planners.registry import PLANNERS

PLENTY = 10**15
PROFILES = sorted((Path(__file__).parents[2] / "benchmarks" / "profiles").glob("*.json.gz"))


def state(greedy: Greedy) -> dict[int, tuple[set[int], float, int, float]]:
    """Of each cell: its sources, time, count and total time."""
    return {
        cell: (c.recomp_srcs, c.recomp_time, c.recomp_cnt, c.total_recomp_time)
        for cell, c in greedy.candidates.items()
    }


def peaks(problem: Problem, order: list[int]) -> list[int]:
    """The simulated peak after each number of drops."""
    return [
        lower(problem, choices(problem, set(problem.droppable) - set(order[:n]))).peak_bytes
        for n in range(len(order) + 1)
    ]


def test_from_the_front_by_hand() -> None:
    """The first op is the cheapest. Each drop hands its sources on to the candidate after it."""
    greedy = Greedy(problem_of(*chain(4, 8, [1.0, 2.0, 4.0, 8.0])))
    assert state(greedy) == {
        0: (set(), 1, 1, 1),
        1: ({0}, 2, 1, 2),
        2: ({1}, 4, 1, 4),
        3: ({2}, 8, 1, 8),
    }
    run = greedy.run()
    assert next(run) == 0
    assert state(greedy)[1] == (set(), 3, 1, 3)  # from the batch, through cell 0
    assert next(run) == 1
    assert state(greedy)[2] == (set(), 7, 1, 7)
    assert next(run) == 2
    assert state(greedy)[3] == (set(), 15, 1, 15)
    assert greedy.candidates[3].recompute_ratio == 8 / 15
    assert list(run) == [3]


def test_from_the_back_by_hand() -> None:
    """The last op is the cheapest. Each drop makes those dropped before it more expensive."""
    greedy = Greedy(problem_of(*chain(4, 8, [10.0, 4.0, 2.0, 1.0])))
    run = greedy.run()
    assert next(run) == 3
    assert state(greedy)[3] == ({2}, 1, 1, 1)
    assert state(greedy)[2] == ({1}, 2, 1, 2)  # its count times their time: 1 × 2
    assert next(run) == 2
    assert state(greedy) == {
        0: (set(), 10, 1, 10),
        1: ({0}, 4, 2, 8),  # among its sources: its count, 2, times 4
        2: ({1}, 2, 2, 2),  # once for itself, once for cell 3
        3: ({1}, 3, 1, 1),  # its sources in its place, and its time on top
    }
    assert next(run) == 1
    assert state(greedy) == {
        0: (set(), 10, 3, 30),
        1: ({0}, 4, 3, 8),
        2: ({0}, 6, 2, 2),
        3: ({0}, 7, 1, 1),
    }
    assert list(run) == [0]


def test_in_the_middle_by_hand() -> None:
    """A candidate between two dropped ones: its total counts the dropped one that it serves."""
    greedy = Greedy(problem_of(*chain(4, [8, 8, 1, 8], [1.0, 100.0, 2.0, 3.0])))
    run = greedy.run()
    assert [next(run), next(run)] == [0, 3]
    assert state(greedy) == {
        0: (set(), 1, 1, 1),
        1: (set(), 101, 1, 101),
        2: ({1}, 2, 1, 2),
        3: ({2}, 3, 1, 3),
    }
    assert next(run) == 2  # 1 byte for 2 µs against 8 for 101
    assert state(greedy)[1] == (set(), 101, 2, 202)
    assert state(greedy)[3] == ({1}, 5, 1, 3)


def test_a_source_that_is_live_again_stays_a_source() -> None:
    """The backward pass reads cell 0, then cell 1, then cell 0: it is live for cell 1."""
    memory = storages(
        (0, Role.INPUT),
        (100, Role.ACTIVATION),
        (10, Role.ACTIVATION),
        (0, Role.OUTPUT),
        (0, Role.GRAD_MAP),
        (0, Role.GRAD_MAP),
    )
    calls = [
        Call(FORWARD, [0], [1]),
        Call(FORWARD, [1], [2]),
        Call(LOSS, [2], [3]),
        Call(BACKWARD, [1], [4]),
        Call(BACKWARD, [2, 4], [5]),
        Call(BACKWARD, [1, 5]),
    ]
    graph = step(memory, [0], calls, outputs=[3])
    greedy = Greedy(problem_of(graph, profile_of(graph)))
    run = greedy.run()
    assert next(run) == 0
    assert state(greedy)[1] == ({0}, 1, 1, 1)
    assert list(run) == [1]


def test_a_diamond_takes_the_union_of_sources() -> None:
    """Cells: a, then b and c from a, then d from b and c."""
    backward = [Costed(BACKWARD, [i]) for i in (4, 3, 2, 1)]
    graph, profile = diamond_of([8, 8, 8, 8], [8, 1, 2, 4], backward)
    greedy = Greedy(problem_of(graph, profile))
    assert state(greedy)[3] == ({1, 2}, 4, 1, 4)
    run = greedy.run()
    assert next(run) == 1
    assert state(greedy)[3] == ({0, 2}, 5, 1, 5)
    assert next(run) == 2
    assert state(greedy)[3] == ({0}, 7, 1, 7)
    assert state(greedy)[0] == (set(), 8, 1, 8)


def test_what_the_backward_pass_does_not_read_is_passed_through() -> None:
    """A temporary, an in-place change, two results of one op and one that must be kept.

    Cell 0 is a temporary; cells 1 and 2 are storage 2 before and after its change; cells 3 and 4
    are made together; cell 5 by an op that changes a buffer; cell 6 from it.
    """
    memory = storages(
        (0, Role.INPUT),
        (4, Role.TEMP),
        *[(4, Role.ACTIVATION)] * 5,
        (0, Role.OUTPUT),
        (4, Role.BUFFER),
    )
    # Values: 0 the batch, 1 the buffer, then storages 1 to 7 in order.
    calls = [
        Call(FORWARD, [0], [1]),
        Call(FORWARD, [2], [2]),
        Call(FORWARD, [3], [], [3]),
        Call(FORWARD, [3], [3, 4]),
        Call(FORWARD, [4, 1], [5], [1]),
        Call(FORWARD, [6], [6]),
        Call(LOSS, [7], [7]),
        *[Call(BACKWARD, [v]) for v in (7, 6, 5, 4, 3)],
    ]
    graph = step(memory, [0, 8], calls, outputs=[8])
    problem = problem_of(graph, profile_of(graph, times_us=[1, 2, 4, 8, 16, 32, *[1.0] * 6]))
    assert [c for c in problem.activations if problem.must_keep[c]] == [5]
    greedy = Greedy(problem)
    assert state(greedy) == {
        2: (set(), 1 + 2 + 4, 1, 7),
        3: ({2}, 8, 1, 8),
        4: ({2}, 8, 1, 8),
        6: ({5}, 32, 1, 32),
    }
    assert sorted(greedy.run()) == [2, 3, 4, 6]
    plan = plan_mutwo(graph, problem.profile, PLENTY)
    check(graph, plan.schedule)


def test_nothing_is_dropped_where_everything_fits() -> None:
    graph, profile = chain(16)
    plain = PLANNERS["none"](graph, profile, PLENTY)
    plan = plan_mutwo(graph, profile, plain.peak_bytes)
    assert plan.schedule == plain.schedule
    assert plan.recompute_us == 0


def test_it_stops_as_soon_as_it_fits() -> None:
    """At every budget, with the first number of drops that fits."""
    graph, profile = chain(8, 1, [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], gradient_bytes=0)
    plain = PLANNERS["none"](graph, profile, PLENTY)
    order = list(Greedy(problem_of(graph, profile)).run())
    found = peaks(problem_of(graph, profile), order)
    assert found[0] == plain.peak_bytes == 8
    for budget in range(min(found), 9):
        plan = plan_mutwo(graph, profile, budget)
        check(graph, plan.schedule)
        n_dropped = sum(not decision.is_kept for decision in plan.decisions)
        assert n_dropped == next(n for n, peak in enumerate(found) if peak <= budget)


def test_the_least_peak_on_the_way_is_told_and_reachable() -> None:
    """Dropping all of a chain brings the peak back up: the least lies before the end."""
    graph, profile = chain(64)
    problem = problem_of(graph, profile)
    found = peaks(problem, list(Greedy(problem).run()))
    assert min(found) < found[-1]
    with pytest.raises(InfeasibleBudget) as raised:
        plan_mutwo(graph, profile, 1)
    assert raised.value.least_peak_bytes == min(found)
    assert plan_mutwo(graph, profile, min(found)).peak_bytes == min(found)
    with pytest.raises(InfeasibleBudget) as raised:
        plan_mutwo(graph, profile, min(found) - 1)
    assert raised.value.least_peak_bytes == min(found)


def test_ops_that_take_no_time_go_first() -> None:
    greedy = Greedy(problem_of(*chain(3, 8, [1.0, 0.0, 1.0])))
    assert next(greedy.run()) == 1


@dataclass
class Literal:
    """One candidate of the second version below."""

    srcs: set[int]
    time: float
    total: float


def literal_order(problem: Problem) -> list[int]:
    """The loop as the specification states it: no index, no heap, every rule by a search."""

    def available(cell: int) -> bool:
        return bool(problem.needs[cell]) or problem.must_keep[cell]

    def lineage(cell: int) -> tuple[set[int], set[int]]:
        op = problem.writer[cell]
        srcs, ops = set(), {op}
        for read in problem.reads[op]:
            if available(read):
                srcs.add(read)
            else:
                more_srcs, more_ops = lineage(read)
                srcs |= more_srcs
                ops |= more_ops
        return srcs, ops

    candidates: dict[int, Literal] = {}
    for cell in problem.droppable:
        if problem.bytes[cell]:
            srcs, ops = lineage(cell)
            us = sum(problem.times[op] for op in ops)
            candidates[cell] = Literal(srcs, us, us)
    dropped: dict[int, Literal] = {}
    order = []
    while candidates:

        def ratio(cell: int) -> float:
            total = candidates[cell].total
            return problem.bytes[cell] / total if total else float("inf")

        chosen = max(candidates, key=lambda cell: (ratio(cell), -cell))
        t = candidates.pop(chosen)
        count = 1
        for other in dropped.values():
            if chosen in other.srcs:
                other.srcs = (other.srcs - {chosen}) | t.srcs
                other.time += t.time
                count += 1
        dropped[chosen] = t
        order.append(chosen)
        first, last = problem.needs[chosen][0], problem.needs[chosen][-1]
        for cell, candidate in candidates.items():
            if chosen in candidate.srcs and not first <= problem.needs[cell][0] <= last:
                candidate.srcs = (candidate.srcs - {chosen}) | t.srcs
                candidate.time += t.time
                users = sum(cell in other.srcs for other in dropped.values())
                candidate.total = candidate.time * (1 + users)
        for cell in t.srcs:
            if cell in candidates:
                candidates[cell].total = count * candidates[cell].time
    return order


@pytest.mark.parametrize("n_forward", [5, 20, 60])
def test_against_the_literal_version(n_forward: int) -> None:
    """The same order on random steps; the floors are below the peaks, and both ends are exact."""
    for seed in range(40):
        rng = random.Random(seed)
        graph, profile = random_step(rng, n_forward, micro_batches=rng.randint(1, 2))
        problem = problem_of(graph, profile)
        order = list(Greedy(problem).run())
        assert order == literal_order(problem)
        found = peaks(problem, order)
        floors = peak_floors(problem, order).tolist()
        assert all(floor <= peak for floor, peak in zip(floors, found, strict=True))
        assert floors[0] == found[0]


def test_random_steps() -> None:
    """The first number of drops that fits is taken; what is told as the least can be had."""
    for seed in range(100):
        rng = random.Random(seed)
        graph, profile = random_step(rng, rng.randint(1, 30), micro_batches=rng.randint(1, 3))
        problem = problem_of(graph, profile)
        found = peaks(problem, list(Greedy(problem).run()))
        for budget in {min(found), max(found), (min(found) + max(found)) // 2}:
            plan = plan_mutwo(graph, profile, budget)
            check(graph, plan.schedule)
            assert plan.peak_bytes == next(peak for peak in found if peak <= budget)
        with pytest.raises(InfeasibleBudget) as raised:
            plan_mutwo(graph, profile, min(found) - 1)
        assert raised.value.least_peak_bytes == min(found)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name.split(".")[0])
def test_measured_profiles(path: Path) -> None:
    """At 80% of the plain peak; a budget that no plan can meet names one that this planner can."""
    graph, profile, _ = load_profile(path)
    plain = PLANNERS["none"](graph, profile, PLENTY)
    plan = plan_mutwo(graph, profile, int(0.8 * plain.peak_bytes))
    check(graph, plan.schedule)
    assert plan.peak_bytes <= 0.8 * plain.peak_bytes
    assert 0 < plan.recompute_us < 0.25 * profile.step_us
    with pytest.raises(InfeasibleBudget) as raised:
        plan_mutwo(graph, profile, 1)
    least = raised.value.least_peak_bytes
    assert plan_mutwo(graph, profile, least).peak_bytes == least
