"""Rewrites a recording: new calls on fake tensors, equal calls made once, and tensors laid out.

A recorded step writes in place. A write to a tensor that the step has made itself can become a new
tensor if no other view of its memory is read later; `MutationAnalysis` finds these. All other
memory that is written to is pinned: it keeps its storage and its layout.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rekindle.core.identity import IdentitySet
from rekindle.engines.inductor import decompositions
from rekindle.engines.strides import contiguous_stride, is_dense, significant_strides
from rekindle.passes.fx_nodes import item_path
from rekindle.torch_internals import FakeTensor, FakeTensorMode, OpOverload
from rekindle.tracing import kernel_check, operators, rng
from rekindle.tracing.tape import Call, Entry, Meta, OptimizerCall, Recording, StorageMeta, Tape

aten = torch.ops.aten

AnyCall = Call | OptimizerCall
_NEVER = 1 << 62


class RecordingBuilder:
    """A recording being built. `node_map` maps recorded nodes to the new ones that replace them."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.tape = Tape()
        self.node_map: dict[fx.Node, fx.Node] = {}
        self._mode = FakeTensorMode()
        self.fakes: dict[fx.Node, FakeTensor] = {}  # by new node
        self._held = IdentitySet()
        self._index_of: dict[int, int] = {}  # by a storage's address
        self._storages: list[torch.UntypedStorage] = []  # kept alive, so that no address is reused
        self._add_inputs()

    def finish(self) -> Recording:
        """The new recording, without dead calls."""
        old, node_map = self.recording, self.node_map
        made = Recording(
            tape=self.tape,
            state=old.state,
            batch_nodes=[node_map[node] for node in old.batch_nodes],
            result=old.result,
            result_nodes=[node_map[node] for node in old.result_nodes],
            grads=[replace(use, final=use.final and node_map[use.final]) for use in old.grads],
            effects=[replace(e, nodes=[node_map[node] for node in e.nodes]) for e in old.effects],
            decisions=old.decisions,
        )
        made.drop_dead_calls()
        self.tape.graph.lint()
        return made

    def calls(self) -> Iterable[AnyCall]:
        """The recorded calls in order, with those of the optimizer."""
        tape = self.recording.tape
        calls: list[AnyCall] = [*tape.calls, *tape.optimizer_calls]
        found = {call.node: call for call in calls}
        return [found[node] for node in tape.graph.nodes if node in found]

    def meta(self, node: fx.Node) -> Meta:
        """Shape, strides, dtype and storage of a new node."""
        return self.tape.metas[node]

    def device(self, node: fx.Node) -> torch.device:
        """The device of a new node."""
        return self.tape.storages[self.tape.metas[node].storage].device

    def arguments(self, call: Call) -> tuple[Any, Any]:
        """A recorded call's arguments, on new nodes."""
        return fx.map_arg((call.node.args, dict(call.node.kwargs)), self.node_map.__getitem__)

    def keep(self, call: Call) -> None:
        """Add a recorded call, on new nodes."""
        args, kwargs = self.arguments(call)
        if call.node.target in (rng.get_state, rng.set_state):  # cannot run on fake tensors
            made = self._append(call.node.target, args, kwargs, call, self._as_recorded(call))
        else:
            made = self.emit(call.node.target, args, kwargs, call)
        self.map_results(call, made)

    def stays_view(self, call: Call) -> bool:
        """True if a recorded call on new nodes would return views and copy nothing."""
        try:
            found = self._run(call.node.target, *self.arguments(call))
        except (RuntimeError, ValueError):  # "Cannot view a tensor with shape ... and strides ..."
            return False
        inputs = (self.fakes[self.node_map[node]] for node in call.node.all_input_nodes)
        viewed = {fake.untyped_storage()._cdata for fake in inputs}
        return all(made.untyped_storage()._cdata in viewed for made in operators.tensors(found))

    def keep_optimizer(self, call: OptimizerCall) -> None:
        """Add a recorded call of the optimizer, on new nodes."""
        grads = [self.node_map[grad] for grad in call.grads]
        target, name = call.node.target, call.node.name
        node = self.tape.graph.create_node("call_function", target, tuple(grads), name=name)
        self.tape.optimizer_calls.append(replace(call, node=node, grads=grads))

    def map_results(self, call: Call, made: Call) -> None:
        """Map the results of a recorded call to those of a new one."""
        by_path = {item_path(node)[1]: node for node in made.results}
        for result in call.results:
            self.node_map[result] = by_path[item_path(result)[1]]

    def emit(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        template: Call,
        *,
        writes: Sequence[fx.Node] | None = None,
        is_random: bool | None = None,
    ) -> Call:
        """Add a call with phase, module and source of `template`, and its writes unless given."""
        if writes is None:
            writes = [self.node_map[each] for each in template.writes]
        call = self._append(target, args, kwargs, template, self._run(target, args, kwargs))
        call.writes = list(writes)
        if is_random is not None:
            call.is_random = is_random
        return call

    def _append(self, target: Any, args: Any, kwargs: Any, template: Call, result: Any) -> Call:
        is_same = target is template.node.target
        name = template.node.name if is_same else target.__name__.partition(".")[0]
        node = self.tape.graph.create_node("call_function", target, args, kwargs, name=name)
        call = replace(
            template,
            serial=len(self.tape.calls) + 1,
            node=node,
            results=self._bind(node, result),
            writes=[],
            flops=template.flops if is_same else 0,
        )
        self.tape.calls.append(call)
        return call

    def _as_recorded(self, call: Call) -> Any:
        """A fake tensor like a call's only result; None if it has none."""
        for result in call.results:
            meta = self.recording.tape.metas[result]
            device = self.recording.tape.storages[meta.storage].device
            with self._mode:
                return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
        return None

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        args = fx.map_arg(args, self.fakes.__getitem__)
        kwargs = fx.map_arg(kwargs, self.fakes.__getitem__)
        with self._mode, torch.no_grad():
            if isinstance(target, OpOverload):
                return kernel_check.call(target, args, kwargs)[0]
            return getattr(target, "on_fakes", target)(*args, **kwargs)

    def _add_inputs(self) -> None:
        """Add the recorded inputs; those that shared a storage still do."""
        tape = self.recording.tape
        storages_of: dict[int, torch.Tensor] = {}
        for entry in tape.entries:
            meta = tape.metas[entry.node]
            storage = tape.storages[meta.storage]
            with self._mode:
                if meta.storage not in storages_of:
                    storages_of[meta.storage] = torch.empty(
                        storage.nbytes, dtype=torch.uint8, device=storage.device
                    )
                typed = torch.empty(0, dtype=meta.dtype, device=storage.device)
                whole = storages_of[meta.storage].untyped_storage()
                fake = typed.set_(whole, 0, meta.shape, meta.stride)
            node = self.tape.graph.placeholder(entry.node.name)
            self.node_map[entry.node] = node
            self.tape.entries.append(Entry(entry.kind, entry.name, node, entry.tensor))
            self._hold(node, fake)

    def _bind(self, node: fx.Node, result: Any) -> list[fx.Node]:
        """Bind the new tensors in a result to nodes: the call's own, or one `getitem` for each."""
        if isinstance(result, torch.Tensor):
            if result in self._held:
                return []  # an argument, returned
            self._hold(node, result)
            return [node]
        found: list[fx.Node] = []
        for index, value in enumerate(result if isinstance(result, (tuple, list)) else ()):
            if value is None:
                continue
            args, name = (node, index), f"{node.name}_out{index}"
            item = self.tape.graph.create_node("call_function", operator.getitem, args, name=name)
            bound = self._bind(item, value)
            if not bound:
                self.tape.graph.erase_node(item)
            found.extend(bound)
        return found

    def _hold(self, node: fx.Node, fake: Any) -> None:
        storage = fake.untyped_storage()
        index = self._index_of.setdefault(storage._cdata, len(self._storages))
        if index == len(self._storages):
            self._storages.append(storage)
            self.tape.storages.append(StorageMeta(storage.nbytes(), fake.device))
        self.fakes[node] = fake
        self._held.add(fake)
        self.tape.metas[node] = Meta(tuple(fake.shape), fake.stride(), fake.dtype, index)


def is_view(call: Call, tape: Tape) -> bool:
    """True if a call returns only views of its arguments."""
    if call.writes or not call.results:
        return False
    read = {tape.metas[node].storage for node in call.node.all_input_nodes}
    return all(tape.metas[node].storage in read for node in call.results)


class MutationAnalysis:
    """Which writes of a recorded step can become new tensors, and which storages are pinned."""

    def __init__(self, recording: Recording, calls: Iterable[AnyCall]) -> None:
        """`calls` are the step's in order, with the optimizer's."""
        self._tape = recording.tape
        self._calls = [c for c in calls if isinstance(c, OptimizerCall) or not c.in_optimizer]
        self._last_compiled = self._find_last_compiled()
        own = [call.node for call in self._tape.calls if not call.in_optimizer]
        self._saves_rng_state = not all(isinstance(node.target, OpOverload) for node in own)
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
    """A recording that is being rewritten: `old` is its tape, `node_map` has the new nodes."""

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

    def emit(self, target: Any, args: Any, template: Call, kwargs: Any = None) -> Call:
        """Add a call without side effects."""
        return self.builder.emit(target, args, kwargs or {}, template, writes=(), is_random=False)

    def emit_once(self, target: Any, args: Any, template: Call, kwargs: Any = None) -> fx.Node:
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
