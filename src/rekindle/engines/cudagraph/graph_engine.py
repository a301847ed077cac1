"""Replays a step's kernels from CUDA graphs, so that it is not host-bound.

The first step runs as generated code, the second is captured, later ones are replayed (see
docs/decisions/019). Graphs work on fixed addresses: the batch is copied in, results are copied out,
and the step is captured again if a parameter or buffer has moved.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.uncopyable import Uncopyable
from rekindle.engines.cudagraph.arena import (
    AllocationRequests,
    CudaPool,
    MemoryMeter,
    SteeredCapture,
)
from rekindle.engines.cudagraph.graph_parts import StepPart, split_step
from rekindle.engines.cudagraph.rng_twins import RngTwins, reset_after_failed_capture
from rekindle.engines.engine import EngineInfo
from rekindle.engines.process_settings import gc_paused
from rekindle.engines.program import Functions, Program, Tensors
from rekindle.engines.strides import is_dense
from rekindle.rewriting.apply_schedule import RewrittenStep
from rekindle.rewriting.step_forms import has_step_hooks
from rekindle.torch_internals import clear_cublas_workspaces
from rekindle.tracing import rng
from rekindle.tracing.tape import EntryKind, Recording

log = logging.getLogger("rekindle")

_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class CudaGraphOptions:
    """Limits beyond which a step runs without CUDA graphs, or without steering."""

    max_graphs: int = 4
    max_captures: int = 3
    max_mismatches: int = 100


class CudaGraphRecorder:
    """Captures CUDA graphs, all in one memory pool that lives as long as one of its graphs does.

    Only the first capture in a pool is steered. Tests emulate this class on the CPU.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pools: WeakKeyDictionary[torch.cuda.CUDAGraph, CudaPool] = WeakKeyDictionary()
        self._peak_bytes = 0

    def memory_meter(self) -> MemoryMeter | None:
        """The meter that shows the workspaces of ops; None if it would not show them now."""
        if torch.backends.cudnn.benchmark:  # first steps try out algorithms and their workspaces
            return None
        return MemoryMeter(self._device)

    def capture(
        self,
        run: Callable[[], list[Any]],
        generators: list[torch.Generator],
        steered: SteeredCapture | None,
    ) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
        """The graph and results of a function; `steered` decides where its results lie."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        try:
            with _idle_device(self._device), torch.cuda.stream(self._stream):
                pool = self._pool_for(steered)
                with pool.capturing(graph), steered.steering(pool) if steered else nullcontext():
                    results = run()
        except BaseException:
            for generator in (rng.generator_of(str(self._device)), *generators):
                reset_after_failed_capture(generator)
            raise
        if steered:
            self._peak_bytes = max(self._peak_bytes, steered.peak_bytes)
        self._pools[graph] = pool
        return graph, results

    def peak_bytes(self) -> int:
        """The peak since the last call."""
        peak, self._peak_bytes = max(self._peak_bytes, self._allocator_peak_bytes()), 0
        return peak

    def _pool_for(self, steered: SteeredCapture | None) -> CudaPool:
        """The pool of all live graphs, or a new one."""
        self._peak_bytes = max(self._peak_bytes, self._allocator_peak_bytes())
        for pool in self._pools.values():
            return pool
        pool = CudaPool(self._device)
        if steered:
            steered.prepare(pool)
        return pool

    def _allocator_peak_bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


@contextmanager
def _idle_device(device: torch.device) -> Iterator[None]:
    """The context of a capture: an idle device, no cached memory, no garbage collection."""
    torch.cuda.synchronize(device)
    gc.collect()
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    try:
        with gc_paused():
            yield
    finally:
        clear_cublas_workspaces()


@dataclass(frozen=True, eq=False)
class _PartGraph:
    """The graph of a part, with its inputs and results at fixed addresses."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[fx.Node, torch.Tensor]  # copies of results of parts outside of graphs
    results: list[Any]


@dataclass(frozen=True, eq=False)
class _StepGraphs:
    """All graphs of a step, and the addresses and hyperparameters that they are valid for."""

    addresses: list[int]
    hyperparameters: list[Any]
    batch: dict[int, torch.Tensor]
    parts: dict[StepPart, _PartGraph] = field(default_factory=dict)


class _StaticBatch:
    """The copy of the batch that graphs read, at fixed addresses.

    If the step only casts a tensor, it may be copied as the cast result.
    """

    def __init__(
        self,
        recording: Recording,
        rewritten: RewrittenStep,
        parts: list[StepPart],
        *,
        may_cast: bool,
    ) -> None:
        self.casts: dict[int, fx.Node] = {}  # the cast nodes by the tensor's index
        self._read: list[int] = []
        metas = recording.tape.metas
        in_graphs = {node for part in parts if part.is_graph for node in part.nodes}
        for index, entered in enumerate(recording.batch_nodes):
            tensor = rewritten.node_map[entered]
            readers = [node for node in rewritten.nodes if tensor in node.all_input_nodes]
            if in_graphs.isdisjoint(readers):
                continue
            self._read.append(index)
            reader = readers[0]
            is_cast = reader.target is _CAST and reader.args == (tensor,)
            if len(readers) > 1 or not may_cast or not is_cast or reader.kwargs.keys() != {"dtype"}:
                continue
            was, made = metas[entered], metas[rewritten.calls[reader].results[0]]
            if made.dtype != was.dtype and made.stride == was.stride:
                self.casts[index] = reader

    def functions(self, inner: Functions) -> Functions:
        """The functions of nodes; `inner` has those that replace their targets already."""
        return {**inner, **dict.fromkeys(self.casts.values(), _cast_once)}

    def allocate(self, batch: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Uninitialized tensors to copy the batch's tensors into, by index."""
        uncast = [index for index in self._read if index not in self.casts]
        static = {index: _empty_like(batch[index]) for index in uncast}
        for index, node in self.casts.items():
            dtype = node.kwargs["dtype"]
            assert isinstance(dtype, torch.dtype)
            static[index] = _empty_like(batch[index], dtype)
        return static


class CudaGraphEngine(Uncopyable):
    """The engine that replays a program's kernels from CUDA graphs.

    `reason` says why it does not, or is empty. `peak_bytes` is the peak of the captured step, or of
    the step before it if workspaces were measured there.
    """

    def __init__(
        self,
        program: Program,
        recorder: CudaGraphRecorder,
        graph: StepGraph | None = None,
        plan: Plan | None = None,
        profile: Profile | None = None,
        options: CudaGraphOptions | None = None,
    ) -> None:
        """`graph`, `plan` and `profile` of the step help to place its allocations, if given."""
        self.program = program
        self.plan = plan
        self._graph, self._profile = graph, profile
        self._options = options or CudaGraphOptions()
        self.peak_bytes = 0
        self.reason = _reason_against_graphs(program)
        self._recorder = recorder
        self._optimizer = program.recording.state.optimizer
        self._is_warm = False
        self._n_captures = 0
        self._capture: _StepGraphs | None = None
        self._split(with_optimizer=_is_capturable(self._optimizer))
        if self.reason:
            log.info("running without CUDA graphs: %s", self.reason)

    def __call__(self, batch: list[torch.Tensor], state: list[torch.Tensor]) -> Any:
        """Run one step, as `Program` does."""
        if self.reason:
            return self.program(batch, state)
        capture = self._capture_for(batch, state) if self._is_warm else None
        return self.program.run_step(lambda: self._outputs(capture, batch, state), state)

    def _outputs(
        self, capture: _StepGraphs | None, batch: Tensors, state: Tensors
    ) -> list[torch.Tensor]:
        """The outputs of a step whose parts run from graphs, which are captured, or without."""
        steered = None if capture else self.steered
        meter = self._recorder.memory_meter() if steered else None
        with steered.measuring_workspaces(meter) if steered else nullcontext():
            passed = self._pass_through(batch, state, ())  # inputs that are returned
            values: dict[fx.Node, Any] = dict(zip(self._passed_through, passed, strict=True))
            self._rng_twins.start()
            for part in self._parts:
                if part.is_graph and capture and not self.reason:
                    results = self._from_graph(part, capture, batch, state, values)
                else:
                    with self.program.uncaptured() if part.is_graph else nullcontext():
                        results = self._run(part, batch, state, [values[n] for n in part.entering])
                values.update(zip(part.leaving, results, strict=True))
            outputs = [
                values[node].clone() if node in self._copied_outputs else values[node]
                for node in self.program.outputs
            ]
        if capture and capture is not self._capture and not self.reason:
            self._capture = capture
            self.peak_bytes = self._recorder.peak_bytes()
        elif steered and not self.reason:
            self.peak_bytes = max(self.peak_bytes, steered.peak_bytes)
        self._is_warm = True
        return outputs

    @property
    def is_steered(self) -> bool:
        """True if the step's allocations lie in one arena, from the second step on."""
        return not self.reason and self.steered is not None and self.steered.has_arena

    @property
    def info(self) -> EngineInfo:
        """What runs the step, and why."""
        if self.reason:
            return EngineInfo("python", f"running without CUDA graphs: {self.reason}")
        return EngineInfo(
            "cudagraph",
            n_graphs=len(self._capture.parts) if self._capture else 0,
            has_optimizer_graph=self._has_optimizer,
            is_steered=self.is_steered,
            graphs_peak_bytes=self.peak_bytes,
        )

    def give_up(self, reason: str) -> None:
        """Run as generated code from now on, and free all graphs and their memory."""
        log.warning("running without CUDA graphs: %s", reason)
        self.reason = reason
        self.peak_bytes = 0
        self._capture = None

    def _split(self, *, with_optimizer: bool) -> None:
        program = self.program
        recording, rewritten = program.recording, program.rewritten
        self._has_optimizer = with_optimizer
        kind = self._recorder.device_type
        self._parts = split_step(
            recording, rewritten, device_type=kind, with_optimizer=with_optimizer
        )
        n_graphs = sum(part.is_graph for part in self._parts)
        if n_graphs == 0:
            self.reason = self.reason or "no part of the step runs on the GPU"
        elif n_graphs > self._options.max_graphs:
            self.reason = self.reason or "work on the host splits the step into too many parts"
        updates = rewritten.optimizer_calls.keys()
        self._updating = {each for each in self._parts if not updates.isdisjoint(each.nodes)}
        self._rng_twins = RngTwins(program, self._parts)
        # a plan expects the batch to be copied in its own dtype
        batch = _StaticBatch(recording, rewritten, self._parts, may_cast=self.plan is None)
        self._static_batch = batch
        functions = batch.functions(self._rng_twins.functions)
        self.steered: SteeredCapture | None = None
        if self._graph is not None and not self.reason:
            planned, casts = (self._graph, self.plan, self._profile), set(batch.casts.values())
            requests = AllocationRequests(program, self._parts, *planned, preallocated=casts)
            self.steered = SteeredCapture(requests, self._options.max_mismatches)
            functions = self.steered.functions(functions)
        self._functions = {
            part: program.compile(part.nodes, part.leaving, part.entering, functions)[1]
            for part in self._parts
        }
        in_graphs = [part for part in self._parts if part.is_graph]
        self._from_host = {n for part in self._parts if not part.is_graph for n in part.leaving}
        from_graphs = {n for part in in_graphs for n in part.leaving}
        self._copied_outputs = self._outputs_to_copy(from_graphs)
        made = {node for part in self._parts for node in part.leaving}
        self._passed_through = [node for node in program.outputs if node not in made]
        self._pass_through = program.compile([], self._passed_through)[1]

    def _outputs_to_copy(self, made: set[fx.Node]) -> set[fx.Node]:
        """The outputs to copy out of the graphs' memory: neither gradients nor views of inputs."""
        recording, node_map = self.program.recording, self.program.rewritten.node_map
        metas = recording.tape.metas
        stay = {metas[entry.node].storage for entry in recording.tape.entries}
        stay |= {metas[use.final].storage for use in recording.grads if use.final is not None}
        return {
            node_map[node]
            for node in recording.outputs
            if node_map[node] in made and metas[node].storage not in stay
        }

    def _run(
        self, part: StepPart, batch: Tensors, state: Tensors, entering: list[Any]
    ) -> list[Any]:
        with torch.enable_grad():  # generated code starts with it on
            results: list[Any] = self._functions[part](batch, state, entering)
        return results

    def _capture_for(self, batch: Tensors, state: Tensors) -> _StepGraphs | None:
        """The valid captured step, or a new one, with this batch; None to run without graphs."""
        capture = self._capture
        if capture and not _are_same(capture.hyperparameters, self._hyperparameters()):
            log.info("hyperparameters change: the optimizer runs outside of the graph from now on")
            self._capture = None
            self._split(with_optimizer=False)
            return None  # the new parts must run once first
        addresses = self._addresses(state)
        if capture and capture.addresses != addresses:
            log.info("capturing again: parameters, buffers or gradients have moved")
            capture = self._capture = None
        if capture is None:
            self._n_captures += 1
            if self._n_captures > self._options.max_captures:
                self.give_up("parameters, buffers or gradients keep moving")
                return None
            self._recorder.peak_bytes()
            static = self._static_batch.allocate(batch)
            capture = _StepGraphs(addresses, self._hyperparameters(), static)
        with torch.no_grad():
            for index, tensor in capture.batch.items():
                tensor.copy_(batch[index])
        return capture

    def _from_graph(
        self,
        part: StepPart,
        capture: _StepGraphs,
        batch: Tensors,
        state: Tensors,
        values: dict[fx.Node, Any],
    ) -> list[Any]:
        """A part's results from its graph, which is captured first if necessary."""
        if part not in capture.parts:
            copied = [n for n in part.entering if n in self._from_host and _is_tensor(values[n])]
            inputs = {node: _empty_like(values[node]) for node in copied}
            own = [capture.batch.get(index, each) for index, each in enumerate(batch)]
            entering = [inputs.get(node, values[node]) for node in part.entering]

            def run() -> list[Any]:
                with self._rng_twins.capturing():
                    return self._run(part, own, state, entering)

            try:
                generators = self._rng_twins.generators(part)
                graph, results = self._recorder.capture(run, generators, self.steered)
            except (RuntimeError, AssertionError) as error:
                self.give_up(f"the step cannot be captured ({str(error).splitlines()[0]})")
                with self.program.uncaptured():
                    return self._run(part, batch, state, [values[n] for n in part.entering])
            capture.parts[part] = _PartGraph(graph, inputs, results)
        captured = capture.parts[part]
        for node, tensor in captured.inputs.items():
            tensor.copy_(values[node])
        self._rng_twins.seed_twins(part)
        if part in self._updating:
            self.program.commit()
        captured.graph.replay()
        return captured.results

    def _addresses(self, state: list[torch.Tensor]) -> list[int]:
        """The addresses of all tensors that graphs use in place."""
        recording = self.program.recording
        tensors: list[torch.Tensor | None] = [*state]
        tensors += [e.tensor for e in recording.tape.entries if e.kind is EntryKind.EXTERNAL]
        tensors += [state[use.slot].grad for use in recording.grads if use.reads_old]
        if self._has_optimizer:
            own = self._optimizer.state.values()
            tensors += [each for held in own for each in held.values() if _is_tensor(each)]
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    def _hyperparameters(self) -> list[Any]:
        """The hyperparameters that a captured optimizer step has fixed, as (name, value) pairs."""
        if not self._has_optimizer:
            return []
        groups = self._optimizer.param_groups
        return [item for group in groups for item in group.items() if item[0] != "params"]


def _reason_against_graphs(program: Program) -> str:
    """Why a step cannot be captured at all; empty if it can."""
    recording = program.recording
    tape = recording.tape
    batch = {tape.metas[node].storage for node in recording.batch_nodes}
    if any(tape.metas[node].storage in batch for call in tape.calls for node in call.writes):
        return "the step writes into its batch"
    if any(tape.metas[node].storage in batch for node in recording.outputs):
        return "the step returns its batch, or a view of it"
    for node in recording.batch_nodes:
        meta = tape.metas[node]
        if 0 not in meta.shape and not is_dense(meta.shape, meta.stride):
            return "a tensor of the batch overlaps itself or has gaps"
    if len({s.device for s in tape.storages if s.device.type == "cuda"}) > 1:
        return "the step uses several GPUs"
    return ""


def _is_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """True if a graph may hold an optimizer's step: it is capturable, and has no hooks."""
    return not has_step_hooks(optimizer) and all(
        group.get("capturable")
        and all(
            value.is_cuda for key, value in group.items() if key != "params" and _is_tensor(value)
        )
        for group in optimizer.param_groups
    )


def _are_same(a: list[Any], b: list[Any]) -> bool:
    """True if two lists of (name, value) pairs are the same, with identical tensors."""
    return len(a) == len(b) and all(
        key == other_key and (value is other or (not _is_tensor(value) and value == other))
        for (key, value), (other_key, other) in zip(a, b, strict=True)
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialized tensor with the shape and strides of another."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=tensor.device
    )


def _cast_once(tensor: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor, unless it was copied into the static batch as the cast result."""
    return tensor if tensor.dtype == dtype else _CAST(tensor, dtype=dtype)
