"""The compiled engine on a GPU: plans are kept, and change no bit of the results."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rekindle
from rekindle import models
from rekindle.engines.inductor.group_compiler import CompiledGroup
from rekindle.measuring.bitwise_compare import State, differences, state_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # strictly: attention is not, if told to warn only
    yield
    torch.use_deterministic_algorithms(False)


def trained(name: str, batch: int, **how: Any) -> tuple[rekindle.TrainStep, State]:
    gc.collect()  # what was there before would count
    torch.manual_seed(0)
    work = models.build(name, batch=batch, precision="bf16", device="cuda")
    parts = (work.train_step, work.model, work.optimizer, work.batch)
    step = rekindle.optimize(*parts, engine="inductor", **how)
    torch.manual_seed(1)
    results = {f"result {i}": step(work.batch).detach().cpu() for i in range(4)}
    ends = {**state_of(work.model, work.optimizer), **results}
    return step, {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in ends.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "batch", "budget"),
    [("bert-base", 8, "75%"), ("resnet18", 64, "85%"), ("gpt2", 4, "75%")],
)
def test_a_plan_changes_no_bit(name: str, batch: int, budget: str) -> None:
    step, plain = trained(name, batch)
    assert step.captured.is_compiled
    del step
    planned_step, planned = trained(name, batch, budget=budget)
    assert (
        plain["result 0"] == planned["result 0"]
    )  # later ones depend on nondeterministic gradients
    assert differences(plain, planned) == []
    info = planned_step.engine_info
    assert (info.name, info.reason) == ("cudagraph", "")
    assert planned_step.budget_bytes is not None
    assert info.graphs_peak_bytes <= planned_step.budget_bytes


@pytest.mark.filterwarnings("ignore")
def test_reserved_memory_is_what_was_planned() -> None:
    """Although ops make several tensors of one size: code asks for them in the order found."""
    torch.cuda.empty_cache()
    step, _ = trained("gpt2", 4)
    info = step.engine_info
    assert info.name == "cudagraph"
    targets = (call.node.target for call in step.captured.recording.tape.calls)
    groups = [target for target in targets if isinstance(target, CompiledGroup)]
    assert any(len(group.order) > 1 for group in groups)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= 1.05 * info.graphs_peak_bytes + (64 << 20)
