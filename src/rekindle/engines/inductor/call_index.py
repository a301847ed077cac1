"""An index of a step's calls for fusion: without views, and with the fusible ones marked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import fx

from rekindle.engines.inductor import decompositions
from rekindle.engines.inductor.fusibility import KEEP_LONG_STATISTICS, is_fusible, is_simple
from rekindle.engines.inductor.recording_builder import is_view
from rekindle.torch_internals import OpOverload
from rekindle.tracing import rng
from rekindle.tracing.tape import Call, OptimizerCall, Tape

aten = torch.ops.aten


class CallIndex:
    """The calls before the optimizer, without views (`calls`), and the rest (`tail`).

    A node's root is the tensor that it is a view of. `fusible` are the nodes of calls that may be
    fused. `read_by_unfused` are the roots that all other calls read, `read_in_backward_by_unfused`
    those that they read in the backward pass. Groups must not touch the storages in `untouchable`.
    """

    def __init__(self, tape: Tape, calls: Iterable[Call | OptimizerCall]) -> None:
        self.tape = tape
        self.maker = {node: call for call in tape.calls for node in call.results}
        body, self.tail = _before_optimizer(list(calls))
        self._views = {call.node for call in body if is_view(call, tape)}
        self.views_of: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        for call in (each for each in body if each.node in self._views):
            for node in call.results:
                self.views_of[self.root(node)].append(node)
        self.calls = [call for call in body if call.node not in self._views]
        last = max((i for i, call in enumerate(self.calls) if call.in_backward), default=-1)
        self.untouchable = self._find_untouchable(body, self.calls[: last + 1])
        self.fusible = {c.node for c in self.calls[: last + 1] if self._is_fusible(c)}
        others = [call for call in self.calls if call.node not in self.fusible]
        self.read_by_unfused = self.read(others)
        self.read_in_backward_by_unfused = self.read(call for call in others if call.in_backward)

    def root(self, node: fx.Node) -> fx.Node:
        """The tensor that a node is a view of, through all views."""
        while node in self.maker and self.maker[node].node in self._views:
            storage = self.tape.metas[node].storage
            inputs = self.maker[node].node.all_input_nodes
            node = next(each for each in inputs if self.tape.metas[each].storage == storage)
        return node

    def read(self, calls: Iterable[Call]) -> set[fx.Node]:
        """The roots that some calls read."""
        return {self.root(arg) for call in calls for arg in call.node.all_input_nodes}

    def nbytes(self, node: fx.Node) -> int:
        """The bytes of a node's tensor."""
        meta = self.tape.metas[node]
        return math.prod(meta.shape) * meta.dtype.itemsize

    def has_mixed_dtypes(self, call: Call) -> bool:
        """True if an operator that is not pointwise gets floats of several dtypes."""
        target, metas = call.node.target, self.tape.metas
        types = {metas[node].dtype for node in call.node.all_input_nodes}
        is_mixed = sum(dtype.is_floating_point for dtype in types) > 1
        return is_mixed and isinstance(target, OpOverload) and not is_simple(target)

    def ordering(self) -> list[set[int]]:
        """The calls that each call must follow because of writes and random draws."""
        written = self._storages(node for call in self.calls for node in call.writes)
        users: dict[int, list[int]] = {}  # by storage: calls since the last write
        drawn: list[int] = []
        predecessors: list[set[int]] = []
        for index, call in enumerate(self.calls):
            writes = self._storages(call.writes)
            reads = self._storages((*call.node.all_input_nodes, *call.results)) & written
            predecessors.append({i for s in writes for i in users.get(s, ())})
            predecessors[index].update(users[s][0] for s in reads if s in users)
            for storage in writes:
                users[storage] = []
            for storage in reads | writes:
                users.setdefault(storage, []).append(index)
            if call.is_random or call.node.target in (rng.get_state, rng.set_state):
                predecessors[index].update(drawn[-1:])
                drawn.append(index)
        return predecessors

    def _storages(self, nodes: Iterable[fx.Node]) -> set[int]:
        return {self.tape.metas[node].storage for node in nodes}

    def _find_untouchable(self, body: list[Call], calls: list[Call]) -> set[int]:
        """The storages that no group may touch.

        They are written to before the backward pass ends, or the compiler cannot follow them:
        viewed by `as_strided`, or complex with conjugate views.
        """
        strided = (c for c in body if c.node.target is aten.as_strided.default)
        return {
            *self._storages(node for call in calls for node in call.writes),
            *self._storages(node for call in strided for node in call.node.all_input_nodes),
            *(meta.storage for meta in self.tape.metas.values() if meta.dtype.is_complex),
        }

    def _is_fusible(self, call: Call) -> bool:
        target = call.node.target
        storages = self._storages([*call.node.all_input_nodes, *call.results])
        devices = {self.tape.storages[storage].device for storage in storages}
        if call.is_random or len(devices) != 1 or not call.results:
            return False
        if target is decompositions.batch_statistics:
            return True
        if call.writes or storages & self.untouchable:
            return False
        if target in KEEP_LONG_STATISTICS and self.has_mixed_dtypes(call):
            return {device.type for device in devices} != {"cpu"}
        return is_fusible(target)


def _before_optimizer(
    calls: list[Call | OptimizerCall],
) -> tuple[list[Call], list[Call | OptimizerCall]]:
    """The calls before the optimizer is first called, and the rest."""
    is_end = [isinstance(call, OptimizerCall) or call.in_optimizer for call in calls]
    end = is_end.index(True) if True in is_end else len(calls)
    return [call for call in calls[:end] if isinstance(call, Call)], calls[end:]
