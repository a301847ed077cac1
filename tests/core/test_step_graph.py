"""The graph's own sums, its fingerprint and the text of a source."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rekindle.core.graph.graph import Op, Phase, Role, Source, StepGraph, Storage, Value

GRAPH = StepGraph(
    ops=(
        Op(0, "mm", "aten.mm.default", Phase.FORWARD, (0, 1), (2,), flops=60),
        Op(1, "t", "aten.t.default", Phase.FORWARD, (2,), (3,), is_view=True),
        Op(2, "drop", "aten.bernoulli_.float", Phase.LOSS, (3,), (), (3,), is_random=True),
        Op(3, "mm_1", "aten.mm.default", Phase.BACKWARD, (0, 3), (4,), flops=40),
    ),
    values=(
        Value(0, "batch_0", 0, (2, 3), "float32"),
        Value(1, "param_w", 1, (3, 5), "float32"),
        Value(2, "mm", 2, (2, 5), "float32", 0),
        Value(3, "t", 2, (5, 2), "float32", 1),
        Value(4, "mm_1", 3, (5, 3), "float32", 3),
    ),
    storages=(
        Storage(0, 24, Role.INPUT),
        Storage(1, 60, Role.PARAM),
        Storage(2, 40, Role.ACTIVATION),
        Storage(3, 60, Role.GRAD),
    ),
    outputs=(4,),
)


def test_sums() -> None:
    """Every phase and role is listed, those without ops or bytes with 0."""
    assert GRAPH.count_by_phase() == {
        Phase.FORWARD: 2,
        Phase.LOSS: 1,
        Phase.BACKWARD: 1,
        Phase.OPTIMIZER: 0,
    }
    assert GRAPH.flops_by_phase()[Phase.FORWARD] == 60
    assert sum(GRAPH.flops_by_phase().values()) == 100
    sums = GRAPH.bytes_by_role()
    assert set(sums) == set(Role)
    assert {role: n for role, n in sums.items() if n} == {
        Role.INPUT: 24,
        Role.PARAM: 60,
        Role.ACTIVATION: 40,
        Role.GRAD: 60,
    }


def test_storage_of_a_view() -> None:
    assert GRAPH.storage_of(3) is GRAPH.storage_of(2) is GRAPH.storages[2]


def replaced(part: str, index: int, **changes: Any) -> StepGraph:
    items = list(getattr(GRAPH, part))
    items[index] = dataclasses.replace(items[index], **changes)
    return dataclasses.replace(GRAPH, **{part: tuple(items)})


@pytest.mark.parametrize(
    "other",
    [
        replaced("ops", 0, target="aten.bmm.default"),
        replaced("ops", 0, name="other"),
        replaced("ops", 0, phase=Phase.LOSS),
        replaced("ops", 0, inputs=(1, 0)),
        replaced("ops", 0, outputs=(3,)),
        replaced("ops", 2, mutates=()),
        replaced("ops", 2, is_random=False),
        replaced("ops", 1, is_view=False),
        replaced("ops", 0, flops=61),
        replaced("values", 0, name="other"),
        replaced("values", 0, storage=1),
        replaced("values", 0, shape=(3, 2)),
        replaced("values", 0, dtype="float16"),
        replaced("values", 2, producer=1),
        replaced("storages", 0, nbytes=25),
        replaced("storages", 0, role=Role.OUTPUT),
        replaced("storages", 0, device="cuda:0"),
        dataclasses.replace(GRAPH, outputs=(2,)),
        dataclasses.replace(GRAPH, outputs=()),
        dataclasses.replace(GRAPH, ops=GRAPH.ops[:-1]),
    ],
)
def test_fingerprint_covers_every_field(other: StepGraph) -> None:
    assert other.fingerprint != GRAPH.fingerprint


def test_fingerprint_leaves_sources_out() -> None:
    moved = replaced("ops", 0, source=Source("layer", "model.py", 9))
    assert moved.fingerprint == GRAPH.fingerprint
    assert len(GRAPH.fingerprint) == 16
    assert int(GRAPH.fingerprint, 16) >= 0


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (Source("body.0", "model.py", 7), "body.0 (model.py:7)"),
        (Source("", "train.py", 3), "train.py:3"),
        (Source("body.0", "", 0), "body.0"),
        (Source("", "", 0), ""),
    ],
)
def test_source_as_text(source: Source, text: str) -> None:
    assert str(source) == text


@pytest.mark.parametrize("part", [GRAPH.ops[0], GRAPH.values[0], GRAPH.storages[0], GRAPH])
def test_nothing_can_be_changed(part: Any) -> None:
    """Graphs are handed around and cached: whoever wants another one makes another one."""
    name = dataclasses.fields(part)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(part, name, 0)
