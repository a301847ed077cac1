"""Writes a new recording from an old one, on fake tensors: calls can be left, changed or added."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rekindle.passes.fx_nodes import item_path
from rekindle.torch_internals import FakeTensor, FakeTensorMode, OpOverload
from rekindle.tracing import fake_overrides, operators, rng
from rekindle.tracing.module_effects import Effect
from rekindle.tracing.recording import GradUse, Recording
from rekindle.tracing.tape import Call, Entry, Meta, OptimizerCall, StorageMeta, Tape


class Builder:
    """A recording in the making. `lead` goes from recorded nodes to those that take their place."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.tape = Tape()
        self.lead: dict[fx.Node, fx.Node] = {}
        self._mode = FakeTensorMode()
        self._fakes: dict[fx.Node, FakeTensor] = {}
        self._known: set[int] = set()  # their identities
        self._index_of: dict[int, int] = {}  # by a storage's address: its number
        self._storages: list[torch.UntypedStorage] = []  # held, so that no address comes twice
        self._enter_all()

    def finish(self) -> Recording:
        """The new recording, without calls that nobody needs."""
        old, lead = self.recording, self.lead
        made = Recording(
            tape=self.tape,
            around=old.around,
            batch_nodes=[lead[node] for node in old.batch_nodes],
            result=old.result,
            result_nodes=[lead[node] for node in old.result_nodes],
            grads=[_moved_grad(use, lead) for use in old.grads],
            effects=[_moved_effect(effect, lead) for effect in old.effects],
        )
        made.drop_dead_calls()
        self.tape.graph.lint()
        return made

    def calls(self) -> Iterable[Call | OptimizerCall]:
        """What was recorded, in order: calls, and calls of the optimizer."""
        tape = self.recording.tape
        found: dict[fx.Node, Call | OptimizerCall] = {call.node: call for call in tape.calls}
        found.update({call.node: call for call in tape.optimizer_calls})
        return [found[node] for node in tape.graph.nodes if node in found]

    def meta(self, node: fx.Node) -> Meta:
        """What is known of a new node's tensor."""
        return self.tape.metas[node]

    def device(self, node: fx.Node) -> torch.device:
        """Where a new node's tensor lies."""
        return self.tape.storages[self.tape.metas[node].storage].device

    def fake(self, node: fx.Node) -> FakeTensor:
        """A tensor of a new node's form, without numbers."""
        return self._fakes[node]

    def keep(self, call: Call) -> None:
        """Make a recorded call, on what takes its arguments' places."""
        args = fx.map_arg(call.node.args, self.lead.__getitem__)
        kwargs = fx.map_arg(call.node.kwargs, self.lead.__getitem__)
        if call.node.target in (rng.get_state, rng.set_state):  # not to be run here
            made = self._append(call.node.target, args, kwargs, call, self._as_recorded(call))
        else:
            made = self.emit(call.node.target, args, kwargs, call)
        self.follow(call, made)

    def is_view_of(self, call: Call) -> bool:
        """Whether a recorded call, made here, would look at its argument and copy nothing."""
        args = fx.map_arg(call.node.args, self.lead.__getitem__)
        kwargs = fx.map_arg(call.node.kwargs, self.lead.__getitem__)
        found = self._run(call.node.target, args, kwargs)
        looked = {
            self.fake(self.lead[n]).untyped_storage()._cdata for n in call.node.all_input_nodes
        }
        return all(made.untyped_storage()._cdata in looked for made in operators.tensors(found))

    def keep_optimizer(self, call: OptimizerCall) -> None:
        """Call the optimizer, with what takes the gradients' places."""
        grads = [self.lead[grad] for grad in call.grads]
        node = self.tape.graph.create_node(
            "call_function", call.node.target, tuple(grads), {}, name=call.node.name
        )
        self.tape.optimizer_calls.append(replace(call, node=node, grads=grads))

    def follow(self, call: Call, made: Call) -> None:
        """Let the results of a new call take the places of a recorded call's, one by one."""
        by_path = {item_path(node)[1]: node for node in made.results}
        for result in call.results:
            self.lead[result] = by_path[item_path(result)[1]]

    def emit(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        like: Call,
        *,
        writes: Sequence[fx.Node] | None = None,
        is_random: bool | None = None,
    ) -> Call:
        """Add a call that came about as another one did. It writes and draws as that one does."""
        if writes is None:
            writes = [self.lead[each] for each in like.writes]
        call = self._append(target, args, kwargs, like, self._run(target, args, kwargs))
        call.writes = list(writes)
        if is_random is not None:
            call.is_random = is_random
        return call

    def _append(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: Call, result: Any
    ) -> Call:
        node = self.tape.graph.create_node(
            "call_function", target, args, kwargs, name=_label(target, like)
        )
        call = replace(
            like,
            serial=len(self.tape.calls) + 1,
            node=node,
            results=self._bind(node, result),
            writes=[],
            flops=like.flops if target is like.node.target else 0,
        )
        self.tape.calls.append(call)
        return call

    def _as_recorded(self, call: Call) -> Any:
        """A tensor of the form of a call's only result; None if there is none."""
        for result in call.results:
            meta = self.recording.tape.metas[result]
            device = self.recording.tape.storages[meta.storage].device
            with self._mode:
                return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
        return None

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        args = fx.map_arg(args, self._fakes.__getitem__)
        kwargs = fx.map_arg(kwargs, self._fakes.__getitem__)
        with self._mode, torch.no_grad():
            if isinstance(target, OpOverload):
                return fake_overrides.run(target, args, kwargs)
            return getattr(target, "on_fakes", target)(*args, **kwargs)

    def _enter_all(self) -> None:
        """Enter what was entered, with tensors on the same storages."""
        tape = self.recording.tape
        memory: dict[int, torch.Tensor] = {}
        for entry in tape.entries:
            meta = tape.metas[entry.node]
            storage = tape.storages[meta.storage]
            with self._mode:
                if meta.storage not in memory:
                    memory[meta.storage] = torch.empty(
                        storage.nbytes, dtype=torch.uint8, device=storage.device
                    )
                typed = torch.empty(0, dtype=meta.dtype, device=storage.device)
                whole = memory[meta.storage].untyped_storage()
                fake = typed.set_(whole, 0, meta.shape, meta.stride)
            node = self.tape.graph.placeholder(entry.node.name)
            self.lead[entry.node] = node
            self.tape.entries.append(Entry(entry.kind, entry.name, node, entry.tensor))
            self._hold(node, fake)

    def _bind(self, node: fx.Node, result: Any) -> list[fx.Node]:
        """Tie the new tensors of a result to nodes: the call's own, or one `getitem` for each."""
        if isinstance(result, torch.Tensor):
            if id(result) in self._known:
                return []  # an argument, handed back
            self._hold(node, result)
            return [node]
        found: list[fx.Node] = []
        for index, item in enumerate(result if isinstance(result, (tuple, list)) else ()):
            if item is None:
                continue
            part = self.tape.graph.create_node(
                "call_function", operator.getitem, (node, index), name=f"{node.name}_out{index}"
            )
            bound = self._bind(part, item)
            if not bound:
                self.tape.graph.erase_node(part)
            found.extend(bound)
        return found

    def _hold(self, node: fx.Node, fake: Any) -> None:
        storage = fake.untyped_storage()
        index = self._index_of.setdefault(storage._cdata, len(self._storages))
        if index == len(self._storages):
            self._storages.append(storage)
            self.tape.storages.append(StorageMeta(storage.nbytes(), fake.device))
        self._fakes[node] = fake
        self._known.add(id(fake))
        self.tape.metas[node] = Meta(tuple(fake.shape), fake.stride(), fake.dtype, index)


def is_view(call: Call, tape: Tape) -> bool:
    """Whether a call computes nothing, and looks at its argument in another way."""
    if call.writes or not call.results:
        return False
    read = {tape.metas[node].storage for node in call.node.all_input_nodes}
    return all(tape.metas[node].storage in read for node in call.results)


def _label(target: Callable[..., Any], like: Call) -> str:
    return like.node.name if target is like.node.target else target.__name__.partition(".")[0]


def _moved_grad(use: GradUse, lead: dict[fx.Node, fx.Node]) -> GradUse:
    return replace(use, final=None if use.final is None else lead[use.final])


def _moved_effect(effect: Effect, lead: dict[fx.Node, fx.Node]) -> Effect:
    return replace(effect, nodes=[lead[node] for node in effect.nodes])
