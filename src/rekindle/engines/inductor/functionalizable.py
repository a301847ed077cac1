"""Which of a recorded step's tensors may be made anew where they are written over.

A tensor that the step has made may be, if nobody looks later on at the memory that is written to
but through the tensor itself. All other memory that is written to is pinned: it stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators
from rekindle.tracing.tape import Call, OptimizerCall, Recording

aten = torch.ops.aten

_NEVER = 1 << 62


class Replaceable:
    """The tensors of one recorded step; `calls` are those in order, with the optimizer's."""

    def __init__(self, recording: Recording, calls: Iterable[Call | OptimizerCall]) -> None:
        self._tape = recording.tape
        self._calls = [c for c in calls if isinstance(c, OptimizerCall) or not c.in_optimizer]
        self._last_compiled = self._find_last_compiled()
        self._sets_states = any(
            not isinstance(call.node.target, OpOverload)
            for call in self._tape.calls
            if not call.in_optimizer
        )
        optimizer_calls = self._tape.optimizer_calls
        self.ends = {*recording.outputs, *(g for call in optimizer_calls for g in call.grads)}
        self.maker = {node: call for call in self._tape.calls for node in call.results}
        self._last_use = self._last_uses()
        self.entered = self.storages(entry.node for entry in self._tape.entries)
        self.pinned: set[int] = set()
        self._find_pinned()
        self.own = self.pinned | self.storages(self.ends)
        """Storages of tensors that no other tensor's place may be taken by, if equal."""

    def storages(self, nodes: Iterable[fx.Node]) -> set[int]:
        """The storages of recorded nodes."""
        return {self._tape.metas[node].storage for node in nodes}

    def is_compiled(self, call: Call) -> bool:
        """Whether a call will be compiled, if it is such that it can be."""
        touched = self.storages([*call.node.all_input_nodes, *call.results, *call.writes])
        return call.serial <= self._last_compiled and touched.isdisjoint(self.pinned)

    def is_dropout(self, call: Call) -> bool:
        """Whether a call is a dropout whose mask may come from a seed."""
        is_dropout = call.node.target is aten.native_dropout.default and call.is_random
        return is_dropout and not self._sets_states and self.is_compiled(call)

    def is_coin(self, call: Call) -> bool:
        """Whether a call fills a new tensor with ones and zeros, as dropout does on a CPU."""
        is_coin = call.node.target is aten.bernoulli_.float and not call.node.kwargs
        is_seeded = is_coin and not self._sets_states and self.is_compiled(call)
        return is_seeded and self._is_unseen(call)

    def is_replaceable(self, call: Call) -> bool:
        """Whether an in-place call may make a new tensor instead."""
        target = call.node.target
        return (
            isinstance(target, OpOverload)
            and not call.is_random
            and operators.is_in_place(target)
            and torch.Tag.pointwise in target.tags
            and operators.out_of_place(target) is not None
            and self._is_unseen(call)
        )

    def _is_unseen(self, call: Call) -> bool:
        """Whether nobody looks later on at what a call writes over, but for what it is given."""
        if len(call.writes) != 1 or call.node.args[0] is not call.writes[0]:
            return False
        (written,) = call.writes
        storage = self._tape.metas[written].storage
        if storage in self.entered or storage in self.pinned:
            return False
        return not any(
            other is not written and last > call.serial and self.maker[other].serial < call.serial
            for other, last in self._last_use.get(storage, {}).items()
        )

    def _find_pinned(self) -> None:
        """Storages that stay as they are: written over for good, or looked at by address."""
        for call in self._calls:
            if isinstance(call, OptimizerCall):
                continue
            if call.node.target is aten.as_strided.default:
                self.pinned |= self.storages(call.node.all_input_nodes)
            elif call.writes and not (self.is_replaceable(call) or self.is_coin(call)):
                self.pinned |= self.storages(call.writes)

    def _find_last_compiled(self) -> int:
        """The last call of a backward pass before the optimizer's: what follows is not fused."""
        last = 0
        for call in self._calls:
            if isinstance(call, OptimizerCall):
                break
            if call.in_backward:
                last = call.serial
        return last

    def _last_uses(self) -> dict[int, dict[fx.Node, int]]:
        """For each storage, when each of the nodes on it is last read."""
        found: dict[int, dict[fx.Node, int]] = {}
        for call in self._tape.calls:
            for node in call.node.all_input_nodes:
                found.setdefault(self._tape.metas[node].storage, {})[node] = call.serial
        for node in self.ends:
            found.setdefault(self._tape.metas[node].storage, {})[node] = _NEVER
        return found
