"""The checker of schedules: it lets valid ones pass, and names the op where one breaks a rule."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hand_made import BACKWARD, FORWARD, LOSS, UPDATE, Call, profile_of, step, storages
from support.random_steps import steps

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.dataflow import dataflow
from rekindle.core.graph.graph import Role, StepGraph
from rekindle.core.graph.schedule import Compute, Free, Instruction, Schedule, check
from rekindle.core.graph.simulate import simulate
from rekindle.errors import InvalidSchedule, PlanError
from rekindle.planners.lowering import Choices, Lowered, choices, lower, to_schedule
from rekindle.planners.problem import problem_of
from rekindle.planners.registry import PLANNERS

# Storages and values: 0 x, 1 w, 2 count, 3 hidden, 4 activation, 5 loss, 6 its gradient, 7 the
# weight's. Op 0 makes 3; op 1 makes 4 of it and draws random numbers, as does op 2, which counts.
GRAPH = step(
    storages(
        (8, Role.INPUT),
        (8, Role.PARAM),
        (4, Role.BUFFER),
        (8, Role.ACTIVATION),
        (8, Role.ACTIVATION),
        (4, Role.OUTPUT),
        (8, Role.GRAD_MAP),
        (8, Role.GRAD),
    ),
    entering=[0, 1, 2],
    calls=[
        Call(FORWARD, [0, 1], [3]),
        Call(FORWARD, [3], [4]),
        Call(FORWARD, [2], [], [2]),
        Call(LOSS, [4], [5]),
        Call(BACKWARD, [4], [6]),
        Call(BACKWARD, [3, 6], [7]),
        Call(UPDATE, [1, 7], [], [1]),
    ],
    outputs=[5],
)
GRAPH = StepGraph(
    tuple(replace(op, is_random=op.index in (1, 2)) for op in GRAPH.ops),
    GRAPH.values,
    GRAPH.storages,
    GRAPH.outputs,
)

PLAIN: Schedule = (
    *(Compute(0), Compute(1), Compute(2), Compute(3), Compute(4), Free(4)),
    *(Compute(5), Free(3), Free(6), Compute(6), Free(7)),
)
# Both activations are dropped; 3 is computed again for 4, and once more for itself.
RECOMPUTED: Schedule = (
    *(Compute(0), Compute(1), Free(3), Compute(2), Compute(3), Free(4)),
    *(Compute(0, 1), Compute(1, 1), Free(3, 1), Compute(4), Free(4, 1)),
    *(Compute(0, 2), Compute(5), Free(3, 2), Free(6), Compute(6), Free(7)),
)


def changed(schedule: Schedule, *changes: tuple[Instruction, list[Instruction]]) -> Schedule:
    """The schedule with instructions replaced by others."""
    replaced = dict(changes)
    assert replaced.keys() <= set(schedule)
    return tuple(new for old in schedule for new in replaced.get(old, [old]))


def test_valid_schedules_pass() -> None:
    check(GRAPH, PLAIN)
    check(GRAPH, RECOMPUTED)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (changed(PLAIN, (Compute(0), [])), "op1: reads v3, which is not live"),
        (changed(RECOMPUTED, (Compute(0, 2), [])), "op5: reads v3, which is not live"),
        (changed(RECOMPUTED, (Compute(0, 1), [])), "op1: reads v3, which is not live"),
        (
            changed(PLAIN, (Compute(4), [Compute(4), Free(3)]), (Free(3), [])),
            "op5: reads v3, which is not live",
        ),
        (
            changed(PLAIN, (Compute(3), [Compute(2, 1), Compute(3)])),
            "op2: must not be recomputed: it changes state (in2)",
        ),
        (
            changed(PLAIN, (Free(4), [Compute(4, 1), Free(6, 1), Free(4)])),
            "op4: must not be recomputed: it is an op of the backward pass",
        ),
        (changed(PLAIN, (Free(3), [Free(3), Free(3)])), "v3: is freed, but is not live"),
        (
            changed(RECOMPUTED, (Free(3, 2), [Free(3, 2), Free(3, 1)])),
            "v3 (copy 1): is freed, but is not live",
        ),
        (changed(PLAIN, (Free(3), [])), "v3: is never freed"),
        (changed(RECOMPUTED, (Free(4, 1), [])), "v4 (copy 1): is never freed"),
        (changed(PLAIN, (Compute(2), [Compute(2), Compute(2)])), "op2: runs twice as the same"),
        (changed(PLAIN, (Compute(6), [Compute(6), Compute(6)])), "op6: runs twice as the same"),
        (
            changed(RECOMPUTED, (Compute(0, 1), [Compute(0, 1), Compute(0, 1)])),
            "op0: runs twice as the same",
        ),
        ((*PLAIN, Free(5)), "v5: is an output, but is not live at the end"),
        (changed(PLAIN, (Compute(2), [])), "op2: never runs"),
        (changed(PLAIN, (Compute(6), [])), "op6: never runs"),
        (
            changed(PLAIN, (Compute(1), []), (Compute(2), [Compute(2), Compute(1)])),
            "op1: draws random numbers out of their captured order",
        ),
        ((*PLAIN, Free(1)), "in1: is freed, but existed before the step"),
        ((*PLAIN, Free(0, 1)), "in0 (copy 1): is freed, but existed before the step"),
        ((*PLAIN, Compute(7)), "op 7: does not exist: there are 7"),
        ((*PLAIN, Compute(-1)), "op -1: does not exist"),
        ((*PLAIN, Free(99)), "storage 99: is freed, but is not live"),
        (
            changed(PLAIN, (Free(7), [Compute(0, 1), Free(3, 1), Free(7)])),
            "op0: reads in1, which is not live",  # the update has changed it
        ),
        ((), "op0: never runs"),
    ],
)
def test_what_is_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(InvalidSchedule) as raised:
        check(GRAPH, schedule)
    assert str(raised.value).startswith(message)


def test_a_recomputation_may_draw_again_at_any_time() -> None:
    """It draws from the state that the captured op started with; op 2 has drawn since."""
    again = [Compute(1, 1), Free(4, 1), Compute(4)]
    check(GRAPH, changed(PLAIN, (Compute(4), again)))


# Value 1 (storage 1) is read by op 1, then changed in place by op 2; op 3 looks at it (value 3).
IN_PLACE = step(
    storages(
        (8, Role.INPUT),
        (8, Role.ACTIVATION),
        (8, Role.ACTIVATION),
        (4, Role.OUTPUT),
        (8, Role.GRAD_MAP),
    ),
    entering=[0],
    calls=[
        Call(FORWARD, [0], [1]),
        Call(FORWARD, [1], [2]),
        Call(FORWARD, [1], [], [1]),
        Call(FORWARD, [1], [1]),
        Call(LOSS, [3], [3]),
        Call(BACKWARD, [3, 2], [4]),
    ],
    outputs=[4],
)
FORWARD_PASS = (Compute(0), Compute(1), Compute(2), Compute(3), Compute(4))


def test_a_copy_passes_through_the_versions_of_the_original() -> None:
    """Both are dropped: 1 is made again, read by op 1, changed, and looked at."""
    again = (Compute(0, 1), Compute(1, 1), Compute(2, 1), Compute(3, 1))
    last = (Compute(5), Free(1, 1), Free(2, 1), Free(4))
    check(IN_PLACE, (*FORWARD_PASS, Free(1), Free(2), *again, *last))


@pytest.mark.parametrize(
    ("again", "message"),
    [
        ([0, 2, 1, 3], "op1: reads v1, which is not live"),  # which op 2 has overwritten
        ([0, 1, 3], "op5: reads v3, which is not live"),  # at the version that op 2 writes
        ([0, 1, 2], "op5: reads v3, which is not live"),  # the view
        ([0, 1, 2, 2, 3], "op2: runs twice as the same copy"),
    ],
)
def test_a_copy_with_another_history_is_refused(again: list[int], message: str) -> None:
    copies = [Compute(op, 1) for op in again]
    last = (Compute(5), Free(1, 1), Free(2, 1), Free(4))
    with pytest.raises(InvalidSchedule) as raised:
        check(IN_PLACE, (*FORWARD_PASS, Free(1), Free(2), *copies, *last))
    assert str(raised.value).startswith(message)


def test_an_in_place_copy_changes_no_other_copy() -> None:
    """Op 2 would change the original a second time."""
    with pytest.raises(InvalidSchedule, match=r"op2: reads v1, which is not live"):
        check(IN_PLACE, (*FORWARD_PASS, Compute(2, 1)))


def test_a_plan_belongs_to_its_graph() -> None:
    plan = PLANNERS["none"](GRAPH, profile_of(GRAPH), 1000)
    plan.check(GRAPH)
    with pytest.raises(PlanError, match="this plan is for another step"):
        plan.check(IN_PLACE)
    with pytest.raises(InvalidSchedule, match="v3: is never freed"):
        replace(plan, schedule=changed(plan.schedule, (Free(3), []))).check(GRAPH)


# Random steps with random choices


@dataclass
class LoweredStep:
    """A step and what the lowering makes of some choices for it."""

    step: tuple[StepGraph, Profile]
    chosen: Choices

    @property
    def graph(self) -> StepGraph:
        return self.step[0]

    @property
    def lowered(self) -> Lowered:
        return lower(problem_of(*self.step), self.chosen)

    @property
    def schedule(self) -> Schedule:
        return to_schedule(self.lowered)


@st.composite
def lowered_steps(draw: st.DrawFn, max_micro_batches: int = 2) -> LoweredStep:
    """Random steps with random choices."""
    graph, profile = step = draw(steps(max_micro_batches=max_micro_batches))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    problem = problem_of(graph, profile)
    share = rng.random()
    chosen = choices(problem, [c for c in range(problem.n_cells) if rng.random() < share])
    if draw(st.booleans()):
        hold_from = [rng.choice((0, rng.randint(0, len(graph.ops)))) for _ in chosen.keep]
        chosen = Choices(chosen.keep, hold_from)
    return LoweredStep(step, chosen)


@settings(max_examples=200, deadline=None)
@given(lowered_steps())
def test_any_choices_make_a_valid_schedule(made: LoweredStep) -> None:
    (graph, profile), lowered, schedule = made.step, made.lowered, made.schedule
    check(graph, schedule)
    plan = replace(PLANNERS["none"](graph, profile, 10**9), schedule=schedule)
    trace = simulate(graph, profile, plan)
    assert trace.peak_bytes == lowered.peak_bytes
    assert trace.recompute_us == pytest.approx(lowered.recompute_us)


@settings(max_examples=60, deadline=None)
@given(lowered_steps(max_micro_batches=1))
def test_no_instruction_is_left_out_or_doubled(made: LoweredStep) -> None:
    graph, schedule = made.graph, made.schedule
    for place in range(len(schedule)):
        for count in (0, 2):
            instructions = [schedule[place]] * count
            with pytest.raises(InvalidSchedule):
                check(graph, (*schedule[:place], *instructions, *schedule[place + 1 :]))


@settings(max_examples=60, deadline=None)
@given(lowered_steps())
def test_no_instruction_comes_before_one_it_needs(made: LoweredStep) -> None:
    graph, schedule = made.graph, made.schedule
    for place, (first, second) in enumerate(pairwise(schedule)):
        if needs(graph, schedule, first, second):
            with pytest.raises(InvalidSchedule):
                check(graph, (*schedule[:place], second, first, *schedule[place + 2 :]))


def needs(graph: StepGraph, schedule: Schedule, first: Instruction, second: Instruction) -> bool:
    """True if two instructions must stay in order: one writes or frees what the other touches.

    Only storages of which there is one copy are looked at: of others, another copy may be read.
    """
    copied = {step.storage for step in schedule if isinstance(step, Free) and step.copy}
    written, touched = zip(uses(graph, first), uses(graph, second), strict=True)
    shared = written[0] & touched[1] | written[1] & touched[0]
    return bool(shared - copied)


def uses(graph: StepGraph, instruction: Instruction) -> tuple[set[int], set[int]]:
    """The storages that an instruction makes, changes or frees, and all that it touches."""
    if isinstance(instruction, Free):
        return {instruction.storage}, {instruction.storage}
    op, flow = graph.ops[instruction.op], dataflow(graph)
    if instruction.copy:
        return set(), {storage for storage, _ in flow.copy_reads[op.index]}
    written = {*flow.makes[op.index], *flow.mutates[op.index]}
    return written, written | {storage for storage, _ in flow.reads[op.index]}
