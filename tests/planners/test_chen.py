"""Chen's planners: known answers on chains and diamonds, growth, and the measured profiles."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from support.chains import chain
from support.hand_made import BACKWARD, FORWARD, LOSS, Call, profile_of, step, storages
from support.random_steps import random_step
from support.reading import recomputed

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Op, Phase, Role, StepGraph
from rekindle.core.graph.schedule import Compute, Plan, check
from rekindle.core.graph.serial import load_profile
from rekindle.errors import InfeasibleBudget
from rekindle.planners.baselines.chen import is_expensive
from rekindle.planners.problem import problem_of
from rekindle.planners.registry import PLANNERS

PLENTY = 10**15
PROFILES = sorted((Path(__file__).parents[2] / "benchmarks" / "profiles").glob("*.json.gz"))
plan_chen_sqrt = PLANNERS["chen-sqrt"]
plan_chen_recursive = PLANNERS["chen-recursive"]
plan_chen_selective = PLANNERS["chen-selective"]
CHEN = [plan_chen_sqrt, plan_chen_recursive, plan_chen_selective]


def kept(plan: Plan) -> set[int]:
    """The storages a plan keeps."""
    return {decision.storage for decision in plan.decisions if decision.is_kept}


def forward_us(graph: StepGraph, profile: Profile) -> float:
    return sum(
        cost.time_us
        for op, cost in zip(graph.ops, profile.costs, strict=True)
        if op.phase in (Phase.FORWARD, Phase.LOSS)
    )


# √n segments


def test_nine_ops_are_three_segments() -> None:
    """Cells 2 and 5 cross the cuts; 6, 7 and 8 are the last segment. Storage i + 1 is cell i."""
    graph, profile = chain(9)
    plan = plan_chen_sqrt(graph, profile, PLENTY)
    check(graph, plan.schedule)
    assert kept(plan) == {3, 6, 7, 8, 9}
    assert recomputed(plan) == [3, 4, 0, 1]
    assert plan.peak_bytes == 2 + 3 + 1  # two cuts, the last segment, a gradient
    assert plan.recompute_us == 4.0


@pytest.mark.parametrize("n", [16, 64, 256, 1024, 4096])
def test_sqrt_grows_like_the_square_root(n: int) -> None:
    graph, profile = chain(n)
    plan = plan_chen_sqrt(graph, profile, PLENTY)
    check(graph, plan.schedule)
    assert plan.peak_bytes == 2 * np.sqrt(n)
    assert 0.5 * n <= plan.recompute_us < n  # at most one more forward pass


@pytest.mark.parametrize("n", [1, 2, 3, 5, 100, 1000])
def test_sqrt_on_any_length(n: int) -> None:
    graph, profile = chain(n)
    plan = plan_chen_sqrt(graph, profile, PLENTY)
    check(graph, plan.schedule)
    assert plan.peak_bytes <= 2 * np.sqrt(n) + 2
    assert plan.recompute_us <= n


def test_segments_are_equal_in_bytes() -> None:
    """Few ops make most of the bytes: the segments are short there, and long elsewhere."""
    sizes = [100] * 8 + [1] * 100
    graph, profile = chain(len(sizes), sizes)
    plain = PLANNERS["none"](graph, profile, PLENTY)
    plan = plan_chen_sqrt(graph, profile, PLENTY)
    check(graph, plan.schedule)
    assert plain.peak_bytes > 900
    assert plan.peak_bytes < 650


def residual(n_blocks: int, wide: int, narrow: int) -> tuple[StepGraph, Profile]:
    """Blocks x → a → b → x + b: between blocks x alone is read on, inside a block x and others.

    A block's cells are a, b (`wide` bytes) and the sum (`narrow`), three storages in this order.
    """
    memory = [(0, Role.INPUT)]
    calls = []
    for block in range(n_blocks):
        x, a = 3 * block, 3 * block + 1
        memory += [(wide, Role.ACTIVATION), (wide, Role.ACTIVATION), (narrow, Role.ACTIVATION)]
        calls += [
            Call(FORWARD, [x], [a]),
            Call(FORWARD, [a], [a + 1]),
            Call(FORWARD, [x, a + 1], [a + 2]),
        ]
    last = 3 * n_blocks
    memory.append((0, Role.OUTPUT))
    calls.append(Call(LOSS, [last], [last + 1]))
    memory.append((0, Role.GRAD_MAP))
    calls.append(Call(BACKWARD, [last], [last + 2]))
    for cell in range(last - 1, -1, -1):
        memory.append((0, Role.GRAD_MAP))
        calls.append(Call(BACKWARD, [cell, len(memory) - 2], [len(memory) - 1]))
    graph = step(storages(*memory), [0], calls, outputs=[last + 1])
    return graph, profile_of(graph)


@pytest.mark.parametrize("planner", [plan_chen_sqrt, plan_chen_recursive])
def test_cuts_lie_between_blocks(planner) -> None:  # type: ignore[no-untyped-def]
    """Where one narrow cell crosses, and not where a skip connection runs parallel to wide ones."""
    graph, profile = residual(12, wide=10, narrow=4)
    plan = planner(graph, profile, PLENTY)
    check(graph, plan.schedule)
    first_of_last = min(storage for storage in kept(plan) if storage % 3)
    assert all(storage % 3 == 0 for storage in kept(plan) if storage < first_of_last)
    assert first_of_last > 3 * 6


def test_what_crosses_several_cuts_is_kept_once() -> None:
    """A cell that the end of the forward pass reads crosses every cut: it is kept, all else too."""
    n = 16
    memory = [(0, Role.INPUT), *[(1, Role.ACTIVATION)] * n, (0, Role.OUTPUT), (0, Role.GRAD_MAP)]
    calls = [Call(FORWARD, [i], [i + 1]) for i in range(n - 1)]
    calls.append(Call(FORWARD, [1, n - 1], [n]))
    calls.append(Call(LOSS, [n], [n + 1]))
    calls.append(Call(BACKWARD, [n], [n + 2]))
    calls += [Call(BACKWARD, [i, n + 2]) for i in range(n - 1, 0, -1)]
    graph = step(storages(*memory), [0], calls, outputs=[n + 1])
    plan = plan_chen_sqrt(graph, profile_of(graph), PLENTY)
    check(graph, plan.schedule)
    assert 1 in kept(plan)
    assert plan.peak_bytes == 8
    assert plan.recompute_us < n


# Segments in segments


@pytest.mark.parametrize("n", [16, 64, 256, 1024, 4096])
def test_recursive_grows_like_the_logarithm(n: int) -> None:
    graph, profile = chain(n)
    plan = plan_chen_recursive(graph, profile, PLENTY)
    check(graph, plan.schedule)
    levels = int(np.log2(n))
    assert plan.peak_bytes == levels + 2
    assert n <= plan.recompute_us <= n * levels / 2


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100, 1000])
def test_recursive_on_any_length(n: int) -> None:
    graph, profile = chain(n)
    plan = plan_chen_recursive(graph, profile, PLENTY)
    check(graph, plan.schedule)
    assert plan.peak_bytes <= np.log2(n) + 4
    assert plan.recompute_us <= n * np.log2(max(n, 2))


def test_recursive_on_uneven_chains() -> None:
    """Bytes and times that differ by ten: the same growth, in units of the largest cell."""
    rng = random.Random(0)
    for n in (64, 512, 2048):
        sizes = [rng.randint(1, 10) for _ in range(n)]
        times = [rng.uniform(1, 10) for _ in range(n)]
        graph, profile = chain(n, sizes, times, gradient_bytes=1)
        plan = plan_chen_recursive(graph, profile, PLENTY)
        check(graph, plan.schedule)
        assert plan.peak_bytes <= 10 * (np.log2(n) + 2)
        assert plan.recompute_us <= sum(times) * np.log2(n)


def test_recursive_by_hand() -> None:
    """Eight ops: what crosses the middle and the middle of the second half stays; then it descends.

    Cells 0…7. Cell 3 crosses the middle of all, cell 5 that of the second half, of which 6 and 7
    are the last part. Cell 4 is computed from cell 3. Then cells 0 to 2 are computed, of which cell
    1 crosses the middle of the first half: cell 0 is freed, and recomputed when it is read.
    """
    graph, profile = chain(8)
    plan = plan_chen_recursive(graph, profile, PLENTY)
    check(graph, plan.schedule)
    assert kept(plan) == {4, 6, 7, 8}
    assert recomputed(plan) == [4, 0, 1, 2, 0]
    assert plan.peak_bytes == 5


def test_each_loss_has_its_own_segments() -> None:
    """Two forward and backward passes in turns: both end with a part that is kept."""
    memory = [(0, Role.INPUT)]
    calls = []
    outputs = []
    for _ in range(2):
        first = len(memory)
        memory += [(1, Role.ACTIVATION)] * 8
        calls.append(Call(FORWARD, [0], [first]))
        calls += [Call(FORWARD, [first + i], [first + i + 1]) for i in range(7)]
        outputs.append(len(memory))
        memory.append((0, Role.OUTPUT))
        calls.append(Call(LOSS, [first + 7], [first + 8]))
        calls += [Call(BACKWARD, [first + i]) for i in range(7, -1, -1)]
    graph = step(storages(*memory), [0], calls, outputs=outputs)
    plan = plan_chen_recursive(graph, profile_of(graph), PLENTY)
    check(graph, plan.schedule)
    assert kept(plan) == {4, 6, 7, 8, 13, 15, 16, 17}
    assert recomputed(plan) == [4, 0, 1, 2, 0, 21, 17, 18, 19, 17]


# By kind of op


def test_what_is_expensive() -> None:
    def op(target: str, flops: int = 0) -> Op:
        return Op(0, "op", target, Phase.FORWARD, (), (), flops=flops)

    for name in ("mm", "addmm", "convolution", "_scaled_dot_product_flash_attention", "_cudnn_rnn"):
        assert is_expensive(op(f"aten.{name}.default")), name
    for name in ("relu_", "native_batch_norm", "native_dropout", "gelu", "max_pool2d", "mul"):
        assert not is_expensive(op(f"aten.{name}.default")), name
    assert is_expensive(op("mine.fused.default", flops=10))


def named(graph: StepGraph, targets: dict[int, str]) -> StepGraph:
    """A graph whose ops have these targets."""
    ops = tuple(
        Op(
            op.index,
            op.name,
            targets.get(op.index, op.target),
            op.phase,
            op.inputs,
            op.outputs,
            op.mutates,
            is_view=op.is_view,
        )
        for op in graph.ops
    )
    return StepGraph(ops, graph.values, graph.storages, graph.outputs)


def test_selective_keeps_matrix_products() -> None:
    """mm, relu, mm, relu: each relu is computed again from the product before it."""
    graph, _ = chain(4)
    graph = named(graph, {0: "aten.mm.default", 2: "aten.mm.default"})
    profile = profile_of(graph)
    plan = plan_chen_selective(graph, profile, PLENTY)
    check(graph, plan.schedule)
    assert kept(plan) == {1, 3}
    assert recomputed(plan) == [3, 1]
    assert plan.peak_bytes == 4


def in_place_pairs(n: int) -> StepGraph:
    """n times a product whose result is changed in place; the backward pass reads what it became.

    Storage 1 + i is the i-th product's; its value is 1 + i as well.
    """
    memory = [(0, Role.INPUT), *[(1, Role.ACTIVATION)] * n, (0, Role.OUTPUT)]
    calls = []
    for i in range(n):
        calls += [Call(FORWARD, [i], [1 + i]), Call(FORWARD, [1 + i], [], [1 + i])]
    calls.append(Call(LOSS, [n], [n + 1]))
    calls += [Call(BACKWARD, [i]) for i in range(n, 0, -1)]
    graph = step(storages(*memory), [0], calls, outputs=[n + 1])
    return named(graph, {2 * i: "aten.mm.default" for i in range(n)})


def test_selective_keeps_what_a_product_became() -> None:
    """Dropped, the changed result would need the product again: nothing cheap is left to drop."""
    graph = in_place_pairs(4)
    plan = plan_chen_selective(graph, profile_of(graph), PLENTY)
    check(graph, plan.schedule)
    assert kept(plan) == {1, 2, 3, 4}
    assert recomputed(plan) == []


@pytest.mark.parametrize("planner", [plan_chen_sqrt, plan_chen_recursive])
def test_no_cut_between_a_result_and_its_change(planner) -> None:  # type: ignore[no-untyped-def]
    """Ops come back in pairs; a cut inside a pair would have nothing to keep."""
    graph = in_place_pairs(64)
    plan = planner(graph, profile_of(graph), PLENTY)
    check(graph, plan.schedule)
    ops = recomputed(plan)
    assert ops
    assert all(a % 2 == 0 and b == a + 1 for a, b in zip(ops[::2], ops[1::2], strict=True))
    assert plan.peak_bytes <= 2 * np.sqrt(64) + 2


def test_what_must_be_kept_is() -> None:
    """Op 1 counts calls in a buffer: its result is kept by every planner."""
    memory = storages(
        (0, Role.INPUT),
        (1, Role.BUFFER),
        *[(1, Role.ACTIVATION)] * 4,
        (0, Role.OUTPUT),
    )
    calls = [
        Call(FORWARD, [0], [2]),
        Call(FORWARD, [2, 1], [3], [1]),
        Call(FORWARD, [3], [4]),
        Call(FORWARD, [4], [5]),
        Call(LOSS, [5], [6]),
        *[Call(BACKWARD, [i]) for i in (5, 4, 3, 2)],
    ]
    graph = step(memory, [0, 1], calls, outputs=[6])
    for planner in CHEN:
        plan = planner(graph, profile_of(graph), PLENTY)
        check(graph, plan.schedule)
        assert 3 in kept(plan)
        assert 1 not in recomputed(plan)


def test_several_results_of_one_op_come_back_together() -> None:
    """Each op makes two results that the backward pass reads: it runs again once."""
    memory = [(0, Role.INPUT)]
    calls = []
    for i in range(9):
        memory += [(1, Role.ACTIVATION), (1, Role.ACTIVATION)]
        calls.append(Call(FORWARD, [max(0, 2 * i - 1)], [2 * i + 1, 2 * i + 2]))
    memory.append((0, Role.OUTPUT))
    calls.append(Call(LOSS, [17], [19]))
    calls += [Call(BACKWARD, [2 * i + 1, 2 * i + 2]) for i in range(8, -1, -1)]
    graph = step(storages(*memory), [0], calls, outputs=[19])
    plan = plan_chen_sqrt(graph, profile_of(graph), PLENTY)
    check(graph, plan.schedule)
    ops = recomputed(plan)
    assert len(ops) == len(set(ops))


# All of them


@pytest.mark.parametrize("planner", CHEN)
def test_a_budget_below_the_peak_is_refused(planner) -> None:  # type: ignore[no-untyped-def]
    graph, profile = chain(64)
    peak = planner(graph, profile, PLENTY).peak_bytes
    assert planner(graph, profile, peak).peak_bytes == peak
    with pytest.raises(InfeasibleBudget) as raised:
        planner(graph, profile, peak - 1)
    assert raised.value.least_peak_bytes == peak


@pytest.mark.parametrize("planner", CHEN)
def test_steps_with_nothing_to_drop(planner) -> None:  # type: ignore[no-untyped-def]
    graph = step(storages((1, Role.PARAM)), [0], [Call(Phase.OPTIMIZER, [0], [], [0])])
    plan = planner(graph, profile_of(graph), PLENTY)
    assert plan.schedule == (Compute(0),)
    empty = step([], [], [])
    assert planner(empty, profile_of(empty), 0).schedule == ()


@pytest.mark.parametrize("planner", CHEN)
def test_random_steps(planner) -> None:  # type: ignore[no-untyped-def]
    """Views, in-place ops, several outputs and losses in turns: the schedule is always valid."""
    for seed in range(150):
        rng = random.Random(seed)
        graph, profile = random_step(rng, rng.randint(1, 30), micro_batches=rng.randint(1, 3))
        plan = planner(graph, profile, PLENTY)
        check(graph, plan.schedule)
        problem = problem_of(graph, profile)
        must = {problem.storage[c] for c in problem.activations if problem.must_keep[c]}
        assert must <= kept(plan)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name.split(".")[0])
def test_measured_profiles(path: Path) -> None:
    """Recursive needs less than √n, that less than selective; √n adds at most a forward pass."""
    graph, profile, _ = load_profile(path)
    plain = PLANNERS["none"](graph, profile, PLENTY)
    root, recursive, selective = (planner(graph, profile, PLENTY) for planner in CHEN)
    for plan in (root, recursive, selective):
        check(graph, plan.schedule)
    assert recursive.peak_bytes < root.peak_bytes < selective.peak_bytes < plain.peak_bytes
    assert selective.recompute_us < recursive.recompute_us
    assert root.recompute_us <= forward_us(graph, profile)
