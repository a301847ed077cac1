"""The lower bound: never above the optimum, and known exactly where one decision is all."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from support.chains import chain
from support.hand_made import BACKWARD, FORWARD, LOSS, Costed, costed_step
from support.random_steps import random_step

from rekindle.planners.bound import Bound
from rekindle.planners.exact.ilp import optimum
from rekindle.planners.lowering import keep_all, lower
from rekindle.planners.problem import Problem, problem_of


def idle_cells(*times_us: float) -> Problem:
    """Micro-batches, each with a cell of 10 bytes that takes this time and is read last.

    It lies idle while 20 bytes of workspace are in use.
    """
    calls = []
    for index, us in enumerate(times_us):
        cell = 1 + 3 * index
        calls += [
            Costed(FORWARD, [0], [10], us),
            Costed(LOSS, [cell], [0]),
            Costed(BACKWARD, [cell + 1], [1], workspace=20),
            Costed(BACKWARD, [cell, cell + 2]),
        ]
    return problem_of(*costed_step(*calls))


def test_one_cell_must_go_by_as_much_as_is_over_the_budget() -> None:
    """31 bytes with it, 21 without: a budget in between takes its share of the 7 µs at least."""
    bound = Bound(idle_cells(7.0))
    assert bound.added_us(31) == 0
    assert bound.added_us(21) == pytest.approx(7.0, rel=1e-3)
    assert bound.added_us(26) == pytest.approx(3.5, rel=1e-3)
    assert bound.added_us(30) == pytest.approx(0.7, rel=1e-3)


def test_below_the_bytes_live_under_every_plan_the_bound_is_infinite() -> None:
    assert Bound(idle_cells(7.0)).added_us(20) == float("inf")


def test_the_cells_that_free_most_for_their_time_count_first() -> None:
    """Cells 0 to 3 lie idle at the peak, where cell 4 is read, 5 bytes each, for 1 to 4 µs.

    Of the 26 bytes there, dropping cells 0 and 1 leaves 16. To reach 14, 2 of the 5 bytes of cell
    2 are missing as well: two fifths of 3 µs.
    """
    problem = problem_of(*chain(5, 5, [1.0, 2.0, 3.0, 4.0, 9.0], gradient_bytes=1))
    bound = Bound(problem)
    assert bound.added_us(26) == 0
    assert bound.added_us(21) == pytest.approx(1.0, rel=1e-3)
    assert bound.added_us(16) == pytest.approx(3.0, rel=1e-3)
    assert bound.added_us(14) == pytest.approx(3.0 + 3.0 * 2 / 5, rel=1e-3)


def test_two_peaks_are_priced_at_once() -> None:
    """Of two micro-batches, each must drop its own."""
    problem = idle_cells(7.0, 5.0)
    assert Bound(problem).added_us(21) == pytest.approx(12.0, rel=1e-3)


def sources_of_one_activation(*sizes: int) -> Problem:
    """Cells of these sizes, 50 µs each, that only the forward pass reads, lead to d: 2 bytes, 3 µs.

    While they are in use, there is no room for d: it is freed, and recomputed from them before
    the first backward op, which reads f. At the peak after that there is room for d alone. So 3 µs
    are added, within a budget of 32 bytes, if the sizes add up to 20.
    """
    n = len(sizes)
    batch, f, d, spent, loss = 0, 1, n + 2, n + 3, n + 4
    sources = list(range(2, n + 2))
    return problem_of(
        *costed_step(
            Costed(FORWARD, [batch], [1], us=100.0),
            *(Costed(FORWARD, [batch], [size], us=50.0) for size in sizes),
            Costed(FORWARD, sources, [2], us=3.0),
            Costed(FORWARD, sources, [1], workspace=10),
            Costed(LOSS, [spent], [0]),
            Costed(BACKWARD, [f, loss], [1]),
            Costed(BACKWARD, [loss + 1], [1], workspace=28),
            Costed(BACKWARD, [d, loss + 2]),
        )
    )


@pytest.mark.parametrize("sizes", [(20,), (10, 10), (1, 19)])
def test_of_sources_only_what_they_lead_to_need_be_held(sizes: tuple[int, ...]) -> None:
    """And what several lead to is held once."""
    problem = sources_of_one_activation(*sizes)
    assert optimum(problem, 32).recompute_us == 3.0
    assert Bound(problem).added_us(32) == pytest.approx(3.0, rel=1e-3)


def problems(seeds: range, most_forward: int) -> list[tuple[int, Problem]]:
    """Random steps with all kinds of ops; every third in two micro-batches, every fifth plain."""
    found = []
    for seed in seeds:
        rng = random.Random(seed)
        n_forward = rng.randint(1, most_forward)
        made = random_step(rng, n_forward, plain=seed % 5 == 0, micro_batches=1 + (seed % 3 == 0))
        found.append((seed, problem_of(*made)))
    return found


@pytest.mark.parametrize("block", range(5))
def test_no_plan_is_below_the_bound(block: int) -> None:
    n_positive = n_near = 0
    for seed, problem in problems(range(50 * block, 50 * block + 50), most_forward=8):
        least = optimum(problem, None).peak_bytes
        most = lower(problem, keep_all(problem)).peak_bytes
        bound = Bound(problem)
        for budget in sorted({least, (2 * least + most) // 3, (least + 2 * most) // 3, most - 1}):
            if least <= budget < most:
                best_us, bound_us = optimum(problem, budget).recompute_us, bound.added_us(budget)
                assert bound_us <= best_us + 1e-6, (seed, budget)
                n_positive += bound_us > 0
                n_near += bound_us > 0.9 * best_us
    assert n_positive > 50
    assert n_near > 5


def test_a_larger_budget_never_has_a_higher_bound() -> None:
    """But for the thousandth by which a bound may stay below the best there is."""
    for seed, problem in problems(range(1000, 1060), most_forward=9):
        least = optimum(problem, None).peak_bytes
        most = lower(problem, keep_all(problem)).peak_bytes
        bound = Bound(problem)
        bounds = [bound.added_us(least + (most - least) * i // 5) for i in range(6)]
        assert bounds[-1] == 0
        for tighter, looser in pairwise(bounds):
            assert looser <= tighter * 1.002 + 1e-6, seed


def test_what_the_next_forward_pass_will_overwrite_is_there_for_nothing_until_then() -> None:
    """Op 5 changes a in place, but b is computed from it before that: 5 µs, without op 0's 7."""
    graph, profile = costed_step(
        Costed(FORWARD, [0], [4], us=7.0),
        Costed(FORWARD, [1], [10], us=5.0),
        Costed(LOSS, [2], [0]),
        Costed(BACKWARD, [3], [1], workspace=20),
        Costed(BACKWARD, [2, 4]),
        Costed(FORWARD, [1], mutates=[1]),
        Costed(LOSS, [1], [0]),
    )
    problem = problem_of(graph, profile)
    assert optimum(problem, 25).recompute_us == 5.0
    assert Bound(problem).added_us(25) == pytest.approx(5.0, rel=1e-3)


def test_what_must_be_kept_is_paid_for_however_high_its_price() -> None:
    """A must-keep cell of 40 bytes and one of 10 that takes 2 µs lie idle at the peak."""
    graph, profile = costed_step(
        Costed(FORWARD, [0, 1], [40], mutates=[1]),
        Costed(FORWARD, [0], [10], us=2.0),
        Costed(LOSS, [2, 3], [0]),
        Costed(BACKWARD, [4], [1], workspace=20),
        Costed(BACKWARD, [2, 3, 5]),
        buffers=[1],
    )
    problem = problem_of(graph, profile)
    assert problem.must_keep == [True, False]
    assert optimum(problem, 62).recompute_us == 2.0
    assert Bound(problem).added_us(62) == pytest.approx(2.0, rel=1e-3)
