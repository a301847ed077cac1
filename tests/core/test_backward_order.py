"""Ops that free memory come first if that lowers the peak, and nothing else changes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from support.random_steps import steps
from support.square_step import square_step
from torch import nn

import rekindle
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.liveness import analyze
from rekindle.core.graph.schedule import check, schedule_of
from rekindle.core.rewrite.backward_order import free_first
from rekindle.measuring.bitwise_compare import compare


def live_bytes(graph: StepGraph) -> list[int]:
    """The bytes at each op of what is made in the step and is gone when it ends."""
    liveness = analyze(graph)
    own = [
        s
        for s in range(len(graph.storages))
        if not (liveness.is_resident[s] or liveness.is_output[s]) and liveness.death[s] >= 0
    ]
    return [
        sum(
            graph.storages[s].nbytes for s in own if liveness.birth[s] <= index <= liveness.death[s]
        )
        for index in range(len(graph.ops))
    ]


def order_of(graph: StepGraph) -> list[str]:
    return [op.name for op in graph.ops]


@settings(max_examples=60)
@given(steps())
def test_random_steps_stay_valid_and_need_no_more(step: tuple[StepGraph, object]) -> None:
    graph = step[0]
    found = free_first(graph)
    assert sorted(order_of(found)) == sorted(order_of(graph))
    check(found, tuple(schedule_of(found, None)))
    assert max(live_bytes(found), default=0) <= max(live_bytes(graph), default=0)
    if order_of(found) != order_of(graph):
        assert max(live_bytes(found)) < max(live_bytes(graph))


def wide_end() -> tuple[object, nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """The peak is at the last layer's gradients: its input is wide, its weight is small."""
    model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return square_step, model, optimizer, torch.randn(256, 8)


def test_a_weights_gradient_comes_before_a_large_one_of_an_input() -> None:
    captured = rekindle.capture(*wide_end())  # type: ignore[arg-type]
    found = free_first(captured.graph)
    before, after = live_bytes(captured.graph), live_bytes(found)
    wide = 256 * 512 * 4
    assert max(before) > 2 * wide
    assert max(after) < max(before) - 0.9 * wide
    assert order_of(found) != order_of(captured.graph)


def test_the_step_runs_so_and_gives_the_same_bits() -> None:
    found = compare(wide_end, rekindle.optimize, steps=3)  # type: ignore[arg-type]
    assert found.equal
    assert found.captured_peak_bytes < found.plain_peak_bytes - 0.9 * 256 * 512 * 4
