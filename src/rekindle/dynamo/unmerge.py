"""Takes apart what Inductor puts together at the price of memory.

Where a matrix product is added to something, Inductor makes one call of both. If that something
comes much later, what the product is made of stays until then. So it is with weights that are used
twice, as the first and the last layer of a language model: the gradient of all its scores would be
there throughout the backward pass.
"""

from __future__ import annotations

import torch
from torch import fx

from rekindle.dynamo import private
from rekindle.dynamo.joint import nbytes_of

aten = torch.ops.aten


class Unmerge(private.CustomGraphPass):
    """Has products computed as soon as they can be, where that frees memory."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph that Inductor is about to compile."""
        place = {node: index for index, node in enumerate(graph.nodes)}
        for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
            if _is_worth_it(node, place):
                _take_apart(graph, node, place)

    def uuid(self) -> str:
        """A name for what is kept on disk."""
        return "rekindle.unmerge 1"


def _is_worth_it(node: fx.Node, place: dict[fx.Node, int]) -> bool:
    """Whether a product that is added to something is smaller than what it waits with."""
    added, *factors = node.all_input_nodes
    if node.kwargs or len(factors) != 2 or node.args != (added, *factors):
        return False
    shapes = [each.meta["val"].shape for each in (added, node)]
    dtypes = {each.meta["val"].dtype for each in (added, *factors, node)}
    is_later = place[added] > max(map(place.__getitem__, factors))
    is_smaller = nbytes_of(node) < sum(map(nbytes_of, factors))
    return shapes[0] == shapes[1] and len(dtypes) == 1 and is_later and is_smaller


def _take_apart(graph: fx.Graph, node: fx.Node, place: dict[fx.Node, int]) -> None:
    """A product of its own, made once there is what it needs, and a sum where both were."""
    added, *factors = node.all_input_nodes
    last = max(factors, key=place.__getitem__)
    after = last
    while after.next.op == "placeholder":
        after = after.next
    with graph.inserting_after(after):
        product = graph.call_function(aten.mm.default, tuple(factors))
    with graph.inserting_before(node):
        total = graph.call_function(aten.add.Tensor, (added, product))
    product.meta, total.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
    place[product] = place[last]
    place[total] = place[node]
