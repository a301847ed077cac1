"""The last changes to a graph that Inductor is about to compile.

**Products are made at once.** Where a matrix product is added to something, Inductor makes one call
of both. If that something comes much later, what the product is made of stays until then. So it is
with weights that are used twice, as the first and the last layer of a language model: the gradient
of all its scores would be there throughout the backward pass. So the two are taken apart.

**Counters are counted together.** Every batch norm counts its batches, each in a kernel of its own,
which take as long to start as large ones. They become one. **So are casts**: see `casts`.
"""

from __future__ import annotations

import torch
from torch import fx

from rekindle.dynamo import private
from rekindle.dynamo.casts import cast_together
from rekindle.dynamo.joint import nbytes_of

aten = torch.ops.aten


class Tidy(private.CustomGraphPass):
    """Saves memory and starts of kernels where Inductor does not."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph that Inductor is about to compile."""
        place = {node: index for index, node in enumerate(graph.nodes)}
        for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
            if _is_worth_it(node, place):
                _take_apart(graph, node, place)
        _count_together(graph)
        cast_together(graph)

    def uuid(self) -> str:
        """A name for what is kept on disk."""
        return "rekindle.tidy 2"


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


def _count_together(graph: fx.Graph) -> None:
    """Add one to all counters in one call."""
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    counts = [node for node in copies if _is_count(node)]
    if len(counts) > 1:
        counters = [node.args[0] for node in counts]
        with graph.inserting_before(counts[-1]):
            graph.call_function(aten._foreach_add_.Scalar, (counters, 1))
        for node in counts:
            total = node.args[1]
            assert isinstance(total, fx.Node)
            graph.erase_node(node)
            graph.erase_node(total)


def _is_count(node: fx.Node) -> bool:
    """Whether a node writes a counter that was there before, with one added, and nothing else."""
    counter, total = node.args[:2]
    if not isinstance(counter, fx.Node) or not isinstance(total, fx.Node) or node.users:
        return False
    val = counter.meta.get("val")
    return (
        counter.op == "placeholder"
        and isinstance(val, torch.Tensor)
        and (val.dtype, val.shape) == (torch.int64, ())
        and (total.target, total.args, total.kwargs) == (aten.add.Tensor, (counter, 1), {})
        and set(total.users) == {node}
        and set(counter.users) == {total, node}
    )
