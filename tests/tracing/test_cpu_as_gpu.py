"""A step on the CPU captured with the operators of a GPU, for forecasts only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rekindle
from rekindle.core.graph.graph import Role, StepGraph
from rekindle.errors import ProfileError, RekindleError


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_step_bf16(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def captured(
    model: nn.Module,
    *shape: int,
    bf16: bool = False,
    make: Any = torch.optim.AdamW,
    as_on_gpu: bool = True,
) -> rekindle.CapturedStep:
    step = train_step_bf16 if bf16 else train_step
    optimizer = make(model.parameters(), lr=1e-3)
    return rekindle.capture(step, model, optimizer, torch.randn(*shape), as_on_gpu=as_on_gpu)


def names(graph: StepGraph) -> list[str]:
    return [op.target.split(".")[1] for op in graph.ops]


class Attention(nn.Module):
    """Attention over 2 heads; `mask` is "none", "causal", "bool" or "float"."""

    def __init__(self, mask: str = "none", dropout: float = 0.0, *, heads: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.mask, self.dropout, self.heads = mask, dropout, heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.heads:
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
        mask = None
        if self.mask in ("bool", "float"):
            mask = torch.ones(x.shape[1], x.shape[1]).tril()
            mask = mask.bool() if self.mask == "bool" else mask
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=self.dropout, is_causal=self.mask == "causal"
        )


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_is_one_operator(mask: str, dropout: float, bf16: bool) -> None:
    """Flash in half precision without a mask, else memory-efficient; one forward, one backward."""
    graph = captured(Attention(mask, dropout), 3, 5, 16, bf16=bf16).graph
    fused = [name for name in names(graph) if "attention" in name]
    kind = "flash" if bf16 and mask in ("none", "causal") else "efficient"
    name = f"_scaled_dot_product_{kind}_attention"
    assert fused == [name, f"{name}_backward"]
    assert not {"bmm", "_softmax", "_safe_softmax"} & set(names(graph))
    attention = next(op for op in graph.ops if op.target.startswith(f"aten.{name}"))
    assert graph.values[attention.outputs[0]].dtype == ("bfloat16" if bf16 else "float32")
    assert attention.is_random is bool(dropout)


def test_attention_without_heads() -> None:
    """Three dimensions are allowed, too."""
    graph = captured(Attention(heads=False), 3, 5, 16).graph
    assert graph.flops_by_phase()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_torchs_own_attention_module(dropout: float) -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, dropout=dropout, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    graph = captured(SelfAttention(), 3, 5, 16).graph
    fused = [name for name in names(graph) if "attention" in name]
    assert fused == [
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    ]


def test_dropout_keeps_one_byte_per_element() -> None:
    """On the CPU, the mask has the dtype of the input."""
    model = nn.Sequential(nn.Linear(16, 24), nn.Dropout(0.3), nn.Linear(24, 2))
    graph = captured(model, 10, 16).graph
    [drop] = [op for op in graph.ops if op.target.startswith("aten.native_dropout.")]
    assert drop.is_random
    _, mask = drop.outputs
    assert graph.values[mask].dtype == "bool"
    assert graph.storage_of(mask).nbytes == 10 * 24
    assert graph.storage_of(mask).role is Role.ACTIVATION
    plain = captured(model, 10, 16, as_on_gpu=False).graph
    masks = [op for op in plain.ops if op.is_random]
    assert [plain.storage_of(v).nbytes for op in masks for v in op.mutates] == [4 * 10 * 24]


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_dropout_that_does_nothing(p: float) -> None:
    """In evaluation mode, or with p = 0, there is no mask."""
    model = nn.Sequential(nn.Linear(16, 24), nn.Dropout(p))
    if p:
        model.eval()
    assert "native_dropout" not in names(captured(model, 10, 16).graph)


def types_of(graph: StepGraph, name: str) -> tuple[str, str]:
    """The dtypes of an operator's first input and first output."""
    op = next(op for op in graph.ops if op.target.startswith(f"aten.{name}."))
    return graph.values[op.inputs[0]].dtype, graph.values[op.outputs[0]].dtype


def test_layer_norm_runs_in_float32_under_autocast() -> None:
    """As in CUDA's autocast; the CPU's runs it in bfloat16."""
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    gpu = captured(model, 10, 16, bf16=True).graph
    cpu = captured(model, 10, 16, bf16=True, as_on_gpu=False).graph
    assert types_of(gpu, "native_layer_norm") == ("float32", "float32")
    assert types_of(cpu, "native_layer_norm") == ("bfloat16", "bfloat16")
    assert types_of(gpu, "addmm") == ("bfloat16", "bfloat16")


def test_softmax_runs_in_float32_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1))
    assert types_of(captured(model, 10, 16, bf16=True).graph, "_softmax") == ("float32", "float32")


def test_without_autocast_nothing_is_converted() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(10, 16, dtype=torch.bfloat16)
    graph = rekindle.capture(train_step, model, optimizer, batch, as_on_gpu=True).graph
    assert types_of(graph, "native_layer_norm") == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_optimizers_use_foreach(make: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    as_gpu = names(captured(model, 10, 16, make=make).graph)
    plain = names(captured(model, 10, 16, make=make, as_on_gpu=False).graph)
    assert any(name.startswith("_foreach") for name in as_gpu)
    assert not any(name.startswith("_foreach") for name in plain)


def test_the_users_choice_of_foreach_is_kept() -> None:
    model = nn.Linear(16, 4)

    def fused(params: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=lr, fused=True)

    found = names(captured(model, 10, 16, make=fused).graph)
    assert "_fused_adamw_" in found
    assert found == names(captured(model, 10, 16, make=fused, as_on_gpu=False).graph)


def test_nothing_stays_patched() -> None:
    """The next capture without `as_on_gpu`, and the plain step, use the CPU's operators."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3))
    before = captured(model, 10, 16, as_on_gpu=False).graph.fingerprint
    captured(model, 10, 16)
    assert captured(model, 10, 16, as_on_gpu=False).graph.fingerprint == before


def test_a_forecast_cannot_run() -> None:
    step = captured(nn.Linear(16, 4), 10, 16)
    assert step.is_forecast
    with pytest.raises(RekindleError, match="without as_on_gpu=True"):
        step(torch.randn(10, 16))


def test_a_forecast_cannot_be_measured() -> None:
    step = captured(nn.Linear(16, 4), 10, 16)
    with pytest.raises(ProfileError, match='name a GPU, as in device="H200"'):
        rekindle.profile(step)
    assert rekindle.profile(step, device="H200").step_us > 0
