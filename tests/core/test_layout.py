"""Addresses for a step's storages: the lecture's example by hand, random steps, wrong layouts."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hand_made import FORWARD, Call, step, storages
from support.random_steps import random_step, steps
from torch import nn, ones, optim

import rekindle
from rekindle import models
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Role, StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.memory.layout import Layout, Piece, layout
from rekindle.core.memory.layout_check import check_layout
from rekindle.core.memory.packing import least_bytes, pack
from rekindle.errors import InfeasibleBudget, InvalidLayout
from rekindle.planners.finish import finish
from rekindle.planners.lowering import choices
from rekindle.planners.problem import problem_of

KIB = 1024


def element_wise(graph: StepGraph) -> StepGraph:
    """The same step, where every op could write over any input of its result's size."""

    def bytes_of(value: int) -> int:
        return graph.storages[graph.values[value].storage].nbytes

    def inputs_alike(op: rekindle.core.graph.graph.Op) -> tuple[int, ...]:
        if len(op.outputs) != 1 or op.is_view or op.mutates:
            return ()
        used = [graph.values[value].storage for value in op.inputs]
        return tuple(
            value
            for value in op.inputs
            if bytes_of(value) == bytes_of(op.outputs[0])
            and used.count(graph.values[value].storage) == 1
        )

    ops = tuple(replace(op, may_overwrite=inputs_alike(op)) for op in graph.ops)
    return replace(graph, ops=ops)


@pytest.fixture
def lecture() -> StepGraph:
    """exp(a · b + 3), each tensor of one kibibyte: the last result is what the step returns."""
    sizes = [(KIB, Role.INPUT)] * 2 + [(KIB, Role.TEMP)] * 2 + [(KIB, Role.OUTPUT)]
    calls = [Call(FORWARD, [0, 1], [2]), Call(FORWARD, [2], [3]), Call(FORWARD, [3], [4])]
    return element_wise(step(storages(*sizes), [0, 1], calls, outputs=[4]))


def test_the_lecture(lecture: StepGraph) -> None:
    """Three results: three places, or one if each is written over the last; two if shared only."""
    for in_place, sharing, kibibytes in (
        (False, False, 3),
        (True, False, 1),
        (False, True, 2),
        (True, True, 1),
    ):
        found = layout(lecture, in_place=in_place, sharing=sharing)
        assert found.arena_bytes == kibibytes * KIB
        check_layout(lecture, found)
    found = layout(lecture)
    assert [(reuse.op, reuse.over.storage, reuse.result.storage) for reuse in found.reuses] == [
        (1, 2, 3),
        (2, 3, 4),
    ]
    assert found.refusals == {0: "in1 existed before the step"}
    assert (found.start.tolist(), found.end.tolist()) == ([0, 1, 2], [1, 2, 2])


def test_what_is_read_later_is_not_written_over() -> None:
    """exp(x) + x, where x = a · a: the sum may be written over either, exp(x) not over x."""
    sizes = [(KIB, Role.INPUT)] + [(KIB, Role.TEMP)] * 2 + [(KIB, Role.OUTPUT)]
    calls = [Call(FORWARD, [0], [1]), Call(FORWARD, [1], [2]), Call(FORWARD, [1, 2], [3])]
    graph = element_wise(step(storages(*sizes), [0], calls, outputs=[3]))
    found = layout(graph)
    assert found.arena_bytes == 2 * KIB
    assert found.refusals == {0: "in0 existed before the step", 1: "v1 is needed later"}
    assert [reuse.op for reuse in found.reuses] == [2]
    check_layout(graph, found)


def test_roles_that_are_left_out() -> None:
    """They have no address, nothing is written over them, and the rest lies as if they were not."""
    sizes = [(KIB, Role.INPUT), (KIB, Role.TEMP), (KIB, Role.GRAD), (KIB, Role.TEMP)]
    calls = [Call(FORWARD, [0], [1]), Call(FORWARD, [1], [2]), Call(FORWARD, [2], [3])]
    graph = element_wise(step(storages(*sizes), [0], calls))
    assert layout(graph).arena_bytes == KIB
    for sharing, kibibytes in ((True, 1), (False, 2)):
        found = layout(graph, sharing=sharing, roles=(Role.TEMP,))
        assert found.storage.tolist() == [1, 3]
        assert found.arena_bytes == kibibytes * KIB
        assert not found.reuses
        assert found.refusals == {0: "in0 existed before the step", 2: "v2 is not laid out"}
    with pytest.raises(InvalidLayout, match="no address"):
        check_layout(graph, found)


@settings(max_examples=60, deadline=None)
@given(made=steps(max_forward=14), seed=st.integers(0, 10**6))
def test_roles_of_random_steps(made: tuple[StepGraph, Profile], seed: int) -> None:
    """With nothing shared, the parts add up to the whole; with all roles, it is the whole."""
    graph, whole, plan = random_layout(made, seed)
    features = (Role.ACTIVATION, Role.GRAD_MAP, Role.TEMP, Role.OUTPUT)
    others = [role for role in Role if role not in features]
    apart = {"in_place": False, "sharing": False}
    parts = [layout(graph, plan, roles=roles, **apart) for roles in (features, others)]
    assert sum(part.arena_bytes for part in parts) == layout(graph, plan, **apart).arena_bytes
    part = layout(graph, plan, roles=features)
    assert part.lower_bound_bytes <= part.arena_bytes
    assert all(graph.storages[storage].role in features for storage in part.storage)
    again = layout(graph, plan, roles=tuple(Role))
    assert again.arena_bytes == whole.arena_bytes


def test_an_mlp_of_two_layers() -> None:
    """relu's result may lie over its input, which no other op reads; that of a product may not."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def train_step(model: nn.Module, optimizer: optim.Optimizer, batch: object) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    graph = rekindle.capture(train_step, model, optimizer, ones(128, 32)).graph
    found = rekindle.layout(graph)
    names = {op.index: op.target.split(".")[1] for op in graph.ops}
    assert "relu" in {names[reuse.op] for reuse in found.reuses}
    assert "threshold_backward" in {names[reuse.op] for reuse in found.reuses}
    assert not {"addmm", "mm"} & {names[reuse.op] for reuse in found.reuses}
    products = [op for op, name in names.items() if name == "addmm"]
    assert all("element-wise" in found.refusals[op] for op in products)
    without = layout(graph, in_place=False)
    assert found.arena_bytes <= without.arena_bytes
    assert found.arena_bytes < layout(graph, sharing=False).arena_bytes


@pytest.mark.parametrize(
    "name", ["mlp", "lstm", "resnet-tiny", "bert-tiny", "gpt2-tiny", "vit-tiny", "resnet50", "vit"]
)
def test_the_zoo_is_within_a_fiftieth_of_the_bound(name: str) -> None:
    """Plain, and at 70% or the least peak; and the four schemes come in the lecture's order."""
    work = models.build(name, **({"batch": 512} if name in ("mlp", "lstm") else {}))
    parts = (work.train_step, work.model, work.optimizer, work.batch)
    captured = rekindle.capture(*parts, as_on_gpu=True)
    graph, profile = captured.graph, rekindle.profile(captured, device="H200")
    plans: list[Plan | None] = [None]
    try:
        plans.append(rekindle.plan(graph, profile, budget="70%", planner="mutwo"))
    except InfeasibleBudget as error:
        least = error.least_peak_bytes
        plans.append(rekindle.plan(graph, profile, budget=least, planner="mutwo"))
    for plan in plans:
        found = rekindle.layout(graph, plan)  # which checks it
        assert found.lower_bound_bytes <= found.arena_bytes <= 1.02 * found.lower_bound_bytes
    none, in_place, sharing, both = (
        layout(graph, in_place=a, sharing=b).arena_bytes
        for b in (False, True)
        for a in (False, True)
    )
    assert none > in_place > sharing >= both


def random_layout(
    made: tuple[StepGraph, Profile], seed: int, *, in_place: bool = True
) -> tuple[StepGraph, Layout, Plan | None]:
    """A random step, dropped in part, laid out."""
    rng = random.Random(seed)
    graph = element_wise(made[0])
    plan = None
    if seed % 3:
        problem = problem_of(graph, replace(made[1], fingerprint=graph.fingerprint))
        kept = [cell for cell in range(problem.n_cells) if rng.random() < 0.4]
        plan = finish(problem, choices(problem, kept), planner="test", budget_bytes=10**12)
    return graph, layout(graph, plan, in_place=in_place), plan


@settings(max_examples=150, deadline=None)
@given(made=steps(max_forward=14), seed=st.integers(0, 10**6))
def test_random_steps(made: tuple[StepGraph, Profile], seed: int) -> None:
    graph, found, plan = random_layout(made, seed)
    check_layout(graph, found, plan)
    assert found.lower_bound_bytes <= found.arena_bytes
    apart = layout(graph, plan, in_place=False)
    assert found.arena_bytes <= apart.arena_bytes
    check_layout(graph, apart, plan)
    assert not apart.reuses


def test_wrong_layouts_are_caught() -> None:
    """Any piece moved onto another that is live at the same time, made smaller, or left out."""
    n_moved = 0
    for seed in range(60):
        rng = random.Random(seed)
        made = random_step(rng, rng.randint(4, 12), micro_batches=1 + seed % 2)
        graph, found, plan = random_layout(made, seed, in_place=bool(seed % 2))
        check_layout(graph, found, plan)
        a, b = rng.sample(range(len(found.storage)), 2)
        meets = found.start[a] < found.end[b] and found.start[b] < found.end[a]
        both = min(found.nbytes[a], found.nbytes[b]) > 0
        if meets and both and found.offset[a] != found.offset[b]:
            offset = found.offset.copy()
            offset[a] = offset[b]
            with pytest.raises(InvalidLayout, match=r"lies over|outside"):
                check_layout(graph, replace(found, offset=offset), plan)
            n_moved += 1
        largest = int(np.argmax(found.nbytes))
        smaller = found.nbytes.copy()
        smaller[largest] = 0
        with pytest.raises(InvalidLayout, match="too few"):
            check_layout(graph, replace(found, nbytes=smaller), plan)
        with pytest.raises(InvalidLayout, match="outside"):
            check_layout(graph, replace(found, arena_bytes=found.arena_bytes - 512), plan)
        gone = {name: getattr(found, name)[1:] for name in ("storage", "copy", "offset", "nbytes")}
        with pytest.raises(InvalidLayout, match="no address"):
            check_layout(graph, replace(found, **gone), plan)
    assert n_moved > 15


def test_an_op_must_not_write_over_what_its_operator_needs(lecture: StepGraph) -> None:
    found = layout(lecture)
    plainly = replace(lecture, ops=tuple(replace(op, may_overwrite=()) for op in lecture.ops))
    with pytest.raises(InvalidLayout, match="its result lies over v2"):
        check_layout(plainly, found)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 12), st.integers(0, 9)),
        min_size=1,
        max_size=40,
    )
)
def test_packed_blocks_do_not_overlap(rows: list[tuple[int, int, int]]) -> None:
    start = np.array([row[0] for row in rows])
    end = start + np.array([row[1] for row in rows])
    nbytes = np.array([row[2] for row in rows]) * 512
    offsets = pack(start, end, nbytes)
    assert (offsets + nbytes).max() >= least_bytes(start, end, nbytes)
    for a in range(len(rows)):
        for b in range(a):
            if start[a] <= end[b] and start[b] <= end[a]:
                assert offsets[a] + nbytes[a] <= offsets[b] or offsets[b] + nbytes[b] <= offsets[a]


def test_blocks_that_are_not_live_at_the_same_time_share_memory() -> None:
    blocks = np.array([0, 1, 3]), np.array([1, 2, 4]), np.array([4, 2, 5])
    assert least_bytes(*blocks) == 6
    assert pack(*blocks).tolist() == [0, 4, 0]


def test_an_empty_step_needs_no_arena() -> None:
    graph = step(storages((8, Role.INPUT)), [0], [])
    found = layout(graph)
    assert (found.arena_bytes, found.lower_bound_bytes, found.ratio) == (0, 0, 1.0)
    check_layout(graph, found)


def test_pieces_are_copies_of_storages() -> None:
    for seed in range(1, 30):
        rng = random.Random(seed)
        _, found, plan = random_layout(random_step(rng, 10), seed)
        pieces = [Piece(int(s), int(c)) for s, c in zip(found.storage, found.copy, strict=True)]
        assert len(pieces) == len(set(pieces))
        if plan and plan.recompute_us and found.copy.max() > 0:
            return
    raise AssertionError("no random step recomputes anything")
