"""Two processes: the same losses as without a plan, and the same decisions in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.small import perceptron
from torch import nn

from rekindle import dynamo

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="no gloo in this torch")

KINDS = ("ddp", "fsdp")


def _wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    return fully_shard(model)


def _train(kind: str, rank: int, planner: str | None) -> tuple[list[float], list[Any]]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model: Any = _wrapped(kind, perceptron())
    if planner is None:
        compiled = torch.compile(model, backend="aot_eager")
    else:
        compiled = dynamo.compile(model, budget="1GiB", planner=planner, lower="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(3):
        torch.manual_seed(10 * number + rank)
        loss = compiled(torch.randn(128, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [] if planner is None else compiled.plans


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        for kind in KINDS:
            plain, _ = _train(kind, rank, None)
            planned, plans = _train(kind, rank, "all")
            facts = [(each.graph.fingerprint, sorted(each.kept.items())) for each in plans]
            added = sum(each.plan.recompute_us for each in plans)
            torch.save((plain, planned, facts, added), f"{folder}/{kind}{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have left what they found; starting them takes longer than the rest."""
    found = tmp_path_factory.mktemp("ranks")
    mp.spawn(_work, (str(found),), nprocs=2)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes(kind: str, folder: Path) -> None:
    found = [torch.load(folder / f"{kind}{rank}.pt", weights_only=False) for rank in range(2)]
    for plain, planned, facts, added in found:
        assert plain == planned
        assert facts
        assert added > 0
    assert found[0][0] != found[1][0]  # each has its own batches
    assert found[0][2] == found[1][2]
