"""The allocations that a step's captured nodes will request, from its graph, plan and profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import fx

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Phase, StepGraph
from rekindle.core.graph.schedule import Compute, Plan, schedule_of
from rekindle.core.graph.simulate import main_device
from rekindle.core.memory.allocator_steering import REST_BYTES, Blocks, rounded
from rekindle.core.memory.layout import layout
from rekindle.engines.cudagraph.graph_parts import StepPart
from rekindle.engines.program import Program
from rekindle.passes.fx_nodes import item_path

# cuBLAS allocates a workspace when it is first used on a stream, and keeps it.
_MATMULS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_addmm_activation")
)


class BlockRequest(NamedTuple):
    """A large block: its lifetime in positions of the schedule, and its size."""

    start: int
    end: int
    nbytes: int
    is_steered: bool  # False in the optimizer's calls, which cannot be steered


class AllocationRequests:
    """The large blocks that the captured nodes of a step request: results, and workspaces.

    `blocks_of` has the indices of each node's blocks in `requests`. The optimizer is called after
    each node of `before_optimizer`; its requests are unknown. Workspaces come from the profile;
    without one, they can be added once they are measured.
    """

    def __init__(
        self,
        program: Program,
        parts: list[StepPart],
        graph: StepGraph,
        plan: Plan | None,
        profile: Profile | None,
        preallocated: AbstractSet[fx.Node] = frozenset(),
    ) -> None:
        """`graph` is the graph of `plan`, or of the recorded step without one.

        The results of `preallocated` nodes exist before the CUDA graph runs.
        """
        self.requests: list[BlockRequest] = []
        self.blocks_of: defaultdict[fx.Node, list[int]] = defaultdict(list)
        self._graph = graph
        rewritten = program.rewritten
        captured = {node for part in parts if part.is_graph for node in part.nodes} - preallocated
        optimizer_calls = captured & rewritten.optimizer_calls.keys()
        self._has_optimizer = bool(optimizer_calls)
        self.before_optimizer = {
            node
            for part in parts
            for node, following in pairwise(part.nodes)
            if following in optimizer_calls
        }
        origin = {node: place for node, place in rewritten.origin.items() if node in captured}
        if not rewritten.origin:  # a step as recorded: nodes are named as their ops
            ops = {op.name: op.index for op in graph.ops}
            origin = {node: (ops[node.name], 0) for node in captured if node.name in ops}
        node_of = {place: node for node, place in origin.items()}
        steps = [step for step in schedule_of(graph, plan) if isinstance(step, Compute)]
        self._ops = [step.op for step in steps]  # by position
        self._nodes = [node_of.get((step.op, step.copy)) for step in steps]
        self._position_of = {node: i for i, node in enumerate(self._nodes) if node is not None}
        self.has_matmuls = any(
            _operator(graph.ops[self._ops[position]].target) in _MATMULS
            for position in self._position_of.values()
        )
        self._add_results(program, parts, plan)
        self.has_workspaces = profile is not None
        if profile is not None:
            workspaces = profile.workspaces_bytes.tolist()
            for position, op in enumerate(self._ops):
                self._add(position, position, workspaces[op])

    @property
    def nodes(self) -> set[fx.Node]:
        """The captured nodes that stand for ops."""
        return set(self._position_of)

    def blocks(self, cublas_workspace_bytes: int) -> Blocks:
        """All blocks, and last cuBLAS's workspace, which is allocated first and kept throughout."""
        requests = self.requests[:]
        if cublas_workspace_bytes > REST_BYTES:
            requests.append(BlockRequest(-1, len(self._ops) - 1, cublas_workspace_bytes, True))
        return Blocks(
            np.array([each.start + 1 for each in requests], dtype=np.int64),
            np.array([each.end + 1 for each in requests], dtype=np.int64),
            np.array([rounded(each.nbytes) for each in requests], dtype=np.int64),
            np.array([each.is_steered for each in requests], dtype=bool),
        )

    def add_workspaces(self, nbytes_of: Mapping[fx.Node, int]) -> None:
        """Add the workspaces that nodes were measured to need."""
        for node, nbytes in nbytes_of.items():
            position = self._position_of[node]
            self._add(position, position, nbytes)
        self.has_workspaces = True

    def _add_results(self, program: Program, parts: list[StepPart], plan: Plan | None) -> None:
        """Add the results of ops. Those handed on to later parts live as long as the graph."""
        graph, device = self._graph, main_device(self._graph)
        storage_of = {value.name: value.storage for value in graph.values}
        handed_on = self._handed_on(program, parts, storage_of)
        request_order = self._request_order(program, storage_of)
        found = layout(graph, plan, in_place=False, sharing=False)
        columns = (found.storage.tolist(), found.start.tolist(), found.end.tolist())
        lifetimes = sorted(
            zip(*columns, strict=True),
            key=lambda each: (each[1], request_order.get((self._ops[each[1]], each[0]), 0)),
        )
        for storage, start, end in lifetimes:
            if graph.storages[storage].device == device:
                last = len(self._ops) - 1 if storage in handed_on else end
                self._add(start, last, graph.storages[storage].nbytes)

    def _add(self, start: int, end: int, nbytes: int) -> None:
        """Add a block if it is large and allocated in a CUDA graph."""
        node, op = self._nodes[start], self._graph.ops[self._ops[start]]
        in_optimizer = self._has_optimizer and op.phase is Phase.OPTIMIZER
        if nbytes <= REST_BYTES or (node is None and not in_optimizer):
            return
        if node is not None:
            self.blocks_of[node].append(len(self.requests))
        self.requests.append(BlockRequest(start, end, nbytes, is_steered=node is not None))

    def _request_order(
        self, program: Program, storage_of: Mapping[str, int]
    ) -> dict[tuple[int, int], int]:
        """By op and storage: the position of the storage among the op's requests."""
        found: dict[tuple[int, int], int] = {}
        for node, position in self._position_of.items():
            call = program.rewritten.calls.get(node)
            order: list[int] = getattr(node.target, "order", [])
            for result in call.results if call else ():
                index = item_path(result)[1]
                if len(index) == 1 and index[0] in order:
                    key = self._ops[position], storage_of.get(result.name, -1)
                    found[key] = order.index(index[0])
        return found

    def _handed_on(
        self, program: Program, parts: list[StepPart], storage_of: Mapping[str, int]
    ) -> set[int]:
        """The storages that CUDA graphs hand on to later parts."""
        found: set[int] = set()
        for node in [node for part in parts if part.is_graph for node in part.leaving]:
            call, indices = program.rewritten.calls.get(node), item_path(node)[1]
            for result in call.results if call else ():
                if not indices or item_path(result)[1] in ((), indices):
                    found.add(storage_of.get(result.name, -1))
        return found


def _operator(target: str) -> str:
    """The name of an operator without namespace and overload."""
    names = target.split(".")
    return names[1] if len(names) > 1 else target
