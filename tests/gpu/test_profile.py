"""On a GPU: profiles are true, and measuring leaves no trace."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.equality import differences, snapshot

import rekindle
from rekindle import models
from rekindle.core.graph.graph import Role

# Tests that run at the same time take their share of the GPU.
IS_ALONE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) == 1


def measured_peak(step: Callable[[], Any]) -> int:
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("name", ["resnet18", "bert-base", "vit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_simulated_peak_is_the_measured_one(name: str, precision: str) -> None:
    gc.collect()
    work = models.build(name, batch=16, precision=precision, device="cuda")
    captured = rekindle.capture(work.train_step, work.model, work.optimizer, work.batch)
    trace = rekindle.simulate(captured.graph, rekindle.profile(captured, cache=False))
    # of the captured step: the plain one's backward has its own thread, with its own cuBLAS
    peak = measured_peak(lambda: captured(work.batch))
    assert trace.peak_bytes == pytest.approx(peak, rel=0.01)


def test_measuring_leaves_no_trace() -> None:
    work = models.build("bert-tiny", batch=4, precision="bf16", device="cuda")
    captured = rekindle.capture(work.train_step, work.model, work.optimizer, work.batch)
    captured(work.batch)
    before = snapshot(work.model, work.optimizer)
    allocated = torch.cuda.memory_allocated()
    rekindle.profile(captured, cache=False)
    gc.collect()
    assert not differences(before, snapshot(work.model, work.optimizer))
    assert torch.cuda.memory_allocated() <= allocated + (64 << 20)


def test_every_op_that_runs_kernels_has_a_time() -> None:
    work = models.build("resnet18", batch=16, precision="bf16", device="cuda")
    captured = rekindle.capture(work.train_step, work.model, work.optimizer, work.batch)
    profile = rekindle.profile(captured, cache=False)
    for op, cost in zip(captured.graph.ops, profile.costs, strict=True):
        assert cost.is_measured
        if op.flops:
            assert cost.time_us > 0, op.name
        if op.is_view:
            assert cost.time_us == 0, op.name
    assert profile.to_host_bytes_per_us > 0
    assert profile.to_device_bytes_per_us > 0


def test_a_step_that_does_not_fit_is_profiled_all_the_same() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    work = models.build("resnet18", batch=256, precision="bf16", device="cuda")
    peak = measured_peak(lambda: work.train_step(work.model, work.optimizer, work.batch))
    captured = rekindle.capture(work.train_step, work.model, work.optimizer, work.batch)
    roomy = rekindle.profile(captured, cache=False)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    # not tighter: with less room, cuDNN itself takes slower kernels that need less workspace
    torch.cuda.set_per_process_memory_fraction(0.9 * peak / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            work.train_step(work.model, work.optimizer, work.batch)
        work.optimizer.zero_grad()
        tight = rekindle.profile(captured, cache=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "alone" in tight.method
    if IS_ALONE:
        assert tight.step_us == pytest.approx(roomy.step_us, rel=0.25)
    assert rekindle.simulate(captured.graph, tight).peak_bytes == pytest.approx(peak, rel=0.03)
    assert tight.overhead_bytes == pytest.approx(roomy.overhead_bytes, abs=16 << 20)


def test_analytic_and_measured_agree() -> None:
    work = models.build("bert-base", batch=16, precision="bf16", device="cuda")
    captured = rekindle.capture(work.train_step, work.model, work.optimizer, work.batch)
    measured = rekindle.profile(captured, cache=False)
    analytic = rekindle.profile(captured, device="H200")
    if "H200" in measured.device and IS_ALONE:
        assert analytic.step_us == pytest.approx(measured.step_us, rel=0.25)
    share = rekindle.simulate(captured.graph, analytic).peak_by_role()[Role.ACTIVATION]
    assert share > 0
