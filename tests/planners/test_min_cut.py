"""The priced minimum cut against every set of cells that could be kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from support.chains import chain
from support.hand_made import (
    BACKWARD,
    FORWARD,
    LOSS,
    Call,
    Costed,
    costed_step,
    profile_of,
    step,
    storages,
)
from support.random_steps import random_step

from rekindle.core.graph.graph import Role
from rekindle.planners.min_cut import CutNetwork
from rekindle.planners.problem import Problem, problem_of

MOST_CELLS = 11
FAR_TOO_MUCH = 1e6


def again_for(problem: Problem, kept: set[int]) -> set[int] | None:
    """The ops that must run again if just these are kept; None if that cannot be."""
    ops: set[int] = set()
    todo = list(problem.activations)
    while todo:
        cell = todo.pop()
        if cell in kept:
            continue
        if problem.must_keep[cell]:
            return None
        op = problem.writer[cell]
        if op not in ops:
            ops.add(op)
            todo += problem.reads[op]
    return ops


def objective(problem: Problem, kept: set[int], prices: list[float]) -> float:
    """The cost of a set of kept cells, prices and times; infinite if it is infeasible."""
    ops = again_for(problem, kept)
    if ops is None:
        return float("inf")
    return sum(problem.times[op] for op in ops) + sum(prices[cell] for cell in kept)


def keep_sets(problem: Problem) -> Iterator[set[int]]:
    """Every set of cells that can be kept."""
    cells = [c for c in range(problem.n_cells) if problem.can_keep[c]]
    for picked in product((False, True), repeat=len(cells)):
        yield {cell for cell, take in zip(cells, picked, strict=True) if take}


@pytest.mark.parametrize("block", range(4))
def test_no_set_of_kept_cells_is_better(block: int) -> None:
    """Times and prices are whole numbers, so rounded capacities cannot decide between two sets."""
    n_mixed = n_fixed = n_overwritten = 0
    for seed in range(40 * block, 40 * block + 40):
        rng = random.Random(seed)
        graph, profile = random_step(rng, rng.randint(2, 9), micro_batches=1 + seed % 2)
        problem = problem_of(graph, profile)
        if problem.n_cells > MOST_CELLS:
            continue
        prices = [float(rng.randint(0, 12)) for _ in range(problem.n_cells)]
        least = min(objective(problem, kept, prices) for kept in keep_sets(problem))
        cut = CutNetwork(problem).solve(np.array(prices))
        assert all(problem.can_keep[cell] for cell in cut.kept)
        assert set(cut.ops) == again_for(problem, set(cut.kept))
        assert objective(problem, set(cut.kept), prices) == least
        assert least - 1e-3 <= cut.value_us <= least
        n_mixed += bool(cut.ops and cut.kept)
        n_fixed += any(problem.must_keep[cell] for cell in cut.kept)
        n_overwritten += any(not problem.can_keep[c] for op in cut.ops for c in problem.writes[op])
    assert n_mixed > 3
    assert n_fixed > 3
    assert n_overwritten > 0


def test_a_chain_keeps_a_cell_where_its_price_is_below_its_time() -> None:
    """Every cell is read, so each is kept or computed for itself: the decisions are separate."""
    problem = problem_of(*chain(4, times_us=[5.0, 1.0, 7.0, 3.0]))
    cut = CutNetwork(problem).solve(np.array([4.0, 2.0, 6.0, 4.0]))
    assert cut.kept == [0, 2]
    assert cut.ops == [1, 3]
    assert cut.value_us == pytest.approx(4 + 1 + 6 + 3)


def unread_middle() -> Problem:
    """A chain of 0, 1 and 2 of which the backward pass reads 2 alone; times 10, 1 and 1."""
    graph = step(
        storages(
            (0, Role.INPUT), *3 * [(4, Role.ACTIVATION)], (0, Role.OUTPUT), (1, Role.GRAD_MAP)
        ),
        entering=[0],
        calls=[
            Call(FORWARD, [0], [1]),
            Call(FORWARD, [1], [2]),
            Call(FORWARD, [2], [3]),
            Call(LOSS, [3], [4]),
            Call(BACKWARD, [4, 3], [5]),
        ],
        outputs=[4],
    )
    return problem_of(graph, profile_of(graph, times_us=[10.0, 1.0, 1.0, 1.0, 1.0]))


def test_a_cell_that_is_not_read_is_kept_for_those_computed_from_it() -> None:
    problem = unread_middle()
    assert problem.activations == [2]
    network = CutNetwork(problem)
    assert network.solve(np.array([2.0, 9.0, 9.0])).kept == [0]  # 2 + 1 + 1
    assert network.solve(np.array([9.0, 2.0, 9.0])).kept == [1]  # 2 + 1
    assert network.solve(np.array([9.0, 9.0, 2.0])).kept == [2]
    nothing = network.solve(np.array([13.0, 13.0, 13.0]))
    assert (nothing.kept, nothing.ops) == ([], [0, 1, 2])


def test_an_op_that_makes_two_cells_is_paid_once() -> None:
    """Op 1 makes cells 1 and 2: recomputed for one, it makes the other, too."""
    graph, profile = costed_step(
        Costed(FORWARD, [0], [4], us=9.0),
        Costed(FORWARD, [1], [4, 4], us=5.0),
        Costed(LOSS, [2, 3], [0]),
        Costed(BACKWARD, [4], [1]),
        Costed(BACKWARD, [1, 2, 3, 5]),
    )
    network = CutNetwork(problem_of(graph, profile))
    together = network.solve(np.array([1.0, 3.0, 3.0]))  # 5 against 3 + 3
    assert (together.kept, together.ops) == ([0], [1])
    apart = network.solve(np.array([1.0, 2.0, 2.0]))
    assert (apart.kept, apart.ops) == ([0, 1, 2], [])


def test_a_price_beyond_all_times_keeps_nothing() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        problem = problem_of(*random_step(rng, rng.randint(2, 12), plain=True))
        network = CutNetwork(problem)
        assert not network.solve(np.full(problem.n_cells, FAR_TOO_MUCH)).kept
        free = network.solve(np.zeros(problem.n_cells))
        assert not free.ops
        assert free.value_us == 0
