"""What Inductor writes to memory in a backward pass: the forecast's view, and what it is told."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.small import Residual, batch_for, perceptron, step
from torch import fx, nn
from torch._inductor.codegen.wrapper import AllocateLine
from torch._subclasses.fake_tensor import FakeTensorMode

from rekindle import dynamo
from rekindle.core.graph.graph import Phase
from rekindle.dynamo import aot
from rekindle.dynamo.post_grad_passes import PostGradOptions, PostGradPasses
from rekindle.errors import InfeasibleBudget

aten = torch.ops.aten
MARK = "inductor_realize_to_strides"
FRESH = {"force_disable_caches": True}


def marked(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.meta.get(MARK)]


def conv(inner: int = 8) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inner, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


class Skips(nn.Module):
    """Blocks whose results are added to what they read, with an activation after the sum."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__()
        self.first = conv(3)
        self.blocks = nn.ModuleList(Residual(conv()) for _ in range(n_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.first(x)
        for block in self.blocks:
            found = block(found).relu()
        return found.mean((1, 2, 3))


@pytest.mark.parametrize("n_blocks", [0, 3])
def test_sums_of_gradients_are_written_once(n_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Inductor computes them wherever they are read, and all their parts stay until then."""
    seen: list[list[fx.Node]] = []
    change = PostGradPasses.__call__

    def look(self: PostGradPasses, graph: fx.Graph) -> None:
        change(self, graph)
        seen.append(marked(graph))

    monkeypatch.setattr(PostGradPasses, "__call__", look)
    model, batch = Skips(n_blocks), torch.randn(16, 3, 64, 64)
    before = deepcopy(model)
    planned = dynamo.compile(model, budget="100%", options=FRESH)
    found = step(planned, batch)
    forward, backward = seen
    assert forward == []
    assert len(backward) == n_blocks  # what each block reads is read twice
    plain = step(before, batch)
    for name, value in found.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-3, atol=1e-5)
    (only,) = planned.plans
    made = {node.name for node in backward}
    assert made <= {value.name for value in only.graph.values}


def test_a_chain_that_is_read_once_takes_no_memory() -> None:
    planned = dynamo.compile(Skips(0), budget="100%", options=FRESH)
    step(planned, torch.randn(16, 3, 64, 64))
    (only,) = planned.plans
    graph = only.graph
    made = [v for v in graph.values if v.producer is not None and v.shape == (16, 8, 64, 64)]
    late = [v.name for v in made if graph.ops[v.producer].phase is Phase.BACKWARD]
    assert len(late) == 1  # the gradient that the convolution's own gradients are computed from


@pytest.mark.parametrize("lower", ["inductor", "eager"])
def test_what_is_read_of_a_variance_is_handed_over(lower: str) -> None:
    """Its root's reciprocal, and not the variance, of which the backward pass computed it again."""
    planned = dynamo.compile(Skips(2), budget="100%", lower=lower, options=FRESH)
    step(planned, torch.randn(16, 3, 64, 64))
    (only,) = planned.plans
    if lower == "eager":  # there the norm is one operator, with results of its own
        assert not any(name.startswith("rsqrt") for name in only.kept)
        return
    roots = [name for name in only.kept if name.startswith("rsqrt")]
    assert len(roots) == 3
    norms = [op for op in only.graph.ops if op.target.startswith("aten.var_mean")]
    assert len(norms) == 3
    for norm in norms:
        both = {only.graph.values[value].name for value in norm.outputs}
        assert len(both) == 2
        assert len(both & set(only.kept)) == 1  # the mean


def test_a_variance_that_is_read_is_handed_over() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found = (x * y).var(1, keepdim=True)
            return (y * found * (found + 1.0).rsqrt()).sum(1)

    x, y = (torch.randn(32, 64, requires_grad=True) for _ in range(2))
    planned = dynamo.compile(Both(), budget="100%", options=FRESH)
    planned(x, y).sum().backward()
    (only,) = planned.plans
    assert not any(name.startswith("rsqrt") for name in only.kept)
    found = x.grad
    x.grad = None
    Both()(x, y).sum().backward()
    torch.testing.assert_close(found, x.grad)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (7, 1)])
def test_indices_of_max_pooling(kernel: int, stride: int) -> None:
    """Inductor inlines them from offsets in a window, unless torch's kernel reads them.

    For large windows that is torch's own gradient; from torch 2.15 on, `scatter_add` for others.
    """
    model = nn.Sequential(conv(3), nn.MaxPool2d(kernel, stride), nn.Conv2d(8, 4, 1))
    planned = dynamo.compile(model, budget="100%", options=FRESH)
    step(planned, torch.randn(2, 3, 32, 32))
    (only,) = planned.plans
    by_torch = {"aten.max_pool2d_with_indices_backward.default", "aten.scatter_add.default"}
    is_written = not by_torch.isdisjoint(op.target for op in only.graph.ops)
    if not any(op.target == "aten.scatter_add.default" for op in only.graph.ops):
        assert is_written == (kernel == 7)
    indices = [v for v in only.graph.values if v.dtype == "int64" and len(v.shape) == 4]
    assert bool(indices) == is_written


def rows_of(wide: int) -> fx.Graph:
    """The gradient of a loss over scores, in short: rows of labels against columns."""
    graph = fx.Graph()

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        vals = fx.map_arg(args, lambda each: each.meta["val"])
        node.meta["val"] = target(*vals)
        return node

    with FakeTensorMode():
        labels, scores = graph.placeholder("labels"), graph.placeholder("scores")
        labels.meta["val"] = torch.empty(4, 1, dtype=torch.int64)
        scores.meta["val"] = torch.empty(4, wide)
        columns = call(aten.arange.default, wide)
        row = call(aten.abs.default, labels)
        expanded = call(aten.expand.default, row, [4, wide])
        is_label = call(aten.eq.Tensor, expanded, columns)
        scaled = call(aten.mul.Tensor, scores, is_label)
        small = call(aten.neg.default, labels)
        graph.output((scaled, call(aten.add.Tensor, small, row)))
    return graph


def test_values_per_row_are_realized() -> None:
    for wide, names in ((256, ["abs_default"]), (128, [])):
        graph = rows_of(wide)
        PostGradPasses(PostGradOptions(large_result_min_bytes=1 << 10, row_min_elements=256))(graph)
        assert [node.name for node in marked(graph)] == names
    graph = rows_of(256)
    PostGradPasses(PostGradOptions(large_result_min_bytes=1 << 20, row_min_elements=256))(graph)
    assert marked(graph) == []  # not worth it


def test_large_buffers_are_not_held_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(line: Any, freed: Any, size: int) -> bool:
        return True

    monkeypatch.setattr(AllocateLine, "should_reuse_buffer", decide)
    line, near, far = (SimpleNamespace(scheduler_node_index=index) for index in (9, 8, 3))
    with aot.freeing_large_buffers():
        reuses: Any = AllocateLine.should_reuse_buffer
        assert [reuses(line, freed, 1 << 30) for freed in (near, far)] == [True, False]
        assert reuses(line, far, 1 << 10)
    assert AllocateLine.should_reuse_buffer is decide
    with pytest.raises(ZeroDivisionError), aot.freeing_large_buffers():
        _ = 1 // 0
    assert AllocateLine.should_reuse_buffer is decide


def test_some_of_a_budget_in_bytes_is_left_free() -> None:
    model, batch = perceptron(0.0), batch_for(perceptron, 128)
    plain = dynamo.compile(model, budget="100%", lower="eager")
    step(plain, batch)
    most = plain.plans[0].plan.peak_bytes
    assert plain.plans[0].plan.recompute_us == 0  # a share of what it takes is not cut
    torch.compiler.reset()
    exact = dynamo.compile(model, budget=most, lower="eager")
    step(exact, batch)
    assert exact.plans[0].plan.peak_bytes <= 0.997 * most
    assert exact.session.budget_bytes == most
    torch.compiler.reset()
    with pytest.raises(InfeasibleBudget) as refused:
        step(dynamo.compile(model, budget=most // 4, lower="eager"), batch)
    torch.compiler.reset()
    least = dynamo.compile(model, budget=refused.value.least_peak_bytes, lower="eager")
    step(least, batch)  # what is left free does not make it impossible
    assert least.plans[0].plan.peak_bytes <= refused.value.least_peak_bytes
