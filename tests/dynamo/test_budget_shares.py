"""A budget in bytes means the peak; what cannot be met is refused, with what could be."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from support.small import attention, batch_for, convolutions, differences, perceptron, step
from torch import nn

from rekindle import dynamo
from rekindle.core.graph.graph import Role
from rekindle.dynamo.budget_shares import share_ratio, static_of_model
from rekindle.errors import InfeasibleBudget, PlanError, UnitError
from rekindle.measuring.timing import measure, resident_tensors

MAKERS = (perceptron, convolutions, attention)


def _saved_bytes(model: dynamo.CompiledModel, batch: torch.Tensor) -> int:
    """The bytes that autograd saves in a step, without parameters, buffers and the batch."""
    there = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), batch)}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(batch)
    found = sum(saved.values())
    out.sum().backward()
    return found


def _runs_once(planned: dynamo.PlannedGraph, op: int | None) -> bool:
    """Whether an op draws random numbers, so that its results are kept for who needs them."""
    return op is not None and planned.graph.ops[op].is_random


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("planner", ["none", "all", "auto"])
def test_autograd_saves_what_the_plan_keeps(make, planner: str) -> None:
    model, batch = make(), batch_for(make)
    budget = "85%" if planner == "auto" else "10GiB"
    planned = dynamo.compile(model, budget=budget, planner=planner, lower="eager")
    step(planned, batch)
    (only,) = planned.plans
    assert _saved_bytes(planned, batch) == only.kept_bytes
    assert len(planned.plans) == 1
    values = {value.name: value for value in only.graph.values}
    storages = {values[name].storage for name in only.kept}
    dropped = {each.storage for each in only.plan.decisions if not each.is_kept}
    assert not storages & dropped
    kept = {each.storage for each in only.plan.decisions if each.is_kept}
    outputs = {s.index for s in only.graph.storages if s.role is Role.OUTPUT}
    once = {values[name].storage for name in only.kept if _runs_once(only, values[name].producer)}
    assert storages <= kept | outputs | once


@pytest.mark.parametrize("make", MAKERS)
def test_less_is_never_more(make) -> None:
    batch = batch_for(make)
    peaks, kept = [], []
    for share in (100, 88, 76):
        torch.compiler.reset()
        planned = dynamo.compile(make(), budget=f"{share}%", lower="eager")
        try:
            step(planned, batch)
        except InfeasibleBudget:
            break
        (only,) = planned.plans
        peaks.append(only.plan.peak_bytes)
        kept.append(only.kept_bytes)
        assert only.plan.peak_bytes <= only.plan.budget_bytes
    assert len(peaks) > 1
    assert peaks == sorted(peaks, reverse=True)
    assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_an_impossible_budget(lower: str) -> None:
    planned = dynamo.compile(perceptron(), budget="20KiB", lower=lower)
    with pytest.raises(InfeasibleBudget) as caught:
        step(planned, batch_for(perceptron))
    assert caught.value.budget_bytes == 20 << 10
    least = caught.value.least_peak_bytes
    assert least > 20 << 10
    if lower == "eager":
        torch.compiler.reset()
        again = dynamo.compile(perceptron(), budget=least, lower=lower)
        step(again, batch_for(perceptron))
        assert again.plans[0].plan.peak_bytes <= least


def test_what_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UnitError):
        dynamo.compile(perceptron(), budget="lots")
    with pytest.raises(PlanError, match="no planner named"):
        dynamo.compile(perceptron(), budget="1GiB", planner="nine")
    with pytest.raises(PlanError, match="'inductor' or 'eager'"):
        dynamo.compile(perceptron(), budget="1GiB", lower="tvm")


def test_the_optimizer_counts() -> None:
    model = perceptron()
    size = sum(p.nbytes for p in model.parameters())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert static_of_model(model, plain).state_bytes == 0
    heavy = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert static_of_model(model, heavy).state_bytes == size
    assert static_of_model(model, None).state_bytes == 2 * size
    adam = torch.optim.AdamW(model.parameters())
    assert static_of_model(model, adam).state_bytes == 2 * size
    step(model, batch_for(perceptron))
    assert static_of_model(model, adam).grad_bytes == size
    adam.step()
    assert 2 * size < static_of_model(model, adam).state_bytes < 2 * size + 4096

    peaks = []
    for optimizer in (plain, adam):
        torch.compiler.reset()
        planned = dynamo.compile(model, budget="100%", optimizer=optimizer, lower="eager")
        step(planned, batch_for(perceptron))
        peaks.append(planned.plans[0].plan.peak_bytes)
    assert 2 * size < peaks[1] - peaks[0] < 2 * size + 4096


def test_the_peak_has_everything_in_it() -> None:
    model, batch = perceptron(), batch_for(perceptron)
    planned = dynamo.compile(model, budget="100%", lower="eager")
    step(planned, batch)
    (only,) = planned.plans
    size = sum(p.nbytes for p in model.parameters())
    sums = only.graph.bytes_by_role()
    assert sums[Role.PARAM] == sums[Role.GRAD] == size
    assert sums[Role.INPUT] == batch.nbytes
    assert only.profile.overhead_bytes == 2 * size  # Adam's
    assert only.plan.peak_bytes >= 3 * size + batch.nbytes + only.kept_bytes
    assert "two tensors for each parameter" in only.note


@pytest.mark.parametrize("share", [80, 70, 60])
@pytest.mark.parametrize("make", [perceptron, attention])
def test_the_forecast_is_what_is_measured(make, share: int) -> None:
    """But for what operators take for themselves, as dropout does on the CPU."""
    model, batch = make(0.0), batch_for(make, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    planned = dynamo.compile(model, budget=f"{share}%", optimizer=optimizer, lower="eager")
    shape = planned(batch).shape

    def train() -> None:
        optimizer.zero_grad()
        planned(batch).backward(torch.ones(shape))  # what a loss would hand back

    around = partial(resident_tensors, model, optimizer, batch)
    found = measure(train, device=torch.device("cpu"), steps=1, resident=around)
    (only,) = planned.plans
    assert only.plan.recompute_us > 0
    assert found.peak_bytes == pytest.approx(only.plan.peak_bytes, abs=4096)


def test_shares() -> None:
    assert share_ratio(10, 90, 0) == 1
    assert share_ratio(10, 90, 10) == 0.5
    assert share_ratio(0, 90, 10) == 0.9


class Lossy(nn.Module):
    """A model whose loss is a graph of its own, with nothing in it to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()
        self.scores = nn.Linear(16, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.scores(self.inner(x))
        torch._dynamo.graph_break()
        return scores.float().log_softmax(-1).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's
def test_earlier_graphs_leave_room_for_later_ones(caplog: pytest.LogCaptureFixture) -> None:
    batch = batch_for(perceptron)
    plain = step(deepcopy(model := Lossy()), batch)
    compiled = dynamo.compile(model, budget="10GiB", lower="eager")
    step(compiled, batch)
    most = max(each.plan.peak_bytes for each in compiled.plans)
    torch.compiler.reset()
    within = 4 * most // 5
    compiled = dynamo.compile(model, budget=within, lower="eager")
    for _ in range(6):
        assert differences(plain, step(compiled, batch)) == []
    first, second = compiled.plans
    assert "a later graph needs" in caplog.text
    assert compiled.session.tries > 0
    assert compiled.session.short_bytes == 0
    assert first.plan.recompute_us > 0
    assert second.plan.peak_bytes <= within


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_what_no_graph_leaves_room_for_is_refused() -> None:
    batch = batch_for(perceptron)
    compiled = dynamo.compile(Lossy(), budget="10GiB", lower="eager")
    step(compiled, batch)
    first, second = compiled.plans
    assert second.plan.peak_bytes > first.plan.peak_bytes
    torch.compiler.reset()
    least = second.plan.peak_bytes - first.kept_bytes  # with nothing kept at all
    compiled = dynamo.compile(Lossy(), budget=least, lower="eager")

    def train() -> None:
        for _ in range(6):
            step(compiled, batch)

    with pytest.raises(InfeasibleBudget):
        train()


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a torch Module, and is of type function"):
        dynamo.compile(lambda x: x, budget="50%")  # type: ignore[arg-type]
