"""Local search never adds time, stays within the budget, and improves what can be improved."""

from __future__ import annotations

import random
from collections.abc import Iterator

from support.chains import chain
from support.diamonds import diamond
from support.random_steps import random_step

from rekindle.planners.local_search import exchange, fit, polish
from rekindle.planners.lowering import Choices, choices, keep_all, lower
from rekindle.planners.problem import Problem, problem_of


def random_problems(seeds: range) -> Iterator[tuple[random.Random, Problem]]:
    for seed in seeds:
        rng = random.Random(seed)
        made = random_step(rng, rng.randint(2, 14), micro_batches=1 + seed % 2)
        yield rng, problem_of(*made)


def over(problem: Problem, chosen: Choices, budget: int) -> int:
    """By how much all positions together are over the budget."""
    return sum(max(int(live) - budget, 0) for live in lower(problem, chosen).live)


def test_room_that_is_left_is_used_for_the_most_expensive_cell_that_fits() -> None:
    """Both sides of the diamond are dropped, and there is room for one: that of 3 µs, not 2."""
    problem = problem_of(*diamond())
    polished = polish(problem, choices(problem, [0]), 43)
    assert polished.keep == [True, False, True, False]
    assert lower(problem, polished).recompute_us == 2.0
    assert lower(problem, polished).peak_bytes == 43


def test_a_cell_that_does_not_fit_is_left_for_one_that_does() -> None:
    """Cells 0 (5 µs) and 2 (2 µs) are dropped. Cell 0 would be live with 1, 2 and two gradients."""
    problem = problem_of(*chain(4, times_us=[5.0, 3.0, 2.0, 4.0]))
    polished = polish(problem, choices(problem, [1, 3]), 4)
    assert polished.keep == [False, True, True, True]
    assert lower(problem, polished).peak_bytes == 4


def test_with_room_for_everything_everything_is_kept() -> None:
    problem = problem_of(*chain(6))
    most = lower(problem, keep_all(problem)).peak_bytes
    assert lower(problem, polish(problem, choices(problem, ()), most)).recompute_us == 0


def test_polish_never_costs_time_and_stays_within_the_budget() -> None:
    n_better = 0
    for rng, problem in random_problems(range(200)):
        share = rng.random()
        chosen = choices(problem, [c for c in problem.droppable if rng.random() < share])
        for cell in problem.droppable:
            chosen.hold_from[cell] = rng.choice((0, 0, rng.randint(0, problem.n_ops)))
        before = lower(problem, chosen)
        most = lower(problem, keep_all(problem)).peak_bytes
        budget = max(before.peak_bytes, (before.peak_bytes + most) // 2)
        after = lower(problem, polish(problem, chosen, budget))
        assert after.peak_bytes <= budget
        assert after.recompute_us <= before.recompute_us
        n_better += after.recompute_us < before.recompute_us
    assert n_better > 50


def test_fit_drops_what_frees_most_for_its_time() -> None:
    """Cells 0 to 3 lie idle at the peak, 5 bytes each: to get 6 bytes off it, the two cheapest go.

    The others take 30 µs and more.
    """
    problem = problem_of(*chain(5, 5, [2.0, 40.0, 1.0, 30.0, 50.0], gradient_bytes=1))
    most = lower(problem, keep_all(problem)).peak_bytes
    fitted = fit(problem, keep_all(problem), most - 6)
    assert [cell for cell in range(5) if not fitted.keep[cell]] == [0, 2]
    lowered = lower(problem, fitted)
    assert lowered.peak_bytes <= most - 6
    assert lowered.recompute_us == 3.0


def test_fit_lets_go_of_what_was_computed_early() -> None:
    """The burst for cell 5 passes through all the others and holds them until they are read.

    Letting some of them go after it brings the peak down, and costs another run.
    """
    problem = problem_of(*chain(6, gradient_bytes=0))
    dropped = choices(problem, ())
    held = lower(problem, dropped).peak_bytes
    fitted = fit(problem, dropped, 2)
    assert any(fitted.hold_from)
    lowered = lower(problem, fitted)
    assert lowered.peak_bytes < held
    assert lowered.recompute_us > lower(problem, dropped).recompute_us


def test_fit_lowers_what_is_over_the_budget_or_leaves_it() -> None:
    n_fitted = n_lower = 0
    for _, problem in random_problems(range(200)):
        chosen = keep_all(problem)
        most = lower(problem, chosen).peak_bytes
        least = lower(problem, choices(problem, ())).peak_bytes
        budget = (min(least, most) + most) // 2
        fitted = fit(problem, chosen, budget)
        before, after = over(problem, chosen, budget), over(problem, fitted, budget)
        assert after < before or fitted == chosen
        n_lower += after < before
        n_fitted += after == 0 < before
    assert n_lower > 40
    assert n_fitted > 30


def test_fit_leaves_a_plan_that_fits_alone() -> None:
    problem = problem_of(*chain(5))
    chosen = choices(problem, [1, 3])
    assert fit(problem, chosen, lower(problem, chosen).peak_bytes) == chosen


def test_exchange_finds_what_neither_dropping_nor_keeping_alone_would() -> None:
    """Of the sides of the diamond, the expensive one is dropped, and there is room for one."""
    problem = problem_of(*diamond())
    chosen = choices(problem, [0, 1])
    assert polish(problem, chosen, 43) == fit(problem, chosen, 43) == chosen
    exchanged = exchange(problem, chosen, 43)
    assert exchanged.keep[:3] == [True, False, True]
    assert lower(problem, exchanged).recompute_us == 2.0


def test_exchange_never_costs_time_and_stays_within_the_budget() -> None:
    n_better = 0
    for rng, problem in random_problems(range(60)):
        kept = [c for c in problem.droppable if rng.random() < 0.5]
        chosen = choices(problem, kept)
        before = lower(problem, chosen)
        after = lower(problem, exchange(problem, chosen, before.peak_bytes))
        assert after.peak_bytes <= before.peak_bytes
        assert after.recompute_us <= before.recompute_us
        n_better += after.recompute_us < before.recompute_us
    assert n_better > 10
