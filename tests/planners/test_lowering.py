"""Lowering: recomputation just in time, lives that end at the last use, and bytes counted right."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
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

from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.graph.graph import Op, Phase, Role, StepGraph, Value
from rekindle.core.graph.schedule import Compute, Free, Instruction, check
from rekindle.core.graph.simulate import simulate
from rekindle.planners.finish import write_up
from rekindle.planners.lowering import Choices, choices, keep_all, lower, to_schedule
from rekindle.planners.problem import Problem, problem_of


def order(problem: Problem, chosen: Choices) -> list[tuple[int, int]]:
    """The ops in the order they run: pairs of op and copy."""
    lowered = lower(problem, chosen)
    return list(zip(lowered.ops.tolist(), lowered.copies.tolist(), strict=True))


def with_holds(problem: Problem, kept: Sequence[int], holds: dict[int, int]) -> Choices:
    """Keep some cells, and let others go until an op."""
    chosen = choices(problem, kept)
    for cell, op in holds.items():
        chosen.hold_from[cell] = op
    return chosen


def test_a_dropped_cell_is_computed_right_before_its_reader() -> None:
    """Ops 0 to 2 forward, 3 the loss; 4, 5, 6, 7 read the cells 2, 1, 0 and the batch."""
    problem = problem_of(*chain(3))
    assert order(problem, choices(problem, [0, 2])) == [
        *((op, 0) for op in range(5)),
        (1, 1),
        *((op, 0) for op in (5, 6, 7)),
    ]


def test_a_burst_computes_all_between_what_is_there_and_what_is_wanted() -> None:
    problem = problem_of(*chain(3))
    lowered = lower(problem, choices(problem, [2]))
    assert lowered.ops.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7]
    assert lowered.copies.tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert lowered.anchor.tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 6, 7]
    assert lowered.recompute_us == 2.0


def test_what_a_burst_computes_on_the_way_is_held_for_its_own_reader() -> None:
    """Cell 0 is computed for cell 1's sake, and read by op 6: it is not computed twice."""
    problem = problem_of(*chain(3, [3, 5, 7]))
    lowered = lower(problem, choices(problem, [2]))
    (held,) = (i for i in lowered.instances if i.storage == 1 and i.copy)
    assert (held.start, held.end) == (5, 8)


def test_a_cell_that_is_not_held_yet_is_let_go_after_the_burst_and_computed_again() -> None:
    problem = problem_of(*chain(3, [3, 5, 7]))
    lowered = lower(problem, with_holds(problem, [2], {0: 6}))
    assert lowered.ops.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 0, 6, 7]
    assert lowered.copies.tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 2, 0, 0]
    first, second = (i for i in lowered.instances if i.storage == 1 and i.copy)
    assert (first.start, first.end) == (5, 6)
    assert (second.start, second.end) == (8, 9)
    assert lowered.recompute_us == 3.0


def test_the_bytes_at_every_position_by_hand() -> None:
    """Cells of 3, 5 and 7 bytes, gradients of 1, and 20 bytes of workspace when op 1 runs."""
    graph, profile = chain(3, [3, 5, 7], gradient_bytes=1)
    costs = tuple(OpCost(c.time_us, 20 if op == 1 else 0) for op, c in enumerate(profile.costs))
    problem = problem_of(graph, Profile("toy", graph.fingerprint, costs))
    kept = lower(problem, keep_all(problem))
    assert kept.live.tolist() == [3, 28, 15, 15, 16, 10, 5, 1]
    dropped = lower(problem, choices(problem, [2]))
    #                                    forward | 4: cell 2 | burst: 0, 1 | 5 to 7
    assert dropped.live.tolist() == [3, 28, 12, 7, 8, 4, 29, 10, 5, 1]
    assert dropped.peak_bytes == 29


def test_everything_is_freed_right_after_its_last_use() -> None:
    graph, profile = chain(2)
    problem = problem_of(graph, profile)
    schedule = to_schedule(lower(problem, choices(problem, [1])))
    expected: list[Instruction] = [
        *(Compute(0), Compute(1), Free(1), Compute(2)),
        *(Compute(3), Free(2)),
        *(Compute(0, 1), Compute(4), Free(1, 1), Free(4)),
        *(Compute(5), Free(5)),
    ]
    assert sorted(map(repr, schedule)) == sorted(map(repr, expected))
    check(graph, schedule)


def test_cells_without_bytes_are_kept_under_all_choices() -> None:
    problem = problem_of(*chain(3, [3, 0, 7]))
    assert choices(problem, ()).keep == [False, True, False]


def test_an_overwritten_version_cannot_be_kept_and_is_computed_on_the_way() -> None:
    """Op 1 changes what op 0 made: the copy of op 1 changes a copy made by op 0."""
    graph, profile = in_place_step()
    problem = problem_of(graph, profile)
    assert problem.can_keep == [False, True]
    lowered = lower(problem, choices(problem, [0]))
    assert lowered.ops.tolist() == [0, 1, 2, 3, 0, 1, 4]
    (copy,) = (i for i in lowered.instances if i.copy)
    assert (copy.start, copy.end) == (4, 6)
    assert lowered.live.tolist() == [8, 8, 8, 1, 9, 9, 9]
    check(graph, to_schedule(lowered))


def in_place_step() -> tuple[StepGraph, Profile]:
    return costed_step(
        Costed(FORWARD, [0], [8]),
        Costed(FORWARD, [1], mutates=[1]),
        Costed(LOSS, [1], [0]),
        Costed(BACKWARD, [2], [1]),
        Costed(BACKWARD, [1, 3]),
    )


def test_views_of_a_copy_are_taken_where_they_are_read() -> None:
    """Op 1 looks at cell 0, and the backward op reads the view: it is taken of the copy."""
    graph = step(
        storages((0, Role.INPUT), (8, Role.ACTIVATION), (0, Role.OUTPUT), (1, Role.GRAD_MAP)),
        entering=[0],
        calls=[
            Call(FORWARD, [0], [1]),
            Call(FORWARD, [1], [1]),
            Call(LOSS, [2], [2]),
            Call(BACKWARD, [3], [3]),
            Call(BACKWARD, [2, 4]),
        ],
        outputs=[3],
    )
    problem = problem_of(graph, profile_of(graph))
    schedule = to_schedule(lower(problem, choices(problem, ())))
    computed = [(i.op, i.copy) for i in schedule if isinstance(i, Compute)]
    assert computed == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (4, 0)]
    check(graph, schedule)


def batch_norm_step() -> tuple[StepGraph, Profile]:
    """x → convolution (1) → batch norm (2, statistics 3 and 4) → loss; as captured on CUDA.

    The copy of the batch norm is another operator, at half the time, which reads the statistics.
    """
    memory = storages(
        (0, Role.INPUT),
        (8, Role.ACTIVATION),
        (8, Role.ACTIVATION),
        (1, Role.ACTIVATION),
        (1, Role.ACTIVATION),
        (0, Role.OUTPUT),
        *2 * [(2, Role.GRAD_MAP)],
        (1, Role.BUFFER),
    )
    names = ("x", "running", "conv", "norm", "mean", "var", "loss", "g0", "g1")
    places = (0, 8, 1, 2, 3, 4, 5, 6, 7)
    makers = (None, None, 0, 1, 1, 1, 2, 3, 4)
    values = tuple(
        Value(index, name, storage, (1,), "float32", producer)
        for index, (name, storage, producer) in enumerate(zip(names, places, makers, strict=True))
    )
    target, copy_target = "aten.native_batch_norm.default", "aten.batch_norm_elemt.default"
    ops = (
        Op(0, "conv", "aten.conv.default", Phase.FORWARD, (0,), (2,)),
        Op(1, "norm", target, Phase.FORWARD, (2, 1), (3, 4, 5), (1,), copy_target=copy_target),
        Op(2, "loss", "aten.mean.default", Phase.LOSS, (3,), (6,)),
        Op(3, "ones", "aten.ones.default", Phase.BACKWARD, (6,), (7,)),
        Op(4, "back", "aten.back.default", Phase.BACKWARD, (3, 7), (8,)),
        Op(5, "norm_back", "aten.back.default", Phase.BACKWARD, (2, 4, 5, 8), ()),
    )
    graph = StepGraph(ops, values, tuple(memory), (6,))
    costs = tuple(OpCost(10.0, copy_us=5.0 if op.copy_target else None) for op in ops)
    return graph, Profile("toy", graph.fingerprint, costs)


def test_a_batch_norm_is_computed_again_from_its_statistics() -> None:
    """They must be kept; the copy reads them and makes the first result alone, in its own time."""
    graph, profile = batch_norm_step()
    problem = problem_of(graph, profile)
    conv, norm, mean, var = range(4)
    assert problem.must_keep == [False, False, True, True]
    assert set(problem.reads[1]) == {conv, mean, var}
    assert problem.writes[1] == [norm]
    lowered = lower(problem, choices(problem, [conv]))
    assert lowered.ops.tolist() == [0, 1, 2, 3, 1, 4, 5]
    assert [i.storage for i in lowered.instances if i.copy] == [problem.storage[norm]]
    assert lowered.recompute_us == 5.0
    schedule = to_schedule(lowered)
    check(graph, schedule)
    assert Free(problem.storage[mean], 1) not in schedule


def random_choices(rng: random.Random, problem: Problem) -> Choices:
    """Any cells kept, overwritten ones, too, for which that means nothing; any held late."""
    share = rng.random()
    chosen = choices(problem, [c for c in range(problem.n_cells) if rng.random() < share])
    for cell in range(problem.n_cells):
        if not problem.can_keep[cell] and rng.random() < 0.3:
            chosen.keep[cell] = True
        if rng.random() < 0.3:
            chosen.hold_from[cell] = rng.randint(0, problem.n_ops)
    return chosen


def test_for_all_choices_the_schedule_is_valid_and_counted_to_the_byte() -> None:
    """Against the checker and the simulator, which follow the schedule and know no choices."""
    n_again = 0
    for seed in range(400):
        rng = random.Random(seed)
        graph, profile = random_step(
            rng, rng.randint(1, 14), micro_batches=rng.choice((1, 1, 2, 3))
        )
        problem = problem_of(graph, profile)
        chosen = random_choices(rng, problem)
        lowered = lower(problem, chosen)
        plan = write_up(lowered, chosen.keep, planner="any", budget_bytes=2**60)
        plan.check(graph)
        trace = simulate(graph, profile, plan)
        is_view = np.array([graph.ops[op].is_view for op in trace.ops]) & (trace.copies > 0)
        assert trace.ops[~is_view].tolist() == lowered.ops.tolist()
        assert trace.live_bytes[~is_view].tolist() == lowered.live.tolist()
        assert trace.peak_bytes == lowered.peak_bytes
        assert trace.recompute_us == lowered.recompute_us
        n_again += bool((lowered.copies > 1).any())
    assert n_again > 100


def test_keeping_everything_computes_nothing_again() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        problem = problem_of(*random_step(rng, rng.randint(1, 14), micro_batches=1 + seed % 2))
        lowered = lower(problem, keep_all(problem))
        assert lowered.ops.tolist() == list(range(problem.n_ops))
        assert lowered.recompute_us == 0


def test_the_bytes_between_ops_leave_out_what_the_next_op_makes() -> None:
    """While a burst runs, its reader's own results and workspace are not there yet."""
    graph, profile = chain(2, gradient_bytes=[4, 6])
    problem = problem_of(graph, profile)
    at, before = problem.base.tolist(), problem.between.tolist()
    assert at == [0, 0, 0, 6, 10, 4]
    assert before == [0, 0, 0, 0, 6, 4]
    assert not graph.ops[5].outputs
