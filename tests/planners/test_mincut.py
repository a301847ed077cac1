"""One price for the whole step: the cheapest priced cut that fits, and steps worked out by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.chains import chain
from support.diamonds import diamond
from support.hand_made import BACKWARD, FORWARD, LOSS, Costed, costed_step
from support.random_steps import random_step
from support.reading import dropped

from rekindle.errors import InfeasibleBudget
from rekindle.planners.baselines.mincut import cheapest_cut, plan_mincut
from rekindle.planners.lowering import choices, keep_all, lower
from rekindle.planners.min_cut import CutNetwork
from rekindle.planners.problem import problem_of


def test_a_chain_drops_the_cells_that_free_most_for_their_time() -> None:
    """Five cells of 5 bytes (storages 1 to 5) that take 1 to 5 µs, gradients of 1 byte.

    26 bytes are live where cell 4 is read. A price drops the cells up to some time: cell 0 frees 5
    bytes, cells 0 and 1 free 10. With cell 2 as well, the three are live together where cell 2 is
    read, between two gradients: 17 bytes. So the peak is never below 16.
    """
    graph, profile = chain(5, 5, [1.0, 2.0, 3.0, 4.0, 5.0], gradient_bytes=1)
    assert dropped(plan_mincut(graph, profile, 26)) == []
    for budget, storages_dropped, us in (
        (25, [1], 1.0),
        (21, [1], 1.0),
        (20, [1, 2], 3.0),
        (16, [1, 2], 3.0),
    ):
        plan = plan_mincut(graph, profile, budget)
        assert dropped(plan) == storages_dropped
        assert plan.recompute_us == us
    with pytest.raises(InfeasibleBudget) as raised:
        plan_mincut(graph, profile, 15)
    assert raised.value.least_peak_bytes == 16


def test_the_price_is_found_between_two_that_are_tried_first() -> None:
    """Both sides take about 1 µs a byte: a coarse step of the price drops both, a fine one the
    cheaper."""
    graph, profile = diamond((10.0, 8.0, 8.2))
    assert plan_mincut(graph, profile, 43).recompute_us == 8.0


def test_a_slow_source_is_kept_though_nothing_reads_it_in_the_backward_pass() -> None:
    """Cell 0 (1 byte, 50 µs) leads to cell 1 (10 bytes, 2 µs), the activation."""
    graph, profile = costed_step(
        Costed(FORWARD, [0], [1], us=50.0),
        Costed(FORWARD, [1], [10], us=2.0),
        Costed(LOSS, [2], [0]),
        Costed(BACKWARD, [3], [1], workspace=20),
        Costed(BACKWARD, [2, 4]),
    )
    assert plan_mincut(graph, profile, 31).recompute_us == 0
    assert plan_mincut(graph, profile, 30).recompute_us == 2
    assert plan_mincut(graph, profile, 22).recompute_us == 2
    assert plan_mincut(graph, profile, 21).recompute_us == 52


def test_no_price_gives_a_cheaper_plan_up_to_the_first_that_fits() -> None:
    """Against a fine sweep of all prices from 0 up to the first at which the plan fits."""
    n_found = 0
    for seed in range(30):
        rng = random.Random(seed)
        problem = problem_of(*random_step(rng, rng.randint(3, 12)))
        network, nbytes = CutNetwork(problem), np.array(problem.bytes, dtype=np.float64)
        most = lower(problem, keep_all(problem)).peak_bytes
        budget = (most + lower(problem, choices(problem, ())).peak_bytes) // 2
        if budget >= most:
            continue
        typical = network.costs_us.sum() / nbytes.sum()
        for price in typical * np.geomspace(1e-3, 1e3, 120):
            lowered = lower(problem, choices(problem, network.solve(price * nbytes).kept))
            if lowered.peak_bytes <= budget:
                best, least = cheapest_cut(problem, budget)
                assert best is not None
                assert least <= budget
                assert lower(problem, best).recompute_us <= lowered.recompute_us
                n_found += 1
                break
    assert n_found > 10


def test_the_peak_that_is_given_as_least_can_be_had_and_no_lower_one() -> None:
    """Of the last two, bisecting finds a lower peak than the prices tried first."""
    made = []
    for seed in range(15):
        rng = random.Random(seed)
        made.append(random_step(rng, rng.randint(1, 12), micro_batches=1 + seed % 2))
    made.append(random_step(random.Random(262), 11, plain=False, micro_batches=2))
    made.append(random_step(random.Random(88), 7, plain=False))
    for graph, profile in made:
        with pytest.raises(InfeasibleBudget) as raised:
            plan_mincut(graph, profile, 0)
        least = raised.value.least_peak_bytes
        assert plan_mincut(graph, profile, least).peak_bytes == least
