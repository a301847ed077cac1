"""A step at any batch size, from the step at two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle.core.cost.batch_scaling import Growth, Sized, Uneven
from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.graph.graph import StepGraph


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def step_at(batch: int) -> StepGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters())
    return rekindle.capture(train_step, model, optimizer, torch.ones(batch, 6)).graph


def grown() -> Growth:
    return Growth(Sized(4, step_at(4)), Sized(8, step_at(8)))


@pytest.mark.parametrize("batch", [2, 4, 7, 8, 64])
def test_a_grown_step_is_the_captured_one(batch: int) -> None:
    assert grown().at(batch).fingerprint == step_at(batch).fingerprint


def test_what_a_sample_adds_to_each_storage() -> None:
    growth = grown()
    larger, smaller = growth.at(64).storages, growth.at(2).storages
    added = [(a.nbytes - b.nbytes) / 62 for a, b in zip(larger, smaller, strict=True)]
    assert growth.bytes_per_sample.tolist() == added
    assert any(added)


def test_another_step_is_refused() -> None:
    other = step_at(8)
    ops = (replace(other.ops[0], target="aten.other"), *other.ops[1:])
    graph = StepGraph(ops, other.values, other.storages, other.outputs)
    with pytest.raises(Uneven, match="other ops"):
        Growth(Sized(4, step_at(4)), Sized(8, graph))


def test_sizes_that_do_not_grow_evenly_are_refused() -> None:
    other = step_at(8)
    larger = tuple(replace(s, nbytes=s.nbytes + 1) for s in other.storages)
    graph = StepGraph(other.ops, other.values, larger, other.outputs)
    with pytest.raises(Uneven, match="linearly"):
        Growth(Sized(4, step_at(4)), Sized(8, graph))


def test_costs_grow_on_a_line_and_are_never_negative() -> None:
    growth = grown()

    def costs(graph: StepGraph, time_us: float, nbytes: int) -> Profile:
        each = (OpCost(time_us, nbytes),) * len(graph.ops)
        return Profile("cpu", graph.fingerprint, each)

    small = costs(growth.small.graph, 10.0, 0)
    large = costs(growth.large.graph, 14.0, 400)
    found = growth.costs_at(small, large, growth.at(16), 16)
    found.check(growth.at(16))
    assert {cost.time_us for cost in found.costs} == {22.0}
    assert {cost.workspace_bytes for cost in found.costs} == {1200}
    least = growth.costs_at(large, small, growth.at(64), 64)
    assert {cost.time_us for cost in least.costs} == {0.0}
