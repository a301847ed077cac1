"""Foreach, in-place and early updates: when they apply, and the resulting graphs and costs."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hand_made import BACKWARD, FORWARD, LOSS, UPDATE, Call, profile_of, step, storages
from support.random_steps import steps

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Op, Phase, Role, StepGraph
from rekindle.core.graph.liveness import analyze
from rekindle.core.graph.schedule import check, schedule_of
from rekindle.core.graph.simulate import simulate
from rekindle.core.rewrite.improve import (
    OpKind,
    Update,
    batch_small_ops,
    carry_over,
    update_early,
    write_in_place,
)
from rekindle.planners.finish import finish
from rekindle.planners.lowering import choices
from rekindle.planners.problem import problem_of

MIB = 1 << 20


def overwritable(graph: StepGraph, over: Mapping[int, Sequence[int]]) -> StepGraph:
    """The same graph, with what each of some ops may write its result over."""
    ops = tuple(replace(op, may_overwrite=tuple(over.get(op.index, ()))) for op in graph.ops)
    return replace(graph, ops=ops)


def storage_of(graph: StepGraph, name: str) -> int:
    return next(value.storage for value in graph.values if value.name == name)


def positions(graph: StepGraph, kind: OpKind) -> list[int]:
    return [op.index for op in graph.ops if op.kind is kind]


def assert_consistent(graph: StepGraph) -> None:
    """Numbers fit, values have the producers that make them, and the plain order is valid."""
    assert [op.index for op in graph.ops] == list(range(len(graph.ops)))
    assert [value.index for value in graph.values] == list(range(len(graph.values)))
    assert [each.index for each in graph.storages] == list(range(len(graph.storages)))
    assert len({op.name for op in graph.ops}) == len(graph.ops)
    made = {value: op.index for op in graph.ops for value in op.outputs}
    assert [value.producer for value in graph.values] == [
        made.get(value.index) for value in graph.values
    ]
    check(graph, schedule_of(graph, None))


# In place


def backward_chain(
    over: Mapping[int, Sequence[int]],
    *,
    late_reads: Sequence[int] = (),
    outputs: Sequence[int] = (3,),
    devices: Mapping[int, str] | None = None,
) -> StepGraph:
    """Two forward ops, and a gradient that goes through three ops; value i lies in storage i.

    Ops 3 and 4 could write over what they read; op 5 makes a weight's gradient, and may read more.
    """
    memory = storages(
        (8, Role.INPUT),
        (8, Role.PARAM),
        (8, Role.ACTIVATION),
        (8, Role.OUTPUT),
        (8, Role.GRAD_MAP),
        (8, Role.GRAD_MAP),
        (8, Role.TEMP),
        (8, Role.GRAD),
        device=dict(devices or {}),
    )
    calls = [
        Call(FORWARD, (0, 1), (2,)),
        Call(LOSS, (2,), (3,)),
        Call(BACKWARD, (3,), (4,)),
        Call(BACKWARD, (4, 2), (5,)),
        Call(BACKWARD, (5,), (6,)),
        Call(BACKWARD, (6, 0, *late_reads), (7,)),
        Call(UPDATE, (7, 1), (), (1,)),
    ]
    return overwritable(step(memory, (0, 1), calls, outputs), over)


CHAIN = {3: (4,), 4: (5,)}


def overwriting(graph: StepGraph) -> dict[int, tuple[int, ...]]:
    """The value that each backward op of a chain overwrites, once it is improved."""
    found = write_in_place(graph)
    assert_consistent(found)
    return {op.index: op.mutates for op in found.ops if op.mutates and op.phase is BACKWARD}


def test_a_chain_of_results_shares_one_storage() -> None:
    graph = backward_chain(CHAIN)
    found = write_in_place(graph)
    assert_consistent(found)
    assert [found.values[v].storage for v in (4, 5, 6)] == [4, 4, 4]
    assert [each.nbytes for each in found.storages] == [8, 8, 8, 8, 8, 0, 0, 8]
    assert (found.ops[3].mutates, found.ops[4].mutates) == ((4,), (5,))
    assert (found.ops[3].may_overwrite, found.ops[4].may_overwrite) == ((), ())
    assert [op.outputs for op in found.ops] == [op.outputs for op in graph.ops]
    assert found.outputs == graph.outputs


def test_a_shared_storage_has_the_role_of_what_it_holds_last() -> None:
    found = write_in_place(backward_chain(CHAIN))
    assert found.storages[4].role is Role.TEMP  # as the last of the chain
    assert [found.storages[s].role for s in (5, 6)] == [Role.TEMP, Role.TEMP]
    found = write_in_place(backward_chain({3: (4,)}))
    assert found.storages[4].role is Role.GRAD_MAP
    assert found.storages[6] == backward_chain({}).storages[6]


def test_a_gradient_written_over_another_storage_lives_until_the_update() -> None:
    found = write_in_place(backward_chain({5: (6,)}))
    assert_consistent(found)
    assert storage_of(found, "v7") == 6
    assert found.storages[6].role is Role.GRAD
    assert (found.storages[7].role, found.storages[7].nbytes) == (Role.TEMP, 0)
    assert analyze(found).death[6] == 6


def test_nobody_holds_anything_longer_than_needed() -> None:
    graph = backward_chain(CHAIN)
    held = tuple(replace(each, held_until=6) for each in graph.storages)
    found = write_in_place(replace(graph, storages=held))
    assert {each.held_until for each in found.storages} == {-1}


def test_what_is_read_later_is_not_overwritten() -> None:
    assert overwriting(backward_chain(CHAIN)) == {3: (4,), 4: (5,)}
    assert overwriting(backward_chain(CHAIN, late_reads=(4,))) == {4: (5,)}
    assert overwriting(backward_chain(CHAIN, late_reads=(5,))) == {3: (4,)}


def test_another_input_is_taken_where_the_first_will_not_do() -> None:
    assert overwriting(backward_chain({3: (2, 4)})) == {3: (4,)}
    assert overwriting(backward_chain({3: (4, 2)})) == {3: (4,)}


def test_outputs_are_neither_overwritten_nor_moved() -> None:
    assert overwriting(backward_chain(CHAIN, outputs=(3, 4))) == {4: (5,)}
    assert overwriting(backward_chain(CHAIN, outputs=(3, 5))) == {}
    assert overwriting(backward_chain(CHAIN, outputs=(3, 6))) == {3: (4,)}


def test_what_was_there_before_the_step_is_not_overwritten() -> None:
    assert overwriting(backward_chain({5: (0,)})) == {}


def test_what_the_forward_pass_has_made_is_not_overwritten() -> None:
    """It is for plans to drop and compute again."""
    assert overwriting(backward_chain({3: (2,)})) == {}


def test_ops_of_other_passes_are_left_alone() -> None:
    memory = storages(
        (8, Role.PARAM), (8, Role.TEMP), (8, Role.TEMP), (8, Role.OUTPUT), (8, Role.TEMP)
    )
    calls = [
        Call(FORWARD, (0,), (1,)),
        Call(FORWARD, (1,), (2,)),
        Call(LOSS, (2,), (3,)),
        Call(UPDATE, (0,), (4,)),
        Call(UPDATE, (4, 0), (), (0,)),
    ]
    graph = overwritable(step(memory, (0,), calls, (3,)), {1: (1,), 2: (2,), 3: (0,)})
    found = write_in_place(graph)
    assert [op.mutates for op in found.ops] == [(), (), (), (), (0,)]
    assert found.storages == graph.storages


def test_a_gradient_is_not_overwritten() -> None:
    """Even if no optimizer reads it, the user may read it at its parameter."""
    memory = storages((8, Role.PARAM), (8, Role.OUTPUT), (8, Role.GRAD), (8, Role.TEMP))
    calls = [
        Call(FORWARD, (0,), (1,)),
        Call(BACKWARD, (1,), (2,)),
        Call(BACKWARD, (2,), (3,)),
    ]
    graph = overwritable(step(memory, (0,), calls, (1,)), {2: (2,)})
    assert overwriting(graph) == {}


def test_a_result_on_another_device_is_not_moved() -> None:
    assert overwriting(backward_chain(CHAIN, devices={5: "cuda:0"})) == {}


def test_random_ops_are_left_alone() -> None:
    graph = backward_chain(CHAIN)
    ops = tuple(replace(op, is_random=op.index == 3) for op in graph.ops)
    assert overwriting(replace(graph, ops=ops)) == {4: (5,)}


def test_a_view_keeps_what_it_looks_at_from_being_overwritten() -> None:
    memory = storages((8, Role.PARAM), (8, Role.OUTPUT), (8, Role.GRAD_MAP), (8, Role.GRAD_MAP))
    calls = [
        Call(LOSS, (0,), (1,)),
        Call(BACKWARD, (1,), (2,)),
        Call(BACKWARD, (2,), (2,)),  # value 3, a view
        Call(BACKWARD, (2,), (3,)),
        Call(BACKWARD, (4,), (), (4,)),
    ]
    over = {3: (2,)}
    assert overwriting(overwritable(step(memory, (0,), calls, (1,)), over))[3] == (2,)
    calls[-1] = Call(BACKWARD, (4, 3), (), (4,))
    assert 3 not in overwriting(overwritable(step(memory, (0,), calls, (1,)), over))


# Together


def with_casts(
    n_casts: int = 4,
    nbytes: int = 8,
    reads: Mapping[int, Sequence[int]] | None = None,
    changes: Mapping[int, Sequence[int]] | None = None,
) -> tuple[StepGraph, list[int]]:
    """A backward pass that casts each gradient it makes, and the ops that cast.

    Gradient i is value 2 + 2i, made by op 1 + 2i, and its cast value 3 + 2i. `reads` and `changes`
    are more values that the op that makes gradient i reads and changes.
    """
    reads, changes = reads or {}, changes or {}
    sizes = [(half, role) for half, role in ((nbytes // 2, Role.TEMP), (nbytes, Role.GRAD))]
    memory = storages((8, Role.PARAM), (4, Role.OUTPUT), *(sizes * n_casts))
    calls = [Call(LOSS, (0,), (1,))]
    for i in range(n_casts):
        more, changed = tuple(reads.get(i, ())), tuple(changes.get(i, ()))
        calls.append(Call(BACKWARD, (1, *more, *changed), (2 + 2 * i,), changed))
        calls.append(Call(BACKWARD, (2 + 2 * i,), (3 + 2 * i,)))
    casts = [2 + 2 * i for i in range(n_casts)]
    calls.append(Call(UPDATE, (*(3 + 2 * i for i in range(n_casts)), 0), (), (0,)))
    return step(memory, (0,), calls, (1,)), casts


def groups(graph: StepGraph) -> list[list[str]]:
    """The results of what is done together, by name."""
    return [
        [graph.values[v].name for v in (op.outputs or op.mutates)]
        for op in graph.ops
        if op.kind is OpKind.FOREACH
    ]


def test_ops_of_one_kind_become_one_in_place_of_the_last() -> None:
    graph, casts = with_casts()
    found = batch_small_ops(graph, [casts])
    assert_consistent(found)
    assert [op.name for op in found.ops] == [
        *("op0", "op1", "op3", "op5", "op7", "op8_together", "op9")
    ]
    (op,) = [op for op in found.ops if op.kind is OpKind.FOREACH]
    assert (op.phase, op.inputs, op.outputs) == (BACKWARD, (2, 4, 6, 8), (3, 5, 7, 9))
    assert [found.values[v].producer for v in op.outputs] == [op.index] * 4
    assert [(v.name, v.storage) for v in found.values] == [
        (v.name, v.storage) for v in graph.values
    ]
    assert [replace(each, held_until=-1) for each in graph.storages] == list(found.storages)
    assert found.outputs == graph.outputs


def test_work_adds_up_and_nobody_writes_in_place() -> None:
    graph, casts = with_casts()
    ops = tuple(replace(op, flops=op.index, may_overwrite=op.inputs[:1]) for op in graph.ops)
    found = batch_small_ops(replace(graph, ops=ops), [casts])
    (op,) = [op for op in found.ops if op.kind is OpKind.FOREACH]
    assert (op.flops, op.may_overwrite) == (sum(casts), ())


def test_a_result_that_is_read_ends_its_group() -> None:
    graph, casts = with_casts(reads={2: (3,)})  # the first cast, before the third
    assert groups(batch_small_ops(graph, [casts])) == [["v3", "v5"], ["v7", "v9"]]
    graph, casts = with_casts(reads={1: (3,)})
    assert groups(batch_small_ops(graph, [casts])) == [["v5", "v7", "v9"]]


def test_an_input_that_is_changed_ends_its_group() -> None:
    graph, casts = with_casts(changes={2: (2,)})  # the first gradient, before the third is made
    found = batch_small_ops(graph, [casts])
    assert_consistent(found)
    assert groups(found) == [["v3", "v5"], ["v7", "v9"]]


def test_an_input_may_be_read_meanwhile() -> None:
    graph, casts = with_casts(reads={2: (2,)})
    assert groups(batch_small_ops(graph, [casts])) == [["v3", "v5", "v7", "v9"]]


def test_a_group_of_one_stays_what_it_is() -> None:
    graph, casts = with_casts(reads={1: (3,), 2: (5,), 3: (7,)})
    found = batch_small_ops(graph, [casts])
    assert groups(found) == []
    assert found.ops == graph.ops
    assert found.values == graph.values
    assert batch_small_ops(graph, [[casts[0]], [], casts[1:2]]).ops == graph.ops


def test_groups_are_as_large_as_a_mebibyte_or_a_sixteenth_of_all() -> None:
    graph, casts = with_casts(n_casts=8, nbytes=MIB // 2)
    assert [len(group) for group in groups(batch_small_ops(graph, [casts]))] == [2, 2, 2, 2]
    graph, casts = with_casts(n_casts=5, nbytes=MIB)
    assert groups(batch_small_ops(graph, [casts])) == []
    graph, casts = with_casts(n_casts=64, nbytes=MIB)
    assert [len(group) for group in groups(batch_small_ops(graph, [casts]))] == [4] * 16


def test_kinds_are_kept_apart() -> None:
    graph, casts = with_casts()
    found = batch_small_ops(graph, [casts[::2], casts[1::2]])
    assert_consistent(found)
    assert groups(found) == [["v3", "v7"], ["v5", "v9"]]


def counting(*counters: int) -> tuple[StepGraph, list[int]]:
    """A forward pass that counts in buffers 1 to 3, and the ops that count."""
    buffers = [(8, Role.BUFFER)] * 3
    memory = storages((8, Role.PARAM), *buffers, (4, Role.OUTPUT))
    calls = [Call(FORWARD, (each,), (), (each,)) for each in counters]
    calls += [Call(LOSS, (0,), (4,)), Call(UPDATE, (0,), (), (0,))]
    return step(memory, range(4), calls, (4,)), list(range(len(counters)))


def test_counters_become_one_op() -> None:
    graph, counts = counting(1, 2, 3)
    found = batch_small_ops(graph, [counts])
    assert_consistent(found)
    assert [op.name for op in found.ops] == ["op2_together", "op3", "op4"]
    op = found.ops[0]
    assert (op.phase, op.inputs, op.outputs, op.mutates) == (FORWARD, (1, 2, 3), (), (1, 2, 3))


def test_a_counter_that_counts_twice_is_in_two_groups() -> None:
    graph, counts = counting(1, 2, 1, 3)
    found = batch_small_ops(graph, [counts])
    assert_consistent(found)
    assert groups(found) == [["in1", "in2"], ["in1", "in3"]]


# Early updates


@dataclass(frozen=True)
class Layers:
    """A chain of layers, each with a weight: the graph, its updates, and its optimizer's ops."""

    graph: StepGraph
    updates: list[Update]
    optimizer_ops: list[int]

    def early(self) -> StepGraph:
        found = update_early(self.graph, self.updates, self.optimizer_ops)
        assert_consistent(found)
        return found


def layers(
    sizes: Sequence[int],
    *,
    also_read: Mapping[int, int] | None = None,
    computed: Collection[int] = (),
    at_once: bool = False,
) -> Layers:
    """A step of layers, whose optimizer makes a temporary for each weight, one by one or at once.

    Layer i's weight is also read by the backward op of layer `also_read[i]`; the weights of
    `computed` layers are computed from (cast, say), and it is that the backward pass reads.
    """
    n, also_read = len(sizes), also_read or {}
    memory = [(nbytes, Role.PARAM) for nbytes in sizes] + [(8, Role.INPUT)]
    calls: list[Call] = []
    count = n + 1  # of values, each a storage of its own

    def call(phase: Phase, reads: Sequence[int], nbytes: int, role: Role) -> int:
        nonlocal count
        memory.append((nbytes, role))
        calls.append(Call(phase, tuple(dict.fromkeys(reads)), (count,)))
        count += 1
        return count - 1

    used = list(range(n))
    hidden = [n]
    for i in range(n):
        if i in computed:
            used[i] = call(FORWARD, (i,), sizes[i], Role.ACTIVATION)
        hidden.append(call(FORWARD, (hidden[-1], used[i]), 16, Role.ACTIVATION))
    loss = call(LOSS, (hidden[-1],), 4, Role.OUTPUT)
    gradient = call(BACKWARD, (loss,), 16, Role.GRAD_MAP)
    grads = dict.fromkeys(range(n), -1)
    for i in reversed(range(n)):
        more = [weight for weight, layer in also_read.items() if layer == i]
        grads[i] = call(BACKWARD, (gradient, hidden[i]), sizes[i], Role.GRAD)
        gradient = call(BACKWARD, (gradient, used[i], *more), 16, Role.GRAD_MAP)
    optimizer_ops = []
    if at_once:
        memory += [(nbytes, Role.TEMP) for nbytes in sizes]
        made = range(count, count + n)
        calls.append(Call(UPDATE, [*grads.values()], made))
        calls.append(Call(UPDATE, [*made, *range(n)], (), range(n)))
        optimizer_ops = [len(calls) - 2, len(calls) - 1]
    for i in range(0 if at_once else n):
        temporary = call(UPDATE, (grads[i],), sizes[i], Role.TEMP)
        calls.append(Call(UPDATE, (temporary, i), (), (i,)))
        optimizer_ops += [len(calls) - 2, len(calls) - 1]
    graph = step(storages(*memory), range(n + 1), calls, (loss,))
    return Layers(graph, [Update(i, grads[i]) for i in range(n)], optimizer_ops)


def updated(graph: StepGraph) -> list[list[str]]:
    """The parameters of each update, by name, in order."""
    return [
        [graph.values[v].name for v in op.mutates] for op in graph.ops if op.kind is OpKind.UPDATE
    ]


def last_read(graph: StepGraph, name: str) -> int:
    """The last op that reads a storage, updates aside."""
    storage = storage_of(graph, name)
    return max(
        op.index
        for op in graph.ops
        if op.kind is not OpKind.UPDATE and storage in {graph.values[v].storage for v in op.inputs}
    )


def update_of(graph: StepGraph, name: str) -> int:
    """The op that updates a parameter."""
    (found,) = (
        op.index
        for op in graph.ops
        if op.kind is OpKind.UPDATE and name in {graph.values[v].name for v in op.mutates}
    )
    return found


def test_an_update_stands_right_behind_the_last_read_of_its_weight() -> None:
    early = layers([64] * 3).early()
    assert updated(early) == [["in2"], ["in1"], ["in0"]]
    for name in ("in0", "in1", "in2"):
        assert update_of(early, name) == last_read(early, name) + 1


def test_an_update_waits_for_all_that_is_computed_from_its_weight() -> None:
    """A plan may drop it, and compute it again from the weight as it was."""
    early = layers([64] * 3, computed={1}).early()
    cast = next(
        v.name
        for op in early.ops
        for v in [early.values[o] for o in op.outputs]
        if op.phase is FORWARD and op.inputs == (1,)
    )
    assert last_read(early, "in1") < last_read(early, cast) < update_of(early, "in1")
    assert update_of(early, "in1") == last_read(early, cast) + 1


def test_a_weight_that_is_read_again_later_is_updated_later() -> None:
    early = layers([64] * 3, also_read={2: 0}).early()  # tied: the last layer's and the first's
    assert update_of(early, "in1") < update_of(early, "in2")
    assert update_of(early, "in2") > last_read(early, "in2")
    assert early.ops[-1].kind is OpKind.UPDATE


def test_the_optimizers_ops_and_what_they_make_are_gone() -> None:
    made = layers([64] * 3)
    early = made.early()
    names = {made.graph.ops[i].name for i in made.optimizer_ops}
    lost = {
        made.graph.values[v].name for i in made.optimizer_ops for v in made.graph.ops[i].outputs
    }
    assert names.isdisjoint(op.name for op in early.ops)
    assert lost.isdisjoint(value.name for value in early.values)
    assert len(early.values) == len(made.graph.values) - len(lost)
    assert len(early.storages) == len(made.graph.storages)
    assert len(early.ops) == len(made.graph.ops) - len(names) + 3
    rest = [op.name for op in early.ops if op.kind is not OpKind.UPDATE]
    assert rest == [op.name for op in made.graph.ops if op.name not in names]


def test_values_keep_their_names_and_storages() -> None:
    made = layers([64] * 3)
    early = made.early()
    before = {value.name: value for value in made.graph.values}
    for value in early.values:
        old = before[value.name]
        assert (value.storage, value.shape, value.dtype) == (old.storage, old.shape, old.dtype)
    assert [early.values[v].name for v in early.outputs] == [
        made.graph.values[v].name for v in made.graph.outputs
    ]
    numbered = {value.name: value.index for value in made.graph.values}
    for op in early.ops:
        old_op = next((o for o in made.graph.ops if o.name == op.name), None)
        if old_op is not None:
            assert [numbered[early.values[v].name] for v in op.inputs] == [*old_op.inputs]


def test_an_update_reads_gradients_and_changes_parameters() -> None:
    early = layers([64] * 3).early()
    for op in early.ops:
        if op.kind is OpKind.UPDATE:
            roles = [early.storage_of(v).role for v in op.inputs]
            assert roles == [Role.GRAD, Role.PARAM]
            assert op.inputs[1:] == op.mutates
            assert (op.phase, op.outputs) == (UPDATE, ())


def test_gradients_die_at_their_own_update() -> None:
    made = layers([64] * 5)
    early = made.early()
    death, before = analyze(early).death, analyze(made.graph).death
    for update in made.updates:
        storage = made.graph.values[update.grad].storage
        assert death[storage] == update_of(early, made.graph.values[update.param].name)
        assert before[storage] == len(made.graph.ops) - 1
    profiles = [profile_of(made.graph), profile_of(early)]
    assert simulate(early, profiles[1]).peak_bytes < simulate(made.graph, profiles[0]).peak_bytes


def test_many_updates_are_done_in_sixteen_calls_at_most() -> None:
    early = layers([64] * 100).early()
    each = updated(early)
    assert 12 <= len(each) <= 16
    assert sorted(name for names in each for name in names) == sorted(f"in{i}" for i in range(100))


def test_a_little_that_is_left_over_does_not_make_another_call() -> None:
    assert len(updated(layers([4, *[64] * 16]).early())) <= 16


def test_a_small_gradient_waits_for_others() -> None:
    early = layers([16, 1600, 16, 16]).early()
    assert updated(early) == [["in3", "in2", "in1"], ["in0"]]


def test_a_weight_without_a_gradient_is_left_alone() -> None:
    made = layers([64] * 3)
    own = {made.optimizer_ops[2], made.optimizer_ops[3]}  # of the second layer
    early = update_early(made.graph, made.updates[::2], set(made.optimizer_ops) - own)
    assert updated(early) == [["in2"], ["in0"]]
    assert [op.name for op in early.ops if op.index >= len(early.ops) - 2] == [
        made.graph.ops[i].name for i in sorted(own)
    ]


# Costs


def test_an_improved_step_costs_what_the_captured_one_does() -> None:
    made = layers([64, 192, 64])
    times = [float(1 + op.index) for op in made.graph.ops]
    profile = profile_of(made.graph, times_us=times, workspaces={0: 5, 3: 7}, overhead_bytes=11)
    early = made.early()
    found = carry_over(profile, made.graph, early)
    found.check(early)
    assert found.step_us == pytest.approx(profile.step_us)
    assert (found.device, found.overhead_bytes) == (profile.device, 11)
    cost_of = dict(zip((op.name for op in made.graph.ops), profile.costs, strict=True))
    for op, cost in zip(early.ops, found.costs, strict=True):
        if op.kind is not OpKind.UPDATE:
            assert cost == cost_of[op.name]


def test_updates_share_the_optimizers_time_by_the_bytes_of_their_gradients() -> None:
    made = layers([64, 192, 64])
    us = dict.fromkeys(made.optimizer_ops, 10.0)
    profile = profile_of(made.graph, times_us=[us.get(op.index, 1.0) for op in made.graph.ops])
    early = made.early()
    found = carry_over(profile, made.graph, early)
    shares = [found.costs[update_of(early, f"in{i}")].time_us for i in range(3)]
    assert shares == pytest.approx([12.0, 36.0, 12.0])


def test_done_together_costs_as_much_as_one_by_one() -> None:
    graph, casts = with_casts()
    profile = profile_of(
        graph,
        times_us=[float(1 + op.index) for op in graph.ops],
        workspaces={casts[0]: 5, casts[1]: 7},
    )
    found = batch_small_ops(graph, [casts])
    costs = carry_over(profile, graph, found)
    costs.check(found)
    (place,) = positions(found, OpKind.FOREACH)
    assert costs.step_us == pytest.approx(profile.step_us)
    assert costs.costs[place].time_us == sum(1.0 + index for index in casts)
    assert costs.costs[place].workspace_bytes == 12


def test_counters_done_together_cost_as_much_as_one_by_one() -> None:
    graph, counts = counting(1, 2, 1, 3)
    profile = profile_of(graph, times_us=[1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    found = batch_small_ops(graph, [counts])
    costs = carry_over(profile, graph, found)
    assert [cost.time_us for cost in costs.costs] == [3.0, 12.0, 16.0, 32.0]


def test_an_update_needs_its_share_of_what_the_optimizer_makes_for_all_at_once() -> None:
    """As where each op of the optimizer is for all parameters: it may need all of its workspace."""
    made = layers([MIB, 3 * MIB], at_once=True)
    early = made.early()
    profile = profile_of(made.graph, workspaces={made.optimizer_ops[-1]: 16})
    found = carry_over(profile, made.graph, early)
    needs = [found.costs[update_of(early, name)].workspace_bytes for name in ("in0", "in1")]
    assert needs == [MIB + 16, 3 * MIB + 16]


def test_an_update_needs_what_the_optimizer_makes_for_one_parameter_at_a_time() -> None:
    """As where the optimizer goes from one to the next: what it makes is as large as each."""
    made = layers([MIB] * 4)
    early = made.early()
    found = carry_over(profile_of(made.graph), made.graph, early)
    assert [found.costs[i].workspace_bytes for i in positions(early, OpKind.UPDATE)] == [MIB] * 4


# Random steps


Meaning = dict[str, int]


class _Numbers:
    """Gives equal terms equal numbers."""

    def __init__(self) -> None:
        self._of: dict[object, int] = {}

    def __call__(self, *term: object) -> int:
        return self._of.setdefault(term, len(self._of))


def meaning(
    captured: StepGraph,
    graph: StepGraph,
    number: _Numbers,
    updates: Sequence[Update] = (),
    optimizer_ops: Collection[int] = (),
) -> tuple[Meaning, Meaning]:
    """The reads of each captured op, and the final state, when a form of a step runs.

    A number stands for all that has gone into a piece of memory. Ops do what the captured ones of
    their name do; only where they put it is the form's own business.
    """
    by_name = {op.name: op for op in captured.ops}
    place = {value.name: value.storage for value in graph.values}
    name = [value.name for value in captured.values]
    holds = {value.storage: number("in", value.name) for value in graph.values}
    maker = {name[v]: op for op in captured.ops for v in op.outputs}
    grad_of = {name[update.param]: name[update.grad] for update in updates}
    reads: Meaning = {}

    def run(op: Op) -> None:
        seen = tuple(holds[place[name[v]]] for v in op.inputs)
        reads[op.name] = number("reads", seen)
        read = {captured.values[v].storage for v in op.inputs}
        changed = {captured.values[v].storage for v in op.mutates}
        for value in op.outputs:
            storage = captured.values[value].storage
            if storage not in read | changed:
                holds[place[name[value]]] = number("made", op.name, storage, seen)
        for storage in dict.fromkeys(place[name[v]] for v in op.mutates):
            holds[storage] = number("changed", op.name, holds[storage], seen)

    def update(param: str) -> None:
        where = place[param]
        holds[where] = number("updated", holds[where], holds[place[grad_of[param]]])

    gone = set(optimizer_ops)
    for op in graph.ops:
        if op.kind is OpKind.UPDATE:
            for value in op.mutates:
                update(graph.values[value].name)
        elif op.kind is OpKind.FOREACH:
            for value in op.outputs:
                run(maker[graph.values[value].name])
        elif graph is captured and op.index in gone:
            for param in grad_of:
                update(param)
            gone = {index for index in gone if index != op.index}
        else:
            run(by_name[op.name])
    entered = [value.name for value in captured.values if value.producer is None]
    kept = {n: holds[place[n]] for n in (*entered, *(name[v] for v in captured.outputs))}
    return reads, kept


def with_overwriting(graph: StepGraph, profile: Profile) -> tuple[StepGraph, Profile]:
    """The same step with few sizes, and with all that ops of one result could write over."""
    sized = tuple(replace(s, nbytes=4 + 4 * (s.nbytes % 2)) for s in graph.storages)
    ops = []
    for op in graph.ops:
        over: list[int] = []
        if len(op.outputs) == 1 and not op.mutates and not op.is_view:
            result = graph.values[op.outputs[0]].storage
            read = [graph.values[v].storage for v in op.inputs]
            over = [
                v
                for v, storage in zip(op.inputs, read, strict=True)
                if read.count(storage) == 1 and sized[storage].nbytes == sized[result].nbytes
            ]
        ops.append(replace(op, may_overwrite=tuple(over)))
    found = replace(graph, ops=tuple(ops), storages=sized)
    return found, replace(profile, fingerprint=found.fingerprint)


def some_updates(graph: StepGraph, rng: random.Random) -> tuple[list[Update], list[int]]:
    """For each weight one of the gradients that a random step's optimizer reads."""
    (own,) = (op for op in graph.ops if op.phase is UPDATE)
    grads = [
        v for v in own.inputs if graph.storage_of(v).role is Role.GRAD and v not in graph.outputs
    ]
    weights = [v for v in own.mutates if graph.storage_of(v).role is Role.PARAM]
    chosen = rng.sample(grads, min(len(grads), len(weights)))
    pairs = zip(weights[: len(chosen)], chosen, strict=True)
    return [Update(weight, grad) for weight, grad in pairs], [own.index]


@settings(max_examples=150, deadline=None)
@given(steps(max_forward=16))
def test_random_steps_in_place(made: tuple[StepGraph, Profile]) -> None:
    """They mean the same, are valid, and take no more memory."""
    graph, profile = with_overwriting(*made)
    found = write_in_place(graph)
    assert_consistent(found)
    number = _Numbers()
    assert meaning(graph, found, number) == meaning(graph, graph, number)
    for value in found.values:  # wherever it lies now, there is room for it
        assert found.storage_of(value.index).nbytes == graph.storage_of(value.index).nbytes
    before = simulate(graph, profile).peak_bytes
    assert simulate(found, carry_over(profile, graph, found)).peak_bytes <= before


@settings(max_examples=150, deadline=None)
@given(steps(max_forward=16), st.randoms(use_true_random=False))
def test_random_steps_with_backward_ops_together(
    made: tuple[StepGraph, Profile], rng: random.Random
) -> None:
    graph, profile = made
    able = [
        op.index
        for op in graph.ops
        if op.phase is BACKWARD and op.outputs and not (op.mutates or op.is_view)
    ]
    kinds: list[list[int]] = [[], []]
    for index in able:
        rng.choice(kinds).append(index)
    found = batch_small_ops(graph, kinds)
    assert_consistent(found)
    number = _Numbers()
    assert meaning(graph, found, number) == meaning(graph, graph, number)
    costs = carry_over(profile, graph, found)
    costs.check(found)
    assert costs.step_us == pytest.approx(profile.step_us)


@settings(max_examples=150, deadline=None)
@given(steps(max_forward=16), st.randoms(use_true_random=False))
def test_random_steps_with_early_updates(
    made: tuple[StepGraph, Profile], rng: random.Random
) -> None:
    """In no more memory; and with all dropped, nothing is computed from an updated weight."""
    graph, profile = with_overwriting(*made)
    form = write_in_place(graph)
    updates, own = some_updates(form, rng)
    early = update_early(form, updates, own)
    assert_consistent(early)
    number = _Numbers()
    reads, end = meaning(graph, early, number, updates)
    wanted_reads, wanted_end = meaning(graph, graph, number, updates, own)
    assert (reads, end) == (wanted_reads, wanted_end)
    costs = carry_over(profile, graph, early)
    if updates:
        assert costs.step_us == pytest.approx(profile.step_us)
    for op in early.ops:
        if op.kind is OpKind.UPDATE:
            roles = [early.storage_of(v).role for v in op.inputs]
            assert {*roles} == {Role.GRAD, Role.PARAM}
    light = replace(costs, costs=tuple(replace(c, workspace_bytes=0) for c in costs.costs))
    plain = replace(profile, costs=tuple(replace(c, workspace_bytes=0) for c in profile.costs))
    assert simulate(early, light).peak_bytes <= simulate(graph, plain).peak_bytes
    problem = problem_of(early, costs)
    plan = finish(problem, choices(problem, ()), planner="test", budget_bytes=10**12)
    plan.check(early)
