"""Proves by symbolic execution that a rewritten step computes what was recorded.

Every storage carries a version: which calls have written it, in order. A call of the rewritten step
must read the versions that were recorded, may not read a freed tensor, and may write to the step's
inputs only if it is the original. The check shares no logic with `apply_schedule`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import fx

from rekindle.core.graph.graph import OpKind, StepGraph
from rekindle.core.graph.schedule import Compute, Schedule
from rekindle.errors import RewriteError
from rekindle.rewriting import multi_tensor
from rekindle.rewriting.apply_schedule import RewrittenStep
from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators, rng
from rekindle.tracing.tape import Call, EntryKind, OptimizerCall, Recording

Version = tuple[Any, ...]


@dataclass(eq=False)
class _Storage:
    """A storage and its version."""

    version: Version
    is_input: bool = False


@dataclass(frozen=True)
class _Tensor:
    """A view of a storage, by the name of the recorded tensor."""

    name: str
    storage: _Storage

    def contents(self) -> tuple[str, Version]:
        return self.name, self.storage.version


def check_rewritten(
    recording: Recording, graph: StepGraph, rewritten: RewrittenStep, schedule: Schedule
) -> None:
    """Raise RewriteError unless a rewritten step computes what was recorded, as scheduled."""
    # Each scheduled call must be there once and in order, and none of the optimizer's.
    run = {call.node.name for call in recording.tape.calls if not call.in_optimizer}
    run.update(op.name for op in graph.ops if op.kind is OpKind.FOREACH)
    computes = [step for step in schedule if isinstance(step, Compute)]
    wanted = [(step.op, step.copy) for step in computes if graph.ops[step.op].name in run]
    found = [rewritten.origin[node] for node in rewritten.nodes if node in rewritten.origin]
    if found != wanted:
        pairs = zip_longest(found, wanted)
        place = next(i for i, (a, b) in enumerate(pairs) if a != b)
        raise RewriteError(f"call {place} of the rewritten step is not the one scheduled there")
    _SymbolicRun(recording, graph, rewritten).run()


class _SymbolicRun:
    """Both steps, executed on versions."""

    def __init__(self, recording: Recording, graph: StepGraph, rewritten: RewrittenStep) -> None:
        self.recording = recording
        self.graph = graph
        self.rewritten = rewritten
        self.calls = {call.node.name: call for call in recording.tape.calls}
        self.reads: dict[str, list[tuple[str, Version]]] = {}  # by call: what it read when recorded
        self.results: dict[str, list[tuple[str, Version]]] = {}  # and what it returned
        self.updates: dict[int, list[Any]] = {}  # by parameter: what each update read
        self.params: dict[str, _Tensor] = {}
        self.entered = {entry.node for entry in recording.tape.entries}

    def run(self) -> None:
        ends = self._run_recorded()
        env = self._inputs(self.rewritten.node_map)
        self.params = self._params(env)
        dead: set[fx.Node] = set()
        for node in self.rewritten.nodes:
            freed = sorted(arg.name for arg in dead.intersection(node.all_input_nodes))
            if freed:
                raise RewriteError(f"{node.name} reads {freed[0]} after it is freed")
            self._run_node(node, env)
            dead.update(self.rewritten.frees.get(node, ()))
        if any(self.updates.values()):
            raise RewriteError("some parameters are never updated")
        for output in self.recording.outputs:
            node = self.rewritten.node_map[output]
            if node in dead or env[node].contents() != ends[output].contents():
                raise RewriteError(f"{output.name} does not end with the recorded value")
        kept = {self.rewritten.node_map[output] for output in self.recording.outputs}
        left = [n for n in self.rewritten.nodes if n in env and n not in dead and n not in kept]
        if left:
            raise RewriteError(f"{left[0].name} is never freed")

    def _inputs(self, nodes: dict[fx.Node, fx.Node]) -> dict[fx.Node, _Tensor]:
        """The tensors that enter the step, with one version for each storage."""
        storages: dict[int, _Storage] = {}
        env = {}
        for entry in self.recording.tape.entries:
            index = self.recording.tape.metas[entry.node].storage
            storage = storages.setdefault(index, _Storage(("entered", index), is_input=True))
            env[nodes[entry.node]] = _Tensor(entry.node.name, storage)
        return env

    def _run_recorded(self) -> dict[fx.Node, _Tensor]:
        """Execute the recorded step, and note what each call reads and returns."""
        env = self._inputs({node: node for node in self.entered})
        params = self._params(env)
        calls = {call.node: call for call in self.recording.tape.calls}
        updates = {call.node: call for call in self.recording.tape.optimizer_calls}
        for node in self.recording.tape.graph.nodes:
            if node in updates:
                grads = [env[grad] for grad in updates[node].grads]
                for slot, contents in self._update(updates[node], params, grads):
                    self.updates.setdefault(slot, []).append(contents)
            if node not in calls or calls[node].in_optimizer:
                continue
            call = calls[node]
            read = [env[node] for node in call.node.all_input_nodes]
            self.reads[call.node.name] = [tensor.contents() for tensor in read]
            made = self._results_of(call, read)
            env.update(made)
            self._write(call, [env[node] for node in call.writes])
            self.results[call.node.name] = [env[node].contents() for node in call.results]
        return env

    def _results_of(self, call: Call, read: list[_Tensor]) -> dict[fx.Node, _Tensor]:
        """The tensors a call returns: views of what it read, or new storages."""
        metas = self.recording.tape.metas
        inputs = call.node.all_input_nodes
        storage_of = {metas[n].storage: t.storage for n, t in zip(inputs, read, strict=True)}
        for node in call.results:
            fresh = _Storage(("made", call.node.name, metas[node].storage))
            storage_of.setdefault(metas[node].storage, fresh)
        return {n: _Tensor(n.name, storage_of[metas[n].storage]) for n in call.results}

    def _write(self, call: Call, tensors: list[_Tensor]) -> None:
        for storage in {tensor.storage for tensor in tensors}:
            storage.version = ("written", call.node.name, storage.version)

    def _run_node(self, node: fx.Node, env: dict[fx.Node, _Tensor]) -> None:
        if node in self.rewritten.optimizer_calls:
            grads = [env[arg] for arg in node.args if isinstance(arg, fx.Node)]
            found = self._update(self.rewritten.optimizer_calls[node], self.params, grads)
            for slot, contents in found:
                if contents not in self.updates.get(slot, ())[:1]:
                    name = self.recording.state.slots[slot].name
                    raise RewriteError(f"{node.name} does not update {name} as was recorded")
                self.updates[slot].pop(0)
            return
        if node in self.rewritten.batched:
            self._run_batched(node, env)
            return
        if node.target is rng.read or node not in self.rewritten.origin:
            return  # reads generator state, or takes one result of a call
        index, copy = self.rewritten.origin[node]
        op = self.graph.ops[index]
        call = self.calls[op.name]
        read = [env[arg] for arg in node.all_input_nodes if arg in env]
        reads: list[tuple[Any, ...]] = [tensor.contents() for tensor in read]
        state = {n.name for n in call.writes if n in self.entered} if copy else set()
        wanted: list[tuple[Any, ...]]
        wanted = [each for each in self.reads[op.name] if each[0] not in state]
        if copy and op.copy_target:
            wanted += self.results[op.name][1:]
        if copy and op.is_view:  # reads no element: those who read the view are checked
            reads, wanted = [each[:1] for each in reads], [each[:1] for each in wanted]
        if sorted(map(repr, reads)) != sorted(map(repr, wanted)):
            raise RewriteError(f"{node.name} does not read what {op.name} read")
        by_name = {tensor.name: tensor for tensor in read}
        held = [
            by_name.get(n.name) or _Tensor(n.name, _Storage(("scratch",)))
            for n in call.node.all_input_nodes
        ]
        made = self._results_of(call, held)
        for arg in self._overwritten(node, call):
            storage = env[arg].storage
            if storage.is_input:
                raise RewriteError(f"{node.name} overwrites {arg.name}, which entered the step")
            storage.version = made[call.results[0]].storage.version
            made[call.results[0]] = _Tensor(call.results[0].name, storage)
        for result in call.results[:1] if copy and op.copy_target else call.results:
            env[self._node_for(result, call, node)] = made[result]
        written = [by_name.get(n.name) or made.get(n) for n in call.writes if n.name not in state]
        self._write(call, [tensor for tensor in written if tensor is not None])

    def _run_batched(self, node: fx.Node, env: dict[fx.Node, _Tensor]) -> None:
        """One foreach call in place of several recorded calls with one tensor each."""
        members = self.graph.ops[self.rewritten.origin[node][0]].members
        calls, tensors = [self.calls[member] for member in members], node.args[0]
        if not isinstance(tensors, (list, tuple)) or len(tensors) != len(calls):
            raise RewriteError(f"{node.name} does not do what each of its members did")
        for index, (call, arg) in enumerate(zip(calls, tensors, strict=True)):
            if multi_tensor.foreach_form(call) != (node.target, node.args[1]):
                raise RewriteError(f"{node.name} does not do what {call.node.name} did")
            assert isinstance(arg, fx.Node)
            if [env[arg].contents()] != self.reads[call.node.name]:
                raise RewriteError(f"{node.name} does not read what {call.node.name} read")
            made = self._results_of(call, [env[arg]])
            self._write(call, [env[arg] for _ in call.writes])
            for user in node.users:
                if user.target is operator.getitem and user.args[1] == index:
                    env[user] = made[call.node]

    def _overwritten(self, node: fx.Node, call: Call) -> list[fx.Node]:
        """The arguments that a rewritten call overwrites and the recorded one only read."""
        if call.writes or not isinstance(node.target, OpOverload):
            return []
        written = operators.written_arguments(node.target, node.args, node.kwargs)
        return [arg for arg in written if isinstance(arg, fx.Node)]

    def _update(
        self, call: OptimizerCall, params: dict[str, _Tensor], grads: Iterable[_Tensor]
    ) -> list[tuple[int, Any]]:
        """Update parameters; returns for each slot the parameter and gradient that were read."""
        found: list[tuple[int, Any]] = []
        for slot, grad in zip(call.params, grads, strict=True):
            param = params.get(self.recording.state.slots[slot].name)
            found.append((slot, (param and param.contents(), grad.contents())))
            if param is not None:
                param.storage.version = ("updated", param.storage.version)
        return found

    def _params(self, env: dict[fx.Node, _Tensor]) -> dict[str, _Tensor]:
        """The parameters by name, among the tensors that enter the step."""
        entries = [e for e in self.recording.tape.entries if e.kind is EntryKind.PARAM]
        names = {entry.node.name: entry.name for entry in entries}
        return {names[t.name]: t for t in env.values() if t.name in names}

    def _node_for(self, result: fx.Node, call: Call, node: fx.Node) -> fx.Node:
        """The rewritten node that holds one result of a rewritten call."""
        # A copy may return one tensor where the recorded call returned several.
        returns_one = self.graph.ops[self.rewritten.origin[node][0]].copy_target
        if result is call.node or (node.target is not call.node.target and returns_one):
            return node
        source, index = result.args
        assert isinstance(source, fx.Node)
        for user in self._node_for(source, call, node).users:
            if user.target is operator.getitem and user.args[1] == index:
                return user
        raise RewriteError(f"{node.name} lacks result {index}")
