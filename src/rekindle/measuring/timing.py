"""Measures whole steps: time, and the peak of allocated bytes, also against a budget."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rekindle.core.notebook import html_table, one_line
from rekindle.measuring.meters import (
    CpuWatch,
    Resident,
    covered_bytes,
    cuda_samples_us,
    peak_bytes,
)
from rekindle.torch_internals import is_profiler_enabled, pytree
from rekindle.tracing.capture_thread import capture_lock
from rekindle.units import format_bytes, format_us

log = logging.getLogger("rekindle")


@dataclass(frozen=True, slots=True)
class Measurement:
    """A step's peak of allocated bytes, its median time, and the samples of the time."""

    peak_bytes: int
    step_us: float
    samples_us: tuple[float, ...]

    def _facts(self) -> dict[str, object]:
        peak, samples = format_bytes(self.peak_bytes), f"{len(self.samples_us)}"
        return {"peak": peak, "step": format_us(self.step_us), "samples": samples}

    __repr__ = one_line
    _repr_html_ = html_table


def measure(
    step: Callable[[], Any],
    *,
    device: torch.device,
    steps: int,
    warmup: int = 1,
    resident: Callable[[], list[Any]] = list,
) -> Measurement:
    """Run `step` to warm up, once to watch memory, then `steps` times for the time.

    `resident` returns the tensors that exist before a step, which the CPU's allocator does not
    report; it is called after the warm-up.
    """
    if steps < 1:
        raise ValueError(f"at least one step is needed for a time, not {steps}")
    for _ in range(warmup):
        step()
    peak = peak_bytes(step, device, resident)
    samples = cuda_samples_us(step, steps) if device.type == "cuda" else _samples_us(step, steps)
    return Measurement(peak, statistics.median(samples), tuple(samples))


def _samples_us(step: Callable[[], Any], steps: int) -> list[float]:
    samples = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples


def resident_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> list[Resident]:
    """Parameters, gradients, buffers, optimizer state and batch, as they are before a step.

    Of a batch that is part of a larger tensor, only the part counts.
    """
    params = list(model.parameters())
    grads = [param.grad for param in params]
    state = pytree.tree_leaves(list(optimizer.state.values()))
    own = (leaf for leaf in (*params, *grads, *model.buffers(), *state) if _has_memory(leaf))
    given = filter(_has_memory, pytree.tree_leaves(batch))
    return [
        *(Resident(tensor, covered_bytes(tensor)) for tensor in given),
        *(Resident(tensor, tensor.untyped_storage().nbytes()) for tensor in own),
    ]


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_meta


class PeakMonitor:
    """The most memory allocated on a device between `start` and `stop`.

    The CPU is watched if `resident` is given, which returns the tensors that exist at the start,
    and if no profiler runs: there can be only one.
    """

    def __init__(
        self,
        device: torch.device | None,
        resident: Callable[[], Iterable[Resident]] | None = None,
    ) -> None:
        self._device = device
        self._resident = resident
        self._watch: CpuWatch | None = None

    @property
    def is_active(self) -> bool:
        """True if the device's allocations can be counted."""
        if self._device is None or self._device.type != "cpu":
            return self._device is not None and self._device.type == "cuda"
        return self._resident is not None and (self._watch is not None or not is_profiler_enabled())

    def start(self) -> None:
        """Begin watching: forget earlier peaks."""
        if not self.is_active:
            return
        assert self._device is not None
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif capture_lock.acquire(blocking=False):  # else another thread is measuring
            assert self._resident is not None
            self._watch = CpuWatch(self._resident())

    def stop(self) -> int | None:
        """The peak since `start`; None where nothing is counted."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            try:
                return watch.stop()
            finally:
                capture_lock.release()
        on_gpu = self._device is not None and self._device.type == "cuda"
        return torch.cuda.max_memory_allocated(self._device) if on_gpu else None


def report_peak(peak_bytes: int, forecast_bytes: int, budget_bytes: int) -> bool:
    """Log a step's measured peak, as a warning if it exceeds the budget; True if it does."""
    exceeds = peak_bytes > budget_bytes
    (log.warning if exceeds else log.info)(
        "the step took %s, and the budget is %s (%s was forecast)",
        format_bytes(peak_bytes),
        format_bytes(budget_bytes),
        format_bytes(forecast_bytes),
    )
    return exceeds
