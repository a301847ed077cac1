"""Small models whose steps are fused into groups, and the groups of a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from support.uncompiled import Parts, no_compiler, recorded
from torch import Tensor, nn

from rekindle.engines.inductor.decompose import decompose
from rekindle.engines.inductor.fusion_groups import fuse
from rekindle.engines.inductor.group_compiler import CompiledGroup, GroupCompiler
from rekindle.tracing.tape import Call, Recording

aten = torch.ops.aten


WIDTH = 16


class Block(nn.Module):
    """Attention and two layers, with dropout, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.queries(self.first_norm(x)).view(batch, length, 3, 2, WIDTH // 2)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        x = x + F.dropout(self.output(found.reshape(x.shape)), 0.1, self.training)
        y = F.gelu(self.wide(self.second_norm(x)))
        return x + F.dropout(self.narrow(y), 0.1, self.training)


class Convolutions(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)) + x, inplace=True)
        return x.mean((2, 3))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def transformer(depth: int = 2) -> Parts:
    blocks = [Block() for _ in range(depth)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(5 * WIDTH, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    return train_step, model, optimizer, [(torch.randn(32, 5, WIDTH), torch.randint(0, 3, (32,)))]


def images(depth: int = 2) -> Parts:
    model = Convolutions(depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_step, model, optimizer, [(torch.randn(16, 3, 6, 6), torch.randint(0, 8, (16,)))]


def fused_step(parts: Parts) -> tuple[Recording, GroupCompiler]:
    fusing = GroupCompiler()
    with no_compiler():
        return fuse(decompose(recorded(parts), for_gpu=False), fusing), fusing


def groups(recording: Recording) -> list[Call]:
    return [call for call in recording.tape.calls if isinstance(call.node.target, CompiledGroup)]


def targets(call: Call) -> list[Any]:
    """What a compiled call does."""
    assert isinstance(call.node.target, CompiledGroup)
    graph = call.node.target.on_fakes.graph
    return [node.target for node in graph.nodes if node.op == "call_function"]
