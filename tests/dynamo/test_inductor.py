"""Graphs that Inductor compiles: the same numbers, less kept; and what the plan knows of fusion."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from support.small import attention, batch_for, convolutions, perceptron, step
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rekindle import dynamo
from rekindle.core.graph.graph import OpKind, Phase
from rekindle.core.graph.schedule import Compute
from rekindle.dynamo import aot, compile_pipeline


@pytest.mark.slow
def test_the_same_numbers_as_without_a_plan() -> None:
    norm = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(144, 8), nn.GELU(), nn.Linear(8, 2))
    batch = batch_for(convolutions)
    plain = step(torch.compile(deepcopy(model)), batch)
    torch.compiler.reset()
    planned = dynamo.compile(model, budget="10GiB", planner="all")
    found = step(planned, batch)
    (only,) = planned.plans
    assert only.plan.recompute_us > 0
    for name, expected in plain.items():  # the compiler's own tolerance: it may fuse otherwise
        torch.testing.assert_close(found[name], expected, msg=name)


class _Stopped(Exception):
    pass


def _planned(monkeypatch, make, budget: str = "10GiB", planner: str = "none"):
    """The plan of a graph as Inductor would compile it, without compiling it."""
    partition = compile_pipeline.partition_joint_graph

    def stop(*args):
        partition(*args)
        raise _Stopped

    monkeypatch.setattr(compile_pipeline, "partition_joint_graph", stop)
    planned = dynamo.compile(make(), budget=budget, planner=planner)
    with pytest.raises(Exception, match="_Stopped"):
        planned(batch_for(make))
    return planned.plans[0]


def test_what_is_fused_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    only = _planned(monkeypatch, perceptron)
    kept = {only.graph.ops[only.graph.values[v].producer].target for v in _values(only)}
    # Matrix products, norms' statistics, seeds, and the inputs of matrix products and additions.
    assert "aten.addmm.default" in kept
    assert not any("gt" in target and target.startswith("aten") for target in kept)
    masks = [v for v in _values(only) if only.graph.values[v].dtype == "bool"]
    assert masks == []


def _values(planned: dynamo.PlannedGraph) -> list[int]:
    return [v.index for v in planned.graph.values if v.name in planned.kept]


def test_dropout_is_computed_again_from_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    only = _planned(monkeypatch, perceptron, planner="all")
    random = [op for op in only.graph.ops if op.is_random]
    assert [op.target for op in random] == ["prims.inductor_seeds.default"]
    again = {each.op for each in only.plan.schedule if isinstance(each, Compute) and each.copy}
    assert random[0].index not in again
    assert random[0].name in only.kept
    drawn = [i for i in again if "inductor_random" in only.graph.ops[i].target]
    assert len(drawn) > 1


def test_fused_ops_cost_their_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    only = _planned(monkeypatch, attention)
    graph, costs = only.graph, only.profile.costs
    fused = [op for op in graph.ops if op.kind is OpKind.FUSED]
    assert fused
    assert all(len(op.members) > 1 for op in fused)
    for op in fused:
        assert costs[op.index].copy_us <= costs[op.index].time_us
    products = [op for op in graph.ops if op.target == "aten.addmm.default"]
    assert all(op.flops > 0 and costs[op.index].copy_us is None for op in products)
    # What only fused ops read is not written when it is computed again.
    readers = {v: [op for op in graph.ops if v in op.inputs] for op in fused for v in op.outputs}
    unwritten = [
        op
        for op in fused
        if all(r.kind is OpKind.FUSED for v in op.outputs for r in readers[v])
        and op.phase is Phase.FORWARD
    ]
    assert all(costs[op.index].copy_us < costs[op.index].time_us for op in unwritten)


def test_less_is_never_more(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for share in (100, 90, 80):
        torch.compiler.reset()
        with monkeypatch.context() as patch:
            peaks.append(_planned(patch, attention, f"{share}%", "auto").plan.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


def test_what_inductor_keeps_on_disk_does_not_hold_the_model() -> None:
    session = dynamo.Session("1GiB", model=perceptron())
    partitioner = aot.Partitioner(lambda: session, session.cache_key)
    assert pickle.loads(pickle.dumps(partitioner)) == partitioner.uuid() == session.cache_key
    assert session.cache_key != dynamo.Session("2GiB", model=perceptron()).cache_key


@pytest.mark.parametrize(
    ("device", "dtype", "groups", "expected"),
    [
        ("cuda", torch.bfloat16, 1, True),
        ("cuda", torch.float16, 1, True),
        ("cuda", torch.float32, 1, False),
        ("cuda", torch.bfloat16, 2, False),
        ("cpu", torch.bfloat16, 1, False),
    ],
)
def test_channels_are_last_where_libraries_turn_them_anyway(
    device: str, dtype: torch.dtype, groups: int, expected: bool
) -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(8, 4, 16, 16, device=device, dtype=dtype)
    assert not aot.wants_channels_last(graph)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    graph.output(graph.call_function(torch.ops.aten.convolution.default, args))
    assert aot.wants_channels_last(graph) == expected
