"""Casts that stand alone are done together, and give the same bits."""

from __future__ import annotations

import operator
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.small import differences
from torch import fx, nn
from torch._higher_order_ops import _foreach_map
from torch._subclasses.fake_tensor import FakeTensorMode

from rekindle import dynamo
from rekindle.dynamo.fusion import NodeKind, changed_state, node_kind, outputs_of
from rekindle.dynamo.post_grad_passes import PostGradOptions, PostGradPasses, batch_casts
from rekindle.dynamo.session import CompileOptions

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
FRESH = {"force_disable_caches": True}


def weights_of(shapes: list[tuple[int, ...]], kept: set[int]) -> fx.GraphModule:
    """A graph that casts tensors and takes their sines, and returns these and some of the casts."""
    graph = fx.Graph()
    with FakeTensorMode():
        for index, shape in enumerate(shapes):
            graph.placeholder(f"w{index}").meta["val"] = torch.empty(shape)
        made, results = [], []
        for node in list(graph.nodes):
            made.append(graph.call_function(CAST, (node, torch.bfloat16)))
            made[-1].meta["val"] = node.meta["val"].to(torch.bfloat16)
            results.append(graph.call_function(aten.sin.default, (made[-1],)))
            results[-1].meta["val"] = made[-1].meta["val"]
        graph.output((*results, *(made[index] for index in sorted(kept))))
    return fx.GraphModule(nn.Module(), graph)


def gradients_of(n: int) -> fx.GraphModule:
    """A graph of products whose casts are returned, but for the first, which is used."""
    graph = fx.Graph()
    with FakeTensorMode():
        a = graph.placeholder("a")
        a.meta["val"] = torch.empty(8, 8, dtype=torch.bfloat16)
        results = []
        for _ in range(n):
            made = graph.call_function(aten.mm.default, (a, a))
            made.meta["val"] = a.meta["val"]
            results.append(graph.call_function(CAST, (made, torch.float32)))
            results[-1].meta["val"] = a.meta["val"].to(torch.float32)
        results[0] = graph.call_function(aten.sin.default, (results[0],))
        results[0].meta["val"] = results[1].meta["val"]
        graph.output(tuple(results))
    return fx.GraphModule(nn.Module(), graph)


def order(graph: fx.Graph) -> list[Any]:
    calls = (node.target for node in graph.nodes if node.op == "call_function")
    return [target for target in calls if target is not operator.getitem]


def done_together(graph: fx.Graph) -> list[int]:
    """How many tensors each call casts."""
    calls = graph.find_nodes(op="call_function", target=_foreach_map)
    return [len(call.args) - 1 for call in calls]


def apart(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=CAST))


def test_weights_before_the_first_is_read() -> None:
    module = weights_of([(4, 4), (8,), (2, 3)], kept={0, 1, 2})
    batch_casts(module.graph, PostGradOptions())
    module.graph.lint()
    assert order(module.graph) == [_foreach_map, *[aten.sin.default] * 3]
    given = [torch.randn(4, 4), torch.randn(8), torch.randn(2, 3)]
    plain = [each.to(torch.bfloat16) for each in given]
    module.recompile()
    found = module(*given)
    assert all(map(torch.equal, found, [*map(torch.sin, plain), *plain]))
    dtypes = [node.meta["val"].dtype for node in outputs_of(module.graph) if node is not None]
    assert set(dtypes) == {torch.bfloat16}


def test_what_does_not_stay_is_cast_where_it_is_read() -> None:
    module = weights_of([(4, 4), (256, 256), (2, 3)], kept={0, 2})
    batch_casts(module.graph, PostGradOptions())
    sin = aten.sin.default
    assert order(module.graph) == [_foreach_map, sin, CAST, sin, sin]
    module = weights_of([(4, 4), (8,), (2, 3)], kept=set())  # unless it is small
    batch_casts(module.graph, PostGradOptions())
    assert order(module.graph) == [_foreach_map, sin, sin, sin]


def test_gradients_after_the_last_is_there() -> None:
    module = gradients_of(4)
    batch_casts(module.graph, PostGradOptions())
    module.graph.lint()
    mm = aten.mm.default
    assert order(module.graph) == [mm, CAST, mm, mm, mm, _foreach_map, aten.sin.default]
    a = torch.randn(8, 8).to(torch.bfloat16)
    module.recompile()
    assert all(torch.equal(each, (a @ a).float()) for each in module(a)[1:])


def test_batches_are_small() -> None:
    module = weights_of([(256,)] * 6 + [(4096,)], kept=set(range(7)))
    batch_casts(module.graph, PostGradOptions(cast_batch_max_bytes=4 * 256 * 4))
    assert done_together(module.graph) == [4, 2]
    assert apart(module.graph) == 1  # larger than a group

    module = weights_of([(4,)] * 7, kept=set(range(7)))
    batch_casts(module.graph, PostGradOptions(cast_batch_max_tensors=3))
    assert done_together(module.graph) == [3, 3]
    assert apart(module.graph) == 1  # left over


class Small(nn.Module):
    """Convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.others = nn.ModuleList(nn.Conv2d(8, 8, 1, bias=False) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.first(x)
        for layer in self.others:
            found = layer(found).relu()
        return self.last(found.mean((2, 3)))


def trained(model: nn.Module, batch: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    compiled = dynamo.compile(model, budget="100%", options=FRESH)
    compiled.session.tuning = CompileOptions(post_grad=PostGradOptions(**options))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(batch)
    loss = out.float().square().mean()
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **named}


@pytest.mark.slow
def test_a_model_gets_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[tuple[list[int], int]] = []

    change = PostGradPasses.__call__

    def count(self: PostGradPasses, graph: fx.Graph) -> None:
        change(self, graph)
        counts.append((done_together(graph), apart(graph)))

    model, batch = Small(), torch.randn(2, 3, 16, 16)
    expected = trained(deepcopy(model), batch, batches_casts=False)
    torch.compiler.reset()
    monkeypatch.setattr(PostGradPasses, "__call__", count)
    found = trained(model, batch)
    assert len(found) == 7
    assert differences(expected, found) == []
    (forward, _), (backward, _) = counts
    assert sum(forward) >= 4  # the convolutions' weights
    assert sum(backward) >= 4  # and their gradients


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_casts_for_convolutions_are_not_done_again(device: str) -> None:
    """On a GPU, where Inductor hands a copy of an image or weight to the backward pass."""
    graph = fx.Graph()
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, weight = graph.placeholder("x"), graph.placeholder("weight")
        x.meta["val"] = torch.empty(2, 3, 8, 8, device=device)
        weight.meta["val"] = torch.empty(4, 3, 3, 3, device=device)
        half = [graph.call_function(CAST, (node, torch.bfloat16)) for node in (x, weight)]
        for node, source in zip(half, (x, weight), strict=True):
            node.meta["val"] = torch.empty_like(source.meta["val"], dtype=torch.bfloat16)
        again = graph.call_function(CAST, (half[0], torch.float32))
        again.meta["val"] = x.meta["val"]
        rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        call = graph.call_function(aten.convolution.default, (*half, *rest))
        call.meta["val"] = torch.empty(2, 4, 6, 6, device=device, dtype=torch.bfloat16)
        graph.output((call, again))
    expected = "layout" if device == "cuda" else None
    assert [changed_state(node) for node in half] == [expected] * 2
    assert changed_state(again) is None
    assert (node_kind(half[0]) is NodeKind.OPAQUE) == (device == "cuda")
