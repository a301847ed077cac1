"""Matmuls that Inductor would delay, and counters that it would count one by one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rekindle import dynamo
from rekindle.dynamo.post_grad_passes import PostGradPasses

aten = torch.ops.aten


def graph_of(added_late: bool, inner: int, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    """A product of 8×inner and inner×8, added to something that comes before it or after it."""
    graph = fx.Graph()
    shapes = {"a": (8, inner), "b": (inner, 8), "c": (8, 8)}
    with FakeTensorMode():
        for name, shape in shapes.items():
            graph.placeholder(name).meta["val"] = torch.empty(shape, dtype=dtype)
        a, b, c = graph.nodes
        calls = [(aten.sin.default, c), (aten.cos.default, a), (aten.cos.default, b)]
        order = calls[1:] + calls[:1] if added_late else calls
        found = {}
        for target, node in order:
            found[node] = graph.call_function(target, (node,))
            found[node].meta = dict(node.meta)
        total = graph.call_function(aten.addmm.default, (found[c], found[a], found[b]), how)
        total.meta = dict(c.meta)
        graph.output(total)
    return graph


def targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_a_product_of_much_is_made_at_once() -> None:
    graph = graph_of(added_late=True, inner=64)
    given = [torch.randn(8, 64), torch.randn(64, 8), torch.randn(8, 8)]
    expected = fx.GraphModule(nn.Module(), graph)(*given)
    PostGradPasses()(graph)
    graph.lint()
    cos, sin = aten.cos.default, aten.sin.default
    assert targets(graph) == [cos, cos, aten.mm.default, sin, aten.add.Tensor]
    torch.testing.assert_close(fx.GraphModule(nn.Module(), graph)(*given), expected)


@pytest.mark.parametrize(
    "how",
    [
        {"added_late": False, "inner": 64},  # nothing waits
        {"added_late": True, "inner": 2},  # the product is larger than what it is made of
        {"added_late": True, "inner": 64, "beta": 2.0},
    ],
)
def test_others_stay(how: dict[str, Any]) -> None:
    graph = graph_of(**how)
    before = targets(graph)
    PostGradPasses()(graph)
    assert targets(graph) == before


class Tied(nn.Module):
    """A language model with tied weights and far more tokens than words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.words(x)
        for layer in self.layers:
            found = torch.tanh(layer(found))
        return F.cross_entropy(F.linear(found, self.words.weight), x)


def merged(graph: fx.Graph) -> int:
    """How many products are added to a matrix."""
    calls = graph.find_nodes(op="call_function", target=aten.addmm.default)
    return sum(call.args[0].meta["val"].dim() == 2 for call in calls)


def test_inductor_is_kept_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[tuple[int, int]] = []
    take_apart = PostGradPasses.__call__

    def count(self: PostGradPasses, graph: fx.Graph) -> None:
        before = merged(graph)
        take_apart(self, graph)
        counts.append((before, merged(graph)))

    monkeypatch.setattr(PostGradPasses, "__call__", count)
    model, batch = Tied(), torch.arange(1024) % 64
    whole = {"force_disable_caches": True}
    dynamo.compile(model, budget="90%", options=whole)(batch).backward()
    assert counts == [(0, 0), (1, 0)]  # forward, backward
    found = model.words.weight.grad
    model.words.weight.grad = None
    model(batch).backward()
    torch.testing.assert_close(found, model.words.weight.grad)


def counting_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)),
        *(nn.Flatten(), nn.Linear(64, 2)),
    )


def test_counters_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    tidy = PostGradPasses.__call__

    def count(self: PostGradPasses, graph: fx.Graph) -> None:
        tidy(self, graph)
        graph.lint()
        found = graph.find_nodes(op="call_function", target=aten._foreach_add_.Scalar)
        seen.extend(len(node.args[0]) for node in found)

    monkeypatch.setattr(PostGradPasses, "__call__", count)
    model, batch = counting_model(), torch.randn(8, 3, 8, 8)
    plain = deepcopy(model)
    planned = dynamo.compile(model, budget="10GiB", options={"force_disable_caches": True})
    for _ in range(3):
        planned(batch).sum().backward()
        plain(batch).sum().backward()
    assert seen == [2]
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, msg=name)
    assert int(model.get_buffer("1.num_batches_tracked")) == 3


def counted(dtype: torch.dtype, step: int, is_read: bool) -> fx.Graph:
    """Two counters that are counted, perhaps not by one, perhaps read by somebody else."""
    graph = fx.Graph()
    counters = [graph.placeholder(name) for name in ("a", "b")]
    totals = [graph.call_function(aten.add.Tensor, (each, step)) for each in counters]
    copies = [
        graph.call_function(aten.copy_.default, pair) for pair in zip(counters, totals, strict=True)
    ]
    graph.output((totals[0],) if is_read else ())
    for node in (*counters, *totals, *copies):
        node.meta["val"] = torch.zeros((), dtype=dtype, device="meta")
    return graph


@pytest.mark.parametrize(
    ("dtype", "step", "is_read", "is_changed"),
    [
        (torch.int64, 1, False, True),
        (torch.float32, 1, False, False),
        (torch.int64, 2, False, False),
        (torch.int64, 1, True, False),  # one that nobody reads is left, and stays as it is
    ],
)
def test_what_is_no_counter_is_left(
    dtype: torch.dtype, step: int, is_read: bool, is_changed: bool
) -> None:
    graph = counted(dtype, step, is_read)
    before = targets(graph)
    PostGradPasses()(graph)
    graph.lint()
    assert (targets(graph) != before) == is_changed
