"""Which inputs compiled groups overwrite, and which values they compute late."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.fused_steps import fused_step, groups, images, targets, train_step, transformer
from support.uncompiled import (
    Parts,
    assert_close,
    grouped,
    grouped_for_gpu,
    no_compiler,
    recorded,
    train,
)
from torch import Tensor, nn

from rekindle.core.graph.dataflow import dataflow
from rekindle.core.graph.graph import OpKind, Role
from rekindle.engines.inductor import decompositions
from rekindle.engines.inductor.decompose import decompose
from rekindle.engines.inductor.fusion_analysis import AlwaysRecomputed, CallIndex
from rekindle.engines.inductor.rewriter import RecordingBuilder
from rekindle.passes.matmul_padding import PaddingOptions
from rekindle.rewriting.multi_tensor import cast
from rekindle.tracing.lift import lift

aten = torch.ops.aten


def classifier(classes: int = 50) -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, classes)).double()
    batch = (torch.randn(16, 6).double(), torch.randint(0, classes, (16,)))
    return train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), [batch]


def test_the_gradient_of_a_loss_lies_over_the_logits() -> None:
    recording, _ = fused_step(classifier())
    (loss,) = [
        call for call in groups(recording) if decompositions.scores_gradient in targets(call)
    ]
    (overwritten,) = loss.writes
    maker = next(call for call in recording.tape.calls if overwritten in call.results)
    assert maker.node.target is aten.addmm.default
    assert loss.results == []
    readers = [c.node.target for c in recording.tape.calls if overwritten in c.node.all_input_nodes]
    assert aten.mm.default in readers  # of the gradient, in the logits' memory
    assert_close(train(classifier(), grouped), train(classifier(), None))


def test_so_it_does_where_the_matmul_was_padded() -> None:
    """On a GPU, in half precision: 498 columns become 504, and so many are overwritten."""
    padded = partial(grouped_for_gpu, padding=PaddingOptions(min_flops=1))

    def make() -> Parts:
        step, model, _, (batch,) = classifier(498)
        model = model.bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return step, model, optimizer, [(batch[0].bfloat16(), batch[1])]

    with no_compiler():
        recording = padded(recorded(make()))
    (loss,) = [
        call for call in groups(recording) if decompositions.scores_gradient in targets(call)
    ]
    assert [recording.tape.metas[node].shape for node in loss.writes] == [(16, 504)]
    assert_close(train(make(), padded), train(make(), grouped), rtol=0.05, atol=0.01)


class Bent(torch.autograd.Function):
    """Nothing in the forward pass, and anything in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.backward = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.backward(grad), None


class Bends(nn.Module):
    def __init__(self, backward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Bent.apply(self.first(x), self.backward))


STRAIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "elements": lambda g: torch.tanh(g) * 2 + g.square(),
    "other numbers beside": lambda g: g * torch.arange(8.0).double() + g,
    "the edge cut and added": lambda g: F.pad(g[:, :-1].sin(), (0, 1)) + 0.0,
    "rows taken apart": lambda g: (g.view(3, 4, 8).cos() * 2).view(12, 8),
}
BENT: dict[str, Callable[[Tensor], Tensor]] = {
    "sums": lambda g: g + g.sum(1, keepdim=True),
    "a column for all": lambda g: g * g[:, :1],
    "columns moved": lambda g: F.pad(g[:, 1:].sin(), (0, 1)) + 0.0,
    "columns moved back": lambda g: F.pad(g[:, :-1].sin(), (1, 0)) + 0.0,
    "rows moved": lambda g: F.pad(g[1:].sin(), (0, 0, 0, 1)) + 0.0,
    "transposed": lambda g: (g.view(8, 12).t().reshape(12, 8).sin() * 2).view(12, 8),
}


@pytest.mark.parametrize("name", [*STRAIGHT, *BENT])
def test_only_what_is_read_in_its_own_place_is_written_over(name: str) -> None:
    def make() -> Parts:
        torch.manual_seed(0)
        model = Bends((STRAIGHT | BENT)[name]).double()
        batch = (torch.randn(12, 6).double(), torch.randint(0, 3, (12,)))
        return train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), [batch]

    recording, _ = fused_step(make())
    metas = recording.tape.metas
    sizes = {math.prod(metas[n].shape) for call in groups(recording) for n in call.writes}
    assert (12 * 8 in sizes) == (name in STRAIGHT)
    assert_close(train(make(), grouped), train(make(), None))


def test_what_two_results_follow_from_is_not_written_over() -> None:
    """A layer norm's gradients: compiled code reads it again for the weight's."""
    recording, _ = fused_step(transformer())
    norms = [c for c in groups(recording) if aten.native_layer_norm_backward.default in targets(c)]
    assert norms
    assert all(call.writes == [] for call in norms)


def test_an_activation_function_is_computed_again_beside_its_gradient() -> None:
    """Its result is used in the forward pass only."""
    recording, _ = fused_step(transformer())
    graph = lift(recording)
    again = [call for call in groups(recording) if aten.gelu.default in targets(call)]
    assert [call.in_backward for call in again] == [True, True]  # in each block
    assert all(aten.gelu_backward.default in targets(call) for call in again)
    made = [v for op in graph.ops if op.target == "aten.gelu.default" for v in op.outputs]
    assert made
    assert all(graph.storage_of(v).role is not Role.ACTIVATION for v in made)


def test_nothing_is_made_late_where_its_readers_come_first() -> None:
    """A convolution's gradients come together, and that of its weight needs its input."""
    recording = decompose(recorded(images()), for_gpu=False)
    step = CallIndex(recording.tape, RecordingBuilder(recording).calls())
    assert AlwaysRecomputed(step, set()).late == {}


def test_what_the_step_returns_is_not_made_late() -> None:
    def returns_hidden(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        hidden = F.gelu(model[0](batch[0]))
        loss = F.cross_entropy(model[2](hidden), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, hidden.detach()

    step, *rest = classifier()
    late = fused_step((step, nn.Sequential(rest[0][0], nn.GELU(), rest[0][2]), *rest[1:]))[0]
    kept = fused_step((returns_hidden, *rest))[0]
    for recording, expected in ((late, True), (kept, False)):
        found = any(aten.gelu.default in targets(call) for call in groups(recording))
        assert found == expected
    assert_close(
        train((returns_hidden, *classifier()[1:]), grouped),
        train((returns_hidden, *classifier()[1:]), None),
    )


def test_short_parameters_are_cast_in_one_call() -> None:
    """Biases, all at once and first; weights each where it is used, for plans to drop."""

    def make() -> Parts:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
        batch = (torch.randn(16, 256), torch.randint(0, 8, (16,)))
        return short_step, model, torch.optim.SGD(model.parameters(), lr=0.1), [batch]

    def short_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    recording, _ = fused_step(make())
    together = [call for call in recording.tape.calls if call.node.target is cast]
    assert [len(call.results) for call in together] == [3]  # two biases, and a short weight
    graph = lift(recording)
    (op,) = [op for op in graph.ops if op.kind is OpKind.CAST]
    assert dataflow(graph).refusals[op.index] == "does what several ops do"
    single = [op for op in graph.ops if op.target == "aten._to_copy.default"]
    assert (256, 256) in [graph.values[op.outputs[0]].shape for op in single]
    assert_close(train(make(), grouped), train(make(), None), rtol=0.05, atol=0.01)
