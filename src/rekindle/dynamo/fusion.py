"""What becomes of a node when its graph is compiled: a kernel of its own, or a part of others.

Inductor writes pointwise operators into whatever reads them, so their results never reach memory
unless something needs them there. Which results do is what a plan has to know: only those take
bytes, and only they can be kept.
"""

from __future__ import annotations

import math
import operator
from enum import Enum
from typing import Any

import torch
from torch import fx

from rekindle.dynamo import aot
from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators

aten, prims = torch.ops.aten, torch.ops.prims
CASTS = frozenset({aten._to_copy.default, prims.convert_element_type.default})


class Kind(Enum):
    """How a node runs.

    A view computes nothing. Something simple is computed wherever it is read. Something gathered
    (a sum, rows of a table) is a kernel with others before and after it in the same kernel, but its
    result is written to memory. Anything else is opaque: it reads memory and writes memory.
    """

    VIEW = "view"
    SIMPLE = "simple"
    GATHERED = "gathered"
    OPAQUE = "opaque"
    WRITE = "write"  # changes a tensor that was there before
    NUMBER = "number"  # no tensor at all


_SIMPLE = {
    *("full", "full_like", "zeros_like", "ones_like", "scalar_tensor", "arange", "iota", "empty"),
    *("constant_pad_nd", "inductor_lookup_seed", "inductor_random", "inductor_randint"),
    *("convert_element_type", "_to_copy", "clone", "slice_scatter", "select_scatter", "copy"),
    *("device_put", "_unsafe_masked_index", "_low_memory_max_pool_offsets_to_indices"),
}
_GATHERED = {
    *("embedding", "index", "_unsafe_index", "gather", "index_select", "cat", "cumsum"),
    *("prepare_softmax_online", "_softmax", "_log_softmax", "native_layer_norm"),
    *("_low_memory_max_pool_with_offsets", "max_pool2d_with_indices_backward"),
    *("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"),
}
_MOST_WINDOWS = 25  # that an element is in
_SAME_MEMORY = {"_unsafe_view", "reshape", "view_of", "alias", "detach", "lift_fresh"}


def kind_of(node: fx.Node, *, fuses: bool) -> Kind:
    """How a node runs; where nothing is fused, all that computes is opaque."""
    target = node.target
    if node.op != "call_function" or aot.is_sym(node):
        return Kind.NUMBER
    if target is operator.getitem:
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        return kind_of(parent, fuses=fuses)
    if not isinstance(target, OpOverload):
        return Kind.OPAQUE
    if target._schema.is_mutable:
        return Kind.WRITE
    if _is_view(target):
        return Kind.VIEW
    if not fuses or never_again(node):
        return Kind.OPAQUE
    name = name_of(target)
    if name == "max_pool2d_with_indices_backward" and not _is_small_pool(*node.args[2:6]):
        return Kind.OPAQUE
    is_single = isinstance(node.meta.get("val"), torch.Tensor)
    if is_single and (torch.Tag.pointwise in target.tags or name in _SIMPLE):
        return Kind.SIMPLE
    if is_reduction(node) or name in _GATHERED:
        return Kind.GATHERED
    return Kind.OPAQUE


def is_reduction(node: fx.Node) -> bool:
    """Whether a node is a sum, a mean, a variance or the like, or one of several such results."""
    while node.target is operator.getitem:
        node = viewed(node)
    return isinstance(node.target, OpOverload) and torch.Tag.reduction in node.target.tags


def never_again(node: fx.Node) -> str | None:
    """Why a node must run once only, if so: the name of what it changes."""
    target = node.target
    if node.op != "call_function":
        return None
    if isinstance(target, OpOverload):
        if operators.is_random(target, node.args, dict(node.kwargs)):
            return "random_generator"
        if target.namespace in ("_c10d_functional", "c10d_functional", "_dtensor"):
            return "process_group"
        if _is_turned(node):
            return "layout"
    is_plain = isinstance(target, OpOverload) or target is operator.getitem or aot.is_sym(node)
    return None if is_plain and not node.is_impure(impure_random=False) else "side_effects"


def _is_small_pool(kernel: Any, stride: Any, padding: Any, dilation: Any) -> bool:
    """Whether Inductor writes the gradient of a pooling itself, and does not call torch's."""
    windows = math.prod(-(-k // s) for k, s in zip(kernel, stride or kernel, strict=True))
    return windows <= _MOST_WINDOWS and set(dilation) == {1}


def _is_turned(node: fx.Node) -> bool:
    """Whether a node casts something that is there before the step, for convolutions on a GPU.

    To cast it again, the backward pass would be handed what it is cast from. Inductor hands that
    over as convolutions read it, channels last: as a copy, larger than the result of the cast.
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


def drop_unread_statistics(graph: fx.Graph) -> None:
    """Take running statistics from batch norm's gradients in training, which do not look at them.

    Otherwise they would be saved for the backward pass.
    """
    for node in graph.find_nodes(
        op="call_function", target=aten.native_batch_norm_backward.default
    ):
        if node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def without_statistics(node: fx.Node) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """The call that computes a batch norm's result again without its running statistics, if any.

    In training it normalises by the batch's own mean and variance; the statistics, which by then
    have changed, go into their own new values alone.
    """
    if node.target is not aten._native_batch_norm_legit_functional.default:
        return None
    tensor, weight, bias, _, _, training, momentum, eps = node.args
    if training is not True:
        return None
    target = aten._native_batch_norm_legit.no_stats
    return target, (tensor, weight, bias, training, momentum, eps)


def name_of(target: Any) -> str:
    """An operator's name without its library and overload."""
    if isinstance(target, OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def viewed(node: fx.Node) -> fx.Node:
    """What a view looks at."""
    found = node.args[0] if node.args else node.all_input_nodes[0]
    assert isinstance(found, fx.Node)
    return found


def after(node: fx.Node) -> fx.Node:
    """The node behind which something can be put that reads a node: none of a graph's inputs."""
    while node.next.op == "placeholder":
        node = node.next
    return node


def _is_view(target: OpOverload) -> bool:
    aliases = [a.alias_info for a in target._schema.arguments if a.alias_info is not None]
    return bool(aliases) or (target.namespace != "" and name_of(target) in _SAME_MEMORY)
