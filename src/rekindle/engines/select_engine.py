"""Engines by name: which one runs a step, and the compiled form of a step where asked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from rekindle.core.cost.allocator import allocated_bytes
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.engines.cudagraph.graph_engine import CudaGraphEngine, CudaGraphRecorder
from rekindle.engines.engine import Engine, EngineInfo
from rekindle.engines.program import Program
from rekindle.errors import RekindleError
from rekindle.tracing.tape import Recording

if TYPE_CHECKING:
    from rekindle.engines.inductor.group_compiler import GroupCompiler

log = logging.getLogger("rekindle")

ENGINES = ("auto", "python", "cudagraph", "inductor")


def check_engine(name: str) -> None:
    """Refuse an engine that does not exist."""
    if name not in ENGINES:
        raise RekindleError(f"there is no engine {name!r}: the engines are {', '.join(ENGINES)}.")


class EngineFactory:
    """Makes the engines of a step's captures: CUDA graphs where possible, else generated code."""

    def __init__(
        self, name: str, device: torch.device, progress: Callable[[str], None] = log.info
    ) -> None:
        """`progress` is called with what is being compiled."""
        check_engine(name)
        self._progress = progress
        self._device = device
        self._asks_for_graphs = name == "cudagraph"
        self._recorder: CudaGraphRecorder | None = None
        self._compiler: GroupCompiler | None = None
        self._compiler_reason = ""
        self._graphs_reason = ""
        if name == "inductor":
            self._compiler = self._new_compiler()
        if name != "python" and device.type == "cuda":
            self._recorder = CudaGraphRecorder(device)
        elif name == "python":
            self._graphs_reason = 'engine="python" was asked for'
        else:
            self._without_graphs(f"the model is on the {device.type}")

    def prepare(self, recording: Recording) -> Recording:
        """The recording with groups of ops compiled, if that was asked for and a compiler works."""
        if self._compiler is None:
            return recording
        from rekindle.engines.inductor.decompose import decompose
        from rekindle.engines.inductor.fusion_groups import fuse

        try:
            decomposed = decompose(recording, for_gpu=self._device.type == "cuda")
            compiled = fuse(decomposed, self._compiler)
            self._compiler.compile(self._progress)
        except Exception as error:  # a compiler, Triton or a header may be missing
            self._without_compiler(error)
            return recording
        return compiled

    def build(
        self,
        program: Program,
        graph: StepGraph | None = None,
        plan: Plan | None = None,
        profile: Profile | None = None,
    ) -> Engine:
        """The engine that runs a program; graph, plan and profile help to place its allocations."""
        if self._recorder is None:
            return program
        if program.is_early:
            # Each call of the optimizer would end a graph, and a graph keeps its memory.
            reason = "parameters are updated early, between the ops of the backward pass"
            self._without_graphs(reason)
            return program
        return CudaGraphEngine(program, self._recorder, graph, plan, profile)

    def info(self, engine: Engine) -> EngineInfo:
        """What runs a step, and why."""
        found = engine.info
        graphs_reason = found.reason
        if found.name == "python" and not graphs_reason:
            graphs_reason = self._graphs_reason
        return replace(
            found,
            reason="; ".join(filter(None, (self._compiler_reason, graphs_reason))),
            is_compiled=self.is_compiled,
            n_compiled=len(self._compiler.functions) if self._compiler else 0,
        )

    @property
    def is_compiled(self) -> bool:
        """True if ops are compiled, so that they may round differently from the plain step."""
        return self._compiler is not None

    @property
    def has_graphs(self) -> bool:
        """True if programs run from CUDA graphs where they can."""
        return self._recorder is not None

    def extra_bytes(self, batch: list[torch.Tensor]) -> int:
        """The bytes that an engine holds besides the step's tensors: CUDA graphs copy the batch."""
        if self._recorder is None:
            return 0
        sizes = np.array([tensor.nbytes for tensor in batch], dtype=np.int64)
        return int(allocated_bytes(sizes, "cuda").sum())

    def _new_compiler(self) -> GroupCompiler | None:
        try:
            # takes seconds to load
            from rekindle.engines.inductor.group_compiler import GroupCompiler
        except ImportError as error:  # a torch without its compiler
            self._without_compiler(error)
            return None
        return GroupCompiler()

    def _without_compiler(self, error: Exception) -> None:
        first_line = (str(error).strip().splitlines() or [repr(error)])[0]
        self._compiler = None
        self._compiler_reason = f"running without the compiler: {first_line}"
        log.warning("%s", self._compiler_reason)
        log.debug("the compiler failed here", exc_info=error)

    def _without_graphs(self, reason: str) -> None:
        self._graphs_reason = f"running without CUDA graphs: {reason}"
        if self._asks_for_graphs or self._device.type == "cuda":
            log.info("%s", self._graphs_reason)
