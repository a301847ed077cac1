"""Instruments: how long ops take and what they allocate, on CUDA and on the CPU."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import DeviceType
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from rekindle.torch_internals import EventType, clear_cublas_workspaces

Around = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]
Run = Callable[[Around], None]  # runs all ops, each through the function it is given

_MARK = "rekindle:"
_REPLAYS = 10  # of the whole step, for its time


class Meter(Protocol):
    """An instrument for one kind of device."""

    allocator: str

    def times_us(self, run: Run, n_ops: int) -> NDArray[np.float64]:
        """The time of each op, from one run."""

    def workspaces_bytes(self, run: Run, n_ops: int) -> tuple[NDArray[np.int64], int]:
        """What each op allocates beside its results, and what was allocated when the run began."""

    def allocated_bytes(self) -> int:
        """What is allocated now; 0 where the allocator does not say."""

    def step_us(self, run: Run) -> float | None:
        """The time of the whole run without any gap between ops, if that can be had."""

    def transfer_rates(self) -> tuple[float, float]:
        """Bytes a microsecond from the device to the host and back; zeros if there is no way."""


def plainly(index: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op and nothing else."""
    return op(*args, **kwargs)


def _marked(index: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with record_function(f"{_MARK}{index}"):
        return op(*args, **kwargs)


class CudaMeter:
    """Kernel times from the profiler, bytes from the caching allocator."""

    allocator = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def times_us(self, run: Run, n_ops: int) -> NDArray[np.float64]:
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with torch_profile(activities=activities, acc_events=True) as profiler:
            run(_marked)
            torch.cuda.synchronize(self._device)
        times = np.zeros(n_ops)
        for event in profiler.events():
            if event.name.startswith(_MARK) and event.device_type == DeviceType.CPU:
                times[int(event.name.removeprefix(_MARK))] += event.device_time_total
        return times

    def workspaces_bytes(self, run: Run, n_ops: int) -> tuple[NDArray[np.int64], int]:
        allocated = torch.cuda.memory_allocated
        found = np.zeros(n_ops, dtype=np.int64)
        at_start: list[int] = []

        def around(index: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            before = allocated(self._device)
            if not at_start:
                at_start.append(before)
            torch.cuda.reset_peak_memory_stats(self._device)
            result = op(*args, **kwargs)
            peak = torch.cuda.max_memory_allocated(self._device)
            found[index] = peak - max(before, allocated(self._device))
            return result

        run(around)
        return found, at_start[0] if at_start else 0

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def step_us(self, run: Run) -> float | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run(plainly)
        except RuntimeError:  # something in the step cannot be captured
            return None
        finally:
            clear_workspaces()  # the stream of the capture has its own, held by the library
        samples = cuda_samples_us(graph.replay, _REPLAYS)
        faster = sorted(samples)[: len(samples) // 2]  # a GPU is slowed down now and then
        return statistics.median(faster)

    def transfer_rates(self) -> tuple[float, float]:
        nbytes = 64 << 20
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        rates = []
        for target, source in ((host, there), (there, host)):
            samples = []
            for _ in range(4):
                torch.cuda.synchronize(self._device)
                start = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize(self._device)
                samples.append((time.perf_counter() - start) * 1e6)
            rates.append(nbytes / min(samples))
        return rates[0], rates[1]


class CpuMeter:
    """Wall times, and bytes from the profiler's record of allocations."""

    allocator = "exact"

    def times_us(self, run: Run, n_ops: int) -> NDArray[np.float64]:
        times = np.zeros(n_ops)
        clock = time.perf_counter_ns

        def around(index: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            start = clock()
            result = op(*args, **kwargs)
            times[index] = (clock() - start) / 1e3
            return result

        run(around)
        return times

    def workspaces_bytes(self, run: Run, n_ops: int) -> tuple[NDArray[np.int64], int]:
        found = np.zeros(n_ops, dtype=np.int64)
        with _watching_the_allocator() as profiler:
            run(_marked)
        moments, totals = allocations(profiler)
        for event in profiler.profiler.kineto_results.events():
            if not event.name().startswith(_MARK):
                continue
            first = int(np.searchsorted(moments, event.start_ns()))
            last = int(np.searchsorted(moments, event.start_ns() + event.duration_ns()))
            before, during = totals[first], totals[first + 1 : last + 1]
            if len(during):
                workspace = int(during.max()) - int(max(before, during[-1]))
                found[int(event.name().removeprefix(_MARK))] = max(0, workspace)
        return found, 0

    def allocated_bytes(self) -> int:
        return 0

    def step_us(self, run: Run) -> float | None:
        return None

    def transfer_rates(self) -> tuple[float, float]:
        return 0.0, 0.0


def cuda_samples_us(step: Callable[[], Any], steps: int) -> list[float]:
    """The times of a few steps on a GPU, launched one behind the other as in a training loop.

    A sample is the time between the ends of two of them, so that launching does not count where it
    is quicker than the GPU.
    """
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    step()  # so that the first one measured is launched while another runs, too
    ends[0].record()
    for end in ends[1:]:
        step()
        end.record()
    ends[-1].synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(ends)]


def clear_workspaces() -> None:
    """Give back what cuBLAS holds for each stream and thread; it takes it anew where it needs it.

    A plain step leaves what its backward thread has used, and a capture what its stream has.
    """
    clear_cublas_workspaces()


def peak_bytes(
    step: Callable[[], Any], device: torch.device, around: Callable[[], Iterable[Any]]
) -> int:
    """The most bytes allocated on a device at any moment of a step, which is run for it.

    CUDA's allocator counts all there is. The CPU's is watched while the step runs: what was there
    before is taken to be the tensors that `around` returns, but for those that go in the step, as
    gradients do that it clears when it begins.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    storages = {
        leaf.untyped_storage().data_ptr(): (
            leaf.untyped_storage().nbytes(),
            StorageWeakRef(leaf.untyped_storage()),
        )
        for leaf in around()
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta
    }
    with _watching_the_allocator() as profiler:
        step()
    there = sum(nbytes for nbytes, storage in storages.values() if not storage.expired())
    return there + int(allocations(profiler)[1].max())


def _watching_the_allocator() -> Any:
    if not torch.cuda.is_available():  # or the profiler complains that it finds no GPU
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)


def allocations(profiler: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """When the CPU's allocator was used, and the bytes held since the start, before and after each.

    The second array is one longer: its first element is 0. Only blocks that were taken while the
    allocator was watched count: for others that go, the profiler knows no size, or a wrong one,
    that of a block which lay at the same address when the allocator was watched before.
    """
    events = list(profiler.profiler.kineto_results.experimental_event_tree())
    found = []
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields))
    found.sort(key=lambda pair: pair[0])
    held: set[int] = set()
    moments, changes = [], [0]
    for moment, block in found:
        if block.alloc_size > 0:
            held.add(block.ptr)
        elif block.ptr in held:
            held.remove(block.ptr)
        else:
            continue
        moments.append(moment)
        changes.append(block.alloc_size)
    return np.array(moments, dtype=np.int64), np.cumsum(changes, dtype=np.int64)
