"""How a step runs: the engines by name."""

from __future__ import annotations

import logging

import numpy as np
import torch

from rekindle.core.allocator import allocated_bytes
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

    def make(self, program: Program) -> Engine:
        """The engine that runs a program."""
        return Graphed(program, self._recorder) if self._recorder else program

    def extra_bytes(self, batch: list[torch.Tensor]) -> int:
        """What an engine holds beside the step's own tensors: graphs have a copy of the batch."""
        if self._recorder is None:
            return 0
        sizes = np.array([tensor.nbytes for tensor in batch], dtype=np.int64)
        return int(allocated_bytes(sizes, "cuda").sum())
