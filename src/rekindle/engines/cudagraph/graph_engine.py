"""Runs a step's kernels from CUDA graphs, so that launching them takes no time.

The first step runs as generated code: libraries set themselves up, the optimizer creates its state,
and it is noted where in the random sequence each op draws. In the second, every part that a graph
can hold is captured and at once replayed; from then on it is replayed. What a graph cannot hold
(see `parts`) runs between the graphs as before.

A graph works on fixed addresses. A batch is copied into tensors of the engine's own; results are
copied out; parameters and buffers are used where they lie, and a graph is captured anew when one of
them has moved. Gradients that are left after the step lie in the graph's memory until the next.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import fx

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.engines.cudagraph.allocation_requests import AllocationRequests
from rekindle.engines.cudagraph.arena import CudaMemory, CudaPool, Memory, SteeredCapture
from rekindle.engines.cudagraph.graph_parts import Part, split
from rekindle.engines.cudagraph.rng_twins import Randomness, revive
from rekindle.engines.cudagraph.static_batch import StaticBatch, like
from rekindle.engines.engine import EngineInfo
from rekindle.engines.gc_pause import collected_later
from rekindle.engines.program import Program
from rekindle.torch_internals import (
    clear_cublas_workspaces,
    global_optimizer_post_hooks,
    global_optimizer_pre_hooks,
)
from rekindle.tracing import rng
from rekindle.tracing.tape import EntryKind

log = logging.getLogger("rekindle")

_MOST_GRAPHS = 4
_MOST_CAPTURES = 3


class Graph(Protocol):
    """Work that was captured, and can be done again."""

    def replay(self) -> None:
        """Do it again, on the same addresses."""


class Recorder(Protocol):
    """What captures work without doing it."""

    device_type: str

    def memory(self) -> Memory | None:
        """The counters that show what ops need; None if they would not show it now."""

    def capture(
        self,
        run: Callable[[], list[Any]],
        generators: list[torch.Generator],
        steered: SteeredCapture | None,
    ) -> tuple[Graph, list[Any]]:
        """Capture what a function does, which may draw from these generators; and its results.

        `steered` says where its results should lie.
        """

    def peak_bytes(self) -> int:
        """The most bytes that were in use since this was last asked."""


class CudaRecorder:
    """Captures CUDA graphs, all in one pool of memory: they never run at the same time.

    A pool lives as long as one of its graphs does. Only what is captured first in it is steered.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pools: WeakKeyDictionary[torch.cuda.CUDAGraph, CudaPool] = WeakKeyDictionary()
        self._peak_bytes = 0

    def memory(self) -> Memory | None:
        if torch.backends.cudnn.benchmark:  # first steps try algorithms out, with all they need
            return None
        return CudaMemory(self._device)

    def capture(
        self,
        run: Callable[[], list[Any]],
        generators: list[torch.Generator],
        steered: SteeredCapture | None,
    ) -> tuple[Graph, list[Any]]:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        try:
            with _quiet(self._device), torch.cuda.stream(self._stream):
                pool = self._pool_for(steered)
                with pool.capturing(graph), steered.steering(pool) if steered else nullcontext():
                    results = run()
        except BaseException:
            for generator in (rng.generator_of(str(self._device)), *generators):
                revive(generator)
            raise
        if steered:
            self._peak_bytes = max(self._peak_bytes, steered.peak_bytes)
        self._pools[graph] = pool
        return graph, results

    def peak_bytes(self) -> int:
        peak, self._peak_bytes = max(self._peak_bytes, self._counted_bytes()), 0
        return peak

    def _pool_for(self, steered: SteeredCapture | None) -> CudaPool:
        """The pool that all graphs share, or a new one."""
        self._peak_bytes = max(self._peak_bytes, self._counted_bytes())
        for pool in self._pools.values():
            return pool
        pool = CudaPool(self._device)
        if steered:
            steered.start(pool)
        return pool

    def _counted_bytes(self) -> int:
        """What the allocator has counted since this was last asked."""
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


@contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    """Nothing is under way on the device, no memory is held for later, no garbage is collected."""
    torch.cuda.synchronize(device)
    gc.collect()
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    try:
        with collected_later():
            yield
    finally:
        clear_cublas_workspaces()


@dataclass(frozen=True, eq=False)
class _Captured:
    """A part's graph: what it reads at fixed addresses, and what it leaves there."""

    graph: Graph
    inputs: dict[fx.Node, torch.Tensor]  # copies of what parts outside of graphs have made
    results: list[Any]


@dataclass(frozen=True, eq=False)
class _Capture:
    """All that is captured at once, and what that takes for granted."""

    pointers: list[int]
    numbers: list[Any]
    batch: dict[int, torch.Tensor]
    parts: dict[Part, _Captured] = field(default_factory=dict)


class CudaGraphEngine:
    """A program whose kernels are launched by graphs. Call it as the program.

    `reason` says why it does not, if so; `peak_bytes` what the captured step needed, or the step
    before it where that was watched.
    """

    def __init__(
        self,
        program: Program,
        recorder: Recorder,
        graph: StepGraph | None = None,
        plan: Plan | None = None,
        profile: Profile | None = None,
    ) -> None:
        """What is known of the step helps to place what it makes: its graph, plan and costs."""
        self.program = program
        self._known = (graph, plan, profile)
        self.peak_bytes = 0
        self.reason = _obstacle(program)
        self._recorder = recorder
        self._optimizer = program.recording.state.optimizer
        self._is_warm = False
        self._n_captures = 0
        self._capture: _Capture | None = None
        self._cut(with_optimizer=_is_capturable(self._optimizer))
        if self.reason:
            log.info("running without CUDA graphs: %s", self.reason)

    def __call__(self, batch: list[torch.Tensor], state: list[torch.Tensor]) -> Any:
        """Run one step, as `Program` does."""
        if self.reason:
            return self.program(batch, state)
        capture = self._capture_for(batch, state) if self._is_warm else None
        steered = None if capture else self._steered
        watching = steered.watching(self._recorder.memory()) if steered else nullcontext()
        with self.program.running(state), watching:
            passed = self._pass(batch, state, ())  # as it is before the step
            values: dict[fx.Node, Any] = dict(zip(self._passed, passed, strict=True))
            self._random.start()
            for part in self._parts:
                if part.is_graph and capture and not self.reason:
                    results = self._from_graph(part, capture, batch, state, values)
                else:
                    with self.program.as_code() if part.is_graph else nullcontext():
                        results = self._run(part, batch, state, [values[n] for n in part.entering])
                values.update(zip(part.leaving, results, strict=True))
            outputs = [
                values[node].clone() if node in self._copied else values[node]
                for node in self.program.outputs
            ]
        if capture and capture is not self._capture and not self.reason:
            self._capture = capture
            self.peak_bytes = self._recorder.peak_bytes()
        elif steered and not self.reason:
            self.peak_bytes = max(self.peak_bytes, steered.peak_bytes)
        self._is_warm = True
        return self.program.finish(outputs, state)

    @property
    def is_steered(self) -> bool:
        """Whether what the step makes lies in one arena, from the second step on."""
        return not self.reason and self._steered is not None and self._steered.has_arena

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
        """Run as generated code from now on, and let go of all graphs and their memory."""
        log.warning("running without CUDA graphs: %s", reason)
        self.reason = reason
        self.peak_bytes = 0
        self._capture = None

    def _cut(self, *, with_optimizer: bool) -> None:
        """Cut the step into parts, and make their functions."""
        program = self.program
        recording, listing = program.recording, program.listing
        self._has_optimizer = with_optimizer
        kind = self._recorder.device_type
        self._parts = split(recording, listing, device_type=kind, with_optimizer=with_optimizer)
        n_graphs = sum(part.is_graph for part in self._parts)
        if n_graphs == 0:
            self.reason = self.reason or "no part of the step runs on the GPU"
        elif n_graphs > _MOST_GRAPHS:
            self.reason = self.reason or "work on the host cuts the step into too many parts"
        self._random = Randomness(program, self._parts)
        graph, plan, profile = self._known
        # a plan counts on a copy of the batch as it is
        batch = StaticBatch(recording, listing, self._parts, may_cast=plan is None)
        self._static_batch = batch
        functions = batch.functions(self._random.functions)
        self._steered: SteeredCapture | None = None
        if graph is not None and not self.reason:
            outside = set(batch.casts.values())
            needs = AllocationRequests(
                program, self._parts, graph, plan, profile, made_outside=outside
            )
            self._steered = SteeredCapture(needs)
            functions = self._steered.functions(functions)
        self._functions = {
            part: program.compile(
                part.nodes,
                entering=part.entering,
                returned=part.leaving,
                functions=functions,
            )[1]
            for part in self._parts
        }
        in_graphs = [part for part in self._parts if part.is_graph]
        self._outside = {n for part in self._parts if not part.is_graph for n in part.leaving}
        self._copied = self._results_in_graphs({n for part in in_graphs for n in part.leaving})
        made = {node for part in self._parts for node in part.leaving}
        self._passed = [node for node in program.outputs if node not in made]
        self._pass = program.compile([], returned=self._passed)[1]

    def _results_in_graphs(self, made: set[fx.Node]) -> set[fx.Node]:
        """The outputs that lie in the graphs' memory and must be copied out of it.

        Gradients stay; so does what looks at a tensor that was there before the step.
        """
        recording, renamed = self.program.recording, self.program.listing.renamed
        metas = recording.tape.metas
        stay = {metas[entry.node].storage for entry in recording.tape.entries}
        stay |= {metas[use.final].storage for use in recording.grads if use.final is not None}
        return {
            renamed[node]
            for node in recording.outputs
            if renamed[node] in made and metas[node].storage not in stay
        }

    def _run(
        self, part: Part, batch: list[torch.Tensor], state: list[torch.Tensor], entering: list[Any]
    ) -> list[Any]:
        with torch.enable_grad():  # what the code of every part starts with
            results: list[Any] = self._functions[part](batch, state, entering)
        return results

    def _capture_for(self, batch: list[torch.Tensor], state: list[torch.Tensor]) -> _Capture | None:
        """The capture that holds for these tensors, or a new and empty one; with the batch in it.

        None if the step is to run without one.
        """
        capture = self._capture
        if capture and not _same(capture.numbers, self._numbers()):
            log.info("the optimizer's numbers change: it runs outside of the graph from now on")
            self._capture = None
            self._cut(with_optimizer=False)
            return None  # the new parts have to be warm first
        pointers = self._pointers(state)
        if capture and capture.pointers != pointers:
            log.info("capturing anew: parameters, buffers or gradients lie elsewhere")
            capture = self._capture = None
        if capture is None:
            self._n_captures += 1
            if self._n_captures > _MOST_CAPTURES:
                self.give_up("parameters, buffers or gradients move again and again")
                return None
            self._recorder.peak_bytes()
            room = self._static_batch.room_for(batch)
            capture = _Capture(pointers, self._numbers(), room)
        with torch.no_grad():
            for index, tensor in capture.batch.items():
                tensor.copy_(batch[index])
        return capture

    def _from_graph(
        self,
        part: Part,
        capture: _Capture,
        batch: list[torch.Tensor],
        state: list[torch.Tensor],
        values: dict[fx.Node, Any],
    ) -> list[Any]:
        """A part's results from its graph, which is captured first where there is none."""
        if part not in capture.parts:
            copied = [n for n in part.entering if n in self._outside and _is_tensor(values[n])]
            inputs = {node: like(values[node]) for node in copied}
            own = [capture.batch.get(index, each) for index, each in enumerate(batch)]
            entering = [inputs.get(node, values[node]) for node in part.entering]

            def run() -> list[Any]:
                with self._random.capturing():
                    return self._run(part, own, state, entering)

            try:
                generators = self._random.generators(part)
                graph, results = self._recorder.capture(run, generators, self._steered)
            except (RuntimeError, AssertionError) as error:
                self.give_up(f"the step cannot be captured ({str(error).splitlines()[0]})")
                with self.program.as_code():
                    return self._run(part, batch, state, [values[n] for n in part.entering])
            capture.parts[part] = _Captured(graph, inputs, results)
        captured = capture.parts[part]
        for node, tensor in captured.inputs.items():
            tensor.copy_(values[node])
        self._random.set_twins(part)
        captured.graph.replay()
        return captured.results

    def _pointers(self, state: list[torch.Tensor]) -> list[int]:
        """Where everything lies that graphs use in its place."""
        recording = self.program.recording
        tensors: list[torch.Tensor | None] = [*state]
        tensors += [e.tensor for e in recording.tape.entries if e.kind is EntryKind.EXTERNAL]
        tensors += [state[use.slot].grad for use in recording.grads if use.reads_old]
        if self._has_optimizer:
            own = self._optimizer.state.values()
            tensors += [each for held in own for each in held.values() if _is_tensor(each)]
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    def _numbers(self) -> list[Any]:
        """What a captured optimizer was told when it was captured, by name."""
        if not self._has_optimizer:
            return []
        groups = self._optimizer.param_groups
        return [item for group in groups for item in group.items() if item[0] != "params"]


def _obstacle(program: Program) -> str:
    """Why a step cannot run from graphs at all; empty if it may."""
    recording = program.recording
    tape = recording.tape
    batch = {tape.metas[node].storage for node in recording.batch_nodes}
    if any(tape.metas[node].storage in batch for call in tape.calls for node in call.writes):
        return "the step writes into its batch"
    if any(tape.metas[node].storage in batch for node in recording.outputs):
        return "the step returns its batch, or a view of it"
    for node in recording.batch_nodes:
        meta = tape.metas[node]
        if not _is_dense(meta.shape, meta.stride):
            return "a tensor of the batch overlaps itself or has gaps"
    if len({s.device for s in tape.storages if s.device.type == "cuda"}) > 1:
        return "the step uses several GPUs"
    return ""


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor has every element once and no gaps, in whatever order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True)):
        if size != 1 and step != expected:
            return 0 in shape
        expected *= size
    return True


def _is_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a graph may hold an optimizer's step: it says so, and nobody watches it."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any((*hooks, global_optimizer_pre_hooks, global_optimizer_post_hooks)):
        return False
    return all(
        group.get("capturable")
        and all(
            value.is_cuda for key, value in group.items() if key != "params" and _is_tensor(value)
        )
        for group in optimizer.param_groups
    )


def _same(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists of named values are the same; of tensors, whether they are the same one."""
    return len(a) == len(b) and all(
        key == other_key and (value is other or (not _is_tensor(value) and value == other))
        for (key, value), (other_key, other) in zip(a, b, strict=True)
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
