"""Writes a plan into a joint graph and partitions it into a forward and a backward module.

The new joint graph has the forward pass first, then the backward pass in the plan's order, with
every recomputation as a node of its own that reads the copies which the plan names. The nodes of
the forward pass that the backward pass reads are saved; torch extracts the two modules there.

`rewriting/apply_schedule` does the same for a recorded step. The two share how a schedule is
resolved and how results are found; the rest differs, since a recorded step frees its tensors,
replays random state and calls the optimizer itself, and AOTAutograd and Inductor do so here.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from rekindle.core.graph.graph import Phase
from rekindle.core.graph.schedule import Plan, ResolvedCompute, resolve
from rekindle.dynamo import aot
from rekindle.dynamo.fusion import (
    FUSED_KINDS,
    NodeKind,
    changed_state,
    is_reduction_result,
    node_kind,
    tensor_bytes,
    without_running_stats,
)
from rekindle.dynamo.joint_graph import JointGraph
from rekindle.torch_internals import OpOverload, must_be_in_backward, must_be_in_forward, pytree

_NORMALIZED_RESULTS = (0, 1, 2)  # of a batch norm: all but its new running statistics


def partition_graph(joint: JointGraph, plan: Plan) -> tuple[aot.Modules, dict[str, int]]:
    """The forward and the backward module, and the bytes of each tensor kept between the two.

    Inputs of the step that are saved are live anyway, and not among these.
    """
    return _Writer(joint).run(plan)


class _Writer:
    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        self.graph = fx.Graph()
        values = enumerate(joint.value_nodes)
        self.value_of = {node: value for value, node in values if node is not None}
        self.early: dict[fx.Node, fx.Node] = {}  # what exists before the backward pass
        self.late: dict[tuple[fx.Node, int], fx.Node] = {}  # what the backward pass computes
        self.inlined: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self.saved: dict[fx.Node, None] = {}

    def run(self, plan: Plan) -> tuple[aot.Modules, dict[str, int]]:
        joint, old = self.joint, self.joint.module.graph
        for node in old.nodes:
            if node.op == "placeholder" or (node in joint.forward and node.op != "output"):
                self.early[node] = self._copy_forward(node)
        for step in resolve(joint.step, plan.schedule):
            if isinstance(step, ResolvedCompute):
                op = joint.step.ops[step.op]
                if step.copy or op.phase is not Phase.FORWARD:
                    self._compute(step)
        self._add_outputs(old)
        self._save_what_is_read_of_reductions()
        joint.module.graph = self.graph
        forward, backward = aot.extract_modules(joint.module, list(self.saved), joint.n_outputs)
        names = {node.name for node in backward.graph.find_nodes(op="placeholder")}
        made = [node for node in self.saved if node.op == "call_function" and node.name in names]
        kept = {node.name: tensor_bytes(node) for node in made if not aot.is_sym(node)}
        return (forward, backward), kept

    def _copy_forward(self, node: fx.Node) -> fx.Node:
        """A node of the forward pass in the new graph."""
        made = self.graph.node_copy(node, self.early.__getitem__)
        if changed_state(node) or must_be_in_forward(node):
            aot.pin(made, "forward")
        return made

    def _compute(self, step: ResolvedCompute) -> None:
        """Write one op of the backward pass, or a recomputation."""
        node = self.joint.op_nodes[step.op]
        if node is None:  # tangents, which are placeholders
            return
        recompute = without_running_stats(node) if step.copy else None
        read = node.all_input_nodes
        if recompute is not None:
            read = [each for each in read if each in recompute[1]]
        inputs = {each: self._find(each, step) for each in read}
        made = self.late[node, step.copy] = self._copy_backward(node, inputs, recompute)
        if not step.copy and (changed_state(node) or must_be_in_backward(node)):
            aot.pin(made, "backward")
        if not step.copy and tensor_bytes(node) >= aot.LARGE_BYTES and _would_be_inlined(node):
            aot.realize(made)
        for value in self.joint.step.ops[step.op].outputs:
            result = self.joint.value_nodes[value]
            assert result is not None
            exists = recompute is None or result.args[1] in _NORMALIZED_RESULTS
            if result is not node and exists:
                self.late[result, step.copy] = self._item(result, node, made)

    def _item(self, result: fx.Node, node: fx.Node, made: fx.Node) -> fx.Node:
        """One of an op's several results."""
        source = result.args[0]
        assert isinstance(source, fx.Node)
        parent = made if source is node else self._item(source, node, made)
        item = self.graph.call_function(operator.getitem, (parent, result.args[1]))
        item.meta = dict(result.meta)
        return item

    def _copy_backward(
        self,
        node: fx.Node,
        inputs: dict[fx.Node, fx.Node],
        call: tuple[OpOverload, tuple[Any, ...]] | None = None,
    ) -> fx.Node:
        """A node of the backward pass with these inputs; `call` in place of the node's own."""
        target, arguments = call or (node.target, node.args)
        args, kwargs = fx.map_arg((arguments, node.kwargs), inputs.__getitem__)
        name = f"{node.name}_again" if node in self.early else node.name
        made = self.graph.create_node(node.op, target, args, kwargs, name, node.type)
        made.meta = dict(node.meta)
        return made

    def _find(self, node: fx.Node, step: ResolvedCompute | None) -> fx.Node:
        """What an op reads: the copy that the plan names, or a node computed from such copies."""
        if node in self.value_of:
            copy = step.copies.get(self.value_of[node], 0) if step is not None else 0
            return self.late.get((node, copy)) or self._save(node)
        if (node, 0) in self.late:  # mutated in the backward pass
            return self.late[node, 0]
        is_input = node.op in ("placeholder", "get_attr") or aot.is_sym(node)
        if (is_input or changed_state(node)) and node in self.early:
            return self._save(node)
        found = tuple(self._find(each, step) for each in node.all_input_nodes)
        if (node, found) not in self.inlined:
            inputs = dict(zip(node.all_input_nodes, found, strict=True))
            self.inlined[node, found] = self._copy_backward(node, inputs)
        return self.inlined[node, found]

    def _save(self, node: fx.Node) -> fx.Node:
        """A node from before the backward pass, saved for it."""
        found = self.early[node]
        if found.op != "get_attr" and not aot.is_tangent(found):
            self.saved.setdefault(found)
        return found

    def _save_what_is_read_of_reductions(self) -> None:
        """Save what the backward pass computes from a reduction in place of the reduction.

        The forward pass has computed it already, it takes no more memory, and the backward pass
        saves a kernel. Only if nothing else reads the reduction: otherwise both would be saved.
        """
        early = set(self.early.values())
        for (node, _), made in self.inlined.items():  # in the order of dependence
            read = made.all_input_nodes
            source = read[0] if len(read) == 1 else None
            if (
                source in self.saved
                and node in self.early
                and _depends_on_reduction_alone(node)
                and tensor_bytes(node) <= tensor_bytes(source)
                and [user for user in source.users if user not in early] == [made]
            ):
                made.replace_all_uses_with(self.early[node])
                self.graph.erase_node(made)
                del self.saved[source]
                self.saved.setdefault(self.early[node])

    def _add_outputs(self, old: fx.Graph) -> None:
        (output,) = old.find_nodes(op="output")
        results = pytree.tree_leaves(output.args)
        for i, node in enumerate(results):
            if isinstance(node, fx.Node):
                is_forward = i < self.joint.n_outputs
                results[i] = self.early[node] if is_forward else self._find(node, None)
        made = self.graph.output(tuple(results))
        made.meta = dict(output.meta)


def _depends_on_reduction_alone(node: fx.Node) -> bool:
    """True if a node is a reduction or is inlined from one and nothing else."""
    while node_kind(node) is NodeKind.INLINED and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return is_reduction_result(node)


def _would_be_inlined(node: fx.Node) -> bool:
    """True if Inductor would compute a node in every fused kernel that reads it.

    Then all its inputs would be live until the last of these kernels.
    """
    is_inlined = node_kind(node) is NodeKind.INLINED
    return is_inlined and any(node_kind(user) in FUSED_KINDS for user in node.users)
