"""Measures every op of a captured step where its tensors live.

Ops run in captured order, after a run to warm up; times are medians over runs. On CUDA an op's time
is that of its kernels, as the profiler reports them, not of launching them; on the CPU it is wall
time. A step too large for the device is measured one distinct operator at a time.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from rekindle.core.cost.devices import Device, find_device
from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.cost.roofline import analytic_profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.liveness import analyze
from rekindle.core.graph.simulate import device_sizes
from rekindle.engines.expandable_segments import tidy
from rekindle.errors import ProfileError
from rekindle.measuring import interpreter
from rekindle.measuring.meters import Around, CpuMeter, CudaMeter, Meter, plainly
from rekindle.tracing import operators
from rekindle.tracing.tape import Recording

log = logging.getLogger("rekindle")

Progress = Callable[[str], None]


def device_name(device: torch.device) -> str:
    """What a device is called in a profile."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def versions(device: torch.device) -> dict[str, str]:
    """What a measurement depends on beside the graph and the device's name."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if device.type == "cpu":
        found["threads"] = str(torch.get_num_threads())
    elif device.type == "cuda":  # settings by which libraries choose their algorithms
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


def measure_profile(
    recording: Recording,
    graph: StepGraph,
    batch: list[torch.Tensor] | None,
    device: torch.device,
    *,
    runs: int = 3,
    progress: Progress = lambda text: None,
) -> Profile:
    """The measured profile of a step. The user's tensors and generators stay as they are."""
    if len(recording.tape.calls) != len(graph.ops):
        raise ProfileError(
            "this step's optimizer cannot be recorded, so the step cannot be measured op by op: "
            'ask for an analytic profile of a named device instead, as in device="H200".'
        )
    meter: Meter = CudaMeter(device) if device.type == "cuda" else CpuMeter()
    session = _Session(recording, graph, meter, device, runs, progress)
    try:
        return session.in_order(batch, device_name(device))
    except torch.OutOfMemoryError:
        log.info("the step does not fit into memory: measuring each distinct operator alone")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return session.one_by_one(batch or [], device_name(device))


def _closest_device(name: str) -> Device:
    try:
        return find_device(name)
    except ProfileError:
        return find_device("A100-80GB")


class _Session:
    def __init__(
        self,
        recording: Recording,
        graph: StepGraph,
        meter: Meter,
        device: torch.device,
        runs: int,
        progress: Progress,
    ) -> None:
        self.recording = recording
        self.device = device
        self.graph = graph
        self.meter = meter
        self.runs = runs
        self.progress = progress
        slots = {(slot.kind, slot.name): slot for slot in recording.state.slots}
        self._slot_of = {
            entry.node: slots[entry.kind, entry.name]
            for entry in recording.tape.entries
            if (entry.kind, entry.name) in slots
        }

    def in_order(self, batch: list[torch.Tensor] | None, device: str) -> Profile:
        """Run the whole step, op after op."""
        recording, n_ops = self.recording, len(self.graph.ops)
        with interpreter.preserved(recording, batch):
            tensors = batch or [interpreter.make_up(recording, n) for n in recording.batch_nodes]
            entering = interpreter.inputs(recording, tensors)  # once: to make some up takes time

            def run(around: Around) -> None:
                interpreter.run(recording, dict(entering), around)

            self.progress("warming up")
            run(plainly)
            self.progress("measuring memory")
            workspaces, at_start = self.meter.workspaces_bytes(run, n_ops)
            samples = []
            for index in range(self.runs):
                self.progress(f"measuring times, run {index + 1} of {self.runs}")
                samples.append(self.meter.times_us(run, n_ops))
            times = np.median(np.stack(samples), axis=0)
            copies = self._copies_us(run, n_ops)
            self.progress("measuring the whole step")
            step_us = self.meter.step_us(run)
        method = f"in order, median of {self.runs} runs"
        if step_us is not None and times.sum() > 0:
            # One at a time, kernels cannot start while the one before drains; in a step they do.
            scale = step_us / times.sum()
            times, copies = times * scale, copies * scale
            method += f"; kernel times scaled by {scale:.3f} to the step in a CUDA graph"
        return self._profile(device, times, copies, workspaces, self._overhead(at_start), method)

    def _copies_us(self, run: Callable[[Around], None], n_ops: int) -> NDArray[np.float64]:
        """The time of each op's `copy_target`, run beside the op itself; 0 where there is none."""
        if not any(op.copy_target for op in self.graph.ops):
            return np.zeros(n_ops)
        self.progress("measuring recomputations")

        def run_copies(around: Around) -> None:
            def op_and_copy(index: int, op: Any, args: Any, kwargs: Any) -> Any:
                result = op(*args, **kwargs)
                if self.graph.ops[index].copy_target:
                    other = operators.copy_op(op, args[0].device, writes=True)
                    around(index, other, operators.copy_arguments(args, result), {})
                return result

            run(op_and_copy)

        samples = [self.meter.times_us(run_copies, n_ops) for _ in range(self.runs)]
        return np.asarray(np.median(np.stack(samples), axis=0))

    def one_by_one(self, batch: list[torch.Tensor], device: str) -> Profile:
        """Run each distinct operator alone, on tensors made for it."""
        calls = self.recording.tape.calls
        groups: dict[Hashable, list[int]] = {}
        for index, call in enumerate(calls):
            groups.setdefault(self._signature(call.node), []).append(index)
        firsts = [indices[0] for indices in groups.values()]
        times, workspaces = np.zeros(len(calls)), np.zeros(len(calls), dtype=np.int64)
        unable: set[int] = set()

        def run(around: Around) -> None:
            for number, index in enumerate(firsts):
                if index in unable:
                    continue
                self.progress(f"operator {number + 1} of {len(firsts)}")
                try:
                    self._run_alone(calls[index].node, lambda *a, i=index: around(i, *a))
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:  # made-up arguments do not suit every operator
                    log.info("%s does not run alone: %s", self.graph.ops[index].name, error)
                    unable.add(index)

        with interpreter.preserved(self.recording):
            run(plainly)
            beside = self._beside(batch)
            alone, _ = self.meter.workspaces_bytes(run, len(calls))
            samples = [self.meter.times_us(run, len(calls)) for _ in range(self.runs)]
            copies = self._copies_us(run, len(calls))
        medians = np.median(np.stack(samples), axis=0)
        for first, indices in zip(firsts, groups.values(), strict=True):
            times[indices], workspaces[indices] = medians[first], alone[first]
            copies[indices] = copies[first]
        method = f"{len(firsts)} distinct operators alone, median of {self.runs} runs"
        if unable:
            method += f"; {len(unable)} of them estimated from bytes and FLOPs"
            estimate = analytic_profile(self.graph, _closest_device(device)).times_us
            for index in unable:
                indices = groups[self._signature(calls[index].node)]
                times[indices] = estimate[indices]
        return self._profile(device, times, copies, workspaces, beside, method)

    def _run_alone(self, node: fx.Node, around: Callable[..., Any]) -> None:
        tidy(self.device)  # all that the one before has left is in the cache
        made = {arg: self._tensor_for(arg, str(node.target)) for arg in node.all_input_nodes}
        args = fx.map_arg(node.args, made.__getitem__)
        kwargs = fx.map_arg(node.kwargs, made.__getitem__)
        with torch.no_grad():
            around(node.target, args, kwargs)

    def _tensor_for(self, node: fx.Node, target: str) -> torch.Tensor:
        """A parameter or buffer itself, since it is there anyway; else a tensor made up."""
        slot = self._slot_of.get(node)
        if slot is not None:
            return slot.get()
        tensor = interpreter.make_up(self.recording, node)
        if "max_pool" in target and tensor.dtype is torch.int64:
            # each gradient to a place of its own: all to one place would make them wait
            height, width = tensor.shape[-2:]
            plane = torch.arange(height * width, device=tensor.device).view(height, width)
            tensor.copy_(plane.expand(tensor.shape))
        return tensor

    def _signature(self, node: fx.Node) -> Hashable:
        """What an operator's cost depends on: itself, and the forms of its arguments."""
        metas = self.recording.tape.metas

        def form(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                return metas[arg]._replace(storage=0)
            if isinstance(arg, (list, tuple)):
                return tuple(form(item) for item in arg)
            return repr(arg)

        kwargs = tuple((key, form(arg)) for key, arg in node.kwargs.items())
        return node.target, tuple(form(arg) for arg in node.args), kwargs

    def _overhead(self, at_start: int) -> int:
        """What was allocated beside the graph's own tensors when the step began."""
        if not at_start:
            return 0
        sizes = device_sizes(self.graph, self.meter.allocator)
        return max(0, at_start - int(sizes[analyze(self.graph).is_resident].sum()))

    def _beside(self, batch: list[torch.Tensor]) -> int:
        """What is allocated now beside the step's own tensors, as far as those are there yet."""
        resident = interpreter.resident_bytes(self.recording, batch, self.device)
        return max(0, self.meter.allocated_bytes() - resident)

    def _profile(
        self,
        device: str,
        times: NDArray[np.float64],
        copies: NDArray[np.float64],
        workspaces: NDArray[np.int64],
        overhead_bytes: int,
        method: str,
    ) -> Profile:
        to_host, to_device = self.meter.transfer_rates()
        return Profile(
            device=device,
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
