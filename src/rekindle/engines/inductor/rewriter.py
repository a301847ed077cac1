"""Shared means of the passes that rewrite a recording: calls made once, and tensors laid out.

A recorded step writes in place. A write to a tensor that the step has made itself can become a new
tensor if no other view of its memory is read later; `MutationAnalysis` finds these. All other
memory that is written to is pinned: it keeps its storage and its layout.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import fx

from rekindle.engines.inductor import decompositions
from rekindle.engines.inductor.recording_builder import RecordingBuilder
from rekindle.engines.strides import contiguous_stride, is_dense, significant_strides
from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators
from rekindle.tracing.tape import Call, OptimizerCall, Recording

aten = torch.ops.aten

_NEVER = 1 << 62


class MutationAnalysis:
    """Which writes of a recorded step can become new tensors, and which storages are pinned."""

    def __init__(self, recording: Recording, calls: Iterable[Call | OptimizerCall]) -> None:
        """`calls` are the step's in order, with the optimizer's."""
        self._tape = recording.tape
        self._calls = [c for c in calls if isinstance(c, OptimizerCall) or not c.in_optimizer]
        self._last_compiled = self._find_last_compiled()
        self._saves_rng_state = any(
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
        # Storages of tensors that must not be merged with an equal tensor.
        self.unshareable = self.pinned | self.storages(self.ends)

    def storages(self, nodes: Iterable[fx.Node]) -> set[int]:
        """The storages of recorded nodes."""
        return {self._tape.metas[node].storage for node in nodes}

    def is_compiled(self, call: Call) -> bool:
        """True if a call will be compiled, provided that its operator is fusible."""
        touched = self.storages([*call.node.all_input_nodes, *call.results, *call.writes])
        return call.serial <= self._last_compiled and touched.isdisjoint(self.pinned)

    def is_dropout(self, call: Call) -> bool:
        """True if a call is a dropout whose mask may be computed from a seed."""
        is_dropout = call.node.target is aten.native_dropout.default and call.is_random
        return is_dropout and not self._saves_rng_state and self.is_compiled(call)

    def is_bernoulli(self, call: Call) -> bool:
        """True if a call fills a new tensor with a random mask, as dropout does on a CPU."""
        is_bernoulli = call.node.target is aten.bernoulli_.float and not call.node.kwargs
        is_seeded = is_bernoulli and not self._saves_rng_state and self.is_compiled(call)
        return is_seeded and self._is_unobserved(call)

    def is_functionalizable(self, call: Call) -> bool:
        """True if an in-place call may return a new tensor instead."""
        target = call.node.target
        return (
            isinstance(target, OpOverload)
            and not call.is_random
            and operators.is_in_place(target)
            and torch.Tag.pointwise in target.tags
            and operators.out_of_place(target) is not None
            and self._is_unobserved(call)
        )

    def _is_unobserved(self, call: Call) -> bool:
        """True if what a call overwrites is read later only through the tensor it is given."""
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
        """Pin storages that are written in place, or viewed by `as_strided`."""
        for call in self._calls:
            if isinstance(call, OptimizerCall):
                continue
            if call.node.target is aten.as_strided.default:
                self.pinned |= self.storages(call.node.all_input_nodes)
            elif call.writes and not (self.is_functionalizable(call) or self.is_bernoulli(call)):
                self.pinned |= self.storages(call.writes)

    def _find_last_compiled(self) -> int:
        """The last call of a backward pass before the optimizer's: later ones are not fused."""
        last = 0
        for call in self._calls:
            if isinstance(call, OptimizerCall):
                break
            if call.in_backward:
                last = call.serial
        return last

    def _last_uses(self) -> dict[int, dict[fx.Node, int]]:
        """For each storage, the last call that reads each of the nodes on it."""
        found: dict[int, dict[fx.Node, int]] = {}
        for call in self._tape.calls:
            for node in call.node.all_input_nodes:
                found.setdefault(self._tape.metas[node].storage, {})[node] = call.serial
        for node in self.ends:
            found.setdefault(self._tape.metas[node].storage, {})[node] = _NEVER
        return found


class Rewriter:
    """A recording that is being rewritten. `node_map` maps recorded nodes to new ones.

    `old` is the recorded tape. New calls take their place in the step (phase, module, source) from
    a recorded one, the `template`.
    """

    def __init__(self, recording: Recording) -> None:
        self.builder = RecordingBuilder(recording)
        self.old = recording.tape
        self.node_map = self.builder.node_map
        self.computed: dict[Hashable, Call] = {}  # by target and arguments
        self.outdated: set[fx.Node] = set()  # new nodes from before the optimizer's last call
        self.functionalized: set[fx.Node] = set()  # recorded nodes no longer written in place
        self.analysis = MutationAnalysis(recording, self.builder.calls())
        self.pinned = self.analysis.pinned
        entries = (entry.node for entry in self.old.entries)
        pinned = (node for node in entries if self.old.metas[node].storage in self.pinned)
        self._new_pinned = {self.builder.meta(self.node_map[node]).storage for node in pinned}

    def emit(
        self,
        target: Any,
        args: tuple[Any, ...],
        template: Call,
        kwargs: dict[str, Any] | None = None,
    ) -> Call:
        """Add a call without side effects."""
        return self.builder.emit(target, args, kwargs or {}, template, writes=(), is_random=False)

    def emit_once(
        self, target: Any, args: Any, template: Call, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """The result of a call without side effects, shared unless its arguments may change."""
        if self.is_pinned(args):
            return self.emit(target, args, template, kwargs).results[0]
        key = (target, repr(args), repr(kwargs or {}))
        if key not in self.computed:
            self.computed[key] = self.emit(target, args, template, kwargs)
        return self.computed[key].results[0]

    def is_pinned(self, args: Iterable[Any]) -> bool:
        """True if one of these new nodes may be written to."""
        nodes = (arg for arg in args if isinstance(arg, fx.Node))
        return any(self.builder.meta(node).storage in self._new_pinned for node in nodes)

    def pin(self, nodes: Iterable[fx.Node], template: Call) -> None:
        """Lay out pinned tensors as recorded from the start: views see what is written."""
        for node in nodes:
            if self.old.metas[node].storage in self.pinned:
                self.restore_layout(node, template)
                self._new_pinned.add(self.builder.meta(self.node_map[node]).storage)

    def copy_to_format(
        self, node: fx.Node, memory_format: torch.memory_format, template: Call
    ) -> fx.Node:
        """A copy in another memory format. A cast tensor (a weight) is cast to it directly."""
        is_cast = node.target is aten._to_copy.default and node not in self.outdated
        if is_cast and not self.is_pinned(node.args):
            kwargs = {**node.kwargs, "memory_format": memory_format}
            return self.emit_once(aten._to_copy.default, node.args, template, kwargs)
        kwargs = {"memory_format": memory_format}
        return self.emit_once(aten.clone.default, (node,), template, kwargs)

    def restore_layout(self, node: fx.Node, template: Call) -> None:
        """Replace a tensor by one with the recorded layout in memory."""
        new = self.node_map[node]
        meta, now = self.old.metas[node], self.builder.meta(new)
        contiguous = meta._replace(stride=contiguous_stride(meta.shape))
        wanted = meta if is_dense(meta.shape, meta.stride) else contiguous
        accepted = significant_strides(meta), significant_strides(wanted)
        if significant_strides(now) in accepted:
            return
        if significant_strides(wanted) == significant_strides(contiguous):
            self.node_map[node] = self.copy_to_format(new, torch.contiguous_format, template)
        else:
            self._copy_to_recorded_stride(node, template)

    def restore_strides(self, node: fx.Node, template: Call) -> None:
        """Restore all strides, of dimensions of one element too: optimizers compare them."""
        self.restore_layout(node, template)
        new, meta = self.node_map[node], self.old.metas[node]
        if self.builder.meta(new).stride == meta.stride or not is_dense(meta.shape, meta.stride):
            return
        if meta.stride == contiguous_stride(meta.shape):
            for shape in ([size for size in meta.shape if size != 1], list(meta.shape)):
                (new,) = self.emit(aten.view.default, (new, shape), template).results
            self.node_map[node] = new
        else:
            self._copy_to_recorded_stride(node, template)

    def _copy_to_recorded_stride(self, node: fx.Node, template: Call) -> None:
        args = self.node_map[node], list(self.old.metas[node].stride)
        self.node_map[node] = self.emit_once(decompositions.in_order, args, template)
