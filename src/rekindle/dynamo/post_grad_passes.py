"""The last changes to a graph before Inductor compiles it.

**Matmuls run early.** Inductor merges a matmul and the addition of its result into one call. If the
other summand comes much later, the matmul's inputs are live until then: with weights tied between
the first and the last layer of a language model, the gradient of the logits would be live
throughout the backward pass. Such calls are split.

**Values per row are realized.** Inductor inlines pointwise chains into their readers unless they
are long; then the result is written to memory. Labels, shifted and masked, and their weights make
the chain of the logits' gradient so long that this gradient, the largest tensor of all, is written
in float32. What is computed once per row is therefore realized, which leaves a short chain.

**Counters and casts are batched.** Every batch norm counts its batches; under autocast every weight
is cast before use, and its gradient is cast back. Each is a kernel that takes longer to launch than
to run, and deep networks of small convolutions become host-bound. Counters become one foreach call;
casts are batched as far as memory hardly changes: weights before the first is read, gradients after
the last is computed. `rewriting/multi_tensor` does this in recorded steps, where the planner
decides what is batched; the two stay apart, since launches can only be compared on a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from rekindle.dynamo import aot
from rekindle.dynamo.fusion import NodeKind, node_kind, tensor_bytes
from rekindle.passes.fx_nodes import past_placeholders
from rekindle.torch_internals import CustomGraphPass

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_VERSION = 4  # of the passes, in Inductor's disk cache


@dataclass(frozen=True)
class PostGradOptions:
    """What counts as large or small in these passes."""

    large_result_min_bytes: int = 64 << 20  # whose values per row are realized
    row_min_elements: int = 8192
    batches_casts: bool = True
    cast_batch_max_bytes: int = 32 << 20  # read or written by one kernel
    cast_batch_max_tensors: int = 64
    small_cast_max_bytes: int = 64 << 10  # a weight's cast that may come early and stay


class PostGradPasses(CustomGraphPass):
    """Saves memory and kernel launches in a graph that Inductor is about to compile."""

    def __init__(self, options: PostGradOptions | None = None) -> None:
        self._options = options or PostGradOptions()

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph."""
        split_late_additions(graph)
        batch_counters(graph)
        realize_row_values(graph, self._options)
        if self._options.batches_casts:
            batch_casts(graph, self._options)

    def uuid(self) -> str:
        """The key in Inductor's disk cache."""
        return f"rekindle.post_grad_passes {_VERSION} {self._options}"


def split_late_additions(graph: fx.Graph) -> None:
    """Split matmuls from additions whose other summand is computed after the matmul's inputs."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        if not _is_late_addition(node, position):
            continue
        added, *factors = node.all_input_nodes
        last = max(factors, key=position.__getitem__)
        with graph.inserting_after(past_placeholders(last)):
            product = graph.call_function(aten.mm.default, tuple(factors))
        with graph.inserting_before(node):
            total = graph.call_function(aten.add.Tensor, (added, product))
        product.meta, total.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
        position[product] = position[last]
        position[total] = position[node]


def _is_late_addition(node: fx.Node, position: dict[fx.Node, int]) -> bool:
    """True if a matmul's result is smaller than its inputs, which wait for the other summand."""
    added, *factors = node.all_input_nodes
    if node.kwargs or len(factors) != 2 or node.args != (added, *factors):
        return False
    shapes = [each.meta["val"].shape for each in (added, node)]
    dtypes = {each.meta["val"].dtype for each in (added, *factors, node)}
    is_late = position[added] > max(map(position.__getitem__, factors))
    is_smaller = tensor_bytes(node) < sum(map(tensor_bytes, factors))
    return shapes[0] == shapes[1] and len(dtypes) == 1 and is_late and is_smaller


def realize_row_values(graph: fx.Graph, options: PostGradOptions) -> None:
    """Realize values that are computed once per row of something large."""
    for node in graph.nodes:
        is_computed = bool(node.all_input_nodes) and node_kind(node) is NodeKind.INLINED
        if is_computed and any(_has_long_rows(user, node, options) for user in _readers(node)):
            aot.realize(node)


def _readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a node, through views."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if node_kind(user) is NodeKind.VIEW else [user]
    return found


def _has_long_rows(node: fx.Node, row_value: fx.Node, options: PostGradOptions) -> bool:
    """True if a node is large and has a long row for each element of another."""
    is_large = tensor_bytes(node) >= options.large_result_min_bytes
    val, per_row = node.meta.get("val"), row_value.meta.get("val")
    if not is_large or not isinstance(val, torch.Tensor) or not isinstance(per_row, torch.Tensor):
        return False
    elements, rows = (aot.size_hint(each.numel()) for each in (val, per_row))
    return per_row.dim() > 0 and elements >= options.row_min_elements * rows


def batch_counters(graph: fx.Graph) -> None:
    """Add one to all counters in one foreach call."""
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
    """True if a node writes an input counter plus one back to it, and nothing else reads either."""
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


def batch_casts(graph: fx.Graph, options: PostGradOptions) -> None:
    """Cast weights and gradients in foreach calls."""
    casts = graph.find_nodes(op="call_function", target=_CAST)
    casts = [node for node in casts if _has_fixed_shape(node)]
    weights = [node for node in casts if _is_of_weight(node, options)]
    gradients = [node for node in casts if _is_of_gradient(node)]
    for batch in _batches(weights, options):
        _replace(graph, batch, before=batch[0])
    for batch in _batches(gradients, options):
        _replace(graph, batch, before=batch[-1])


def _has_fixed_shape(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and all(isinstance(size, int) for size in val.shape)


def _is_of_weight(node: fx.Node, options: PostGradOptions) -> bool:
    """True if a cast is of an input and may run early: it outlives the pass, or is small."""
    (read,) = node.all_input_nodes
    outlives = any(user.op == "output" for user in node.users)
    is_small = tensor_bytes(node) <= options.small_cast_max_bytes
    return read.op == "placeholder" and (outlives or is_small)


def _is_of_gradient(node: fx.Node) -> bool:
    """True if a cast is of an opaque kernel's result, which only it reads, and is returned."""
    (read,) = node.all_input_nodes
    is_returned = all(user.op == "output" for user in node.users)
    return is_returned and set(read.users) == {node} and node_kind(read) is NodeKind.OPAQUE


def _batches(casts: Iterable[fx.Node], options: PostGradOptions) -> list[list[fx.Node]]:
    """Casts that run in one kernel each, in order, without those that stay alone."""
    found: list[list[fx.Node]] = [[]]
    total = 0
    for node in casts:
        (read,) = node.all_input_nodes
        nbytes = max(tensor_bytes(node), tensor_bytes(read))
        if nbytes > options.cast_batch_max_bytes:
            continue
        is_full = len(found[-1]) == options.cast_batch_max_tensors
        if is_full or total + nbytes > options.cast_batch_max_bytes:
            found.append([])
            total = 0
        found[-1].append(node)
        total += nbytes
    return [batch for batch in found if len(batch) > 1]


def _replace(graph: fx.Graph, casts: list[fx.Node], before: fx.Node) -> None:
    """Replace casts by one call, in the place of one of them."""
    inner = fx.Graph()
    read = [node.all_input_nodes[0] for node in casts]
    made = []
    for node, source in zip(casts, read, strict=True):
        placeholder = inner.placeholder(source.name)
        placeholder.meta = {"val": source.meta["val"]}
        made.append(inner.call_function(_CAST, (placeholder, node.args[1])))
        made[-1].meta = {"val": node.meta["val"]}
    inner.output(tuple(made))
    with graph.inserting_before(before):
        call = aot.foreach_call(graph, inner, read)
        call.meta = {"val": tuple(node.meta["val"] for node in casts)}
        for index, node in enumerate(casts):
            item = graph.call_function(operator.getitem, (call, index))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item)
    for node in casts:
        graph.erase_node(node)
