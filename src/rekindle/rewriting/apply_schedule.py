"""Puts a schedule into a recorded step: copies where it computes again, and frees where it frees.

The result is a new FX graph in the schedule's order. Every copy is the recorded call once more, on
the copies of its arguments that the schedule says are there; a random op's copy draws the numbers
that the op drew, from the generator state it started with; a copy leaves all state alone.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from rekindle.core.graph.graph import TOGETHER_TARGET, UPDATE_TARGET, Op, StepGraph
from rekindle.core.graph.schedule import Free, ResolvedCompute, Schedule, resolve
from rekindle.passes.fx_nodes import item_path
from rekindle.rewriting import multi_tensor
from rekindle.rewriting.codegen import last_uses
from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators, rng
from rekindle.tracing.recording import Recording
from rekindle.tracing.tape import Call, OptimizerCall


@dataclass
class RewrittenStep:
    """A step as nodes in the order they run, and the nodes whose tensors go after each.

    `calls` has the recorded call behind each node, `optimizer_calls` the one it stands for,
    `together` all those that one node does; `origin` says which copy of which op a node is.
    `renamed` leads from recorded nodes to those that hold the same thing when the step ends.
    """

    graph: fx.Graph
    nodes: list[fx.Node] = field(default_factory=list)
    frees: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    calls: dict[fx.Node, Call] = field(default_factory=dict)
    optimizer_calls: dict[fx.Node, OptimizerCall] = field(default_factory=dict)
    together: dict[fx.Node, list[Call]] = field(default_factory=dict)
    origin: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    renamed: dict[fx.Node, fx.Node] = field(default_factory=dict)


def as_recorded(recording: Recording) -> RewrittenStep:
    """The step as it was recorded, each tensor freed after its last use."""
    tape = recording.tape
    in_optimizer = {call.node for call in tape.calls if call.in_optimizer}
    nodes = [
        node
        for node in tape.graph.nodes
        if node.op == "call_function" and item_path(node)[0] not in in_optimizer
    ]
    entered = {entry.node for entry in tape.entries}
    return RewrittenStep(
        tape.graph,
        nodes,
        frees=last_uses(nodes, entered.union(recording.outputs)),
        calls={call.node: call for call in tape.calls},
        optimizer_calls={call.node: call for call in tape.optimizer_calls},
        renamed={node: node for node in entered.union(recording.outputs)},
    )


def rewrite(recording: Recording, graph: StepGraph, schedule: Schedule) -> RewrittenStep:
    """The step as the schedule runs it; `graph` is the recording's own, lifted."""
    listing = _Rewriter(recording, graph, schedule).run()
    listing.graph.lint()
    return listing


class _Rewriter:
    def __init__(self, recording: Recording, graph: StepGraph, schedule: Schedule) -> None:
        self.recording = recording
        self.graph = graph
        self.schedule = schedule
        self.listing = RewrittenStep(fx.Graph())
        self.call_of = {call.node.name: call for call in recording.tape.calls}
        self.value_of = {value.name: value.index for value in graph.values}
        self.node_of: dict[tuple[int, int], fx.Node] = {}  # by value and copy
        self.held: dict[tuple[int, int], list[fx.Node]] = {}  # by storage and copy
        self.random_state: dict[int, fx.Node] = {}  # by op: what its generator started from
        self.scratch: list[fx.Node] = []
        self.is_early = bool(graph.early_updates)
        self.again = {step.op for step in schedule if not isinstance(step, Free) and step.copy}

    def run(self) -> RewrittenStep:
        for entry in self.recording.tape.entries:
            node = self.listing.graph.placeholder(entry.node.name)
            self.node_of[self.value_of[entry.node.name], 0] = node
            self.listing.renamed[entry.node] = node
        before, last = self._optimizer_places()
        for step in resolve(self.graph, self.schedule):
            if isinstance(step, Free):
                self._free(step)
                continue
            if not step.copy:
                for call in before.get(step.op, ()):
                    self._run_optimizer(call)
            self._compute(step)
        for call in last:
            self._run_optimizer(call)
        for node in self.recording.outputs:
            self.listing.renamed[node] = self.node_of[self.value_of[node.name], 0]
        self._free_looks()
        return self.listing

    def _free_looks(self) -> None:
        """Views of what stays after the step hold no memory: each goes after its last use."""
        outputs = set(self.listing.renamed.values())
        looks = {node for nodes in self.held.values() for node in nodes if node not in outputs}
        for node in reversed(self.listing.nodes):
            last = [n for n in (node, *node.all_input_nodes) if n in looks]
            if last:
                self.listing.frees.setdefault(node, []).extend(last)
                looks.difference_update(last)

    def _optimizer_places(self) -> tuple[dict[int, list[OptimizerCall]], list[OptimizerCall]]:
        """The op before which each call of the user's optimizer stands; and those after all."""
        index = {op.name: op.index for op in self.graph.ops}
        if self.is_early:
            return {}, []
        calls = {call.node: call for call in self.recording.tape.optimizer_calls}
        before: dict[int, list[OptimizerCall]] = {}
        waiting: list[OptimizerCall] = []
        for node in self.recording.tape.graph.nodes:
            if node in calls:
                waiting.append(calls[node])
            if node.name in index and waiting:
                before[index[node.name]] = waiting
                waiting = []
        return before, waiting

    def _compute(self, step: ResolvedCompute) -> None:
        op = self.graph.ops[step.op]
        call = self.call_of.get(op.name)
        if op.target == UPDATE_TARGET:
            self._run_optimizer(self._part_of_optimizer(op))
            return
        if op.target == TOGETHER_TARGET:
            self._compute_together(op, step)
            return
        if call is None or call.in_optimizer:
            return  # the user's optimizer does that
        node = self._copy(call, step) if step.copy else self._captured(call, step)
        self._add(node, call)
        self.listing.origin[node] = (step.op, step.copy)
        if self.scratch:
            self.listing.frees[node], self.scratch = self.scratch, []
        if call.results == [call.node]:
            self._bind(call.node, node, step)
            return
        if step.copy and op.copy_target:
            self._bind(call.results[0], node, step)  # all that this operator returns
            return
        parts = {call.node: node}
        for result in call.results:
            self._bind(result, self._part(result, call, parts), step)
        results = self._results(call, step)
        last = self.listing.nodes[-1]
        self.listing.frees[last] = [part for part in parts.values() if part not in results]

    def _compute_together(self, op: Op, step: ResolvedCompute) -> None:
        """One call for several recorded ones, and its results, each for itself."""
        calls = [self.call_of[member] for member in op.members]
        function, argument = multi_tensor.combined(calls[0])
        tensors = [self._lead(multi_tensor.operand(call), step) for call in calls]
        node = self._create(function, (tensors, argument), {}, op.name)
        self._add(node, calls[0])
        self.listing.origin[node] = (step.op, step.copy)
        self.listing.together[node] = calls
        if function is not multi_tensor.cast:
            return
        for index, call in enumerate(calls):
            part = self._create(operator.getitem, (node, index), {}, call.node.name)
            self._add(part, call)
            self._bind(call.node, part, step)
        self.listing.frees[part] = [node]

    def _results(self, call: Call, step: ResolvedCompute) -> list[fx.Node]:
        values = [self.value_of[result.name] for result in call.results]
        return [self.node_of[value, step.copies[value]] for value in values]

    def _captured(self, call: Call, step: ResolvedCompute) -> fx.Node:
        if call.is_random and step.op in self.again:
            source = _generator_of(call, self.recording)
            state = self._create(rng.read, (source,), {}, f"{call.node.name}_state")
            self._add(state, call)
            self.random_state[step.op] = state
        args, kwargs = self._arguments(call.node, step)
        return self._create(*self._in_place(call, step, args, kwargs), call.node.name)

    def _in_place(
        self, call: Call, step: ResolvedCompute, args: Any, kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """What to call with what, where the graph has an op write over what it read."""
        target, written = call.node.target, self.graph.ops[step.op].mutates
        if call.writes or not written:
            return target, args, kwargs
        assert isinstance(target, OpOverload)
        overwriting = operators.overwriting(target)
        if overwriting is None:
            return operators.in_place(target), args, kwargs
        out = self.node_of[written[0], step.copies[written[0]]]
        return overwriting, args, {**kwargs, operators.last_argument(overwriting): out}

    def _copy(self, call: Call, step: ResolvedCompute) -> fx.Node:
        """A call that computes again what the captured one computed, and changes nothing else."""
        op = self.graph.ops[step.op]
        name = f"{call.node.name}_again"
        if op.copy_target:
            assert isinstance(call.node.target, OpOverload)
            device = self.recording.tape.storages[self._storage(call.results[0])].device
            results = tuple(self.node_of[self.value_of[r.name], 0] for r in call.results[1:])
            target = operators.copy_op(call.node.target, device, writes=True)
            args, _ = self._arguments(call.node, step, without=set(call.writes))
            return self._create(target, operators.copy_arguments(args, (None, *results)), {}, name)
        changed = self._state(call)
        args, kwargs = self._arguments(call.node, step, without=changed)
        if changed and self._follows_from_state(call):
            args, kwargs = self._arguments(call.node, step, instead=self._scratch(call, changed))
        if not call.is_random:
            return self._create(*self._in_place(call, step, args, kwargs), name)
        source = _generator_of(call, self.recording)
        state = self.random_state[step.op]
        return self._create(rng.replay, (source, state, call.node.target, *args), kwargs, name)

    def _state(self, call: Call) -> set[fx.Node]:
        """The arguments of a call that were there before the step and that it changes."""
        entered = {entry.node for entry in self.recording.tape.entries}
        return entered.intersection(call.writes)

    def _follows_from_state(self, call: Call) -> bool:
        """Whether the types of a batch norm's results depend on statistics that a copy lacks."""
        target = call.node.target
        is_norm = isinstance(target, OpOverload) and operators.writes_statistics(target)
        return is_norm and call.node.args[1] is None

    def _scratch(self, call: Call, state: set[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Memory for a copy to write to in place of state; it goes right after the copy."""
        made = {}
        for node in sorted(state, key=lambda each: each.name):
            meta = self.recording.tape.metas[node]
            device = self.recording.tape.storages[meta.storage].device
            how = {"dtype": meta.dtype, "device": device}
            name = f"{node.name}_scratch"
            made[node] = self._create(torch.empty, (list(meta.shape),), how, name)
            self._add(made[node], call)
        self.scratch += made.values()
        return made

    def _arguments(
        self,
        node: fx.Node,
        step: ResolvedCompute,
        without: Collection[fx.Node] = (),
        instead: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
    ) -> tuple[Any, Any]:
        """A recorded call's arguments, from the copies it reads; None for what is left out."""

        def lead(arg: fx.Node) -> fx.Node | None:
            if arg in instead:
                return instead[arg]
            return None if arg in without else self._lead(arg, step)

        return fx.map_arg(node.args, lead), fx.map_arg(node.kwargs, lead)

    def _lead(self, arg: fx.Node, step: ResolvedCompute) -> fx.Node:
        """The node that holds what a recorded argument is, at this step of the schedule."""
        value = self.value_of[arg.name]
        return self.node_of[value, step.copies[value]]

    def _part(self, result: fx.Node, call: Call, parts: dict[fx.Node, fx.Node]) -> fx.Node:
        """One tensor or list of what a call returns, taken out of it as the recording did.

        `parts` has what is there already, by the recorded nodes.
        """
        if result not in parts:
            source, index = result.args
            assert isinstance(source, fx.Node)
            whole = self._part(source, call, parts)
            parts[result] = self._create(result.target, (whole, index), {}, result.name)
            self._add(parts[result], call)
        return parts[result]

    def _bind(self, result: fx.Node, node: fx.Node, step: ResolvedCompute) -> None:
        value = self.value_of[result.name]
        copy = step.copies[value]
        self.node_of[value, copy] = node
        self.held.setdefault((self.graph.values[value].storage, copy), []).append(node)

    def _free(self, step: Free) -> None:
        nodes = self.held.pop((step.storage, step.copy), [])
        if nodes:
            self.listing.frees.setdefault(self.listing.nodes[-1], []).extend(nodes)

    def _part_of_optimizer(self, op: Op) -> OptimizerCall:
        """The recorded optimizer call with the gradients of one update, and their parameters."""
        (call,) = self.recording.tape.optimizer_calls
        names = {self.graph.values[value].name for value in op.inputs}
        pairs = [(p, g) for p, g in zip(call.params, call.grads, strict=True) if g.name in names]
        return replace(call, params=[p for p, _ in pairs], grads=[g for _, g in pairs])

    def _run_optimizer(self, call: OptimizerCall) -> None:
        grads = tuple(self.node_of[self.value_of[grad.name], 0] for grad in call.grads)
        node = self._create(call.node.target, grads, {}, call.node.name)
        self.listing.nodes.append(node)
        self.listing.optimizer_calls[node] = call

    def _storage(self, node: fx.Node) -> int:
        return self.recording.tape.metas[node].storage

    def _create(self, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
        return self.listing.graph.create_node("call_function", target, args, kwargs, name=name)

    def _add(self, node: fx.Node, call: Call) -> None:
        self.listing.nodes.append(node)
        self.listing.calls[node] = call


def _generator_of(call: Call, recording: Recording) -> torch.Generator | str:
    """Whom a random call draws from: its own generator, or the default one of its device."""
    for arg in (*call.node.args, *call.node.kwargs.values()):
        if isinstance(arg, torch.Generator):
            return arg
    touched = [*call.results, *call.writes]
    return str(recording.tape.storages[recording.tape.metas[touched[0]].storage].device)
