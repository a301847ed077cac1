"""Casts that are done together on a GPU: the same bits, with fewer kernels."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from rekindle import dynamo
from rekindle.dynamo.post_grad_passes import PostGradOptions
from rekindle.dynamo.session import CompileOptions

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]
LAYERS = 12


class Deep(nn.Module):
    """Many small convolutions, some of which look at more than one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        sizes = [3 if index % 3 == 0 else 1 for index in range(LAYERS)]
        self.others = nn.ModuleList(
            nn.Conv2d(64, 64, size, padding=size // 2, bias=False) for size in sizes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.first(x)
        for layer in self.others:
            found = layer(found).relu()
        return found.mean((1, 2, 3))


def trained(
    model: nn.Module, batch: torch.Tensor, *, batches_casts: bool = True
) -> tuple[list[torch.Tensor], int]:
    """Gradients of a step, and how many kernels it started."""
    torch.compiler.reset()
    fresh = {"force_disable_caches": True}
    compiled = dynamo.compile(model, budget="100%", options=fresh)
    post_grad = PostGradOptions(batches_casts=batches_casts)
    compiled.session.tuning = CompileOptions(post_grad=post_grad)

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = compiled(batch)
        out.float().square().sum().backward()
        torch.cuda.synchronize()

    for _ in range(4):
        step()
    with torch.profiler.profile(acc_events=True) as profiler:
        step()
    on_gpu = torch.autograd.DeviceType.CUDA
    kernels = [event for event in profiler.events() if event.device_type == on_gpu]
    return [p.grad for p in model.parameters() if p.grad is not None], len(kernels)


def test_the_same_bits_with_fewer_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    model = Deep().cuda()
    batch = torch.randn(8, 3, 32, 32, device="cuda")
    found, n_kernels = trained(deepcopy(model), batch)
    expected, n_apart = trained(deepcopy(model), batch, batches_casts=False)
    assert len(found) == len(expected) == LAYERS + 1
    assert all(map(torch.equal, found, expected))
    assert n_kernels <= n_apart - LAYERS  # of 2 × 13 casts, a few are left
