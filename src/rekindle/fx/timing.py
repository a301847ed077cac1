"""Measures a step: the device's peak of allocated bytes and the time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a step really took. `peak_bytes` is None where the device does not tell (the CPU)."""

    peak_bytes: int | None
    step_us: float
    samples_us: tuple[float, ...]


def measure(
    step: Callable[[], Any], *, device: torch.device, steps: int, warmup: int = 1
) -> Measurement:
    """Run `step` a few times: the median time, and the most bytes allocated at any moment."""
    on_cuda = device.type == "cuda"
    for _ in range(warmup):
        step()
    if on_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    samples = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        if on_cuda:
            torch.cuda.synchronize(device)
        samples.append((time.perf_counter() - start) * 1e6)
    peak = torch.cuda.max_memory_allocated(device) if on_cuda else None
    return Measurement(peak, statistics.median(samples), tuple(samples))
