"""Blocks, the options of segments, and the dynamic program over them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from support.chains import chain
from support.diamonds import DIAMOND_OPTIMA, diamond
from support.hand_made import BACKWARD, FORWARD, LOSS, Costed, costed_step
from support.random_steps import random_step
from support.synthetic import deep_resnet

from rekindle.core.graph.schedule import check
from rekindle.planners.chain import BlockPartition, Chain, Option, segment_plans
from rekindle.planners.exact.ilp import optimum
from rekindle.planners.lowering import keep_all, lower, to_schedule
from rekindle.planners.problem import Problem, problem_of


def random_chain(rng: random.Random, most: int = 12) -> Problem:
    """A chain with cells and ops of any cost."""
    n = rng.randint(3, most)
    graph, profile = chain(
        n,
        [rng.randint(1, 9) for _ in range(n)],
        [float(rng.randint(1, 9)) for _ in range(n)],
        gradient_bytes=rng.choice((0, 1, 3)),
        reads_output=rng.random() < 0.5,
    )
    return problem_of(graph, profile)


# Blocks


def test_a_chain_is_cut_where_few_bytes_cross() -> None:
    blocks = BlockPartition(problem_of(*chain(8, [9, 8, 1, 9, 8, 1, 9, 9])))
    assert blocks.ends.tolist() == [3, 6, 8]
    assert blocks.block_of_cell == [0, 0, 0, 1, 1, 1, 2, 2]


def test_blocks_are_as_many_as_asked_for_at_most() -> None:
    problem = problem_of(*chain(200))
    for most in (5, 20, 100):
        assert 0.5 * most <= BlockPartition(problem, most).n_blocks <= most + 1


def test_every_op_is_in_one_block() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        blocks = BlockPartition(problem_of(*random_step(rng, rng.randint(1, 20))))
        starts = [0, *blocks.ends.tolist()]
        assert all(a < b for a, b in pairwise(starts))
        assert starts[-1] == len(blocks.ops)
        for number, (start, end) in enumerate(pairwise(starts)):
            assert set(blocks.block_of_op[start:end]) == {number}


def test_ops_that_write_one_storage_are_in_one_block() -> None:
    problem = problem_of(*deep_resnet(12))
    blocks = BlockPartition(problem)
    assert blocks.n_blocks > 10
    assert not all(problem.can_keep)  # ReLUs in place
    of_storage: dict[int, set[int]] = {}
    for cell, storage in enumerate(problem.storage):
        of_storage.setdefault(storage, set()).add(blocks.block_of_cell[cell])
    assert all(len(found) == 1 for found in of_storage.values())


# Segments


def test_a_segment_is_a_problem_of_its_own() -> None:
    """Blocks 1 and 2 of a chain of one op each: cells 1 and 2, read by the ops 9 and 8.

    It hands cell 2 on to the next segment, and cell 1 from its first block to its second.
    """
    problem = problem_of(*chain(5, 4, [1.0, 2.0, 3.0, 4.0, 5.0]))
    segment = BlockPartition(problem).segment(1, 3)
    assert segment.cells == [1, 2]
    assert segment.ops == [1, 2, 8, 8, 8, 9, 9]
    assert segment.exports == [1]
    assert segment.borders == [0]
    assert segment.block_of_cell == [0, 1]
    own = segment.problem
    assert own.bytes == [4, 4]
    assert own.times[:2] == [2.0, 3.0]
    assert own.writer == [0, 1]
    assert own.needs == [[5], [3]]
    assert own.reads[:2] == [[], [0]]


def test_what_runs_between_the_readers_counts_in_the_segments_before_and_after() -> None:
    """Op 5 reads cell 1, op 6 nothing, op 7 cell 0; op 4, before them all, nothing either."""
    graph, profile = costed_step(
        Costed(FORWARD, [0], [4]),
        Costed(FORWARD, [1], [4]),
        Costed(LOSS, [2], [0]),
        Costed(BACKWARD, [3], [1]),
        Costed(BACKWARD, [4], workspace=40),
        Costed(BACKWARD, [2, 4], [1]),
        Costed(BACKWARD, [5], [1], workspace=60),
        Costed(BACKWARD, [1, 6]),
    )
    problem = problem_of(graph, profile)
    blocks = BlockPartition(problem)
    assert blocks.n_blocks == 2
    first, second = blocks.segment(0, 1), blocks.segment(1, 2)
    assert second.problem.base.max() == problem.base[[4, 6]].max()
    assert problem.base[4] in second.problem.base
    assert first.problem.base.max() == problem.base[6]


def test_segments_of_one_signature_have_the_same_options() -> None:
    """A signature says all that options depend on but times, which are equal where sizes are."""
    blocks = BlockPartition(problem_of(*deep_resnet(10, stages=2)))
    first: dict[object, list[tuple[int, list[int], list[int], list[bool], list[int]]]] = {}
    n_shared = 0
    for length in (1, 2, 3, 6):
        for start in range(blocks.n_blocks - length + 1):
            segment = blocks.segment(start, start + length)
            found = [
                (
                    s.kept_bytes,
                    s.recomputed.tolist(),
                    s.live.tolist(),
                    s.chosen.keep,
                    s.chosen.hold_from,
                )
                for s in segment_plans(segment)
            ]
            n_shared += segment.signature in first
            assert first.setdefault(segment.signature, found) == found
    assert n_shared > 20


def test_options_of_a_signature_are_made_once() -> None:
    options = Chain(problem_of(*deep_resnet(10, stages=2))).options
    by_signature: dict[object, set[int]] = {}
    n_options: dict[object, int] = {}
    for option in (option for ending in options for option in ending):
        by_signature.setdefault(option.segment.signature, set()).add(id(option.plan))
        n_options[option.segment.signature] = n_options.get(option.segment.signature, 0) + 1
    assert any(n_options[each] > len(made) for each, made in by_signature.items())
    for each, made in by_signature.items():
        assert n_options[each] % len(made) == 0


# Options


def test_the_options_of_a_chain_drop_the_cells_that_free_most_for_their_time_first() -> None:
    """0.25, 1, 2, and 3 µs a byte: the corners of the hull drop one cell after the other.

    Dropping all is no option: where the cells are held after one burst, nothing is won by that.
    """
    problem = problem_of(*chain(4, [4, 3, 2, 1], [1.0, 3.0, 4.0, 3.0], gradient_bytes=50))
    blocks = BlockPartition(problem)
    found = segment_plans(blocks.segment(0, blocks.n_blocks))
    kept = {shape.kept_bytes: shape.recomputed.tolist() for shape in found}
    assert kept[10] == []
    assert kept[6] == [0]
    assert kept[3] == [0, 1]
    assert kept[1] == [0, 1, 2]


def test_no_option_is_beaten_by_another() -> None:
    for seed in range(30):
        blocks = BlockPartition(random_chain(random.Random(seed)))
        segment = blocks.segment(0, min(4, blocks.n_blocks))
        times = np.array(segment.problem.times)
        costs = [
            (s.kept_bytes, s.live.max(), times[s.recomputed].sum()) for s in segment_plans(segment)
        ]
        assert (min(c[2] for c in costs)) == 0
        for mine in costs:
            beaten = [all(a <= b for a, b in zip(o, mine, strict=True)) for o in costs]
            assert sum(beaten) == 1  # by itself


def test_a_long_segment_has_a_nested_plan() -> None:
    """The first burst leaves the borders of blocks alone: less memory, and a second run."""
    problem = problem_of(*chain(24, [9, 9, 1] * 8, gradient_bytes=0))
    blocks = BlockPartition(problem)
    segment = blocks.segment(0, 6)
    found = {
        sum(s.chosen.hold_from) > 0: s
        for s in segment_plans(segment)
        if not any(s.chosen.keep[:-1])
    }
    nested, flat = found[True], found[False]
    assert nested.kept_bytes == flat.kept_bytes
    assert nested.live.max() < 0.5 * flat.live.max()
    assert len(flat.recomputed) < len(nested.recomputed) <= 2 * len(flat.recomputed)


def test_what_an_option_needs_is_what_lowering_it_alone_counts() -> None:
    """One segment of all blocks: its peak is the peak of the step with these choices."""
    for seed in range(30):
        problem = random_chain(random.Random(seed), most=6)
        whole = Chain(problem)
        n_blocks = whole.blocks.n_blocks
        for option in whole.options[n_blocks]:
            if option.first == 0:
                lowered = lower(problem, whole._choices([option]))
                assert option.peak_bytes == lowered.peak_bytes
                assert option.added_us == lowered.recompute_us


# The dynamic program


def paths(options: list[list[Option]], last: int) -> Iterator[list[Option]]:
    """Every way through the blocks up to one, the last option last."""
    if last == 0:
        yield []
        return
    for option in options[last]:
        for before in paths(options, option.first):
            yield [*before, option]


def peak(path: list[Option]) -> int:
    """The most bytes along a path: what was kept before each option, and what it needs."""
    kept = np.cumsum([0, *(option.kept_bytes for option in path)])
    return max(int(before) + option.peak_bytes for before, option in zip(kept, path, strict=False))


@pytest.mark.parametrize("seed", range(8))
def test_no_way_through_the_blocks_is_better(seed: int) -> None:
    problem = random_chain(random.Random(seed), most=7)
    found = Chain(problem)
    ways = [
        (peak(path), sum(option.added_us for option in path))
        for path in paths(found.options, found.blocks.n_blocks)
    ]
    assert len(ways) > 10
    least = min(way[0] for way in ways)
    assert found.solve(least - 1) is None
    for budget in sorted({way[0] for way in ways}):
        chosen = found.solve(budget)
        assert chosen is not None
        best_us = min(us for nbytes, us in ways if nbytes <= budget)
        assert lower(problem, chosen).recompute_us == best_us
    assert lower(problem, found.least_peak()).peak_bytes <= least


def test_solutions_of_chains_fit_or_there_is_none() -> None:
    n_found = 0
    for seed in range(40):
        problem = random_chain(random.Random(seed), most=15)
        found = Chain(problem)
        most = lower(problem, keep_all(problem)).peak_bytes
        least = lower(problem, found.least_peak()).peak_bytes
        for budget in (least - 1, least, (least + most) // 2, (least + 3 * most) // 4, most):
            chosen = found.solve(budget)
            assert chosen is not None or budget < most
            if chosen is not None:
                n_found += 1
                assert lower(problem, chosen).peak_bytes <= budget
    assert n_found > 120


def test_a_chain_whose_optimum_is_known() -> None:
    """Of four cells, cell 1 is the cheapest to compute again of those that lie at the peak."""
    problem = problem_of(*chain(4, times_us=[5.0, 3.0, 2.0, 4.0]))
    found = Chain(problem)
    for budget, keep in ((5, [True, True, True, True]), (4, [True, False, True, True])):
        chosen = found.solve(budget)
        assert chosen is not None
        assert chosen.keep == keep
    assert found.solve(3) is None  # which needs a cell computed twice


def test_a_diamond_whose_optimum_is_known() -> None:
    problem = problem_of(*diamond())
    found = Chain(problem)
    for budget, cells, us in DIAMOND_OPTIMA:
        chosen = found.solve(budget)
        assert chosen is not None
        assert [cell for cell in problem.droppable if not chosen.keep[cell]] == cells
        assert lower(problem, chosen).recompute_us == us
    assert found.solve(DIAMOND_OPTIMA[-1][0] - 1) is None


def test_it_is_often_the_optimum_on_chains() -> None:
    """The options of a segment are those on its hull, so not always."""
    equal = []
    for seed in range(30):
        problem = random_chain(random.Random(seed), most=8)
        found = Chain(problem)
        most = lower(problem, keep_all(problem)).peak_bytes
        least = lower(problem, found.least_peak()).peak_bytes
        for budget in {(least + most) // 2, (least + 3 * most) // 4} - {most}:
            chosen = found.solve(budget)
            if chosen is not None:
                added_us, best_us = lower(problem, chosen).recompute_us, optimum(problem, budget)
                assert added_us >= best_us.recompute_us
                equal.append(added_us == best_us.recompute_us)
    assert len(equal) > 30
    assert sum(equal) > 0.7 * len(equal)


def gated_step(n: int) -> Problem:
    """A chain, then a cell that is changed in place by the first one, and again, and copied.

    As in a recurrent layer, whose gates read what one op made for all steps of the sequence.
    """
    first, gate, copy = 1, n + 2, n + 3
    forward = [Costed(FORWARD, [0], [8])]
    forward += [Costed(FORWARD, [1 + i if i else 0], [4]) for i in range(n)]
    forward += [
        Costed(FORWARD, [gate - 1], [4]),
        Costed(FORWARD, [gate, first], mutates=[gate]),
        Costed(FORWARD, [gate], mutates=[gate]),
        Costed(FORWARD, [gate], [4]),
        Costed(FORWARD, [gate], mutates=[gate]),
        Costed(LOSS, [gate], [0]),
    ]
    gradient = copy + 1
    backward = [Costed(BACKWARD, [gradient], [1]), Costed(BACKWARD, [gate, copy, gradient + 1])]
    backward += [Costed(BACKWARD, [1 + i, gradient + 1]) for i in range(n, 0, -1)]
    return problem_of(*costed_step(*forward, *backward))


def test_what_reads_a_version_that_is_gone_is_pinned_as_its_writer_is() -> None:
    problem = gated_step(40)
    found = Chain(problem)
    changes = [op for op, cells in enumerate(problem.writes) if cells and op > 41]
    assert not any(problem.can_keep[problem.writes[op][0]] for op in changes[:2])
    assert found.blocks.pinned == set(changes)
    check(problem.graph, to_schedule(lower(problem, found.least_peak())))
