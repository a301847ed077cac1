"""How a step runs: the engines by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from rekindle.core.cost.allocator import allocated_bytes
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.engines.cudagraph.graph_engine import CudaGraphEngine, CudaRecorder, Recorder
from rekindle.engines.program import Program
from rekindle.errors import RekindleError
from rekindle.tracing.tape import Recording

if TYPE_CHECKING:
    from rekindle.engines.inductor.group_compiler import Fusing

log = logging.getLogger("rekindle")

ENGINES = ("auto", "python", "cudagraph", "inductor")

Engine = Program | CudaGraphEngine


def check_engine(name: str) -> None:
    """Refuse an engine that does not exist."""
    if name not in ENGINES:
        raise RekindleError(f"there is no engine {name!r}: the engines are {', '.join(ENGINES)}.")


def _new_fusing() -> Fusing | None:
    """What compiles; None where torch comes without its compiler."""
    try:
        from rekindle.engines.inductor.group_compiler import (
            Fusing,  # not for others: it takes seconds to load
        )
    except ImportError as error:
        log.warning("running without the compiler: %s", error)
        return None
    return Fusing()


class EngineMaker:
    """Puts programs on an engine; they stay generated code where graphs cannot be had."""

    def __init__(
        self, name: str, device: torch.device, progress: Callable[[str], None] = log.info
    ) -> None:
        """`progress` is told what is being compiled."""
        self._progress = progress
        self._device = device
        check_engine(name)
        self._recorder: Recorder | None = None
        self._fusing: Fusing | None = None
        if name == "inductor":
            self._fusing = _new_fusing()
        if name != "python" and device.type == "cuda":
            self._recorder = CudaRecorder(device)
        elif name == "cudagraph":
            log.info("running without CUDA graphs: the model is on the %s", device.type)

    def make(
        self,
        program: Program,
        graph: StepGraph | None = None,
        plan: Plan | None = None,
        profile: Profile | None = None,
    ) -> Engine:
        """The engine that runs a program.

        `graph` and `plan` are what the program was made from, `profile` what its ops cost.
        """
        if self._recorder is None:
            return program
        if program.is_early:
            # Every call of the optimizer would end a graph, which holds its memory.
            log.info("running without CUDA graphs: parameters are updated as their gradients come")
            return program
        return CudaGraphEngine(program, self._recorder, graph, plan, profile)

    def prepare(self, recording: Recording) -> Recording:
        """The step that is planned and run in place of a captured one: compiled, if so asked.

        Without a working compiler, that is the captured one.
        """
        if self._fusing is None:
            return recording
        from rekindle.engines.inductor.decompose import normalized
        from rekindle.engines.inductor.fusion_groups import fused

        try:
            normal = normalized(recording, for_gpu=self._device.type == "cuda")
            compiled = fused(normal, self._fusing)
            self._fusing.compile(self._progress)
        except Exception as error:  # whatever is missing: a compiler, Triton, a header
            reason = str(error).strip().splitlines()
            log.warning("running without the compiler: %s", reason[0] if reason else repr(error))
            log.debug("that came from here", exc_info=error)
            self._fusing = None
            return recording
        return compiled

    @property
    def is_compiled(self) -> bool:
        """Whether what runs has been compiled, so that it may round differently."""
        return self._fusing is not None

    @property
    def has_graphs(self) -> bool:
        """Whether programs run from CUDA graphs, where they can."""
        return self._recorder is not None

    def extra_bytes(self, batch: list[torch.Tensor]) -> int:
        """What an engine holds beside the step's own tensors: graphs have a copy of the batch."""
        if self._recorder is None:
            return 0
        sizes = np.array([tensor.nbytes for tensor in batch], dtype=np.int64)
        return int(allocated_bytes(sizes, "cuda").sum())
