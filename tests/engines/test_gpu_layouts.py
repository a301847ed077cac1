"""Attention for a GPU: no copy between the product that makes queries, keys and values and it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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

from rekindle.engines.inductor.decompose import decompose
from rekindle.engines.inductor.gpu_layouts import ATTENTION_INPUTS, uncopied_view
from rekindle.engines.inductor.rewriter import RecordingBuilder
from rekindle.tracing.tape import Recording

aten = torch.ops.aten
WIDTH, HEADS = 32, 2


class Attends(nn.Module):
    """Attention as in vision transformers: the sequence dimension is moved first, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.attention(x, x, x, need_weights=False)
        return x + found


def squared(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def attends() -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(Attends(), nn.LayerNorm(WIDTH), Attends()).double()
    return squared, model, torch.optim.SGD(model.parameters(), lr=0.1), [batch()]


def batch() -> Tensor:
    return torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def normal() -> Recording:
    with no_compiler():
        return decompose(recorded(attends()), for_gpu=True)


def test_attention_reads_what_a_product_has_made() -> None:
    tape = normal().tape
    maker = {node: call.node for call in tape.calls for node in call.results}
    found = [call.node for call in tape.calls if call.node.target in ATTENTION_INPUTS]
    assert len(found) == 4  # forward and backward, twice
    for node in found:
        for tensor in node.args[ATTENTION_INPUTS[node.target]]:
            assert maker[tensor].target is aten.as_strided.default
            product = maker[tensor]
            while product.target not in (aten.addmm.default, aten.clone.default):
                product = maker[product.all_input_nodes[0]]
            assert product.target is aten.addmm.default  # with its bias, and not copied
    assert not [c for c in tape.calls if c.node.target is aten.mm.default and not c.in_backward]
    flops = [call.flops for call in tape.calls if call.node.target is aten.addmm.default]
    assert all(flops)


def test_the_same_numbers() -> None:
    plain = train(attends(), None)
    assert_close(train(attends(), grouped_for_gpu), plain)
    assert_close(train(attends(), grouped), plain)


def test_under_a_budget_too() -> None:
    free = train(attends(), grouped_for_gpu)
    assert_close(train(attends(), grouped_for_gpu, budget="90%"), free, rtol=0, atol=0)


def place_of(make: Any) -> Any:
    """Where the elements of something are that is made of a tensor of 2×6×16 numbers."""
    layer = nn.Linear(16, 16).double()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = (make(model(x)) * 1.5).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    recording = recorded((step, layer, optimizer, [torch.randn(2, 6, 16).double()]))
    build = RecordingBuilder(recording)
    for call in recording.tape.calls:
        if call.node.target is aten.mul.Tensor and not call.in_backward:
            break
        build.keep(call)
    place = uncopied_view(build, build.node_map[call.node.all_input_nodes[0]])
    return place and place[1:]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: x.transpose(0, 1).clone(memory_format=torch.contiguous_format), True),
        (lambda x: x.transpose(0, 1).contiguous()[2:], True),
        (lambda x: x.transpose(0, 1).contiguous().view(6, 2, 2, 8).transpose(1, 2), True),
        (lambda x: x.transpose(0, 1).contiguous().view(12, 16), False),  # across rows that moved
        (lambda x: x.transpose(1, 2).contiguous(), False),  # elements do not lie side by side
        (lambda x: x.transpose(0, 1).contiguous()[:, :, 4:], False),  # rows start anywhere
        (lambda x: x.transpose(0, 1), False),  # no copy
    ],
)
def test_where_elements_were_before_a_copy(make: Any, expected: bool) -> None:
    found = place_of(make)
    assert (found is not None) == expected
    if found is not None:
        numbers = torch.arange(2 * 6 * 16.0)
        assert torch.equal(numbers.as_strided(*found), make(numbers.view(2, 6, 16)))
