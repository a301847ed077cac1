"""From the joint graph of AOTAutograd to a `StepGraph`: the planners' view of a compiled step.

A value of the step is a tensor in memory: the result of a kernel. Views and nodes that Inductor
inlines (`fusion`) are no values; an op of the step is a node together with the inlined nodes before
it. A cast or an activation function that the backward pass reads is therefore recomputed there from
its inputs, and only these can be kept or dropped.

The forward pass is what the graph's forward outputs need; all else is the backward pass.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from rekindle.core.graph.graph import Op, OpKind, Phase, Role, Source, StepGraph
from rekindle.dynamo import aot
from rekindle.dynamo.fusion import (
    CASTS,
    FUSED_KINDS,
    NodeKind,
    changed_state,
    node_kind,
    outputs_of,
    target_name,
    tensor_bytes,
    view_source,
    without_running_stats,
)
from rekindle.dynamo.planned_graph import Key
from rekindle.dynamo.unused_tangents import unused_tangents
from rekindle.passes.fx_nodes import item_path, root
from rekindle.passes.graph_builder import GraphBuilder
from rekindle.torch_internals import OpOverload, must_be_in_forward
from rekindle.tracing import operators

TANGENTS = "rekindle.tangents"
"""The target of the two ops at the start and the end of the backward pass.

Tangents are live from the one to the other, since autograd holds them.
"""

_BIG_INPUT_RATIO = 1 / 4  # of a result's bytes: inputs of at least this size are big ones
_MIN_BACKWARD_JOIN = 3  # big inputs that realizing their result frees in the backward pass
_MAX_NAMES = 4  # that a fused op's name is made of
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ATTRIBUTE = re.compile(r"\[['\"]?(\w+)['\"]?\]|\.(\w+)")
_SKIPPED_ATTRIBUTES = frozenset({"self", "_modules", "_orig_mod"})


class JointInputs(NamedTuple):
    """A joint graph as AOTAutograd hands it over, of a graph that Dynamo captured.

    The first `n_outputs` outputs are the forward pass's; `static_inputs` are the positions of
    parameters and buffers. `key` identifies the captured graph.
    """

    module: fx.GraphModule
    inputs: Sequence[Any]
    n_outputs: int
    static_inputs: Collection[int]
    key: Key


@dataclass(frozen=True)
class JointGraph:
    """A joint graph and its step.

    `value_nodes` and `op_nodes` are the FX nodes of the step's values and ops; state other than
    tensors (a random generator) is a value without a node. `is_fused[op]` is True if Inductor fuses
    the op with its neighbours. `forward` are the nodes of the forward pass and the step's inputs;
    the first `n_outputs` of the graph's outputs are the forward pass's.
    """

    module: fx.GraphModule
    n_outputs: int
    step: StepGraph
    value_nodes: tuple[fx.Node | None, ...]
    op_nodes: tuple[fx.Node | None, ...]
    is_fused: tuple[bool, ...]
    forward: frozenset[fx.Node]


def lift_joint_graph(given: JointInputs, *, fuses: bool, holds_outputs: bool) -> JointGraph:
    """The step of a joint graph.

    The outputs of the forward pass are live until the step ends if the caller holds them; otherwise
    only scalars are.
    """
    return _Lift(given, fuses, holds_outputs).run()


class _Lift(GraphBuilder):
    def __init__(self, given: JointInputs, fuses: bool, holds_outputs: bool) -> None:
        super().__init__()
        self.module, self.n_outputs = given.module, given.n_outputs
        self.static_inputs, self.holds_outputs = set(given.static_inputs), holds_outputs
        self.all = list(self.module.graph.nodes)
        self.position = {node: position for position, node in enumerate(self.all)}
        self.kinds = {node: node_kind(node, fuses=fuses) for node in self.all}
        self.sizes = {node: tensor_bytes(node) for node in self.all}
        outputs = outputs_of(self.module.graph)
        self.results = [node for node in outputs[: self.n_outputs] if node is not None]
        self.gradients = outputs[self.n_outputs :]
        self.tangents = [node for node in self.all if aot.is_tangent(node)]
        self.after_tangents = self._dependents(self.tangents)
        self.forward = self._find_forward()
        self.realized: set[fx.Node] = set()  # the nodes written to memory
        self.read_through: dict[fx.Node, tuple[fx.Node, ...]] = {}  # memory that a node reads
        self.value_nodes: list[fx.Node | None] = []
        self.op_nodes: list[fx.Node | None] = []
        self.state: dict[str, int] = {}  # values of state that is no tensor

    def run(self) -> JointGraph:
        self._find_realized()
        self._add_inputs()
        units = [node for node in self.all if self._is_unit(node)]
        forward = [node for node in units if node in self.forward]
        for node in forward:
            if self.kinds[node] is not NodeKind.MUTATION:
                self._add_op(node, Phase.FORWARD)
        self._add_mutations([n for n in forward if self.kinds[n] is NodeKind.MUTATION])
        tangents = self._add_tangents()
        for node in units:
            if node not in self.forward:
                self._add_op(node, Phase.BACKWARD)
        self._append(Op(len(self.ops), "tangents_end", TANGENTS, Phase.BACKWARD, tangents, ()))
        return JointGraph(
            self.module,
            self.n_outputs,
            self._step(),
            tuple(self.value_nodes),
            tuple(self.op_nodes),
            tuple(n is not None and self.kinds[n] in FUSED_KINDS for n in self.op_nodes),
            frozenset(self.forward),
        )

    def _dependents(self, starts: Iterable[fx.Node]) -> set[fx.Node]:
        """These nodes, and all that depend on them."""
        found = set(starts)
        for node in self.all:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _find_forward(self) -> set[fx.Node]:
        """The nodes of the forward pass, and the step's inputs."""
        needed = {node for node in self.results if node not in self.after_tangents}
        for node in self.all:
            runs_once = changed_state(node) and not aot.is_tagged_backward(node)
            mutates = self.kinds[node] is NodeKind.MUTATION and must_be_in_forward(node)
            if (runs_once or mutates) and node not in self.after_tangents:
                needed.add(node)
        for node in reversed(self.all):
            if node in needed:
                needed.update(node.all_input_nodes)
        for node in self.all:
            is_item = node.target is operator.getitem and node.args[0] in needed
            is_input = node.op in ("placeholder", "get_attr") or aot.is_sym(node)
            if is_item or (is_input and node not in self.after_tangents):
                needed.add(node)
        return needed

    def _find_realized(self) -> None:
        """Find the nodes written to memory, and for each node the memory it is computed from."""
        needed = [*self.results, *(node for node in self.gradients if node is not None)]
        for node in self.all:
            if self.kinds[node] is NodeKind.OPAQUE:
                needed += [] if node.target is operator.getitem else node.all_input_nodes
        self.realized.update(base for node in needed if self._is_result(base := self._base(node)))
        for node in self.all:
            kind = self.kinds[node]
            if node.op in ("placeholder", "get_attr"):
                is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
                self.read_through[node] = (node,) if is_tensor else ()
            elif node in self.forward and aot.is_sym(node):
                self.read_through[node] = ()
            elif kind is NodeKind.MUTATION:
                self.read_through[node] = self.read_through[view_source(node)]
            else:
                read = self._memory_read_by(node.all_input_nodes)
                is_inlined = kind is NodeKind.INLINED
                if self._is_join(node, read) if is_inlined else self._is_result(node):
                    self.realized.add(node)
                self.read_through[node] = (node,) if node in self.realized else tuple(read)

    def _memory_read_by(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
        """The tensors in memory that some nodes are computed from, in order."""
        return dict.fromkeys(each for node in nodes for each in self.read_through[node])

    def _is_result(self, node: fx.Node) -> bool:
        """True if a node computes a tensor, and not a tuple of them."""
        computes = self.kinds[node] in (NodeKind.OPAQUE, *FUSED_KINDS)
        return computes and isinstance(node.meta.get("val"), torch.Tensor)

    def _base(self, node: fx.Node) -> fx.Node:
        """The tensor behind views and mutations."""
        through = (NodeKind.VIEW, NodeKind.MUTATION)
        return root(node, lambda n: view_source(n) if self.kinds[n] in through else None)

    def _is_join(self, node: fx.Node, read: Iterable[fx.Node]) -> bool:
        """True if an inlined node is realized: it depends on several computed tensors of its size.

        Keeping it in their place can save memory, and chains stay short. In the backward pass,
        where each of its readers computes it as well, it has to free several tensors.
        """
        least = self.sizes[node] * _BIG_INPUT_RATIO
        big = [r for r in read if r.op == "call_function" and self.sizes[r] >= least]
        if node in self.forward:
            return self.sizes[node] > 0 and len(big) > 1
        frees_several = len(big) >= _MIN_BACKWARD_JOIN
        return self.sizes[node] > 0 and frees_several and self._n_readers(node) > 1

    def _n_readers(self, node: fx.Node) -> int:
        """The number of nodes that read a result, or its only view or cast."""
        users = list(node.users)
        is_view = len(users) == 1 and self.kinds[users[0]] is NodeKind.VIEW
        is_cast = len(users) == 1 and users[0].target in CASTS
        return self._n_readers(users[0]) if is_view or is_cast else len(users)

    def _is_unit(self, node: fx.Node) -> bool:
        """True if a node is an op of the step."""
        kind = self.kinds[node]
        if node.op != "call_function" or node.target is operator.getitem:
            return False
        if kind in (NodeKind.OPAQUE, NodeKind.REALIZED, NodeKind.MUTATION):
            return True
        runs_once = kind is not NodeKind.NUMBER and changed_state(node) is not None
        return node in self.realized or runs_once

    def _add_node(self, node: fx.Node, producer: int | None, role: Role | None = None) -> int:
        val = node.meta["val"]
        storage = self.add_storage(self.sizes[node], val.device)
        self.value_nodes.append(node)
        shape = map(aot.size_hint, val.shape)
        return self.add_value(node, storage, shape, val.dtype, producer, role)

    def _add_state(self, name: str) -> int:
        """The value of state that ops change and that is no tensor."""
        if name not in self.state:
            device = self._storages[0][1] if self._storages else "cpu"
            storage = self.add_storage(0, device)
            self.value_nodes.append(None)
            self.state[name] = self.add_value(name, storage, (), torch.uint8, None, Role.BUFFER)
        return self.state[name]

    def _append(self, op: Op, node: fx.Node | None = None) -> None:
        self.ops.append(op)
        self.op_nodes.append(node)

    def _add_inputs(self) -> None:
        """The values that exist before the step: parameters, buffers, the batch, constants."""
        inputs = [node for node in self.all if node.op == "placeholder"]
        inputs = [node for node in inputs if not aot.is_tangent(node)]
        for position, node in enumerate(inputs):
            gradient = self.gradients[position] if position < len(self.gradients) else None
            if isinstance(node.meta.get("val"), torch.Tensor):
                role = Role.INPUT
                if position in self.static_inputs:
                    role = Role.BUFFER if gradient is None else Role.PARAM
                self._add_node(node, None, role)
        for node in self.all:
            if node.op == "get_attr" and isinstance(node.meta.get("val"), torch.Tensor):
                self._add_node(node, None, Role.BUFFER)

    def _add_tangents(self) -> tuple[int, ...]:
        """The op that starts the backward pass; unused tangents take no memory."""
        self.sizes |= dict.fromkeys(unused_tangents(self.module.graph), 0)
        tensors = [n for n in self.tangents if isinstance(n.meta.get("val"), torch.Tensor)]
        index = len(self.ops)
        outputs = tuple(self._add_node(node, index) for node in tensors)
        self._append(Op(index, "tangents", TANGENTS, Phase.BACKWARD, (), outputs))
        return outputs

    def _add_op(self, node: fx.Node, phase: Phase) -> None:
        index = len(self.ops)
        inlined = self._inlined_before(node)
        read = node.all_input_nodes
        if (recompute := without_running_stats(node)) is not None:
            read = [each for each in read if each in recompute[1]]
        inputs = [self.value_of[each] for each in self._memory_read_by(read)]
        changed = [] if (state := changed_state(node)) is None else [self._add_state(state)]
        if self.kinds[node] is NodeKind.MUTATION:
            changed += [self.value_of[each] for each in self.read_through[view_source(node)]]
        elif phase is Phase.BACKWARD:
            changed = []  # runs once in any case
        results = [node, *node.users] if node in self.realized else list(node.users)
        outputs = [r for r in results if r in self.realized and item_path(r)[0] is node]
        op = Op(
            index=index,
            name=node.name,
            target=self._target(node, inlined),
            phase=phase,
            inputs=tuple(dict.fromkeys(inputs)),
            outputs=tuple(self._add_node(each, index) for each in outputs),
            mutates=tuple(dict.fromkeys(changed)),
            is_random=state == "random_generator" and phase is Phase.FORWARD,
            flops=_flops(node),
            source=_source(node),
            members=tuple(each.name for each in (*inlined, node)) if inlined else (),
        )
        self._append(op, node)

    def _add_mutations(self, nodes: Sequence[fx.Node]) -> None:
        """One op for everything that the forward pass mutates at its end: buffers, statistics."""
        if nodes:
            read = self._memory_read_by(each for node in nodes for each in node.all_input_nodes)
            changed = self._memory_read_by(map(view_source, nodes))
            inputs, mutated = (
                tuple(sorted(self.value_of[each] for each in some)) for some in (read, changed)
            )
            name, target = nodes[0].name, str(nodes[0].target)
            op = Op(len(self.ops), name, target, Phase.FORWARD, inputs, (), mutated)
            self._append(op, nodes[0])

    def _inlined_before(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that are computed in a fused node's kernel, in order."""
        if self.kinds[node] not in FUSED_KINDS:
            return []
        found: set[fx.Node] = set()
        todo = list(node.all_input_nodes)
        while todo:
            each = todo.pop()
            if each not in self.realized and each not in found and each.op == "call_function":
                found.add(each)
                todo += each.all_input_nodes
        inlined = [each for each in found if self.kinds[each] is NodeKind.INLINED]
        return sorted(inlined, key=self.position.__getitem__)

    def _target(self, node: fx.Node, inlined: Sequence[fx.Node]) -> str:
        if not inlined:
            target = node.target
            return str(target) if isinstance(target, OpOverload) else f"hop.{target_name(target)}"
        last = dict.fromkeys(target_name(each.target) for each in (node, *reversed(inlined)))
        return OpKind.FUSED.value + "_".join(reversed(list(last)[:_MAX_NAMES]))

    def _step(self) -> StepGraph:
        held = [node for node in self.results if self.holds_outputs or _is_scalar(node)]
        ends = [*held, *(node for node in self.gradients if node is not None)]
        bases = [base for node in ends if (base := self._base(node)) in self.value_of]
        outputs = dict.fromkeys(self.value_of[b] for b in bases if b.op == "call_function")
        grads = {
            self.values[self.value_of[self._base(gradient)]].storage
            for position, gradient in enumerate(self.gradients)
            if gradient is not None
            and position in self.static_inputs
            and self.value_of.get(self._base(gradient)) in outputs
        }
        return self.build(tuple(outputs), grads, held_until={})


def _is_scalar(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return not isinstance(val, torch.Tensor) or val.dim() == 0


def _flops(node: fx.Node) -> int:
    """Floating-point operations of a node, for the current sizes."""
    target = node.target
    if not isinstance(target, OpOverload) or target._overloadpacket not in flop_registry:
        return 0

    def plain(val: Any) -> Any:
        if isinstance(val, torch.Tensor):
            shape = list(map(aot.size_hint, val.shape))
            return torch.empty(shape, dtype=val.dtype, device="meta")
        return aot.size_hint(val) if isinstance(val, torch.SymInt) else val

    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: plain(n.meta["val"]))
    val = node.meta["val"]
    out = tuple(map(plain, val)) if isinstance(val, (tuple, list)) else plain(val)
    return operators.flops(target, args, kwargs, out)


def _source(node: fx.Node) -> Source:
    """The module that a node belongs to, and the user's line."""
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    paths = [path for path, _ in stack.values()] or [""]
    found = ("".join(each) for each in _ATTRIBUTE.findall(paths[-1]))
    module = ".".join(name for name in found if name not in _SKIPPED_ATTRIBUTES)
    frames = _FRAME.findall(meta.get("stack_trace") or "")
    filename, lineno = frames[-1] if frames else ("", 0)
    return Source(module, filename, int(lineno))
