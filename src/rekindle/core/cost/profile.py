"""The cost of an op, and the profile of a whole step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rekindle.core.graph.graph import StepGraph
from rekindle.core.notebook import html_table, one_line
from rekindle.errors import ProfileError
from rekindle.units import format_us


@dataclass(frozen=True, slots=True)
class OpCost:
    """One op's time on the device, and its workspace.

    `copy_us` is the time of a recomputation by another operator (`Op.copy_target`).
    """

    time_us: float
    workspace_bytes: int = 0
    is_measured: bool = False
    copy_us: float | None = None


@dataclass(frozen=True)
class Profile:
    """The cost of every op of one graph on one device.

    `allocator` says how the device's allocator counts bytes; `overhead_bytes` is allocated
    throughout the step, in addition to the graph's storages (libraries' workspaces). Copies between
    host and device take `transfer_latency_us + bytes / …_bytes_per_us`.
    """

    device: str
    fingerprint: str
    costs: tuple[OpCost, ...]
    allocator: str = "exact"
    overhead_bytes: int = 0
    transfer_latency_us: float = 10.0
    to_host_bytes_per_us: float = 0.0
    to_device_bytes_per_us: float = 0.0
    method: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def times_us(self) -> NDArray[np.float64]:
        """The time of each op."""
        return np.array([cost.time_us for cost in self.costs], dtype=np.float64)

    @cached_property
    def copy_times_us(self) -> NDArray[np.float64]:
        """The time of a recomputation of each op."""
        copies = [c.time_us if c.copy_us is None else c.copy_us for c in self.costs]
        return np.array(copies, dtype=np.float64)

    @cached_property
    def workspaces_bytes(self) -> NDArray[np.int64]:
        """The workspace of each op."""
        return np.array([cost.workspace_bytes for cost in self.costs], dtype=np.int64)

    @cached_property
    def starts_us(self) -> NDArray[np.float64]:
        """When each op starts, and the step's end after the last."""
        return np.concatenate([[0.0], np.cumsum(self.times_us)])

    @property
    def step_us(self) -> float:
        """The time of the whole step."""
        return float(self.times_us.sum())

    def to_host_us(self, nbytes: int) -> float | None:
        """The time to copy so many bytes to the host; None if the device is the host."""
        return _transfer_us(nbytes, self.transfer_latency_us, self.to_host_bytes_per_us)

    def to_device_us(self, nbytes: int) -> float | None:
        """The time to copy so many bytes back."""
        return _transfer_us(nbytes, self.transfer_latency_us, self.to_device_bytes_per_us)

    def check(self, graph: StepGraph) -> None:
        """Raise unless this profile is for that graph."""
        if self.fingerprint != graph.fingerprint or len(self.costs) != len(graph.ops):
            raise ProfileError(
                f"this profile is for another step (graph {self.fingerprint}, {len(self.costs)} "
                f"ops) than the one given ({graph.fingerprint}, {len(graph.ops)} ops): profile "
                "again with rekindle.profile(captured)."
            )

    def _facts(self) -> dict[str, object]:
        is_measured = any(cost.is_measured for cost in self.costs)
        return {
            "device": self.device,
            "step": format_us(self.step_us),
            "ops": f"{len(self.costs):,}, {'measured' if is_measured else 'estimated'}",
            "graph": self.fingerprint,
        }

    __repr__ = one_line
    _repr_html_ = html_table


def _transfer_us(nbytes: int, latency_us: float, bytes_per_us: float) -> float | None:
    return latency_us + nbytes / bytes_per_us if bytes_per_us else None
