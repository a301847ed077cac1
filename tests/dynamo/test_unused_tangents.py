"""Tangents that are not given take no memory, and those that are given count."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import fx, nn

from rekindle import dynamo
from rekindle.core.graph.graph import StepGraph
from rekindle.dynamo import unused_tangents as variants
from rekindle.dynamo.joint_graph import TANGENTS
from rekindle.dynamo.unused_tangents import BackwardVariants, unused_tangents, without_tangents

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_WORDS = 64


class Speaker(nn.Module):
    """Returns its loss and its scores, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, 16)
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU())

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.inner(self.words(words)) @ self.words.weight.T
        flat = scores.float().view(-1, _WORDS)
        return nn.functional.cross_entropy(flat, words.reshape(-1)), scores


def only_loss(loss: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return loss


def loss_and_scores(loss: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return loss + scores.square().mean()


def only_scores(loss: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.square().mean()


def words(size: int = 24) -> torch.Tensor:
    return torch.randint(0, _WORDS, (size, 8), generator=torch.Generator().manual_seed(5))


def gradients(model: Any, batch: torch.Tensor, of: Loss) -> list[torch.Tensor]:
    model.zero_grad()
    of(*model(batch)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """For every backward pass, which of its gradients are None when it begins."""
    found: list[list[bool]] = []
    run = BackwardVariants.__call__

    def watched(self: BackwardVariants, args: list[Any]) -> Any:
        found.append([args[i] is None for i in sorted({*self.unused, *self.required})])
        return run(self, args)

    monkeypatch.setattr(BackwardVariants, "__call__", watched)
    return found


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The tangents that are left out of each compiled graph."""
    found: list[set[str]] = []

    def counted(module: fx.GraphModule, names: set[str]) -> fx.GraphModule:
        found.append(names)
        return without_tangents(module, names)

    monkeypatch.setattr(variants, "without_tangents", counted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_gradients_are_right_whatever_is_given(
    lower: str, seen: list[list[bool]], forms: list[set[str]]
) -> None:
    model = Speaker()
    plain = deepcopy(model)
    planned = dynamo.compile(model, budget="10GiB", lower=lower)
    for of in (only_loss, loss_and_scores, only_scores, only_loss):
        found = gradients(planned, words(), of)
        expected = gradients(plain, words(), of)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other)
            assert lower != "eager" or torch.equal(mine, other)
    assert seen == [[False, True], [False, False], [True, False], [False, True]]
    assert [len(names) for names in forms] == [1, 0]  # compiled once for each


def test_other_sizes_need_no_zeros_either(seen: list[list[bool]]) -> None:
    model = Speaker()
    plain = deepcopy(model)
    planned = dynamo.compile(model, budget="10GiB", lower="eager", dynamic=True)
    for size in (24, 10, 17):
        found = gradients(planned, words(size), only_loss)
        expected = gradients(plain, words(size), only_loss)
        assert all(map(torch.equal, found, expected))
    assert seen == [[False, True]] * 3


def tangent_bytes(graph: StepGraph) -> list[int]:
    (start,) = (op for op in graph.ops if op.target == TANGENTS and op.outputs)
    return [graph.storage_of(value).nbytes for value in start.outputs]


def test_the_forecast_has_no_zeros() -> None:
    planned = dynamo.compile(Speaker(), budget="10GiB", lower="eager")
    gradients(planned, words(), only_loss)
    assert tangent_bytes(planned.plans[0].graph) == [4, 0]


class Two(nn.Module):
    """Returns two tensors, and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.inner(x)
        return first, first.relu()


def test_without_a_loss_all_are_taken_to_be_given() -> None:
    planned = dynamo.compile(Two(), budget="10GiB", lower="eager")
    _, second = planned(torch.randn(8, 4))
    second.sum().backward()
    assert tangent_bytes(planned.plans[0].graph) == [128, 128]


def joint(of: Callable[..., fx.Node]) -> fx.Graph:
    """A backward graph in which the second gradient is used in some way."""
    graph = fx.Graph()
    loss, scores, x = map(graph.placeholder, ("tangents_1", "tangents_2", "x"))
    for node, shape in ((loss, ()), (scores, (4, 4)), (x, (4, 4))):
        node.meta["val"] = torch.empty(shape, device="meta")
    graph.output(of(graph, scores, x))
    for node in graph.nodes:
        node.meta.setdefault("val", torch.empty(4, 4, device="meta"))
    return graph


def test_only_sums_can_do_without() -> None:
    aten = torch.ops.aten

    def added(graph: fx.Graph, scores: fx.Node, x: fx.Node) -> fx.Node:
        turned = graph.call_function(aten.permute.default, (scores, [1, 0]))
        return graph.call_function(aten.add.Tensor, (turned, x))

    def multiplied(graph: fx.Graph, scores: fx.Node, x: fx.Node) -> fx.Node:
        return graph.call_function(aten.mul.Tensor, (scores, x))

    def doubled(graph: fx.Graph, scores: fx.Node, x: fx.Node) -> fx.Node:
        turned = graph.call_function(aten.permute.default, (scores, [1, 0]))
        return graph.call_function(aten.add.Tensor, (turned, scores))

    assert [node.name for node in unused_tangents(joint(added))] == ["tangents_2"]
    assert unused_tangents(joint(multiplied)) == []
    assert unused_tangents(joint(doubled)) == []
