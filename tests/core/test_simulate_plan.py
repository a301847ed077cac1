"""Simulated plans: a timeline worked out by hand, and the lowering's own count."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from support.tiny_step import MIB, OVERHEAD_BYTES, tiny_plan, tiny_step

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Role, StepGraph
from rekindle.core.graph.schedule import Compute, Free, Plan
from rekindle.core.graph.serial import load_profile
from rekindle.core.graph.simulate import ROLES, simulate
from rekindle.errors import InvalidSchedule, PlanError
from rekindle.planners.lowering import Choices, choices, lower, to_schedule
from rekindle.planners.problem import problem_of
from rekindle.planners.registry import PLANNERS

MEASURED = Path(__file__).parents[2] / "benchmarks" / "profiles"


def test_every_position_by_hand() -> None:
    graph, profile, _ = tiny_step()
    plan = tiny_plan()
    plan.check(graph)
    trace = simulate(graph, profile, plan)
    resident = 2 * MIB + OVERHEAD_BYTES
    assert trace.ops.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6]
    assert trace.copies.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert (trace.live_bytes - resident).tolist() == [
        MIB + MIB // 2,
        5 * MIB,
        4 * MIB + 4,
        8,
        MIB + MIB // 2 + 4,
        5 * MIB + 4,
        5 * MIB + 4,
        2 * MIB + 4,
        MIB + 4,
    ]
    assert trace.starts_us.tolist() == [0, 100, 120, 130, 170, 270, 290, 320, 520, 620]
    assert (trace.step_us, trace.recompute_us) == (620, 120)
    assert (trace.peak_position, trace.peak_op) == (5, 1)
    assert trace.peak_bytes == 5 * MIB + 4 + resident
    activations = trace.by_role[ROLES.index(Role.ACTIVATION)] // MIB
    assert activations.tolist() == [0, 4, 4, 0, 0, 4, 4, 0, 0]
    assert trace.peak_by_role()[Role.ACTIVATION] == 4 * MIB


def test_what_is_alive() -> None:
    graph, profile, _ = tiny_step()
    trace = simulate(graph, profile, tiny_plan())
    assert trace.alive_at(3) == [0, 1, 4, 5]
    assert trace.alive_at(5) == [3, 0, 1, 2, 5]


def test_two_copies_at_once_count_twice() -> None:
    graph, profile, _ = tiny_step()
    plan = tiny_plan()
    held = [each for each in plan.schedule if each not in (Free(3), Free(3, 1))]
    late = dataclasses.replace(plan, schedule=(*held, Free(3), Free(3, 1)))
    trace = simulate(graph, profile, late)
    assert trace.alive_at(6)[:2] == [3, 3]
    assert trace.by_role[ROLES.index(Role.ACTIVATION)].max() == 8 * MIB


def test_the_plain_step_is_its_own_order() -> None:
    graph, _, trace = tiny_step()
    assert trace.ops.tolist() == list(range(len(graph.ops)))
    assert not trace.copies.any()
    assert trace.recompute_us == 0
    assert trace.peak_position == trace.peak_op


def test_a_plan_of_another_step() -> None:
    graph, profile, _ = tiny_step()
    plan = dataclasses.replace(tiny_plan(), fingerprint="0" * 16)
    with pytest.raises(PlanError, match="another step"):
        simulate(graph, profile, plan)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (Free(3), r"storage 3 \(copy 0\): is freed, but is not live"),
        (Free(2, 9), r"storage 2 \(copy 9\): is freed, but is not live"),
        (Compute(7), "op 7: does not exist: there are 7"),
        (Compute(-1), "op -1: does not exist"),
    ],
)
def test_an_instruction_that_makes_no_sense(instruction: Compute | Free, message: str) -> None:
    graph, profile, _ = tiny_step()
    plan = tiny_plan()
    broken = dataclasses.replace(plan, schedule=(*plan.schedule, instruction))
    with pytest.raises(InvalidSchedule, match=message):
        simulate(graph, profile, broken)


@pytest.mark.parametrize("path", sorted(MEASURED.glob("*.json.gz")), ids=lambda p: p.name)
def test_the_lowering_counts_the_same(path: Path) -> None:
    """Position by position, for random choices, and also if copies are freed and recomputed.

    A schedule has more positions than the lowering: the views of what is computed again.
    """
    graph, profile, _ = load_profile(path)
    check_random_choices(graph, profile, random.Random(path.name))


def test_copies_that_another_operator_makes() -> None:
    """Batch norm computed again from its own mean and variance: quicker, and one output alone."""
    measured, profile, _ = load_profile(MEASURED / "resnet152_b32_bf16_h200.json.gz")
    ops = [
        dataclasses.replace(op, copy_target="aten.batch_norm_elemt.default")
        if op.target == "aten.native_batch_norm.default"
        else op
        for op in measured.ops
    ]
    graph = dataclasses.replace(measured, ops=tuple(ops))
    costs = [
        dataclasses.replace(cost, copy_us=cost.time_us / 2 if op.copy_target else None)
        for op, cost in zip(ops, profile.costs, strict=True)
    ]
    changed = dataclasses.replace(profile, fingerprint=graph.fingerprint, costs=tuple(costs))
    assert sum(cost.copy_us is not None for cost in costs) > 100
    check_random_choices(graph, changed, random.Random(0))


def check_random_choices(graph: StepGraph, profile: Profile, rng: random.Random) -> None:
    problem = problem_of(graph, profile)
    for share in (0.0, 0.3, 0.8):
        kept = choices(problem, [c for c in range(problem.n_cells) if rng.random() < share]).keep
        hold_from = [rng.choice((0, 0, len(graph.ops))) for _ in kept]
        lowered = lower(problem, Choices(kept, hold_from))
        schedule = to_schedule(lowered)
        plan = Plan("random", graph.fingerprint, 1 << 60, schedule, (), 0, 0.0)
        plan.check(graph)
        trace = simulate(graph, profile, plan)
        is_view = np.array([op.is_view for op in graph.ops])
        own = ~(is_view[trace.ops] & (trace.copies > 0))
        assert trace.ops[own].tolist() == lowered.ops.tolist()
        assert trace.copies[own].tolist() == lowered.copies.tolist()
        assert trace.live_bytes[own].tolist() == lowered.live.tolist()
        assert trace.peak_bytes == lowered.peak_bytes
        assert trace.recompute_us == pytest.approx(lowered.recompute_us)
        assert trace.step_us == pytest.approx(profile.step_us + lowered.recompute_us)


def test_it_is_quick() -> None:
    """Linear in the schedule's length; the limits are loose, for slow machines."""
    graph, profile, _ = load_profile(MEASURED / "bert-large_b32_bf16_h200.json.gz")
    plan = PLANNERS["all"](graph, profile, 1 << 60)
    limits = {"plain": (None, 10e-6), "planned": (plan, 20e-6)}
    for name, (which, per_op) in limits.items():
        times = []
        for _ in range(5):
            started = perf_counter()
            simulate(graph, profile, which)
            times.append(perf_counter() - started)
        assert min(times) < per_op * len(graph.ops), name
