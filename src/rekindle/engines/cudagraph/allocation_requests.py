"""What a step's nodes are going to ask the allocator for, as far as its graph and profile tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import numpy as np
from torch import fx

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Phase, StepGraph
from rekindle.core.graph.schedule import Compute, Plan
from rekindle.core.graph.simulate import main_device
from rekindle.core.memory.allocator_steering import REST_BYTES, Blocks, rounded
from rekindle.core.memory.layout import layout, schedule_of
from rekindle.engines.cudagraph.graph_parts import Part
from rekindle.engines.program import Program
from rekindle.passes.fx_nodes import item_path

# The library for these takes memory when it is first used on a stream, and keeps it.
_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_addmm_activation")
)


class AllocationRequests:
    """The large pieces that the captured nodes of a step ask for: results, and workspaces.

    `pieces_of` has those of each node, by their number. After each of `last_before_unknown` comes a
    call of the optimizer, which cannot be looked into. Workspaces are known from a profile; without
    one, they can be added.
    """

    def __init__(
        self,
        program: Program,
        parts: list[Part],
        graph: StepGraph,
        plan: Plan | None,
        profile: Profile | None,
        made_outside: AbstractSet[fx.Node] = frozenset(),
    ) -> None:
        """`plan` is what the program was rewritten by, if anything; `graph` is of the plan.

        What nodes of `made_outside` stand for is there before the graph runs.
        """
        self._nbytes: list[int] = []
        self.pieces_of: defaultdict[fx.Node, list[int]] = defaultdict(list)
        self.last_before_unknown: set[fx.Node] = set()
        self.has_products = False
        self._start: list[int] = []
        self._end: list[int] = []
        self._is_steered: list[bool] = []
        self._graph = graph
        listing = program.listing
        self._captured = {node for part in parts if part.is_graph for node in part.nodes}
        self._captured -= made_outside
        self._calls = self._captured & listing.optimizer_calls.keys()
        origin = {node: place for node, place in listing.origin.items() if node in self._captured}
        if not listing.origin:  # the step as it was recorded: nodes have the names of their ops
            ops = {op.name: op.index for op in graph.ops}
            origin = {n: (ops[n.name], 0) for n in self._captured if n.name in ops}
        node_of = {place: node for node, place in origin.items()}
        schedule = schedule_of(graph, plan)
        runs = [(step.op, step.copy) for step in schedule if isinstance(step, Compute)]
        self._n_positions = len(runs)
        nodes = [node_of.get(run) for run in runs]
        self._places = {
            node: (position, run[0])
            for position, (run, node) in enumerate(zip(runs, nodes, strict=True))
            if node is not None
        }
        self.has_workspaces = profile is not None
        self._add_results(plan, runs, nodes, self._left(program, parts), self._ranks(program))
        if profile is not None:
            workspaces = profile.workspaces_bytes.tolist()
            for position, (run, node) in enumerate(zip(runs, nodes, strict=True)):
                self._add(position, position, workspaces[run[0]], run[0], node)
        for run, node in zip(runs, nodes, strict=True):
            if node is not None and _operator(graph.ops[run[0]].target) in _PRODUCTS:
                self.has_products = True
        for part in parts:
            for node, following in zip(part.nodes, part.nodes[1:], strict=False):
                if following in self._calls:
                    self.last_before_unknown.add(node)

    @property
    def nodes(self) -> set[fx.Node]:
        """The captured nodes that stand for ops."""
        return set(self._places)

    @property
    def n_pieces(self) -> int:
        """How many pieces there are."""
        return len(self._nbytes)

    def pieces(self, library_bytes: int) -> Blocks:
        """All pieces, with what a library keeps throughout as the last one; it is there first."""
        has_library = library_bytes > REST_BYTES
        last = [(0, self._n_positions, library_bytes, True)] if has_library else []
        start = [each + 1 for each in self._start] + [each[0] for each in last]
        end = [each + 1 for each in self._end] + [each[1] for each in last]
        nbytes = self._nbytes + [each[2] for each in last]
        is_steered = self._is_steered + [each[3] for each in last]
        return Blocks(
            np.array(start, dtype=np.int64),
            np.array(end, dtype=np.int64),
            np.array([rounded(each) for each in nbytes], dtype=np.int64),
            np.array(is_steered, dtype=bool),
        )

    def add_workspaces(self, nbytes_of: Mapping[fx.Node, int]) -> None:
        """Add what nodes were seen to ask for beside their results."""
        for node, nbytes in nbytes_of.items():
            position, op = self._places[node]
            self._add(position, position, nbytes, op, node)
        self.has_workspaces = True

    def _add_results(
        self,
        plan: Plan | None,
        runs: list[tuple[int, int]],
        nodes: list[fx.Node | None],
        left: set[int],
        ranks: Mapping[tuple[int, int], int],
    ) -> None:
        """Add what ops make. What a graph hands on to later parts is there as long as the graph."""
        graph, device = self._graph, main_device(self._graph)
        laid = layout(graph, plan, in_place=False, sharing=False)
        lives = zip(laid.storage.tolist(), laid.start.tolist(), laid.end.tolist(), strict=True)
        asked = sorted(lives, key=lambda life: (life[1], ranks.get((runs[life[1]][0], life[0]), 0)))
        for storage, start, end in asked:
            if graph.storages[storage].device == device:
                last = self._n_positions - 1 if storage in left else end
                nbytes = graph.storages[storage].nbytes
                self._add(start, last, nbytes, runs[start][0], nodes[start])

    def _add(self, start: int, end: int, nbytes: int, op: int, node: fx.Node | None) -> None:
        """Add a piece, if it is a large one and made in a graph."""
        in_call = self._graph.ops[op].phase is Phase.OPTIMIZER and bool(self._calls)
        if nbytes <= REST_BYTES or (node is None and not in_call):
            return
        if node is not None:
            self.pieces_of[node].append(len(self._nbytes))
        self._nbytes.append(nbytes)
        self._start.append(start)
        self._end.append(end)
        self._is_steered.append(node is not None)

    def _ranks(self, program: Program) -> dict[tuple[int, int], int]:
        """By op and storage: when memory is asked for it, among an op's results."""
        storage_of = {value.name: value.storage for value in self._graph.values}
        ranks: dict[tuple[int, int], int] = {}
        for node, (_, op) in self._places.items():
            call = program.listing.calls.get(node)
            order: list[int] = getattr(node.target, "order", [])
            for result in call.results if call else ():
                index = item_path(result)[1]
                if len(index) == 1 and index[0] in order:
                    ranks[op, storage_of.get(result.name, -1)] = order.index(index[0])
        return ranks

    def _left(self, program: Program, parts: list[Part]) -> set[int]:
        """The storages of what graphs hand on."""
        listing, graph = program.listing, self._graph
        storage_of = {value.name: value.storage for value in graph.values}
        found: set[int] = set()
        for node in [node for part in parts if part.is_graph for node in part.leaving]:
            call, indices = listing.calls.get(node), item_path(node)[1]
            for result in call.results if call else ():
                if not indices or item_path(result)[1] in ((), indices):
                    found.add(storage_of.get(result.name, -1))
        return found


def _operator(target: str) -> str:
    """An operator's name without namespace and overload."""
    names = target.split(".")
    return names[1] if len(names) > 1 else target
