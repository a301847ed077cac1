"""The last changes to a graph that Inductor is about to compile.

**Products are made at once.** Where a matrix product is added to something, Inductor makes one call
of both. If that something comes much later, what the product is made of stays until then. So it is
with weights that are used twice, as the first and the last layer of a language model: the gradient
of all its scores would be there throughout the backward pass. So the two are taken apart.

**Rows' numbers are written first.** Inductor computes pointwise chains where they are read, unless
they are long; then their result is written to memory. So it is with the gradient of a language
model's scores: labels, which are shifted and masked, and what each of them weighs make the chain
long, and the scores' gradient, the largest tensor there is, is written in float32. What is computed
for a whole row is therefore written before, which leaves a short chain for each score.

**Counters are counted together.** Every batch norm counts its batches, each in a kernel of its own,
which take as long to start as large ones. They become one. **So are casts**: see `casts`.
"""

from __future__ import annotations

import torch
from torch import fx

from rekindle.dynamo import aot
from rekindle.dynamo.foreach_casts import cast_together
from rekindle.dynamo.fusion import Kind, after, kind_of
from rekindle.dynamo.joint_graph import nbytes_of

aten = torch.ops.aten
_MUCH_BYTES = 64 << 20
_MANY = 8192  # elements in a row


class Tidy(aot.CustomGraphPass):
    """Saves memory and starts of kernels where Inductor does not."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph that Inductor is about to compile."""
        place = {node: index for index, node in enumerate(graph.nodes)}
        for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
            if _is_worth_it(node, place):
                _take_apart(graph, node, place)
        _count_together(graph)
        _write_rows(graph)
        cast_together(graph)

    def uuid(self) -> str:
        """A name for what is kept on disk."""
        return "rekindle.tidy 3"


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
    with graph.inserting_after(after(last)):
        product = graph.call_function(aten.mm.default, tuple(factors))
    with graph.inserting_before(node):
        total = graph.call_function(aten.add.Tensor, (added, product))
    product.meta, total.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
    place[product] = place[last]
    place[total] = place[node]


def _write_rows(graph: fx.Graph) -> None:
    """Have what is computed for whole rows of something large written to memory before."""
    for node in graph.nodes:
        is_computed = bool(node.all_input_nodes) and kind_of(node, fuses=True) is Kind.SIMPLE
        if is_computed and any(_is_much(user, node) for user in _readers(node)):
            aot.write_to_memory(node)


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a node, through views of it."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if kind_of(user, fuses=True) is Kind.VIEW else [user]
    return found


def _is_much(node: fx.Node, row: fx.Node) -> bool:
    """Whether a node is large, and has many elements for each of another's."""
    many = nbytes_of(node) >= _MUCH_BYTES
    val, of = node.meta.get("val"), row.meta.get("val")
    if not many or not isinstance(val, torch.Tensor) or not isinstance(of, torch.Tensor):
        return False
    numbers = (aot.hint(each.numel()) for each in (val, of))
    return of.dim() > 0 and next(numbers) >= _MANY * next(numbers)


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
