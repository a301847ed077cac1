"""Schemes of memory optimisation on steps that grow: their order, and how fast they grow."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from support.hand_made import BACKWARD, FORWARD, UPDATE, Call, step, storages
from torch import nn

import rekindle
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Role, StepGraph
from rekindle.models.workload import ModelSpec, Workload
from rekindle.models.zoo import small
from rekindle.models.zoo.catalog import FAMILIES, build
from rekindle.report.schemes_report import SCHEMES, Estimate, growth
from rekindle.studies.schemes import (
    estimate,
    forecast_bytes,
    mark_weight_tensors,
)

LENGTHS = (12, 32, 80)


def profiled(work: Workload) -> tuple[StepGraph, Profile]:
    parts = (work.train_step, work.model, work.optimizer, work.batch)
    captured = rekindle.capture(*parts, as_on_gpu=True)
    return captured.graph, rekindle.profile(captured, device="H200")


@cache
def estimated(family: str, size: int) -> dict[str, Estimate]:
    extent = {"resnet": {"image": 64}, "lstm": {"hidden": 64, "vocab": 100}}[family]
    return estimate(*profiled(FAMILIES[family].build(size, batch=4, **extent)))


@pytest.mark.parametrize(
    ("family", "size"), [("resnet", 14), ("resnet", 26), ("lstm", 4), ("lstm", 8)]
)
def test_the_schemes_come_in_the_lecture_s_order(family: str, size: int) -> None:
    if family == "resnet":
        pytest.importorskip("torchvision")
    found = {name: each.feature_bytes for name, each in estimated(family, size).items()}
    assert list(found) == [scheme.name for scheme in SCHEMES]
    assert found["none"] > found["in-place"] > found["sharing"] >= found["in-place-sharing"]
    assert found["auto"] == min(found.values())
    assert found["auto"] < 0.7 * found["in-place-sharing"]
    assert found["sqrt"] < found["in-place-sharing"]


def test_only_what_is_computed_again_takes_time() -> None:
    for scheme in SCHEMES:
        added_us = estimated("lstm", 8)[scheme.name].added_us
        assert (added_us > 0) == (scheme.planner is not None)


def test_memory_grows_with_the_root_of_the_length() -> None:
    """No scheme without checkpoints does better than linear; √n segments are what they say."""
    schemes = [s for s in SCHEMES if s.name in ("none", "in-place-sharing", "sqrt")]
    found: dict[str, list[int]] = {scheme.name: [] for scheme in schemes}
    for length in LENGTHS:
        build_fn = partial(small.lstm_stepped, length)
        work = build(ModelSpec("lstm", "", 8, build_fn), hidden=64, vocab=100, layers=1)
        for name, each in estimate(*profiled(work), schemes=schemes).items():
            found[name].append(each.feature_bytes)
    assert growth(LENGTHS, found["none"]) == pytest.approx(1.0, abs=0.1)
    assert growth(LENGTHS, found["in-place-sharing"]) == pytest.approx(1.0, abs=0.1)
    assert growth(LENGTHS, found["sqrt"]) == pytest.approx(0.5, abs=0.15)


def test_weights_and_their_gradients_do_not_count() -> None:
    """The same network, of the same feature maps, has a hundred times the weights in one layer."""

    class Wide(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.embedding = nn.Embedding(rows, 16)
            self.layers = nn.Sequential(*[nn.Linear(16, 16), nn.Tanh()] * 3)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layers(self.embedding(batch))

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: object) -> None:
        (model(batch).square().mean() + model(batch).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = []
    for rows in (50, 5000):
        model = Wide(rows)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        captured = rekindle.capture(
            train_step, model, optimizer, torch.zeros(64, dtype=torch.long), as_on_gpu=True
        )
        found.append(estimate(captured.graph, rekindle.profile(captured, device="H200")))
    narrow, wide = ({name: e.feature_bytes for name, e in each.items()} for each in found)
    assert narrow == wide
    assert wide["none"] < 5000 * 16 * 4


def test_parts_of_a_weight_s_gradient_are_found() -> None:
    """Two products are added up to the gradient; the map that both are made from is no part."""
    graph = step(
        storages(
            (8, Role.INPUT),
            (8, Role.PARAM),
            (8, Role.GRAD_MAP),
            (8, Role.GRAD_MAP),
            (8, Role.GRAD_MAP),
            (8, Role.GRAD),
            (8, Role.TEMP),
        ),
        entering=[0, 1],
        calls=[
            Call(BACKWARD, [0], [2]),
            Call(BACKWARD, [0, 2], [3]),
            Call(BACKWARD, [0, 2], [4]),
            Call(BACKWARD, [3, 4], [5]),
            Call(UPDATE, [5], [6]),
            Call(UPDATE, [1, 6], [], [1]),
        ],
    )
    summing = replace(graph.ops[3], target="aten.add.Tensor")
    graph = replace(graph, ops=(*graph.ops[:3], summing, *graph.ops[4:]))
    roles = [storage.role for storage in mark_weight_tensors(graph).storages]
    assert roles == [Role.INPUT, Role.PARAM, Role.GRAD_MAP, *[Role.GRAD] * 4]


def test_a_forecast_counts_what_the_step_makes() -> None:
    graph = step(
        storages((100, Role.INPUT), (40, Role.TEMP), (7, Role.OUTPUT)),
        entering=[0],
        calls=[Call(FORWARD, [0], [1]), Call(FORWARD, [1], [2])],
        outputs=[2],
    )
    costs = (
        rekindle.core.cost.profile.OpCost(1.0),
        rekindle.core.cost.profile.OpCost(1.0, workspace_bytes=5),
    )
    profile = Profile("cpu", graph.fingerprint, costs, overhead_bytes=1000)
    assert forecast_bytes(graph, profile) == 40 + 7 + 5
