"""How Inductor runs each node of a graph: as a kernel of its own, or as part of others.

Inductor inlines pointwise operators into the kernels that read them, so their results are not
written to memory unless something needs them there. Only results in memory take bytes, and only
they can be kept.
"""

from __future__ import annotations

import math
import operator
from enum import Enum
from typing import Any

import torch
from torch import fx

from rekindle.dynamo import aot
from rekindle.passes import fusible_ops
from rekindle.passes.fx_nodes import item_path
from rekindle.torch_internals import OpOverload, pytree
from rekindle.tracing import operators

aten, prims = torch.ops.aten, torch.ops.prims
CASTS = frozenset({aten._to_copy.default, prims.convert_element_type.default})


class NodeKind(Enum):
    """How a node runs."""

    VIEW = "view"  # computes nothing
    INLINED = "inlined"  # computed in every kernel that reads it, without memory of its own
    REALIZED = "realized"  # fused with its neighbours, but written to memory: sums, table rows
    OPAQUE = "opaque"  # a kernel of its own, which reads memory and writes memory
    MUTATION = "mutation"  # writes to a tensor that existed before
    NUMBER = "number"  # not a tensor


FUSED_KINDS = (NodeKind.INLINED, NodeKind.REALIZED)
_INLINED = {
    *("full", "full_like", "zeros_like", "ones_like", "scalar_tensor", "arange", "iota", "empty"),
    *("_to_copy", "clone", "constant_pad_nd", "copy", "device_put"),
    *("inductor_lookup_seed", "inductor_random", "inductor_randint", "convert_element_type"),
    *("slice_scatter", "select_scatter", "_unsafe_masked_index"),
    "_low_memory_max_pool_offsets_to_indices",
}
_REALIZED = {
    *("embedding", "index", "_unsafe_index", "gather", "index_select", "cat", "cumsum"),
    *("prepare_softmax_online", "_softmax", "_log_softmax", "native_layer_norm"),
    *("_low_memory_max_pool_with_offsets", "max_pool2d_with_indices_backward"),
    *("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"),
}
_MAX_POOLING_WINDOWS = 25  # per element, for which Inductor writes the gradient itself
_SAME_MEMORY = {"_unsafe_view", "reshape", "view_of", "alias", "detach", "lift_fresh"}


def node_kind(node: fx.Node, *, fuses: bool = True) -> NodeKind:
    """How a node runs; if nothing is fused, every node that computes is opaque."""
    target = node.target
    if node.op != "call_function" or aot.is_sym(node):
        return NodeKind.NUMBER
    if target is operator.getitem:
        return node_kind(view_source(node), fuses=fuses)
    if not isinstance(target, OpOverload):
        return NodeKind.OPAQUE
    if target._schema.is_mutable:
        return NodeKind.MUTATION
    if _is_view(target):
        return NodeKind.VIEW
    if not fuses or changed_state(node):
        return NodeKind.OPAQUE
    name = target_name(target)
    if name == "max_pool2d_with_indices_backward" and not _is_small_pool(*node.args[2:6]):
        return NodeKind.OPAQUE
    is_single = isinstance(node.meta.get("val"), torch.Tensor)
    if is_single and (torch.Tag.pointwise in target.tags or name in _INLINED):
        return NodeKind.INLINED
    if fusible_ops.is_reduction(target) or name in _REALIZED:
        return NodeKind.REALIZED
    return NodeKind.OPAQUE


def is_reduction_result(node: fx.Node) -> bool:
    """True if a node is the result of a reduction, or one of several."""
    return fusible_ops.is_reduction(item_path(node)[0].target)


def changed_state(node: fx.Node) -> str | None:
    """The name of the state that a node changes, so that it must run once; None if none."""
    target = node.target
    if node.op != "call_function":
        return None
    if isinstance(target, OpOverload):
        if operators.is_random(target, node.args, dict(node.kwargs)):
            return "random_generator"
        if target.namespace in ("_c10d_functional", "c10d_functional", "_dtensor"):
            return "process_group"
        if _is_cast_for_convolution(node):
            return "layout"
    is_plain = isinstance(target, OpOverload) or target is operator.getitem or aot.is_sym(node)
    return None if is_plain and not node.is_impure(impure_random=False) else "side_effects"


def _is_small_pool(kernel: Any, stride: Any, padding: Any, dilation: Any) -> bool:
    """True if Inductor writes the gradient of a max pooling itself and does not call torch's."""
    windows = math.prod(-(-k // s) for k, s in zip(kernel, stride or kernel, strict=True))
    return windows <= _MAX_POOLING_WINDOWS and set(dilation) == {1}


def _is_cast_for_convolution(node: fx.Node) -> bool:
    """True if a node casts an input of the step for a convolution on a GPU.

    To recompute the cast, the backward pass would need the input, which Inductor saves in the
    convolution's layout, channels_last: as a copy, larger than the result of the cast.
    """
    val, read = node.meta.get("val"), node.args[0] if node.args else None
    return (
        node.target in CASTS
        and isinstance(val, torch.Tensor)
        and (val.device.type, val.dim()) == ("cuda", 4)
        and isinstance(read, fx.Node)
        and read.op == "placeholder"
        and any(user.target is aten.convolution.default for user in node.users)
    )


def drop_running_stats(graph: fx.Graph) -> None:
    """Remove running statistics from batch norms' gradients in training, which ignore them.

    Otherwise they would be saved for the backward pass.
    """
    for node in graph.find_nodes(
        op="call_function", target=aten.native_batch_norm_backward.default
    ):
        if node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def without_running_stats(node: fx.Node) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """The call that recomputes a batch norm without its running statistics; None for other nodes.

    In training it normalises by the batch's mean and variance. The running statistics, which have
    changed by then, only affect their own new values.
    """
    if node.target is not aten._native_batch_norm_legit_functional.default:
        return None
    tensor, weight, bias, _, _, training, momentum, eps = node.args
    if training is not True:
        return None
    target = aten._native_batch_norm_legit.no_stats
    return target, (tensor, weight, bias, training, momentum, eps)


def target_name(target: Any) -> str:
    """An operator's name without its library and overload."""
    if isinstance(target, OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def view_source(node: fx.Node) -> fx.Node:
    """The tensor that a view shows, a mutation changes, or an item is taken from."""
    source = node.args[0] if node.args else node.all_input_nodes[0]
    assert isinstance(source, fx.Node)
    return source


def outputs_of(graph: fx.Graph) -> list[fx.Node | None]:
    """A graph's results in order; None for constants."""
    (output,) = graph.find_nodes(op="output")
    leaves = pytree.tree_leaves(output.args)
    return [each if isinstance(each, fx.Node) else None for each in leaves]


def tensor_bytes(node: fx.Node) -> int:
    """The bytes of a node's tensor; 0 if it is none."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return 0
    return math.prod(map(aot.size_hint, val.shape)) * val.dtype.itemsize


def _is_view(target: OpOverload) -> bool:
    aliases = [a.alias_info for a in target._schema.arguments if a.alias_info is not None]
    return bool(aliases) or (target.namespace != "" and target_name(target) in _SAME_MEMORY)
