"""Replays a step on paper: how many bytes are alive at every moment, and what they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.core.allocator import allocated_bytes
from rekindle.core.cost import Profile
from rekindle.core.ir import Role, StepGraph
from rekindle.core.liveness import Liveness, analyze

ROLES = tuple(Role)


@dataclass(frozen=True)
class Trace:
    """Bytes and microseconds at every position of a step.

    `live_bytes[i]` is what is allocated while op i runs, workspace included; `by_role` splits it,
    one row a role in the order of `ROLES`, workspace counted as temporary. A position is an op:
    its outputs exist, its inputs still do.
    """

    graph: StepGraph
    live_bytes: NDArray[np.int64]
    by_role: NDArray[np.int64]
    starts_us: NDArray[np.float64]
    overhead_bytes: int
    sizes_bytes: NDArray[np.int64]
    liveness: Liveness

    @property
    def peak_op(self) -> int:
        """The index of the op during which the most bytes are allocated."""
        return int(np.argmax(self.live_bytes))

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated at any moment, everything counted."""
        return int(self.live_bytes.max(initial=0))

    @property
    def step_us(self) -> float:
        """The time of the whole step."""
        return float(self.starts_us[-1])

    def peak_by_role(self) -> dict[Role, int]:
        """What the peak is made of."""
        column = self.by_role[:, self.peak_op]
        return {role: int(count) for role, count in zip(ROLES, column, strict=True)}

    def alive_at(self, position: int) -> list[int]:
        """The storages that are there while an op runs, largest first."""
        liveness = self.liveness
        there = (liveness.birth <= position) & (position <= liveness.release)
        indices = np.flatnonzero(there & (self.sizes_bytes > 0))
        return [int(i) for i in indices[np.argsort(-self.sizes_bytes[indices], kind="stable")]]


def simulate(graph: StepGraph, profile: Profile) -> Trace:
    """The memory of the plain step, as the device's caching allocator would count it.

    A storage's bytes are rounded up as the allocator does; an op's outputs exist before its inputs
    are freed; its workspace exists while it runs.
    """
    profile.check(graph)
    liveness = analyze(graph)
    sizes = device_sizes(graph, profile.allocator)
    n_ops = len(graph.ops)
    role_index = {role: i for i, role in enumerate(ROLES)}
    roles = np.array([role_index[s.role] for s in graph.storages], dtype=np.int64)
    changes = np.zeros((len(ROLES), n_ops + 1), dtype=np.int64)
    np.add.at(changes, (roles, np.minimum(liveness.birth, n_ops)), sizes)
    release = liveness.release
    np.subtract.at(changes, (roles, release + 1), np.where(release >= 0, sizes, 0))
    by_role = np.cumsum(changes[:, :n_ops], axis=1)
    by_role[role_index[Role.TEMP]] += profile.workspaces_bytes
    live = by_role.sum(axis=0) + profile.overhead_bytes
    return Trace(
        graph=graph,
        live_bytes=live,
        by_role=by_role,
        starts_us=profile.starts_us,
        overhead_bytes=profile.overhead_bytes,
        sizes_bytes=sizes,
        liveness=liveness,
    )


def device_sizes(graph: StepGraph, allocator: str) -> NDArray[np.int64]:
    """Each storage's bytes on the main device, as its allocator counts; 0 for what is elsewhere."""
    device = main_device(graph)
    sizes = np.array([storage.nbytes for storage in graph.storages], dtype=np.int64)
    elsewhere = np.array([storage.device != device for storage in graph.storages], dtype=bool)
    return np.where(elsewhere, 0, allocated_bytes(sizes, allocator))


def main_device(graph: StepGraph) -> str:
    """The device that holds the parameters."""
    for storage in graph.storages:
        if storage.role is Role.PARAM:
            return storage.device
    return graph.storages[0].device if graph.storages else "cpu"
