"""What every engine offers to those who run steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rekindle.core.notebook import html_table, one_line
from rekindle.units import format_bytes

if TYPE_CHECKING:
    from rekindle.engines.program import Program


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What runs a step, and why: `step.engine_info`.

    `name` is "python" (generated code) or "cudagraph"; `reason` says why CUDA graphs or
    the compiler are not used. `is_compiled` says that Inductor compiled the ops between matrix
    products, in `n_compiled` distinct functions. The rest is about CUDA graphs: how many were
    captured so far, whether one of them holds the optimizer, whether they were captured at planned
    addresses in one arena, and the peak of the capture.
    """

    name: str
    reason: str = ""
    is_compiled: bool = False
    n_compiled: int = 0
    n_graphs: int = 0
    has_optimizer_graph: bool = False
    is_steered: bool = False
    graphs_peak_bytes: int = 0

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = {"engine": self.name, "compiled groups": self.n_compiled}
        if self.name == "cudagraph":
            facts |= {"CUDA graphs": self.n_graphs, "peak": format_bytes(self.graphs_peak_bytes)}
        return facts | ({"reason": self.reason} if self.reason else {})

    __repr__ = one_line
    _repr_html_ = html_table


class Engine(Protocol):
    """Runs one step: `Program` as generated code, `CudaGraphEngine` from CUDA graphs."""

    peak_bytes: int  # what CUDA graphs needed when they were captured, 0 without them

    @property
    def program(self) -> Program:
        """The generated code."""

    @property
    def is_steered(self) -> bool: ...

    @property
    def info(self) -> EngineInfo: ...

    def give_up(self, reason: str) -> None:
        """Run as generated code from now on."""

    def __call__(self, batch: list[torch.Tensor], state: list[torch.Tensor]) -> Any:
        """Run one step on a batch's tensors; returns what the user's function returns."""
