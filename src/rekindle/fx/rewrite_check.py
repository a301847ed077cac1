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

from rekindle.core.ir import StepGraph
from rekindle.core.schedule import Compute, Schedule
from rekindle.errors import RewriteError
from rekindle.fx import rng
from rekindle.fx.recording import Recording
from rekindle.fx.rewrite import Listing
from rekindle.fx.tape import Call

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


def check_listing(
    recording: Recording, graph: StepGraph, listing: Listing, schedule: Schedule
) -> None:
    """Raise RewriteError unless a listing computes what the recording does, as scheduled."""
    _check_order(graph, listing, schedule, recording)
    _Paper(recording, graph, listing).run()


def _check_order(
    graph: StepGraph, listing: Listing, schedule: Schedule, recording: Recording
) -> None:
    """The calls stand in the schedule's order, each once; the optimizer's own are not run."""
    run = {call.node.name for call in recording.tape.calls if not call.in_optimizer}
    wanted = [
        (step.op, step.copy)
        for step in schedule
        if isinstance(step, Compute) and graph.ops[step.op].name in run
    ]
    found = [listing.origin[node] for node in listing.nodes if node in listing.origin]
    if found != wanted:
        pairs = zip_longest(found, wanted)
        place = next(i for i, (a, b) in enumerate(pairs) if a != b)
        raise RewriteError(f"call {place} of the rewritten step is not the one scheduled there")


class _Paper:
    """Both steps, run on marks."""

    def __init__(self, recording: Recording, graph: StepGraph, listing: Listing) -> None:
        self.recording = recording
        self.graph = graph
        self.listing = listing
        self.calls = {call.node.name: call for call in recording.tape.calls}
        self.reads: dict[str, list[tuple[str, Mark]]] = {}  # by call: what the recorded one read
        self.results: dict[str, list[tuple[str, Mark]]] = {}  # and what it made

    def run(self) -> None:
        ends = self._recorded()
        env = self._entered({e.node: self.listing.renamed[e.node] for e in self._entries()})
        deleted: set[fx.Node] = set()
        for node in self.listing.nodes:
            gone = deleted.intersection(node.all_input_nodes)
            if gone:
                raise RewriteError(f"{node.name} reads {min(n.name for n in gone)} after its end")
            self._run_again(node, env)
            deleted.update(self.listing.frees.get(node, ()))
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
        for call in self.recording.tape.calls:
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
            for arg in node.all_input_nodes:
                env[arg].seen()
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
        results = call.results[:1] if copy and op.copy_target else call.results
        for result in results:
            env[self._node_for(result, call, node)] = made[result]
        written = [by_name.get(n.name) or made.get(n) for n in call.writes if n.name not in state]
        self._write(call, [tensor for tensor in written if tensor is not None])

    def _is_state(self, node: fx.Node) -> bool:
        return any(entry.node is node for entry in self._entries())

    def _node_for(self, result: fx.Node, call: Call, node: fx.Node) -> fx.Node:
        """The rewritten node that holds one result of a rewritten call."""
        if result is call.node or (node.target is not call.node.target and self._is_single(node)):
            return node
        index = result.args[1]
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == index:
                return user
        raise RewriteError(f"{node.name} lacks result {index}")

    def _is_single(self, node: fx.Node) -> bool:
        """Whether a call returns one tensor alone, where the recorded one returned several."""
        return bool(self.graph.ops[self.listing.origin[node][0]].copy_target)
