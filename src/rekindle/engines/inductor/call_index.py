"""A step's calls as the compiler's part of it sees them: views apart, and who may be fused."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import fx

from rekindle.engines.inductor import decompositions
from rekindle.engines.inductor.fusibility import KEEP_LONG_STATISTICS, is_fusible, is_simple
from rekindle.engines.inductor.recording_builder import is_view
from rekindle.passes.fx_nodes import root
from rekindle.torch_internals import OpOverload
from rekindle.tracing import rng
from rekindle.tracing.tape import Call, OptimizerCall, Tape

aten = torch.ops.aten


class CallIndex:
    """What is called before the optimizer is: `calls` without views, and `tail`, the rest.

    `fusible` are the nodes of calls that groups are made of; `read_by_others` is what all other
    calls read, `read_by_others_later` what those of the backward pass do.
    """

    def __init__(self, tape: Tape, calls: Iterable[Call | OptimizerCall]) -> None:
        self.tape = tape
        self.maker = {node: call for call in tape.calls for node in call.results}
        body, self.tail = _split(list(calls))
        self._views = {call.node for call in body if is_view(call, tape)}
        self.views_of: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        for call in (each for each in body if each.node in self._views):
            for node in call.results:
                self.views_of[self.root(node)].append(node)
        self.calls = [call for call in body if call.node not in self._views]
        last = max((i for i, call in enumerate(self.calls) if call.in_backward), default=-1)
        self.kept = self._kept(body, self.calls[: last + 1])
        self.fusible = {c.node for c in self.calls[: last + 1] if self._is_fusible(c)}
        others = [call for call in self.calls if call.node not in self.fusible]
        self.read_by_others = self.read(others)
        self.read_by_others_later = self.read(call for call in others if call.in_backward)

    def root(self, node: fx.Node) -> fx.Node:
        """What a node looks at, through all views."""
        return root(node, self._shown)

    def _shown(self, node: fx.Node) -> fx.Node | None:
        """The tensor that a view shows; None if the node is no view."""
        if node not in self.maker or self.maker[node].node not in self._views:
            return None
        storage = self.tape.metas[node].storage
        inputs = self.maker[node].node.all_input_nodes
        return next(each for each in inputs if self.tape.metas[each].storage == storage)

    def read(self, calls: Iterable[Call]) -> set[fx.Node]:
        """What some calls read."""
        return {self.root(arg) for call in calls for arg in call.node.all_input_nodes}

    def nbytes(self, node: fx.Node) -> int:
        """The bytes of a node's tensor."""
        meta = self.tape.metas[node]
        return math.prod(meta.shape) * meta.dtype.itemsize

    def has_mixed_types(self, call: Call) -> bool:
        """Whether an operator that is more than element by element gets long and short numbers."""
        target, metas = call.node.target, self.tape.metas
        types = {metas[node].dtype for node in call.node.all_input_nodes}
        is_mixed = sum(dtype.is_floating_point for dtype in types) > 1
        return is_mixed and isinstance(target, OpOverload) and not is_simple(target)

    def orders(self) -> list[set[int]]:
        """What each call has to follow, whatever it reads: writes, and draws of random numbers."""
        written = self._storages(node for call in self.calls for node in call.writes)
        touched: dict[int, list[int]] = {}  # by storage: who has, from the last write on
        drawn: list[int] = []
        needs: list[set[int]] = []
        for index, call in enumerate(self.calls):
            writes = self._storages(call.writes)
            reads = self._storages((*call.node.all_input_nodes, *call.results)) & written
            needs.append({i for s in writes for i in touched.get(s, ())})
            needs[index].update(touched[s][0] for s in reads if s in touched)
            for storage in writes:
                touched[storage] = []
            for storage in reads | writes:
                touched.setdefault(storage, []).append(index)
            if call.is_random or call.node.target in (rng.get_state, rng.set_state):
                needs[index].update(drawn[-1:])
                drawn.append(index)
        return needs

    def _storages(self, nodes: Iterable[fx.Node]) -> set[int]:
        return {self.tape.metas[node].storage for node in nodes}

    def _kept(self, body: list[Call], calls: list[Call]) -> set[int]:
        """Storages that no group may touch: written to before the backward pass ends, or such that
        the compiler cannot follow (seen by address, or complex, with marks on views).
        """
        looks = (c for c in body if c.node.target is aten.as_strided.default)
        return {
            *self._storages(node for call in calls for node in call.writes),
            *self._storages(node for call in looks for node in call.node.all_input_nodes),
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
        if call.writes or storages & self.kept:
            return False
        if target in KEEP_LONG_STATISTICS and self.has_mixed_types(call):
            return {device.type for device in devices} != {"cpu"}
        return is_fusible(target)


def _split(calls: list[Call | OptimizerCall]) -> tuple[list[Call], list[Call | OptimizerCall]]:
    """What comes before the optimizer is first called, and the rest."""
    is_end = [isinstance(call, OptimizerCall) or call.in_optimizer for call in calls]
    end = is_end.index(True) if True in is_end else len(calls)
    return [call for call in calls[:end] if isinstance(call, Call)], calls[end:]
