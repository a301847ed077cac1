"""Measures every op of a traced step on the device of its tensors, and caches the profile.

Ops run in order, after a warm-up run; times are medians over several runs (decision 10). If a step
does not fit the device, each distinct operator is measured alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import os
import platform
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from rekindle.core.cost.devices import find_device
from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.cost.roofline import analytic_profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.liveness import analyze
from rekindle.core.graph.serial import load_profile, save_profile
from rekindle.core.graph.simulate import device_sizes
from rekindle.core.identity import IdentitySet
from rekindle.errors import ProfileError
from rekindle.measuring.meters import (
    CallOp,
    CpuMeter,
    CudaMeter,
    Meter,
    call_plainly,
    release_cached_memory,
)
from rekindle.torch_internals import (
    AutoDispatchBelowAutograd,
    clear_cublas_workspaces,
    set_grad_enabled,
    set_version_counter,
)
from rekindle.tracing import operators, rng
from rekindle.tracing.capture_thread import capture_lock
from rekindle.tracing.step_state import EntryKind, Slot
from rekindle.tracing.tape import Recording
from rekindle.tracing.undo import random_states, set_random_states, uninterrupted

log = logging.getLogger("rekindle")

Progress = Callable[[str], None]
T = TypeVar("T")


def device_name(device: torch.device) -> str:
    """The name of a device in profiles."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def versions(device: torch.device) -> dict[str, str]:
    """Versions and settings that a measurement depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if device.type == "cpu":
        found["threads"] = str(torch.get_num_threads())
    elif device.type == "cuda":  # libraries choose their algorithms by these settings
        found["settings"] = " ".join(
            name
            for name, is_set in (
                ("deterministic", torch.are_deterministic_algorithms_enabled()),
                ("cudnn-deterministic", torch.backends.cudnn.deterministic),
                ("cudnn-benchmark", torch.backends.cudnn.benchmark),
                ("cudnn-tf32", torch.backends.cudnn.allow_tf32),
                (f"matmul-{torch.get_float32_matmul_precision()}", True),
            )
            if is_set
        )
    return found


def measured_profile(
    recording: Recording,
    graph: StepGraph,
    batch: list[torch.Tensor] | None,
    device: torch.device,
    *,
    cache: bool = True,
    runs: int = 3,
    progress: Progress = lambda text: None,
    min_cached_cpu_us: float = 5e6,
) -> Profile:
    """The profile of a step, from the cache or measured.

    The user's tensors and generators keep their values. The overhead of CUDA's libraries is cached
    with the profile; other memory in use is counted each time. A CPU's times depend on its load, so
    that steps shorter than `min_cached_cpu_us` are always measured.
    """
    if device.type == "cuda":
        clear_cublas_workspaces()
    session = _Session(recording, graph, device, runs, progress)
    other_bytes = session.other_bytes(batch or [])
    current = device_name(device), versions(device)
    cached = _load_cached(graph, *current) if cache and runs <= 3 else None
    if cached is not None and (device.type != "cpu" or cached.step_us > min_cached_cpu_us):
        return replace(cached, overhead_bytes=cached.overhead_bytes + other_bytes)
    with capture_lock:  # a second measurement would disturb this one, and crash the profiler
        measured = session.profile(batch)
    if cache:
        library_bytes = max(0, measured.overhead_bytes - other_bytes)
        _save_cached(graph, replace(measured, overhead_bytes=library_bytes))
    return measured


_MAX_RECENT = 32
_recent: dict[Hashable, Profile] = {}


def repeatable_profile(
    recording: Recording,
    graph: StepGraph,
    batch: list[torch.Tensor],
    device: torch.device,
    given: Profile | None = None,
) -> Profile:
    """The profile that is given; otherwise, on the CPU, the one that this process used before.

    A step that is optimized again, for the least peak that InfeasibleBudget named, is then planned
    with the same times and workspaces, and the peak is found again.
    """
    if device.type != "cpu":
        return given or measured_profile(recording, graph, batch, device)
    layouts = tuple((meta.stride, meta.dtype) for meta in recording.tape.metas.values())
    current = versions(device)
    key = graph.fingerprint, hash(layouts), tuple(sorted(current.items()))
    if given is not None and (given.device, given.versions) != (device_name(device), current):
        return given  # of another machine, for this capture only
    profile = given or _recent.get(key) or measured_profile(recording, graph, batch, device)
    _recent[key] = profile
    for oldest in list(_recent)[:-_MAX_RECENT]:
        _recent.pop(oldest, None)
    return profile


# The cache on disk. A profile that cannot be read is measured again and overwritten.


def cache_folder() -> Path:
    """The folder of cached profiles, in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rekindle" / "profiles"


def _cache_path(graph: StepGraph, device: str, versions: Mapping[str, str]) -> Path:
    key = json.dumps([graph.fingerprint, device, sorted(versions.items())])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_folder() / f"{graph.fingerprint}-{digest}.json.gz"


def _load_cached(graph: StepGraph, device: str, versions: Mapping[str, str]) -> Profile | None:
    """The cached profile of a graph on a device; None if there is none or it does not match."""
    try:
        path = _cache_path(graph, device, versions)
        if not path.exists():
            return None
        profile = load_profile(path).profile
    except (ProfileError, OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        _warn_once(f"ignoring a cached profile: {error}")
        return None
    found = (profile.fingerprint, profile.device, dict(profile.versions))
    if found != (graph.fingerprint, device, dict(versions)):
        log.warning("ignoring the cached profile %s: other graph, device or versions", path)
        return None
    return profile


def _save_cached(graph: StepGraph, profile: Profile) -> None:
    """Write a profile to the cache; if that fails, warn: a full disk stops no training."""
    try:
        path = _cache_path(graph, profile.device, profile.versions)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(path, graph, profile, {})
    except (OSError, RuntimeError) as error:
        _warn_once(f"could not cache the profile: {error}")


@cache
def _warn_once(text: str) -> None:
    log.warning(text)


@dataclass
class _Session:
    recording: Recording
    graph: StepGraph
    device: torch.device
    runs: int
    progress: Progress

    def __post_init__(self) -> None:
        on_cuda = self.device.type == "cuda"
        self.meter: Meter = CudaMeter(self.device) if on_cuda else CpuMeter()
        self._slot_of = _slots_of_entries(self.recording)

    def other_bytes(self, batch: list[torch.Tensor]) -> int:
        """Bytes allocated on the device now for anything but the step's own tensors."""
        storages = _real_storages(self.recording, batch)
        own_bytes = sum(s.nbytes() for s in storages if s.device.type == self.device.type)
        return max(0, self.meter.allocated_bytes() - own_bytes)

    def profile(self, batch: list[torch.Tensor] | None) -> Profile:
        """Measure the step in order, or its operators alone if it does not fit into memory."""
        if len(self.recording.tape.calls) != len(self.graph.ops):
            raise ProfileError(
                "this step's optimizer cannot be recorded, so the step cannot be measured op by "
                'op: ask for an analytic profile of a named device instead, as in device="H200".'
            )
        try:
            return self._in_order(batch)
        except torch.OutOfMemoryError:
            log.info("the step does not fit into memory: measuring each distinct operator alone")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._one_by_one(batch or [])

    def _in_order(self, batch: list[torch.Tensor] | None) -> Profile:
        """Run the whole step, op after op."""
        recording, n_ops = self.recording, len(self.graph.ops)

        def measure() -> tuple[Any, ...]:
            tensors = batch or [
                _synthetic_tensor(recording, node) for node in recording.batch_nodes
            ]
            entering = inputs(recording, tensors)  # once: making tensors takes time

            def run(call_op: CallOp) -> None:
                run_ops(recording, dict(entering), call_op)

            self.progress("warming up")
            run(call_plainly)
            self.progress("measuring memory")
            memory = self.meter.workspaces_bytes(run, n_ops)
            samples = []
            for index in range(self.runs):
                self.progress(f"measuring times, run {index + 1} of {self.runs}")
                samples.append(self.meter.times_us(run, n_ops))
            copies = self._copies_us(run, n_ops)
            self.progress("measuring the whole step")
            return *memory, np.median(np.stack(samples), axis=0), copies, self.meter.step_us(run)

        workspaces, at_start, times, copies, step_us = preserving(recording, measure, batch)
        method = f"in order, median of {self.runs} runs"
        if step_us is not None and times.sum() > 0:
            # Measured alone, a kernel cannot start while the one before drains; in a step it does.
            scale = step_us / times.sum()
            times, copies = times * scale, copies * scale
            method += f"; kernel times scaled by {scale:.3f} to the step in a CUDA graph"
        overhead_bytes = 0
        if at_start:
            sizes = device_sizes(self.graph, self.meter.allocator)
            own_bytes = int(sizes[analyze(self.graph).is_resident].sum())
            overhead_bytes = max(0, at_start - own_bytes)
        return self._profile(times, copies, workspaces, overhead_bytes, method)

    def _copies_us(self, run: Callable[[CallOp], None], n_ops: int) -> NDArray[np.float64]:
        """The time of each op's `copy_target`, run after the op itself; 0 for ops without one."""
        if not any(op.copy_target for op in self.graph.ops):
            return np.zeros(n_ops)
        self.progress("measuring recomputations")

        def run_copies(call_op: CallOp) -> None:
            def op_and_copy(index: int, op: Any, args: Any, kwargs: Any) -> Any:
                result = op(*args, **kwargs)
                if self.graph.ops[index].copy_target:
                    other = operators.copy_op(op, args[0].device, writes=True)
                    call_op(index, other, operators.copy_arguments(args, result), {})
                return result

            run(op_and_copy)

        samples = [self.meter.times_us(run_copies, n_ops) for _ in range(self.runs)]
        return np.asarray(np.median(np.stack(samples), axis=0))

    def _one_by_one(self, batch: list[torch.Tensor]) -> Profile:
        """Run each distinct operator alone, on tensors made for it."""
        calls = self.recording.tape.calls
        groups: dict[Hashable, list[int]] = {}
        for index, call in enumerate(calls):
            groups.setdefault(self._signature(call.node), []).append(index)
        firsts = [indices[0] for indices in groups.values()]
        times, workspaces = np.zeros(len(calls)), np.zeros(len(calls), dtype=np.int64)
        failing: set[int] = set()

        def run(call_op: CallOp) -> None:
            for number, index in enumerate(firsts):
                if index in failing:
                    continue
                self.progress(f"operator {number + 1} of {len(firsts)}")
                try:
                    self._run_alone(calls[index].node, lambda *a, i=index: call_op(i, *a))
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:  # synthetic arguments do not suit every operator
                    log.info("%s does not run alone: %s", self.graph.ops[index].name, error)
                    failing.add(index)

        def measure() -> tuple[Any, ...]:
            run(call_plainly)
            overhead_bytes = self.other_bytes(batch)
            alone, _ = self.meter.workspaces_bytes(run, len(calls))
            samples = [self.meter.times_us(run, len(calls)) for _ in range(self.runs)]
            medians = np.median(np.stack(samples), axis=0)
            return overhead_bytes, alone, medians, self._copies_us(run, len(calls))

        overhead_bytes, alone, medians, copies = preserving(self.recording, measure)
        for first, indices in zip(firsts, groups.values(), strict=True):
            times[indices], workspaces[indices] = medians[first], alone[first]
            copies[indices] = copies[first]
        method = f"{len(firsts)} distinct operators alone, median of {self.runs} runs"
        if failing:
            method += f"; {len(failing)} of them estimated from bytes and FLOPs"
            try:
                device = find_device(device_name(self.device))
            except ProfileError:
                device = find_device("A100-80GB")
            estimate = analytic_profile(self.graph, device).times_us
            for index in failing:
                indices = groups[self._signature(calls[index].node)]
                times[indices] = estimate[indices]
        return self._profile(times, copies, workspaces, overhead_bytes, method)

    def _run_alone(self, node: fx.Node, call_op: Callable[..., Any]) -> None:
        release_cached_memory(self.device)  # of the operator before
        made = {arg: self._tensor_for(arg, str(node.target)) for arg in node.all_input_nodes}
        args = fx.map_arg(node.args, made.__getitem__)
        kwargs = fx.map_arg(node.kwargs, made.__getitem__)
        with torch.no_grad():
            call_op(node.target, args, kwargs)

    def _tensor_for(self, node: fx.Node, target: str) -> torch.Tensor:
        """A parameter or buffer itself; a synthetic tensor for anything else."""
        slot = self._slot_of.get(node)
        if slot is not None:
            return slot.get()
        tensor = _synthetic_tensor(self.recording, node)
        if "max_pool" in target and tensor.dtype is torch.int64:
            # Indices of max pooling: distinct ones, or atomic adds to one address would be slow.
            height, width = tensor.shape[-2:]
            plane = torch.arange(height * width, device=tensor.device).view(height, width)
            tensor.copy_(plane.expand(tensor.shape))
        return tensor

    def _signature(self, node: fx.Node) -> Hashable:
        """An operator and its arguments' layouts, which determine its cost."""
        metas = self.recording.tape.metas

        def layout(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                return metas[arg]._replace(storage=0)
            if isinstance(arg, (list, tuple)):
                return tuple(layout(item) for item in arg)
            return repr(arg)

        kwargs = tuple((key, layout(arg)) for key, arg in node.kwargs.items())
        return node.target, tuple(layout(arg) for arg in node.args), kwargs

    def _profile(
        self,
        times: NDArray[np.float64],
        copies: NDArray[np.float64],
        workspaces: NDArray[np.int64],
        overhead_bytes: int,
        method: str,
    ) -> Profile:
        to_host, to_device = self.meter.transfer_rates()
        if self.device.type == "cpu":
            state_bytes = torch.default_generator.get_state().nbytes  # while `replay` puts it back
            for index, call in enumerate(self.recording.tape.calls):
                if call.is_random and rng.redrawn("cpu", call.node.target) is None:
                    workspaces[index] = max(workspaces[index], state_bytes)
        return Profile(
            device=device_name(self.device),
            fingerprint=self.graph.fingerprint,
            costs=tuple(
                OpCost(
                    float(times[op.index]),
                    int(workspaces[op.index]),
                    is_measured=True,
                    copy_us=float(copies[op.index]) if op.copy_target else None,
                )
                for op in self.graph.ops
            ),
            allocator=self.meter.allocator,
            overhead_bytes=overhead_bytes,
            to_host_bytes_per_us=to_host,
            to_device_bytes_per_us=to_device,
            method=method,
            versions=versions(self.device),
        )


# The op-by-op interpreter. It may run on the user's tensors: `preserving` restores their values.


def inputs(recording: Recording, batch: list[torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    """A tensor for each entry of the step; optimizer state that does not exist yet is all zeros.

    Optimizers start from zeros. Random state could turn parameters into NaN (the square root of a
    negative average), for which kernels may take another time.
    """
    slots = _slots_of_entries(recording)
    made = dict(zip(recording.batch_nodes, batch, strict=True))
    for entry in recording.tape.entries:
        if entry.kind is EntryKind.BATCH:
            continue
        if entry.node in slots:
            made[entry.node] = slots[entry.node].get()
        elif _is_real(entry.tensor):
            made[entry.node] = entry.tensor
        else:
            made[entry.node] = _synthetic_tensor(recording, entry.node).zero_()
    return made


def _slots_of_entries(recording: Recording) -> dict[fx.Node, Slot]:
    """The slot of each entry that has one."""
    slots = {(slot.kind, slot.name): slot for slot in recording.state.slots}
    entries = (entry for entry in recording.tape.entries if (entry.kind, entry.name) in slots)
    return {entry.node: slots[entry.kind, entry.name] for entry in entries}


def _synthetic_tensor(recording: Recording, node: fx.Node) -> torch.Tensor:
    """A tensor laid out like a node's value: random floats; zeros for integers, often indices."""
    meta = recording.tape.metas[node]
    device = recording.tape.storages[meta.storage].device
    last = sum((size - 1) * step for size, step in zip(meta.shape, meta.stride, strict=True))
    count = last + 1 if 0 not in meta.shape else 0
    memory = torch.zeros(count, dtype=meta.dtype, device=device)
    if meta.dtype.is_floating_point:
        memory.normal_()
    return memory.as_strided(meta.shape, meta.stride)


def preserving(
    recording: Recording, function: Callable[[], T], batch: list[torch.Tensor] | None = None
) -> T:
    """Call a function, then restore every real tensor and generator, from copies in host memory."""
    tensors = [t for t in _real_tensors(recording, batch or []) if not t.is_inference()]
    versions = [tensor._version for tensor in tensors]
    # As tensors of bytes: what restores them then needs no memory.
    whole = [_bytes_of(storage) for storage in _real_storages(recording, batch or [])]
    copies = [(tensor, tensor.to("cpu", copy=True)) for tensor in whole]
    nodes = (call.node for call in recording.tape.calls)
    args: Iterator[Any] = (arg for node in nodes for arg in (*node.args, *node.kwargs.values()))
    generators = IdentitySet(arg for arg in args if isinstance(arg, torch.Generator))
    own_states = [(generator, generator.get_state()) for generator in generators]
    states = random_states()
    with uninterrupted() as interruptible:
        try:
            with interruptible():
                return function()
        finally:
            for tensor, copy in copies:
                tensor.copy_(copy)
            set_version_counter(tuple(tensors), tuple(versions))
            for generator, state in own_states:
                generator.set_state(state)
            set_random_states(states)


def _real_storages(
    recording: Recording, batch: list[torch.Tensor]
) -> Iterator[torch.UntypedStorage]:
    storages = (tensor.untyped_storage() for tensor in _real_tensors(recording, batch))
    yield from {storage.data_ptr(): storage for storage in storages}.values()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _real_tensors(recording: Recording, batch: list[torch.Tensor]) -> list[torch.Tensor]:
    entered = [entry.tensor for entry in recording.tape.entries if _is_real(entry.tensor)]
    return [*entered, *(slot.get() for slot in recording.state.slots), *batch]


def _is_real(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def run_ops(recording: Recording, values: dict[fx.Node, Any], call_op: CallOp) -> None:
    """Run every op in order, and delete each of the `values` after its last use."""
    calls = {call.node: index for index, call in enumerate(recording.tape.calls)}
    nodes = [n for n in recording.tape.graph.nodes if n in calls or n.target is operator.getitem]
    dying = _last_uses(nodes)
    with torch.enable_grad(), AutoDispatchBelowAutograd():
        for node in nodes:
            if node.target is operator.getitem:
                values[node] = values[node.all_input_nodes[0]][node.args[1]]
            else:
                args = fx.map_arg(node.args, values.__getitem__)
                kwargs = fx.map_arg(node.kwargs, values.__getitem__)
                set_grad_enabled(recording.tape.calls[calls[node]].grad_enabled)
                values[node] = call_op(calls[node], node.target, args, kwargs)
                del args, kwargs
            for dead in dying[node]:
                del values[dead]


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    seen: set[fx.Node] = set()
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        last = [n for n in (node, *node.all_input_nodes) if n not in seen]
        seen.update(last)
        dying[node] = last
    return dying
