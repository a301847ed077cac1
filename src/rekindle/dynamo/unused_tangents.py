"""Gradients that nobody gives: those of outputs that the loss was computed from.

A language model returns its loss and its scores, and is trained by the gradient of the loss. For
that of the scores, autograd makes zeros, as many as there are scores, and holds them throughout the
backward pass. Here they are left away: the backward graph is compiled without them. Where such a
gradient is given after all, the graph is compiled once more, as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from rekindle.dynamo import aot
from rekindle.dynamo.fusion import CASTS, Kind, kind_of

aten = torch.ops.aten


def ungiven(graph: fx.Graph) -> list[fx.Node]:
    """The gradients, of those that a backward pass starts from, that are taken not to be given.

    There has to be a loss beside them, that is a number, and all they do is to be added to what
    comes from it.
    """
    tangents = [node for node in graph.nodes if aot.is_backward_input(node)]
    losses = [node for node in tangents if _shape(node) == ()]
    found = [node for node in tangents if node not in losses and _sums(node)]
    others = [node for node in tangents if node not in found]
    is_known = all(_shape(node) is not None for node in others)
    return found if losses and is_known else []


def without(module: fx.GraphModule, names: set[str]) -> fx.GraphModule:
    """A backward graph that does not have these gradients; the given one is left as it is."""
    made = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    last = made.graph_copy(module.graph, copied)
    (output,) = module.graph.find_nodes(op="output")
    made.output(last).meta = dict(output.meta)
    for node in module.graph.find_nodes(op="placeholder"):
        if node.name in names:
            for total, other in _sums(copied[node]).items():
                total.replace_all_uses_with(other)
            _erase(made, copied[node])
    found = fx.GraphModule(module, made)
    found.meta = dict(module.meta)
    return found


def compile_backward(
    module: fx.GraphModule, inputs: Sequence[Any], compile: aot.Compile
) -> Callable[[list[Any]], Any]:
    """Compile a backward graph without what is not given."""
    is_whole = not ungiven(module.graph)
    return compile(module, inputs) if is_whole else Backward(module, inputs, compile)


class Backward:
    """A compiled backward graph, in one form for each set of gradients that are left away.

    The form that is expected to be needed is compiled at once.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], compile: aot.Compile) -> None:
        self._boxed_call = True  # takes its arguments as a list, and empties it
        self._module, self._inputs = module, list(inputs)
        self._compile = aot.in_this_context(compile)
        self._names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        tangents = dict.fromkeys(filter(aot.is_backward_input, module.graph.nodes))
        expected = {node.name for node in ungiven(module.graph)}
        self._expected = {i for i, name in enumerate(self._names) if name in expected}
        vals = {node.name: node.meta["val"] for node in tangents if node.name not in expected}
        self._zeros = {
            i: (tuple(vals[name].shape), vals[name].dtype, vals[name].device)
            for i, name in enumerate(self._names)
            if isinstance(vals.get(name), torch.Tensor)
        }
        self._forms = {frozenset(self._expected): self._form(frozenset(self._expected))}

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph; its gradients that are None were not given."""
        for i, (shape, dtype, device) in self._zeros.items():
            if args[i] is None:
                args[i] = torch.zeros(shape, dtype=dtype, device=device)
        absent = frozenset(i for i in self._expected if args[i] is None)
        if absent not in self._forms:
            self._forms[absent] = self._form(absent)
        for i in sorted(absent, reverse=True):
            del args[i]
        return self._forms[absent](args)

    def _form(self, absent: frozenset[int]) -> Callable[[list[Any]], Any]:
        names = {self._names[i] for i in absent}
        inputs = [each for i, each in enumerate(self._inputs) if i not in absent]
        return self._compile(without(self._module, names), inputs)


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """The sizes of a node's tensor; None where they are not fixed."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return ()
    is_fixed = all(isinstance(size, int) for size in val.shape)
    return tuple(val.shape) if is_fixed else None


def _sums(node: fx.Node) -> dict[fx.Node, fx.Node]:
    """The sums that something goes into, with what it is added to; empty if it goes elsewhere."""
    found: dict[fx.Node, fx.Node] = {}
    todo = [node]
    while todo:
        for user in (each := todo.pop()).users:
            if kind_of(user, fuses=True) is Kind.VIEW or user.target in CASTS:
                todo.append(user)
            elif user not in found and (other := _other(user, each)) is not None:
                found[user] = other
            else:
                return {}
    return found


def _other(total: fx.Node, node: fx.Node) -> fx.Node | None:
    """What a sum adds to a node: something of the sum's own shape and type."""
    if total.target is not aten.add.Tensor or total.kwargs:
        return None
    others = [each for each in total.args if isinstance(each, fx.Node) and each is not node]
    if len(others) != 1:
        return None
    mine, sum_ = others[0].meta.get("val"), total.meta.get("val")
    is_alike = (
        isinstance(mine, torch.Tensor)
        and isinstance(sum_, torch.Tensor)
        and mine.shape == sum_.shape
        and mine.dtype == sum_.dtype
    )
    return others[0] if is_alike else None


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Take a node away, and all that is computed from it, which nobody reads by now."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)
