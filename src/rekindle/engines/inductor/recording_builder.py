"""Writes a new recording from an old one on fake tensors, with calls dropped, changed or added."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rekindle.passes.fx_nodes import item_path
from rekindle.torch_internals import FakeTensor, FakeTensorMode, OpOverload
from rekindle.tracing import fake_overrides, operators, rng
from rekindle.tracing.tape import Call, Entry, Meta, OptimizerCall, Recording, StorageMeta, Tape


class RecordingBuilder:
    """A recording being built. `node_map` maps recorded nodes to the new ones that replace them."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.tape = Tape()
        self.node_map: dict[fx.Node, fx.Node] = {}
        self._mode = FakeTensorMode()
        self.fakes: dict[fx.Node, FakeTensor] = {}  # by new node
        self._fake_ids: set[int] = set()
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
            effects=[
                replace(effect, nodes=[node_map[node] for node in effect.nodes])
                for effect in old.effects
            ],
        )
        made.drop_dead_calls()
        self.tape.graph.lint()
        return made

    def calls(self) -> Iterable[Call | OptimizerCall]:
        """The recorded calls in order, with those of the optimizer."""
        tape = self.recording.tape
        found: dict[fx.Node, Call | OptimizerCall] = {call.node: call for call in tape.calls}
        found.update({call.node: call for call in tape.optimizer_calls})
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
        viewed = {
            self.fakes[self.node_map[n]].untyped_storage()._cdata for n in call.node.all_input_nodes
        }
        return all(made.untyped_storage()._cdata in viewed for made in operators.tensors(found))

    def keep_optimizer(self, call: OptimizerCall) -> None:
        """Add a recorded call of the optimizer, on new nodes."""
        grads = [self.node_map[grad] for grad in call.grads]
        node = self.tape.graph.create_node(
            "call_function", call.node.target, tuple(grads), {}, name=call.node.name
        )
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
        """Add a call whose phase, module and source are those of the recorded call `template`.

        `writes` and `is_random` default to the template's.
        """
        if writes is None:
            writes = [self.node_map[each] for each in template.writes]
        call = self._append(target, args, kwargs, template, self._run(target, args, kwargs))
        call.writes = list(writes)
        if is_random is not None:
            call.is_random = is_random
        return call

    def _append(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        template: Call,
        result: Any,
    ) -> Call:
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
                return fake_overrides.call(target, args, kwargs)
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
            if id(result) in self._fake_ids:
                return []  # an argument, returned
            self._hold(node, result)
            return [node]
        found: list[fx.Node] = []
        for index, value in enumerate(result if isinstance(result, (tuple, list)) else ()):
            if value is None:
                continue
            item = self.tape.graph.create_node(
                "call_function", operator.getitem, (node, index), name=f"{node.name}_out{index}"
            )
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
        self._fake_ids.add(id(fake))
        self.tape.metas[node] = Meta(tuple(fake.shape), fake.stride(), fake.dtype, index)


def is_view(call: Call, tape: Tape) -> bool:
    """True if a call returns only views of its arguments."""
    if call.writes or not call.results:
        return False
    read = {tape.metas[node].storage for node in call.node.all_input_nodes}
    return all(tape.metas[node].storage in read for node in call.results)
