"""Casts of many tensors in one kernel.

Under autocast every weight is cast before it is used, and its gradient is cast back, each in a
kernel of its own. Starting a kernel takes a host some microseconds, and small ones run no longer
than that: a deep network of small convolutions then waits for the host. So casts that stand alone
are done together, as many at a time as make little difference to memory: of weights, before the
first of them is read; of gradients, after the last of them is there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from rekindle.dynamo import aot
from rekindle.dynamo.fusion import Kind, kind_of
from rekindle.dynamo.joint_graph import nbytes_of

_CAST = torch.ops.prims.convert_element_type.default
_MOST_BYTES = 32 << 20  # read or written, by one kernel
_MOST_TENSORS = 64
_SMALL_BYTES = 64 << 10


def cast_together(graph: fx.Graph) -> None:
    """Change the casts of a graph that Inductor is about to compile."""
    casts = [node for node in graph.find_nodes(op="call_function", target=_CAST) if _is_plain(node)]
    weights, gradients = (list(filter(one, casts)) for one in (_is_of_weight, _is_of_gradient))
    for group in _groups(weights):
        _replace(graph, group, before=group[0])
    for group in _groups(gradients):
        _replace(graph, group, before=group[-1])


def _is_plain(node: fx.Node) -> bool:
    """Whether a cast has sizes that are known."""
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and all(isinstance(size, int) for size in val.shape)


def _is_of_weight(node: fx.Node) -> bool:
    """Whether a cast is of something that is there before its pass, and may as well come early.

    It stays after the pass has ended, or is small.
    """
    (read,) = node.all_input_nodes
    stays = any(user.op == "output" for user in node.users)
    return read.op == "placeholder" and (stays or nbytes_of(node) <= _SMALL_BYTES)


def _is_of_gradient(node: fx.Node) -> bool:
    """Whether a cast is of what a kernel has written that nothing is fused to, and is returned."""
    (read,) = node.all_input_nodes
    is_returned = all(user.op == "output" for user in node.users)
    return is_returned and set(read.users) == {node} and kind_of(read, fuses=True) is Kind.OPAQUE


def _groups(casts: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Casts that are done together, in order; those that stay alone are left away."""
    found: list[list[fx.Node]] = [[]]
    total = 0
    for node in casts:
        (read,) = node.all_input_nodes
        nbytes = max(nbytes_of(node), nbytes_of(read))
        if nbytes > _MOST_BYTES:
            continue
        if total + nbytes > _MOST_BYTES or len(found[-1]) == _MOST_TENSORS:
            found.append([])
            total = 0
        found[-1].append(node)
        total += nbytes
    return [group for group in found if len(group) > 1]


def _replace(graph: fx.Graph, casts: list[fx.Node], before: fx.Node) -> None:
    """One call for all of these, in the place of one of them."""
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
        call = aot.call_on_each(graph, inner, read)
        call.meta = {"val": tuple(node.meta["val"] for node in casts)}
        for index, node in enumerate(casts):
            item = graph.call_function(operator.getitem, (call, index))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item)
    for node in casts:
        graph.erase_node(node)
