"""Applies a schedule to a recorded step: adds recomputed calls and frees.

A recomputed call, or copy, repeats a recorded one on the copies of its arguments that are live
there. It draws the same random numbers, and writes to no state (docs/decisions/018).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from rekindle.core.graph.graph import Op, OpKind, StepGraph
from rekindle.core.graph.schedule import Free, ResolvedCompute, Schedule, resolve
from rekindle.passes.fx_nodes import item_path
from rekindle.rewriting import multi_tensor
from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators, rng
from rekindle.tracing.tape import Call, OptimizerCall, Recording


@dataclass
class RewrittenStep:
    """A step as nodes in execution order, and the nodes whose tensors are freed after each.

    `node_map` maps recorded inputs and outputs to the nodes that hold them at the step's end.
    """

    graph: fx.Graph
    nodes: list[fx.Node] = field(default_factory=list)
    frees: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    calls: dict[fx.Node, Call] = field(default_factory=dict)  # the recorded ones
    optimizer_calls: dict[fx.Node, OptimizerCall] = field(default_factory=dict)
    batched: dict[fx.Node, list[Call]] = field(default_factory=dict)  # by foreach node
    origin: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)  # op, and copy or 0
    node_map: dict[fx.Node, fx.Node] = field(default_factory=dict)


def as_recorded(recording: Recording) -> RewrittenStep:
    """The step in recorded order, each tensor freed after its last use."""
    tape = recording.tape
    in_optimizer = {call.node for call in tape.calls if call.in_optimizer}
    nodes = [
        node
        for node in tape.graph.nodes
        if node.op == "call_function" and item_path(node)[0] not in in_optimizer
    ]
    kept = {*recording.outputs, *(entry.node for entry in tape.entries)}
    return RewrittenStep(
        tape.graph,
        nodes,
        frees=last_uses(nodes, kept),
        calls={call.node: call for call in tape.calls},
        optimizer_calls={call.node: call for call in tape.optimizer_calls},
        node_map={node: node for node in kept},
    )


def rewrite(recording: Recording, graph: StepGraph, schedule: Schedule) -> RewrittenStep:
    """The recorded step under a schedule of its lifted `graph`."""
    rewritten = _Rewriter(recording, graph, schedule).run()
    rewritten.graph.lint()
    return rewritten


class _Rewriter:
    def __init__(self, recording: Recording, graph: StepGraph, schedule: Schedule) -> None:
        self.recording = recording
        self.graph = graph
        self.schedule = schedule
        self.rewritten = RewrittenStep(fx.Graph())
        self.call_of = {call.node.name: call for call in recording.tape.calls}
        self.value_of = {value.name: value.index for value in graph.values}
        self.node_of: dict[tuple[int, int], fx.Node] = {}  # by value and copy
        self.held: dict[tuple[int, int], list[fx.Node]] = {}  # by storage and copy
        self.random_state: dict[int, fx.Node] = {}  # by op: its generator's state before it
        self.scratch: list[fx.Node] = []
        self.recomputed = {step.op for step in schedule if not isinstance(step, Free) and step.copy}

    def run(self) -> RewrittenStep:
        for entry in self.recording.tape.entries:
            node = self.rewritten.graph.placeholder(entry.node.name)
            self.node_of[self.value_of[entry.node.name], 0] = node
            self.rewritten.node_map[entry.node] = node
        before, last = self._optimizer_positions()
        for step in resolve(self.graph, self.schedule):
            if isinstance(step, Free):
                freed = self.held.pop((step.storage, step.copy), [])
                if freed:
                    self.rewritten.frees.setdefault(self.rewritten.nodes[-1], []).extend(freed)
                continue
            if not step.copy:
                for call in before.get(step.op, ()):
                    self._run_optimizer(call)
            self._compute(step)
        for call in last:
            self._run_optimizer(call)
        for node in self.recording.outputs:
            self.rewritten.node_map[node] = self.node_of[self.value_of[node.name], 0]
        self._free_views_of_outputs()
        return self.rewritten

    def _free_views_of_outputs(self) -> None:
        """Free views of storages that outlive the step after their last use."""
        views = {node for nodes in self.held.values() for node in nodes}
        views.difference_update(self.rewritten.node_map.values())
        others = set(self.rewritten.graph.nodes) - views
        for node, freed in last_uses(self.rewritten.nodes, others).items():
            if freed:
                self.rewritten.frees.setdefault(node, []).extend(freed)

    def _optimizer_positions(self) -> tuple[dict[int, list[OptimizerCall]], list[OptimizerCall]]:
        """The optimizer calls that come before each op, and those that come last."""
        if self.graph.early_updates:
            return {}, []
        index = {op.name: op.index for op in self.graph.ops}
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
        if op.kind is OpKind.UPDATE:
            self._run_optimizer(self._partial_optimizer_call(op))
            return
        if op.kind is OpKind.FOREACH:
            self._compute_batched(op, step)
            return
        if call is None or call.in_optimizer:
            return  # run by the user's optimizer
        node = self._copy(call, step) if step.copy else self._original(call, step)
        self._add(node, call)
        self.rewritten.origin[node] = (step.op, step.copy)
        if self.scratch:
            self.rewritten.frees[node], self.scratch = self.scratch, []
        if call.results == [call.node]:
            self._bind(call.node, node, step)
            return
        if step.copy and op.copy_target:
            self._bind(call.results[0], node, step)  # the only result of this operator
            return
        items = {call.node: node}
        for result in call.results:
            self._bind(result, self._item(result, call, items), step)
        results = [self._resolved(result, step) for result in call.results]
        last = self.rewritten.nodes[-1]
        self.rewritten.frees[last] = [item for item in items.values() if item not in results]

    def _compute_batched(self, op: Op, step: ResolvedCompute) -> None:
        """One foreach call for several recorded ones, and one node for each of its results."""
        calls = [self.call_of[member] for member in op.members]
        function, argument = multi_tensor.foreach_form(calls[0])
        tensors = [self._resolved(call.node.all_input_nodes[0], step) for call in calls]
        node = self._create(function, (tensors, argument), {}, op.name)
        self._add(node, calls[0])
        self.rewritten.origin[node] = (step.op, step.copy)
        self.rewritten.batched[node] = calls
        if function is not multi_tensor.cast:
            return
        for index, call in enumerate(calls):
            item = self._create(operator.getitem, (node, index), {}, call.node.name)
            self._add(item, call)
            self._bind(call.node, item, step)
        self.rewritten.frees[item] = [node]

    def _original(self, call: Call, step: ResolvedCompute) -> fx.Node:
        if call.is_random and step.op in self.recomputed:
            name, source = f"{call.node.name}_state", _generator_of(call, self.recording)
            self.random_state[step.op] = state = self._create(rng.read, (source,), {}, name)
            self._add(state, call)
        args, kwargs = self._arguments(call.node, step)
        return self._create(*self._in_place(call, step, args, kwargs), call.node.name)

    def _in_place(
        self, call: Call, step: ResolvedCompute, args: Any, kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Target and arguments of a call, in place or with `out=` if the graph has it overwrite."""
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
        """A call that recomputes a recorded one without side effects."""
        op = self.graph.ops[step.op]
        name = f"{call.node.name}_again"
        if op.copy_target:
            assert isinstance(call.node.target, OpOverload)
            device = _device_of(self.recording, call.results[0])
            results = tuple(self.node_of[self.value_of[r.name], 0] for r in call.results[1:])
            target = operators.copy_op(call.node.target, device, writes=True)
            args, _ = self._arguments(call.node, step, dict.fromkeys(call.writes))
            return self._create(target, operators.copy_arguments(args, (None, *results)), {}, name)
        state = {entry.node for entry in self.recording.tape.entries}.intersection(call.writes)
        replaced = dict.fromkeys(state)
        if state and self._needs_running_statistics(call):
            replaced = self._scratch(call, state)
        args, kwargs = self._arguments(call.node, step, replaced)
        if not call.is_random:
            return self._create(*self._in_place(call, step, args, kwargs), name)
        source, before = _generator_of(call, self.recording), self.random_state[step.op]
        seeded = rng.redrawn(source, call.node.target)
        if seeded is not None:
            args, kwargs = operators.without_generator(seeded, args, kwargs)
            return self._create(rng.redraw, (before, seeded, *args), kwargs, name)
        return self._create(rng.replay, (source, before, call.node.target, *args), kwargs, name)

    def _needs_running_statistics(self, call: Call) -> bool:
        """True for a batch norm without weight: they determine the dtypes of its results."""
        target = call.node.target
        is_norm = isinstance(target, OpOverload) and operators.writes_statistics(target)
        return is_norm and call.node.args[1] is None

    def _scratch(self, call: Call, state: set[fx.Node]) -> dict[fx.Node, fx.Node | None]:
        """Uninitialized tensors for a copy to write to in place of state, freed right after it."""
        found: dict[fx.Node, fx.Node | None] = {}
        for node in sorted(state, key=lambda each: each.name):
            meta = self.recording.tape.metas[node]
            options = {"dtype": meta.dtype, "device": _device_of(self.recording, node)}
            name = f"{node.name}_scratch"
            found[node] = made = self._create(torch.empty, (list(meta.shape),), options, name)
            self._add(made, call)
            self.scratch.append(made)
        return found

    def _arguments(
        self,
        node: fx.Node,
        step: ResolvedCompute,
        replaced: Mapping[fx.Node, fx.Node | None] = MappingProxyType({}),
    ) -> tuple[Any, Any]:
        """A recorded call's arguments, from the copies it reads, except where `replaced`."""

        def resolved(arg: fx.Node) -> fx.Node | None:
            return replaced[arg] if arg in replaced else self._resolved(arg, step)

        return fx.map_arg(node.args, resolved), fx.map_arg(node.kwargs, resolved)

    def _resolved(self, arg: fx.Node, step: ResolvedCompute) -> fx.Node:
        """The node that holds a recorded argument at this step of the schedule."""
        value = self.value_of[arg.name]
        return self.node_of[value, step.copies[value]]

    def _item(self, result: fx.Node, call: Call, items: dict[fx.Node, fx.Node]) -> fx.Node:
        """The node for one item of what a call returns: one of `items`, or a new `getitem`."""
        if result not in items:
            source, index = result.args
            assert isinstance(source, fx.Node)
            whole = self._item(source, call, items)
            items[result] = self._create(result.target, (whole, index), {}, result.name)
            self._add(items[result], call)
        return items[result]

    def _bind(self, result: fx.Node, node: fx.Node, step: ResolvedCompute) -> None:
        value = self.value_of[result.name]
        copy = step.copies[value]
        self.node_of[value, copy] = node
        self.held.setdefault((self.graph.values[value].storage, copy), []).append(node)

    def _partial_optimizer_call(self, op: Op) -> OptimizerCall:
        """The recorded optimizer call, restricted to the parameters of one early update."""
        (call,) = self.recording.tape.optimizer_calls
        names = {self.graph.values[value].name for value in op.inputs}
        pairs = [(p, g) for p, g in zip(call.params, call.grads, strict=True) if g.name in names]
        return replace(call, params=[p for p, _ in pairs], grads=[g for _, g in pairs])

    def _run_optimizer(self, call: OptimizerCall) -> None:
        grads = tuple(self.node_of[self.value_of[grad.name], 0] for grad in call.grads)
        node = self._create(call.node.target, grads, {}, call.node.name)
        self.rewritten.nodes.append(node)
        self.rewritten.optimizer_calls[node] = call

    def _create(self, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
        return self.rewritten.graph.create_node("call_function", target, args, kwargs, name=name)

    def _add(self, node: fx.Node, call: Call) -> None:
        self.rewritten.nodes.append(node)
        self.rewritten.calls[node] = call


def last_uses(nodes: Sequence[fx.Node], kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The nodes to free after each node: those with no later use and not in `kept`."""
    seen = set(kept)
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        dying[node] = [n for n in (node, *node.all_input_nodes) if n not in seen]
        seen.update(dying[node])
    return dying


def _generator_of(call: Call, recording: Recording) -> torch.Generator | str:
    """The generator of a random call: its own, or the name of its device for the default one."""
    for arg in (*call.node.args, *call.node.kwargs.values()):
        if isinstance(arg, torch.Generator):
            return arg
    return str(_device_of(recording, [*call.results, *call.writes][0]))


def _device_of(recording: Recording, node: fx.Node) -> torch.device:
    return recording.tape.storages[recording.tape.metas[node].storage].device
