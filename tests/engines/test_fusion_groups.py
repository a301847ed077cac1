"""Which calls are fused into groups, and which stay calls of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.fused_steps import aten, fused_step, groups, images, targets, transformer
from support.uncompiled import Parts, assert_close, grouped, train
from torch import Tensor, nn

from rekindle.core.graph.graph import Role
from rekindle.engines.inductor import decompositions
from rekindle.engines.inductor.fusion_analysis import is_simple
from rekindle.engines.inductor.group_compiler import CompiledGroup
from rekindle.measuring.bitwise_compare import differences
from rekindle.tracing.lift import lift

MODELS: dict[str, Callable[..., Parts]] = {"transformer": transformer, "images": images}


LIBRARY = ("mm", "addmm", "bmm", "convolution", "attention", "embedding")


@pytest.mark.parametrize("name", MODELS)
def test_library_calls_stay_calls_of_their_own(name: str) -> None:
    recording, _ = fused_step(MODELS[name]())
    inside = [target.__name__ for call in groups(recording) for target in targets(call)]
    outside = [call.node.name for call in recording.tape.calls if call not in groups(recording)]
    assert not any(word in each for each in inside for word in LIBRARY)
    assert any(word in each for each in outside for word in LIBRARY)


@pytest.mark.parametrize("name", MODELS)
def test_little_is_left_beside_it(name: str) -> None:
    """In the passes, everything else that computes is in a group, or one simple call."""
    recording, _ = fused_step(MODELS[name]())
    graph = lift(recording)
    last = max(index for index, call in enumerate(recording.tape.calls) if call.in_backward)
    for call, op in zip(recording.tape.calls[:last], graph.ops, strict=False):
        is_library = any(word in call.node.name for word in LIBRARY)
        is_compiled = isinstance(call.node.target, CompiledGroup)
        is_alone = call.writes or call.is_random or is_simple(call.node.target)
        assert is_library or is_compiled or op.is_view or is_alone, call.node


@pytest.mark.parametrize("name", MODELS)
def test_equal_layers_have_equal_functions(name: str) -> None:
    (_, few), (_, many) = (fused_step(MODELS[name](depth)) for depth in (2, 6))
    assert len(few.functions) == len(many.functions)
    assert many.n_calls > 2 * few.n_calls


@pytest.mark.parametrize("name", MODELS)
def test_groups_never_mix_forward_and_backward(name: str) -> None:
    """Backward groups depend on a gradient; forward groups come before any."""
    recording, _ = fused_step(MODELS[name]())
    grads = {n for c in recording.tape.calls if c.in_backward for n in c.results}
    for call in groups(recording):
        assert call.in_backward or grads.isdisjoint(call.node.all_input_nodes)
        if call.in_backward and call is not groups(recording)[-1]:
            names = [target.__name__ for target in targets(call)]
            assert not any(name.startswith("native_layer_norm.") for name in names)


@pytest.mark.parametrize("name", MODELS)
def test_no_mask_is_kept_for_the_backward_pass(name: str) -> None:
    recording, _ = fused_step(MODELS[name]())
    graph = lift(recording)
    kept = [v for v in graph.values if graph.storage_of(v.index).role is Role.ACTIVATION]
    assert kept
    assert not [value.name for value in kept if value.dtype == "bool"]
    drawn = [c for c in groups(recording) if decompositions.draw_mask in targets(c)]
    assert {c.in_backward for c in drawn} == ({False, True} if name == "transformer" else set())


def test_what_costs_no_more_to_compute_than_to_read_is_computed_again() -> None:
    """Of a pointwise chain, only its input is kept: a matmul's result."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(self.layer(x)).exp()
            return torch.tanh(y * torch.sigmoid(y.double()).float() + torch.arange(8))

    model = Chain()
    parts = rows_summed, model, torch.optim.SGD(model.parameters()), [torch.randn(6, 8)]
    graph = lift(fused_step(parts)[0])
    kept = [v for v in graph.values if graph.storage_of(v.index).role is Role.ACTIVATION]
    assert len({v.storage for v in kept}) == 1
    assert graph.ops[kept[0].producer or 0].target == "aten.addmm.default"


def rows_summed(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    """A bias has the sum over rows of a gradient that two products read as well."""
    loss = torch.tanh(model(batch)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_sums_over_rows_of_what_a_product_reads_are_separate() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    parts = rows_summed, model, torch.optim.SGD(model.parameters()), [torch.randn(6, 8)]
    recording, _ = fused_step(parts)
    tape = recording.tape
    sums = [call for call in groups(recording) if aten.sum.dim_IntList in targets(call)]
    assert len(sums) == 2
    for call in sums:
        assert set(targets(call)) <= {aten.sum.dim_IntList, aten.view.default}
        (read,) = call.node.all_input_nodes
        readers = [c for c in tape.calls if read in c.node.all_input_nodes]
        assert len(readers) >= 2


def writes_between(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    """A buffer is written to, and read before and after."""
    hidden = model[0](batch)
    before = torch.tanh(hidden + model.scale)
    with torch.no_grad():
        model.scale.add_(1.0)
    after = torch.sigmoid(before + model.scale)
    loss = model[1](after).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_nothing_is_fused_across_a_write() -> None:
    def make() -> Parts:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        model.register_buffer("scale", torch.ones(4).double())
        batches = [torch.randn(6, 4).double()]
        return writes_between, model, torch.optim.SGD(model.parameters(), lr=0.1), batches

    recording, _ = fused_step(make())
    tape = recording.tape
    by_users = [c for c in tape.calls if not c.in_optimizer and c not in groups(recording)]
    (written,) = {tape.metas[node].storage for call in by_users for node in call.writes}
    for call in groups(recording):
        assert written not in {tape.metas[node].storage for node in call.node.all_input_nodes}
    assert_close(train(make(), grouped), train(make(), None))


def test_clipped_gradients_are_fused_all_the_same() -> None:
    """They are written to, but after the backward pass."""

    def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def names(parts: Parts) -> list[str]:
        recording, _ = fused_step(parts)
        return [call.node.name for call in groups(recording)]

    plain = transformer()
    assert names((clipped, *plain[1:])) == names(plain)


def test_random_draws_keep_their_order() -> None:
    """Groups move past each other; a call that draws does not move past another that does."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            late = torch.rand_like(hidden)
            early = torch.randn(6, 4, dtype=x.dtype)
            mixed = hidden * 2 + late.sin() * early
            return self.second(mixed + torch.tanh(hidden) * torch.rand_like(mixed))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
        return rows_summed(model, optimizer, batch)

    def make() -> Parts:
        torch.manual_seed(0)
        model = Noisy().double()
        batches = [torch.randn(6, 4).double()]
        return step, model, torch.optim.SGD(model.parameters(), lr=0.1), batches

    assert_close(train(make(), grouped), train(make(), None))


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_changes_no_bit(name: str) -> None:
    """Recomputed groups are the same code on the same numbers, masks included."""

    def trained(**how: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        return train(MODELS[name](), grouped, steps=4, **how)

    plain = trained()
    assert differences(plain, trained(budget="85%")) == []


def test_no_chain_is_too_long() -> None:
    """The number of recomputed calls is bounded, for the compiler and for the recursion."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            for index in range(600):
                x = torch.sin(x + index)
            return x

    model = Chain()
    parts = rows_summed, model, torch.optim.SGD(model.parameters()), [torch.randn(6, 4)]
    recording, _ = fused_step(parts)
    assert max(len(targets(call)) for call in groups(recording)) <= 64 * 33
    assert len(groups(recording)) < 60
