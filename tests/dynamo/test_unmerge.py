"""Products that Inductor would put off until what they are added to is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rekindle import dynamo
from rekindle.dynamo.unmerge import Unmerge

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
    Unmerge()(graph)
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
    Unmerge()(graph)
    assert targets(graph) == before


class Tied(nn.Module):
    """The first and the last layer are the same, and there are far more tokens than words."""

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
    take_apart = Unmerge.__call__

    def count(self: Unmerge, graph: fx.Graph) -> None:
        before = merged(graph)
        take_apart(self, graph)
        counts.append((before, merged(graph)))

    monkeypatch.setattr(Unmerge, "__call__", count)
    model, batch = Tied(), torch.arange(1024) % 64
    whole = {"force_disable_caches": True}
    dynamo.compile(model, budget="90%", options=whole)(batch).backward()
    assert counts == [(0, 0), (1, 0)]  # forward, backward
    found = model.words.weight.grad
    model.words.weight.grad = None
    model(batch).backward()
    torch.testing.assert_close(found, model.words.weight.grad)
