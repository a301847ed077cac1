"""Puts a plan into a joint graph and cuts it in two: a forward module and a backward module.

The joint graph is written anew: first what the forward pass computes, then the backward pass in the
plan's order, with every recomputation a node of its own that reads what the plan says it reads.
What the second part reads of the first is what is saved, and that is where torch cuts.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from rekindle.core.graph.graph import Phase
from rekindle.core.graph.schedule import Plan, ResolvedCompute, resolve
from rekindle.dynamo import aot
from rekindle.dynamo.fusion import Kind, is_reduction, kind_of, never_again, without_statistics
from rekindle.dynamo.joint_graph import Joint, nbytes_of, outputs_of
from rekindle.torch_internals import OpOverload

_NORMALISED = (0, 1, 2)  # the results of a batch norm that are not its new statistics


@dataclass(frozen=True)
class Split:
    """The two modules, and what the first leaves to the second: names and bytes of tensors.

    `kept` are the tensors that the forward pass makes and saves; inputs that it saves, which are
    there in any case, are not among them.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    kept: dict[str, int]

    @property
    def kept_bytes(self) -> int:
        """The bytes that are held from the forward pass to the backward pass."""
        return sum(self.kept.values())


def split(joint: Joint, plan: Plan) -> Split:
    """The two modules of a planned joint graph."""
    return _Writer(joint).run(plan)


class _Writer:
    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.graph = fx.Graph()
        self.number = {node: i for i, node in enumerate(joint.nodes) if node is not None}
        self.first: dict[fx.Node, fx.Node] = {}  # what is there before the backward pass
        self.again: dict[tuple[fx.Node, int], fx.Node] = {}  # what the backward pass makes
        self.inner: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self.saved: dict[fx.Node, None] = {}

    def run(self, plan: Plan) -> Split:
        joint, old = self.joint, self.joint.module.graph
        for node in old.nodes:
            if node.op == "placeholder" or (node in joint.forward and node.op != "output"):
                self.first[node] = self._first(node)
        for step in resolve(joint.step, plan.schedule):
            if isinstance(step, ResolvedCompute):
                op = joint.step.ops[step.op]
                if step.copy or op.phase is not Phase.FORWARD:
                    self._run(step)
        self._finish(old)
        self._save_what_is_read()
        module = joint.module
        module.graph = self.graph
        saved = list(self.saved)
        tensors = [node for node in saved if not aot.is_sym(node)]
        syms = [node for node in saved if aot.is_sym(node)]
        forward, backward = aot.cut(module, tensors, syms, joint.n_outputs)
        names = {node.name for node in backward.graph.find_nodes(op="placeholder")}
        made = [node for node in saved if node.op == "call_function" and node.name in names]
        kept = {node.name: nbytes_of(node) for node in made if not aot.is_sym(node)}
        return Split(forward, backward, kept)

    def _first(self, node: fx.Node) -> fx.Node:
        """A node of the forward pass in the new graph."""
        made = self.graph.node_copy(node, self.first.__getitem__)
        if never_again(node) or aot.must_be_in_forward(node):
            aot.stay_in_forward(made)
        return made

    def _run(self, run: ResolvedCompute) -> None:
        """Write one op of the backward pass, or a recomputation."""
        node = self.joint.main[run.op]
        if node is None:  # the tangents, which are there, and stay
            return
        simpler = without_statistics(node) if run.copy else None
        read = node.all_input_nodes
        if simpler is not None:
            read = [each for each in read if each in simpler[1]]
        found = {each: self._find(each, run) for each in read}
        made = self.again[node, run.copy] = self._copied(node, found, simpler)
        if not run.copy and (never_again(node) or aot.must_be_in_backward(node)):
            aot.stay_in_backward(made)
        if not run.copy and nbytes_of(node) >= aot.LARGE_BYTES and _is_shared(node):
            aot.write_to_memory(made)
        for value in self.joint.step.ops[run.op].outputs:
            result = self.joint.nodes[value]
            assert result is not None
            is_there = simpler is None or result.args[1] in _NORMALISED
            if result is not node and is_there:
                self.again[result, run.copy] = self._item(result, node, made)

    def _item(self, result: fx.Node, node: fx.Node, made: fx.Node) -> fx.Node:
        """One of an op's several results."""
        source = result.args[0]
        assert isinstance(source, fx.Node)
        parent = made if source is node else self._item(source, node, made)
        item = self.graph.call_function(operator.getitem, (parent, result.args[1]))
        item.meta = dict(result.meta)
        return item

    def _copied(
        self,
        node: fx.Node,
        found: dict[fx.Node, fx.Node],
        call: tuple[OpOverload, tuple[Any, ...]] | None = None,
    ) -> fx.Node:
        """A node of the backward pass, which reads what was found for its inputs.

        It calls what the node does, or what is given.
        """
        target, arguments = call or (node.target, node.args)
        args, kwargs = fx.map_arg((arguments, node.kwargs), found.__getitem__)
        name = f"{node.name}_again" if node in self.first else node.name
        made = self.graph.create_node(node.op, target, args, kwargs, name, node.type)
        made.meta = dict(node.meta)
        return made

    def _find(self, node: fx.Node, run: ResolvedCompute | None) -> fx.Node:
        """What an op reads: the copy the plan says, or something computed from such copies."""
        if node in self.number:
            value = self.number[node]
            copy = run.copies.get(value, 0) if run is not None else 0
            return self.again.get((node, copy)) or self._saved(node)
        if (node, 0) in self.again:  # changed in the backward pass
            return self.again[node, 0]
        is_there = node.op in ("placeholder", "get_attr") or aot.is_sym(node)
        if (is_there or never_again(node)) and node in self.first:
            return self._saved(node)
        found = tuple(self._find(each, run) for each in node.all_input_nodes)
        if (node, found) not in self.inner:
            of = dict(zip(node.all_input_nodes, found, strict=True))
            self.inner[node, found] = self._copied(node, of)
        return self.inner[node, found]

    def _saved(self, node: fx.Node) -> fx.Node:
        """Something of before the backward pass, which is saved for it."""
        found = self.first[node]
        if found.op != "get_attr" and not aot.is_backward_input(found):
            self.saved.setdefault(found)
        return found

    def _save_what_is_read(self) -> None:
        """Save what the backward pass computes from a sum, a mean or a variance, instead of that.

        The forward pass has computed it, it takes no more memory, and the backward pass would start
        a kernel for it. Only where nothing else is read of the sum: then nothing more is saved.
        """
        early = set(self.first.values())
        for (node, _), made in self.inner.items():  # what reads others comes after them
            read = made.all_input_nodes
            source = read[0] if len(read) == 1 else None
            if (
                source in self.saved
                and node in self.first
                and self._is_of_sums(node)
                and nbytes_of(node) <= nbytes_of(source)
                and [user for user in source.users if user not in early] == [made]
            ):
                made.replace_all_uses_with(self.first[node])
                self.graph.erase_node(made)
                del self.saved[source]
                self.saved.setdefault(self.first[node])

    def _is_of_sums(self, node: fx.Node) -> bool:
        """Whether a node computes from a reduction's result, and nothing else."""
        while kind_of(node, fuses=True) is Kind.SIMPLE and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
        return is_reduction(node)

    def _finish(self, old: fx.Graph) -> None:
        (output,) = old.find_nodes(op="output")
        n_outputs = self.joint.n_outputs
        ends = outputs_of(old)
        found = [
            node if node is None else self.first[node] if i < n_outputs else self._find(node, None)
            for i, node in enumerate(ends)
        ]
        others = aot.leaves(output.args)
        results = [
            other if node is None else node for node, other in zip(found, others, strict=True)
        ]
        made = self.graph.output(tuple(results))
        made.meta = dict(output.meta)


def _is_shared(node: fx.Node) -> bool:
    """Whether a value would be computed in every kernel that reads it, if it were for Inductor.

    Then all that it is computed from stays until the last of them has run.
    """
    fused = (Kind.SIMPLE, Kind.GATHERED)
    is_simple = kind_of(node, fuses=True) is Kind.SIMPLE
    return is_simple and any(kind_of(user, fuses=True) in fused for user in node.users)
