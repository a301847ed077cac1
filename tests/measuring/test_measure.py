"""Measured profiles on the CPU agree with the allocator, are complete, and change nothing."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
from support.equality import differences, same, snapshot
from support.square_step import square_step as train_step
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from torch.utils import _pytree as pytree

import rekindle
from rekindle import models
from rekindle.errors import ProfileError
from rekindle.measuring import measure
from rekindle.measuring.meters import allocations

ZOO: dict[str, dict[str, int]] = {
    "mlp": {},
    "lstm": {"batch": 16, "sequence": 5, "hidden": 64, "vocab": 200},
    "resnet-tiny": {},
    "bert-tiny": {"batch": 4},
    "gpt2-tiny": {"batch": 4},
    "vit-tiny": {"batch": 8},
}


def resident_bytes(work: models.Workload) -> int:
    """Bytes allocated before the step: parameters, buffers, optimizer state and batch."""
    state = [*work.optimizer.state.values()]
    leaves = pytree.tree_leaves([work.batch, state, *work.model.parameters()])
    tensors = [t for t in (*leaves, *work.model.buffers()) if isinstance(t, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def measured_peak(work: models.Workload) -> int:
    """The allocator's peak in one plain step, after one to warm up."""
    work.train_step(work.model, work.optimizer, work.batch)
    with torch_profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        work.train_step(work.model, work.optimizer, work.batch)
    _, totals = allocations(profiler)
    return int(totals.max()) + resident_bytes(work)


def captured(work: models.Workload) -> rekindle.CapturedStep:
    return rekindle.capture(work.train_step, work.model, work.optimizer, work.batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(name: str, precision: str) -> None:
    """The simulated peak is the allocator's; every op has a time; nothing is left behind.

    Captured before the first step, so that the optimizer has no state yet.
    """
    work = models.build(name, precision=precision, **ZOO[name])
    step = captured(work)
    before = snapshot(work.model, work.optimizer)
    batch = copy.deepcopy(work.batch)
    profile = rekindle.profile(step, cache=False, runs=1)
    assert not differences(before, snapshot(work.model, work.optimizer))
    assert not work.optimizer.state
    pairs = zip(pytree.tree_leaves(batch), pytree.tree_leaves(work.batch), strict=True)
    assert all(same(a, b) for a, b in pairs)

    assert all(cost.is_measured for cost in profile.costs)
    for op, cost in zip(step.graph.ops, profile.costs, strict=True):
        assert cost.time_us > 0 or op.is_view, op.name
        assert cost.workspace_bytes >= 0

    trace = rekindle.simulate(step.graph, profile)
    assert trace.peak_bytes == pytest.approx(measured_peak(work), rel=0.02)


@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy, F.l1_loss]
)
def test_a_reduced_loss_keeps_the_storage_of_the_unreduced_one(loss: Any) -> None:
    """Until the step ends, though it is a scalar: torch computes some losses in place."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.rand(512, 64), torch.rand(512, 64))

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        value = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    step = rekindle.optimize(train_step, model, optimizer, batch, budget="100%", planner="none")
    assert step.plan is not None
    assert step.measure(batch, steps=1).peak_bytes == pytest.approx(step.plan.peak_bytes, abs=64)


@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny"])
def test_attention_over_a_long_sequence_in_bf16(name: str) -> None:
    """On the CPU, attention with dropout also computes scores in bfloat16 that are never read.

    The capture drops that op, so that its bytes do not count.
    """
    work = models.build(name, batch=2, sequence=256, precision="bf16")
    step = captured(work)
    trace = rekindle.simulate(step.graph, rekindle.profile(step, cache=False, runs=1))
    assert trace.peak_bytes == pytest.approx(measured_peak(work), rel=0.02)


def test_the_profile_says_how_it_was_made() -> None:
    profile = rekindle.profile(captured(models.build("mlp", batch=2)), cache=False, runs=2)
    assert (profile.device, profile.allocator, profile.overhead_bytes) == ("cpu", "exact", 0)
    assert profile.method == "in order, median of 2 runs"
    assert profile.versions["torch"] == torch.__version__
    assert profile.to_host_us(1) is None
    assert profile.to_device_us(1) is None


def test_progress_is_reported() -> None:
    told: list[str] = []
    rekindle.profile(
        captured(models.build("mlp", batch=2)), cache=False, runs=2, progress=told.append
    )
    assert told[0] == "warming up"
    assert "measuring times, run 2 of 2" in told


# No side effects


class Net(nn.Module):
    """Buffers that change, and dropout; it may draw from a generator of its own."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.generator = generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return nn.functional.dropout(self.norm(self.linear(x + noise)), 0.2)


def profiled(
    model: nn.Module, batch: torch.Tensor, *, step: Any = train_step, make: Any = torch.optim.AdamW
) -> tuple[rekindle.CapturedStep, Any]:
    """A captured step, and a function that measures it."""
    optimizer = make(model.parameters(), lr=0.1)
    found = rekindle.capture(step, model, optimizer, batch)
    return found, lambda: rekindle.profile(found, cache=False, runs=1)


def test_generators_keep_their_state() -> None:
    model, batch = Net(), torch.randn(8, 6)
    _, measure_it = profiled(model, batch)
    states = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )
    measure_it()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_the_models_own_generator_keeps_its_state() -> None:
    generator = torch.Generator().manual_seed(1)
    _, measure_it = profiled(Net(generator), torch.randn(8, 6))
    state = generator.get_state()
    measure_it()
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("n_steps", [0, 2])
def test_state_and_old_gradients_stay(n_steps: int) -> None:
    model, batch = Net(), torch.randn(8, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(n_steps):
        train_step(model, optimizer, batch)
    model(batch).sum().backward()  # gradients that the step will add to
    step = rekindle.capture(train_step, model, optimizer, batch)
    before = snapshot(model, optimizer)
    grads = [param.grad for param in model.parameters()]
    rekindle.profile(step, cache=False, runs=1)
    assert not differences(before, snapshot(model, optimizer))
    assert all(a is p.grad for a, p in zip(grads, model.parameters(), strict=True))
    assert bool(optimizer.state) is bool(n_steps)


def test_a_step_that_changes_its_batch() -> None:
    """Measuring runs the step several times, and leaves the batch unchanged."""

    def scaling(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        batch.mul_(2)
        return train_step(model, optimizer, batch)

    batch = torch.ones(8, 6)
    _, measure_it = profiled(nn.Linear(6, 2), batch, step=scaling)
    measure_it()
    assert batch.tolist() == torch.ones(8, 6).tolist()


def test_a_buffer_whose_elements_share_memory() -> None:
    class Expanded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("scale", torch.full((1,), 3.0).expand(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    model = Expanded()
    _, measure_it = profiled(model, torch.randn(8, 6))
    measure_it()
    assert model.scale.tolist() == 6 * [3.0]


def test_training_goes_on_as_if_nothing_had_been_measured() -> None:
    results = []
    for measures in (False, True):
        torch.manual_seed(3)
        model, batch = Net(), torch.randn(8, 6)
        step, measure_it = profiled(model, batch)
        losses = [step(batch).item()]
        if measures:
            measure_it()
        losses.append(step(batch).item())
        results.append(losses)
    assert results[0] == results[1]


def test_a_deleted_batch() -> None:
    """Random numbers replace it, and the generators keep their state."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    batch = torch.randn(8, 6)
    step, measure_it = profiled(model, batch)
    with_batch = rekindle.simulate(step.graph, measure_it())
    del batch
    gc.collect()  # a capture leaves cycles behind, and they may hold it
    assert step.first_batch() is None
    state = torch.get_rng_state()
    profile = measure_it()
    assert torch.equal(torch.get_rng_state(), state)
    assert rekindle.simulate(step.graph, profile).peak_bytes == with_batch.peak_bytes


def test_a_deleted_batch_of_indices() -> None:
    model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 2))
    batch = torch.randint(5, (8, 3))
    step, measure_it = profiled(model, batch)
    del batch
    gc.collect()
    assert step.first_batch() is None
    assert measure_it().step_us > 0


class Unruly(torch.optim.Optimizer):
    """Reads its gradients as numpy arrays, which cannot be recorded."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(torch.from_numpy(param.grad.numpy() * group["lr"]))


def test_an_optimizer_that_cannot_be_recorded() -> None:
    step, measure_it = profiled(nn.Linear(6, 2), torch.randn(8, 6), make=Unruly)
    with pytest.raises(ProfileError, match=r'analytic profile of a named device.*device="H200"'):
        measure_it()
    profile = rekindle.profile(step, device="H200")
    assert rekindle.simulate(step.graph, profile).peak_bytes > 0


# Steps that do not fit


@pytest.fixture
def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the whole step fail for lack of memory."""

    def step_us(*args: Any) -> None:
        raise torch.OutOfMemoryError("there is no room")

    monkeypatch.setattr(measure.CpuMeter, "step_us", step_us)


@pytest.mark.usefixtures("_no_room")
@pytest.mark.parametrize("name", ["mlp", "resnet-tiny", "bert-tiny"])
def test_operators_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = models.build(name, batch=2)
    step = captured(work)
    before = snapshot(work.model, work.optimizer)
    alone = rekindle.profile(step, cache=False, runs=1)
    assert not differences(before, snapshot(work.model, work.optimizer))
    assert not work.optimizer.state
    assert "alone" in alone.method
    for op, cost in zip(step.graph.ops, alone.costs, strict=True):
        assert cost.time_us > 0 or op.is_view, op.name
    monkeypatch.undo()
    in_order = rekindle.profile(step, cache=False, runs=1)
    assert "in order" in in_order.method
    peaks = [rekindle.simulate(step.graph, profile).peak_bytes for profile in (alone, in_order)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.001)


@pytest.mark.usefixtures("_no_room")
def test_the_overhead_where_ops_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the first op's synthetic tensors, and without optimizer state yet to be created."""
    work = models.build("mlp", batch=2)
    own_bytes = resident_bytes(work)
    monkeypatch.setattr(measure.CpuMeter, "allocated_bytes", lambda self: own_bytes + 4096)
    assert rekindle.profile(captured(work), cache=False, runs=1).overhead_bytes == 4096


@pytest.mark.usefixtures("_no_room")
def test_distinct_operators_are_measured_once() -> None:
    """Three equal layers: their matmuls have the same signature, and get one time."""
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    step, measure_it = profiled(model, torch.randn(8, 6), make=torch.optim.SGD)
    profile = measure_it()
    forward = [op.index for op in step.graph.ops if op.flops and op.phase.value == "forward"]
    assert len(forward) == 3
    assert len({profile.costs[index].time_us for index in forward}) == 1
    n_distinct = int(profile.method.split()[0])
    assert n_distinct < len(step.graph.ops)


@pytest.mark.usefixtures("_no_room")
def test_parameters_are_restored_where_memory_runs_out() -> None:
    """Ops of the step have changed them by then."""
    model, batch = Net(), torch.randn(8, 6)
    step, measure_it = profiled(model, batch, make=torch.optim.SGD)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert "alone" in measure_it().method
    assert all(same(before[name], value) for name, value in model.state_dict().items())
    assert step(batch) is not None


@pytest.mark.parametrize("name", ["resnet-tiny", "bert-tiny"])
def test_measuring_makes_no_nans(name: str) -> None:
    """Before the first step there is no optimizer state; its replacement must be valid."""
    work = models.build(name, **ZOO[name])
    step = captured(work)
    batch = step.first_batch()
    assert batch is not None

    def run() -> None:
        for _ in range(3):
            given = measure.inputs(step.recording, batch)
            measure.run_ops(
                step.recording, given, lambda index, op, args, kwargs: op(*args, **kwargs)
            )
            assert all(param.isfinite().all() for param in work.model.parameters())

    measure.preserving(step.recording, run, batch)
