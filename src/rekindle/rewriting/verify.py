"""Proves a rewritten step right by running it on paper, without looking at how it was made.

Every piece of memory carries a mark that says which calls wrote it, in order. The recorded step is
run on marks first, and it is noted which marks each call reads. Then the rewritten step is run on
marks: a call, captured or computed again, must read the very same marks, may not read what has been
deleted, and may not write to what was there before the step unless it is the captured one.
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

Mark = tuple[Any, ...]


@dataclass(eq=False)
class _Memory:
    """A piece of memory and what it holds."""

    mark: Mark
    is_state: bool = False


@dataclass(frozen=True)
class _Tensor:
    """A look at memory: which tensor of the recorded step it is."""

    name: str
    memory: _Memory

    def seen(self) -> tuple[str, Mark]:
        return self.name, self.memory.mark


def check_rewritten(
    recording: Recording, graph: StepGraph, listing: RewrittenStep, schedule: Schedule
) -> None:
    """Raise RewriteError unless a listing computes what the recording does, as scheduled."""
    _check_order(graph, listing, schedule, recording)
    _Paper(recording, graph, listing).run()


def _check_order(
    graph: StepGraph, listing: RewrittenStep, schedule: Schedule, recording: Recording
) -> None:
    """The calls stand in the schedule's order, each once; the optimizer's own are not run."""
    run = {call.node.name for call in recording.tape.calls if not call.in_optimizer}
    wanted = [
        (step.op, step.copy)
        for step in schedule
        if isinstance(step, Compute)
        and (graph.ops[step.op].name in run or graph.ops[step.op].kind is OpKind.FOREACH)
    ]
    found = [listing.origin[node] for node in listing.nodes if node in listing.origin]
    if found != wanted:
        pairs = zip_longest(found, wanted)
        place = next(i for i, (a, b) in enumerate(pairs) if a != b)
        raise RewriteError(f"call {place} of the rewritten step is not the one scheduled there")


class _Paper:
    """Both steps, run on marks."""

    def __init__(self, recording: Recording, graph: StepGraph, listing: RewrittenStep) -> None:
        self.recording = recording
        self.graph = graph
        self.listing = listing
        self.calls = {call.node.name: call for call in recording.tape.calls}
        self.reads: dict[str, list[tuple[str, Mark]]] = {}  # by call: what the recorded one read
        self.results: dict[str, list[tuple[str, Mark]]] = {}  # and what it made
        self.updates: dict[int, list[Any]] = {}  # by parameter: what the optimizer reads, in order
        self.params: dict[str, _Tensor] = {}

    def run(self) -> None:
        ends = self._recorded()
        env = self._entered({e.node: self.listing.renamed[e.node] for e in self._entries()})
        self.params = self._params(env)
        deleted: set[fx.Node] = set()
        for node in self.listing.nodes:
            gone = deleted.intersection(node.all_input_nodes)
            if gone:
                raise RewriteError(f"{node.name} reads {min(n.name for n in gone)} after its end")
            self._run_again(node, env)
            deleted.update(self.listing.frees.get(node, ()))
        if any(self.updates.values()):
            raise RewriteError("some parameters are never updated")
        for output in self.recording.outputs:
            node = self.listing.renamed[output]
            if node in deleted or env[node].seen() != ends[output].seen():
                raise RewriteError(f"{output.name} is not at the end what it should be")
        kept = {self.listing.renamed[output] for output in self.recording.outputs}
        left = [n for n in self.listing.nodes if n in env and n not in deleted and n not in kept]
        if left:
            raise RewriteError(f"{left[0].name} is never deleted")

    def _entries(self) -> Iterable[Any]:
        return self.recording.tape.entries

    def _entered(self, nodes: dict[fx.Node, fx.Node]) -> dict[fx.Node, _Tensor]:
        """What is there before the step, each storage with a mark of its own."""
        memories: dict[int, _Memory] = {}
        env = {}
        for entry in self._entries():
            storage = self.recording.tape.metas[entry.node].storage
            memory = memories.setdefault(storage, _Memory(("entered", storage), is_state=True))
            env[nodes[entry.node]] = _Tensor(entry.node.name, memory)
        return env

    def _recorded(self) -> dict[fx.Node, _Tensor]:
        """Run the recorded step, and note what each call reads and makes."""
        env = self._entered({entry.node: entry.node for entry in self._entries()})
        params = self._params(env)
        calls = {call.node: call for call in self.recording.tape.calls}
        updates = {call.node: call for call in self.recording.tape.optimizer_calls}
        for node in self.recording.tape.graph.nodes:
            if node in updates:
                grads = [env[grad] for grad in updates[node].grads]
                for slot, seen in self._update(updates[node], params, grads):
                    self.updates.setdefault(slot, []).append(seen)
            if node not in calls or calls[node].in_optimizer:
                continue
            call = calls[node]
            read = [env[node] for node in call.node.all_input_nodes]
            self.reads[call.node.name] = [tensor.seen() for tensor in read]
            made = self._made(call, read)
            env.update(made)
            self._write(call, [env[node] for node in call.writes])
            self.results[call.node.name] = [env[node].seen() for node in call.results]
        return env

    def _made(self, call: Call, read: list[_Tensor]) -> dict[fx.Node, _Tensor]:
        """The tensors a call returns: views of what it read, or new memory with a mark."""
        metas = self.recording.tape.metas
        inputs = call.node.all_input_nodes
        memory_of = {metas[n].storage: t.memory for n, t in zip(inputs, read, strict=True)}
        for node in call.results:
            fresh = _Memory(("made", call.node.name, metas[node].storage))
            memory_of.setdefault(metas[node].storage, fresh)
        return {n: _Tensor(n.name, memory_of[metas[n].storage]) for n in call.results}

    def _write(self, call: Call, tensors: list[_Tensor]) -> None:
        for memory in {tensor.memory for tensor in tensors}:
            memory.mark = ("written", call.node.name, memory.mark)

    def _run_again(self, node: fx.Node, env: dict[fx.Node, _Tensor]) -> None:
        if node in self.listing.optimizer_calls:
            grads = [env[arg] for arg in node.args if isinstance(arg, fx.Node)]
            found = self._update(self.listing.optimizer_calls[node], self.params, grads)
            for slot, seen in found:
                if seen not in self.updates.get(slot, ())[:1]:
                    name = self.recording.state.slots[slot].name
                    raise RewriteError(f"{node.name} does not update {name} as was recorded")
                self.updates[slot].pop(0)
            return
        if node in self.listing.together:
            self._run_together(node, env)
            return
        if node.target is rng.read or node not in self.listing.origin:
            return  # the generator's state, or one result of a call, bound with it
        index, copy = self.listing.origin[node]
        op = self.graph.ops[index]
        call = self.calls[op.name]
        inputs = [arg for arg in node.all_input_nodes if arg in env]
        read = [env[arg] for arg in inputs]
        seen = [tensor.seen() for tensor in read]
        state = {n.name for n in call.writes if self._is_state(n)} if copy else set()
        wanted = [each for each in self.reads[op.name] if each[0] not in state]
        if copy and op.copy_target:
            wanted += self.results[op.name][1:]
        if sorted(map(repr, seen)) != sorted(map(repr, wanted)):
            raise RewriteError(f"{node.name} does not read what {op.name} read")
        by_name = {tensor.name: tensor for tensor in read}
        ordered = [by_name.get(n.name) for n in call.node.all_input_nodes]
        held = [
            t or _Tensor(n.name, _Memory(("scratch",)))
            for t, n in zip(ordered, call.node.all_input_nodes, strict=True)
        ]
        made = self._made(call, held)
        for arg in self._overwritten(node, call):
            memory = env[arg].memory
            if memory.is_state:
                raise RewriteError(f"{node.name} writes over {arg.name}, which is not its own")
            memory.mark = made[call.results[0]].memory.mark
            made[call.results[0]] = _Tensor(call.results[0].name, memory)
        results = call.results[:1] if copy and op.copy_target else call.results
        for result in results:
            env[self._node_for(result, call, node)] = made[result]
        written = [by_name.get(n.name) or made.get(n) for n in call.writes if n.name not in state]
        self._write(call, [tensor for tensor in written if tensor is not None])

    def _run_together(self, node: fx.Node, env: dict[fx.Node, _Tensor]) -> None:
        """Several recorded calls of one tensor each, done by one."""
        members = self.graph.ops[self.listing.origin[node][0]].members
        calls, tensors = [self.calls[member] for member in members], node.args[0]
        if not isinstance(tensors, (list, tuple)) or len(tensors) != len(calls):
            raise RewriteError(f"{node.name} does not do what each of its members did")
        for index, (call, arg) in enumerate(zip(calls, tensors, strict=True)):
            if multi_tensor.combined(call) != (node.target, node.args[1]):
                raise RewriteError(f"{node.name} does not do what {call.node.name} did")
            assert isinstance(arg, fx.Node)
            if [env[arg].seen()] != self.reads[call.node.name]:
                raise RewriteError(f"{node.name} does not read what {call.node.name} read")
            made = self._made(call, [env[arg]])
            self._write(call, [env[arg] for _ in call.writes])
            for user in node.users:
                if user.target is operator.getitem and user.args[1] == index:
                    env[user] = made[call.node]

    def _overwritten(self, node: fx.Node, call: Call) -> list[fx.Node]:
        """What a rewritten call writes over that the recorded one only read."""
        if call.writes or not isinstance(node.target, OpOverload):
            return []
        written = operators.written_arguments(node.target, node.args, node.kwargs)
        return [arg for arg in written if isinstance(arg, fx.Node)]

    def _update(
        self, call: OptimizerCall, params: dict[str, _Tensor], grads: Iterable[_Tensor]
    ) -> list[tuple[int, Any]]:
        """Let the optimizer change parameters; for each slot, what was there and its gradient."""
        found: list[tuple[int, Any]] = []
        for slot, grad in zip(call.params, grads, strict=True):
            param = params.get(self.recording.state.slots[slot].name)
            found.append((slot, (param and param.seen(), grad.seen())))
            if param is not None:
                param.memory.mark = ("updated", param.memory.mark)
        return found

    def _params(self, env: dict[fx.Node, _Tensor]) -> dict[str, _Tensor]:
        """The parameters by name, of what is there before the step."""
        names = {e.node.name: e.name for e in self._entries() if e.kind is EntryKind.PARAM}
        return {names[t.name]: t for t in env.values() if t.name in names}

    def _is_state(self, node: fx.Node) -> bool:
        return any(entry.node is node for entry in self._entries())

    def _node_for(self, result: fx.Node, call: Call, node: fx.Node) -> fx.Node:
        """The rewritten node that holds one result of a rewritten call."""
        if result is call.node or (node.target is not call.node.target and self._is_single(node)):
            return node
        source, index = result.args
        assert isinstance(source, fx.Node)
        for user in self._node_for(source, call, node).users:  # a list in what it returns, or all
            if user.target is operator.getitem and user.args[1] == index:
                return user
        raise RewriteError(f"{node.name} lacks result {index}")

    def _is_single(self, node: fx.Node) -> bool:
        """Whether a call returns one tensor alone, where the recorded one returned several."""
        return bool(self.graph.ops[self.listing.origin[node][0]].copy_target)
