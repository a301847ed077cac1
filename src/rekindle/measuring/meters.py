"""Meters for CUDA and the CPU: the time that ops take, and the bytes they allocate."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import DeviceType
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from rekindle.errors import ProfileError
from rekindle.torch_internals import (
    EventType,
    clear_cublas_workspaces,
    is_profiler_enabled,
    recorded_allocations,
)
from rekindle.tracing.capture_thread import capture_lock

CallOp = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]  # (index, op, args, kwargs)
Run = Callable[[CallOp], None]  # runs all ops of a step, each by a call of the given function

_MARK = "rekindle op "  # no operator has such a name
_STEP_REPLAYS = 10
_LARGE_CACHE_RATIO = 1 / 4  # of the memory available to the process


def call_plainly(index: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an op and measure nothing."""
    return op(*args, **kwargs)


def _call_marked(index: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with record_function(f"{_MARK}{index}"):
        return op(*args, **kwargs)


class CudaMeter:
    """Kernel times from the profiler, bytes from the caching allocator."""

    allocator = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def times_us(self, run: Run, n_ops: int) -> NDArray[np.float64]:
        """The time of each op, from one run; by events if the user's own profiler is running."""
        if is_profiler_enabled():
            return self._times_by_events_us(run, n_ops)
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with torch_profile(activities=activities, acc_events=True) as profiler:
            run(_call_marked)
            torch.cuda.synchronize(self._device)
        times = np.zeros(n_ops)
        for event in profiler.events():
            if event.name.startswith(_MARK) and event.device_type == DeviceType.CPU:
                times[int(event.name.removeprefix(_MARK))] += event.device_time_total
        return times

    def _times_by_events_us(self, run: Run, n_ops: int) -> NDArray[np.float64]:
        spans: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

        def call_op(index: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            result = op(*args, **kwargs)
            end.record()
            spans.append((index, start, end))
            return result

        run(call_op)
        torch.cuda.synchronize(self._device)
        times = np.zeros(n_ops)
        for index, start, end in spans:
            times[index] += start.elapsed_time(end) * 1e3
        return times

    def workspaces_bytes(self, run: Run, n_ops: int) -> tuple[NDArray[np.int64], int]:
        """Each op's temporary bytes, without its results, and the bytes allocated at the start."""
        allocated = torch.cuda.memory_allocated
        found = np.zeros(n_ops, dtype=np.int64)
        at_start: list[int] = []

        def call_op(index: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            before = allocated(self._device)
            if not at_start:
                at_start.append(before)
            torch.cuda.reset_peak_memory_stats(self._device)
            result = op(*args, **kwargs)
            peak = torch.cuda.max_memory_allocated(self._device)
            found[index] = peak - max(before, allocated(self._device))
            return result

        run(call_op)
        return found, at_start[0] if at_start else 0

    def allocated_bytes(self) -> int:
        """The bytes allocated now."""
        return torch.cuda.memory_allocated(self._device)

    def step_us(self, run: Run) -> float | None:
        """The time of the whole run without gaps between ops; None if it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run(call_plainly)
        except RuntimeError:  # an op cannot be captured in a CUDA graph
            return None
        finally:
            clear_cublas_workspaces()  # cuBLAS holds one for the stream of the capture
        samples = cuda_samples_us(graph.replay, _STEP_REPLAYS)
        faster = sorted(samples)[: len(samples) // 2]  # GPUs throttle now and then
        return statistics.median(faster)

    def transfer_rates(self) -> tuple[float, float]:
        """Bytes per microsecond from the device to the host, and back."""
        nbytes = 64 << 20
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        on_device = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        rates = []
        for target, source in ((host, on_device), (on_device, host)):
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
    """Wall times, and bytes from the profiler's record of allocations.

    There is no count of allocated bytes, no step without gaps, and no transfer.
    """

    allocator = "exact"

    def times_us(self, run: Run, n_ops: int) -> NDArray[np.float64]:
        times = np.zeros(n_ops)
        clock = time.perf_counter_ns

        def call_op(index: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            start = clock()
            result = op(*args, **kwargs)
            times[index] = (clock() - start) / 1e3
            return result

        run(call_op)
        return times

    def workspaces_bytes(self, run: Run, n_ops: int) -> tuple[NDArray[np.int64], int]:
        found = np.zeros(n_ops, dtype=np.int64)
        if is_profiler_enabled():
            return self._workspaces_without_kineto(run, n_ops), 0
        with _profiled_memory() as profiler:
            run(_call_marked)
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

    def _workspaces_without_kineto(self, run: Run, n_ops: int) -> NDArray[np.int64]:
        """The same while the user's own profiler is running, which a second one would crash."""
        found = np.zeros(n_ops, dtype=np.int64)
        index, total, before, peak = -1, 0, 0, 0
        for kind, name, nbytes in recorded_allocations(lambda: run(_call_marked)):
            if kind == "memory_alloc":
                total += nbytes
                peak = max(peak, total)
            elif name.startswith(_MARK) and kind == "push":
                index = int(name.removeprefix(_MARK))
                before = peak = total
            elif name.startswith(_MARK):
                found[index] = max(0, peak - max(before, total))
        return found

    def allocated_bytes(self) -> int:
        return 0

    def step_us(self, run: Run) -> float | None:
        return None

    def transfer_rates(self) -> tuple[float, float]:
        return 0.0, 0.0


Meter = CudaMeter | CpuMeter


def cuda_samples_us(step: Callable[[], Any], steps: int) -> list[float]:
    """The times of steps on a GPU, launched back to back as in a training loop.

    A sample is the time between the ends of two steps, so that launching counts only if the step
    is host-bound.
    """
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    step()  # so that the first measured step, too, is launched while another runs
    ends[0].record()
    for end in ends[1:]:
        step()
        end.record()
    ends[-1].synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(ends)]


def available_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process may use, including those in use already."""
    index = torch.cuda.current_device() if device.index is None else device.index
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    allowed_bytes = int(total_bytes * torch.cuda.get_per_process_memory_fraction(index))
    return min(free_bytes + torch.cuda.memory_reserved(index), allowed_bytes)


def release_cached_memory(device: torch.device) -> None:
    """Empty the CUDA allocator's cache if it is large: it may be fragmented."""
    if device.type == "cuda":
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if cached_bytes > int(available_bytes(device) * _LARGE_CACHE_RATIO):
            torch.cuda.empty_cache()


def peak_bytes(
    step: Callable[[], Any], device: torch.device, resident: Callable[[], Iterable[Resident]]
) -> int:
    """Run a step, and return the peak of the bytes allocated on a device.

    CUDA's allocator counts all bytes. The CPU's is watched only while the step runs: to its count
    are added the tensors that `resident` returns, except those that the step frees, such as
    gradients that it clears first.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    if is_profiler_enabled():
        raise ProfileError(
            "a profiler is running, and memory on the CPU is measured with another one: measure "
            "outside of it."
        )
    with capture_lock:
        watch = CpuWatch(resident())
        try:
            step()
        finally:
            peak = watch.stop()
    return peak


class Resident(NamedTuple):
    """A tensor that exists before a step, and the bytes of its storage that count."""

    tensor: torch.Tensor
    nbytes: int


def covered_bytes(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's first element to its last one."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(1 + sum((n - 1) * step for n, step in steps)) * tensor.dtype.itemsize


class CpuWatch:
    """Watches the CPU's allocator from its creation until `stop`.

    `resident` are the tensors that exist now. Those that are freed meanwhile do not count.
    """

    def __init__(self, resident: Iterable[Resident]) -> None:
        self._storages: dict[int, tuple[int, Any]] = {}
        for tensor, nbytes in resident:
            storage = tensor.untyped_storage()
            others, _ = self._storages.get(storage.data_ptr(), (0, None))
            self._storages[storage.data_ptr()] = max(nbytes, others), StorageWeakRef(storage)
        self._profiler = _profiled_memory()
        self._profiler.__enter__()

    def stop(self) -> int:
        """The most bytes that were allocated at once."""
        self._profiler.__exit__(None, None, None)
        storages = self._storages.values()
        kept_bytes = sum(nbytes for nbytes, storage in storages if not storage.expired())
        return kept_bytes + int(allocations(self._profiler)[1].max())


def _profiled_memory() -> Any:
    if not torch.cuda.is_available():  # or the profiler warns that it finds no GPU
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)


def allocations(profiler: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The times of the CPU allocator's events, and the bytes held before, between and after them.

    The second array is one longer, and starts with 0. Only blocks that were allocated while the
    profiler ran count: for others that are freed it knows no size, or that of an earlier block at
    the same address.
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
