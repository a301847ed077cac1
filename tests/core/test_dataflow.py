"""Versions of storages, what a recomputation reads, and which ops may run a second time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.hand_made import BACKWARD, FORWARD, LOSS, UPDATE, Call, step, storages

from rekindle.core.graph.dataflow import dataflow, is_state_free
from rekindle.core.graph.graph import Op, Role, StepGraph

# Storages and values 0 x, 1 w, 2 state; 3 hidden, changed in place by op 2 and looked at by op 3
# (value 5, storage 3); value 4 is storage 4; value 6 the loss, storage 5.
IN_PLACE = step(
    storages(
        (8, Role.INPUT),
        (8, Role.PARAM),
        (8, Role.BUFFER),
        (8, Role.ACTIVATION),
        (8, Role.ACTIVATION),
        (4, Role.OUTPUT),
    ),
    entering=[0, 1, 2],
    calls=[
        Call(FORWARD, [0, 1], [3]),
        Call(FORWARD, [3], [4]),
        Call(FORWARD, [3, 4], [], [3]),
        Call(FORWARD, [3], [3]),
        Call(LOSS, [5, 2], [5], [2]),
        Call(BACKWARD, [5, 4]),
        Call(UPDATE, [1], [], [1]),
    ],
    outputs=[6],
)


def test_versions() -> None:
    """Inputs have version 0, new storages version 1; an in-place op writes the next."""
    flow = dataflow(IN_PLACE)
    assert flow.reads == (
        ((0, 0), (1, 0)),
        ((3, 1),),
        ((3, 1), (4, 1)),
        ((3, 2),),
        ((3, 2), (2, 0)),
        ((3, 2), (4, 1)),
        ((1, 0),),
    )
    assert flow.makes == ((3,), (4,), (), (), (5,), (), ())
    assert flow.mutates == ((), (), (3,), (), (2,), (), (1,))
    assert flow.last_version == (0, 1, 1, 2, 1, 1)


def test_a_graph_is_analyzed_once() -> None:
    assert dataflow(IN_PLACE) is dataflow(IN_PLACE)


def test_who_may_run_again() -> None:
    """Forward ops that change no state, and views of any phase."""
    assert dataflow(IN_PLACE).refusals == (
        None,
        None,
        None,
        None,
        "changes state (in2)",
        "is an op of the backward pass",
        "is an op of the optimizer pass",
    )


def test_a_view_of_the_backward_pass_may_be_taken_again() -> None:
    graph = step(
        storages((8, Role.INPUT), (8, Role.ACTIVATION)),
        entering=[0],
        calls=[Call(FORWARD, [0], [1]), Call(BACKWARD, [1], [1])],
    )
    assert dataflow(graph).refusals == (None, None)


def reads_state(changing_phase: object, *, reads_before: bool) -> StepGraph:
    """Op 0 or 1 reads a buffer; the other one changes it."""
    change = Call(changing_phase, [1], [], [1])  # type: ignore[arg-type]
    read = Call(FORWARD, [0, 1], [2])
    return step(
        storages((8, Role.INPUT), (8, Role.BUFFER), (8, Role.ACTIVATION)),
        entering=[0, 1],
        calls=[read, change] if reads_before else [change, read],
    )


def test_state_that_changes_later_is_gone() -> None:
    """Unless the update changes it: that comes after every recomputation."""
    gone = reads_state(FORWARD, reads_before=True)
    assert dataflow(gone).refusals[0] == "reads state that changes later (in1)"
    assert dataflow(reads_state(BACKWARD, reads_before=True)).refusals[0] is not None
    assert dataflow(reads_state(UPDATE, reads_before=True)).refusals[0] is None
    assert dataflow(reads_state(FORWARD, reads_before=False)).refusals[1] is None


# Values 0 x, 1 and 2 running statistics; 3 result, 4 mean, 5 deviation.
NORM = step(
    storages((8, Role.INPUT), *2 * [(4, Role.BUFFER)], *3 * [(8, Role.ACTIVATION)]),
    entering=[0, 1, 2],
    calls=[Call(FORWARD, [0, 1, 2], [3, 4, 5], [1, 2]), Call(BACKWARD, [0, 3, 4, 5])],
)


def with_target(graph: StepGraph, target: str, copy_target: str = "") -> StepGraph:
    """The graph with another operator as its first op."""
    first = replace(graph.ops[0], target=target, copy_target=copy_target)
    return StepGraph((first, *graph.ops[1:]), graph.values, graph.storages, graph.outputs)


def test_a_batch_norm_runs_again_without_its_state() -> None:
    flow = dataflow(with_target(NORM, "aten.native_batch_norm.default"))
    assert flow.refusals[0] is None
    assert flow.copy_inputs[0] == (0,)
    assert flow.copy_reads[0] == ((0, 0),)
    assert flow.copy_makes[0] == (3, 4, 5)


def test_a_copy_by_another_operator_reads_the_other_results() -> None:
    flow = dataflow(with_target(NORM, "aten.native_batch_norm.default", "aten.other.default"))
    assert flow.copy_inputs[0] == (0, 4, 5)
    assert flow.copy_reads[0] == ((0, 0), (4, 1), (5, 1))
    assert flow.copy_makes[0] == (3,)
    assert flow.makes[0] == (3, 4, 5)


def test_another_op_that_changes_state_does_not_run_again() -> None:
    flow = dataflow(with_target(NORM, "aten.add_.Tensor"))
    assert flow.refusals[0] == "changes state (in1)"


@pytest.mark.parametrize(
    ("target", "is_free"),
    [
        ("aten.native_batch_norm.default", True),
        ("aten.cudnn_batch_norm.default", True),
        ("aten.native_layer_norm.default", False),
        ("native_batch_norm", False),
        ("", False),
    ],
)
def test_state_free_ops(target: str, is_free: bool) -> None:
    assert is_state_free(Op(0, "op", target, FORWARD, (), ())) is is_free
