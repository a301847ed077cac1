"""How a step runs: the engines by name."""

from __future__ import annotations

import logging

import numpy as np
import torch

from rekindle.core.allocator import allocated_bytes
from rekindle.core.cost import Profile
from rekindle.core.ir import StepGraph
from rekindle.core.schedule import Plan
from rekindle.errors import RekindleError
from rekindle.fx.cudagraph import CudaRecorder, Graphed, Recorder
from rekindle.fx.execute import Program

log = logging.getLogger("rekindle")

ENGINES = ("auto", "python", "cudagraph")

Engine = Program | Graphed


def check_engine(name: str) -> None:
    """Refuse an engine that does not exist."""
    if name not in ENGINES:
        raise RekindleError(f"there is no engine {name!r}: the engines are {', '.join(ENGINES)}.")


class EngineMaker:
    """Puts programs on an engine; they stay generated code where graphs cannot be had."""

    def __init__(self, name: str, device: torch.device) -> None:
        check_engine(name)
        self._recorder: Recorder | None = None
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
        if (
            program.is_early
        ):  # every call of the optimizer would end a graph, which holds its memory
            log.info("running without CUDA graphs: parameters are updated as their gradients come")
            return program
        return Graphed(program, self._recorder, graph, plan, profile)

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
