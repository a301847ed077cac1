"""Tangents that are always zero: outputs such as logits that are returned but not differentiated.

A language model returns its loss and its logits, and is trained by the gradient of the loss. For
the tangent of the logits, autograd allocates zeros and holds them throughout the backward pass.
Here the backward graph is compiled without them; if such a tangent is given after all, the graph is
compiled again with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from rekindle.dynamo import aot
from rekindle.dynamo.fusion import CASTS, NodeKind, node_kind

aten = torch.ops.aten
_LAYOUTS = {torch.contiguous_format: None, torch.channels_last: 4, torch.channels_last_3d: 5}


def unused_tangents(graph: fx.Graph) -> list[fx.Node]:
    """The tangents that are expected to be zero.

    They are only added to other gradients, and there is a scalar tangent: a loss.
    """
    tangents = [node for node in graph.nodes if aot.is_tangent(node)]
    losses = [node for node in tangents if _shape(node) == ()]
    unused = [node for node in tangents if node not in losses and _sums(node)]
    others = [node for node in tangents if node not in unused]
    is_known = all(_shape(node) is not None for node in others)
    return unused if losses and is_known else []


def without_tangents(module: fx.GraphModule, names: set[str]) -> fx.GraphModule:
    """A copy of a backward graph in which these tangents are zero, and no inputs."""
    made = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    last = made.graph_copy(module.graph, copied)
    (output,) = module.graph.find_nodes(op="output")
    made.output(last).meta = dict(output.meta)
    for node in module.graph.find_nodes(op="placeholder"):
        if node.name in names:
            for total, other in _sums(copied[node]).items():
                total.replace_all_uses_with(_in_layout_of(total, other))
            _erase(made, copied[node])
    found = fx.GraphModule(module, made)
    found.meta = dict(module.meta)
    return found


def compile_backward(
    module: fx.GraphModule, inputs: Sequence[Any], compile: aot.Compile
) -> Callable[[list[Any]], Any]:
    """Compile a backward graph without its unused tangents."""
    has_unused = bool(unused_tangents(module.graph))
    return BackwardVariants(module, inputs, compile) if has_unused else compile(module, inputs)


class BackwardVariants:
    """A backward graph, compiled once for each set of missing tangents.

    The expected variant is compiled at once, the others when they are needed.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], compile: aot.Compile) -> None:
        self._boxed_call = True  # takes its arguments as a list, and empties it
        self._module, self._inputs = module, list(inputs)
        self._compile = aot.in_current_context(compile)
        placeholders = module.graph.find_nodes(op="placeholder")
        self._names = [node.name for node in placeholders]
        unused = {node.name for node in unused_tangents(module.graph)}
        self.unused = {i for i, name in enumerate(self._names) if name in unused}
        self.required = {
            i: (tuple(val.shape), val.dtype, val.device)
            for i, node in enumerate(placeholders)
            if aot.is_tangent(node) and node.name not in unused
            if isinstance(val := node.meta["val"], torch.Tensor)
        }
        expected = frozenset(self.unused)
        self._variants = {expected: self._compile_without(expected)}

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph; tangents that were not given are None."""
        for i, (shape, dtype, device) in self.required.items():
            if args[i] is None:
                args[i] = torch.zeros(shape, dtype=dtype, device=device)
        missing = frozenset(i for i in self.unused if args[i] is None)
        if missing not in self._variants:
            self._variants[missing] = self._compile_without(missing)
        for i in sorted(missing, reverse=True):
            del args[i]
        return self._variants[missing](args)

    def _compile_without(self, missing: frozenset[int]) -> Callable[[list[Any]], Any]:
        names = {self._names[i] for i in missing}
        inputs = [each for i, each in enumerate(self._inputs) if i not in missing]
        return self._compile(without_tangents(self._module, names), inputs)


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of a node's tensor; None if it is symbolic."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return ()
    is_fixed = all(isinstance(size, int) for size in val.shape)
    return tuple(val.shape) if is_fixed else None


def _sums(node: fx.Node) -> dict[fx.Node, fx.Node]:
    """The sums that read a node, with their other summand; empty if anything else reads it."""
    found: dict[fx.Node, fx.Node] = {}
    todo = [node]
    while todo:
        for user in (each := todo.pop()).users:
            if node_kind(user) is NodeKind.VIEW or user.target in CASTS:
                todo.append(user)
            elif user not in found and (other := _other_summand(user, each)) is not None:
                found[user] = other
            else:
                return {}
    return found


def _in_layout_of(total: fx.Node, other: fx.Node) -> fx.Node:
    """The other summand of a sum; as a copy, if its strides are not the sum's.

    Kernels add up in an order that depends on strides.
    """
    layout = _copied_layout(total, other)
    if layout is None:
        return other
    with total.graph.inserting_before(total):
        made = total.graph.call_function(aten.clone.default, (other,), {"memory_format": layout})
    made.meta = dict(total.meta)
    return made


def _copied_layout(total: fx.Node, other: fx.Node) -> torch.memory_format | None:
    """The layout that a copy of a summand needs to have a sum's strides; None if no copy is needed.

    `preserve_format` if no layout gives these strides.
    """
    wanted, given = total.meta["val"], other.meta["val"]
    if given.stride() == wanted.stride():
        return None
    for layout, n_dims in _LAYOUTS.items():
        is_possible = n_dims in (None, wanted.dim())
        if is_possible and given.clone(memory_format=layout).stride() == wanted.stride():
            return layout
    return torch.preserve_format


def _other_summand(total: fx.Node, node: fx.Node) -> fx.Node | None:
    """The node that a sum adds to another one, if it has the sum's shape and dtype.

    And if it has the sum's strides, or a copy can have them.
    """
    if total.target is not aten.add.Tensor or total.kwargs:
        return None
    others = [each for each in total.args if isinstance(each, fx.Node) and each is not node]
    if len(others) != 1:
        return None
    other_val, total_val = others[0].meta.get("val"), total.meta.get("val")
    is_alike = (
        isinstance(other_val, torch.Tensor)
        and isinstance(total_val, torch.Tensor)
        and other_val.shape == total_val.shape
        and other_val.dtype == total_val.dtype
        and _copied_layout(total, others[0]) is not torch.preserve_format
    )
    return others[0] if is_alike else None


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node and everything that depends on it, which is unused by now."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)
