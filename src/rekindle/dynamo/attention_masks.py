"""Masks of attention that keep a fused kernel from being used, taken away where they can be.

Fused kernels want a mask whose last side lies in memory as it is, one number after the other. A
model that builds a mask by stretching a column has the compiler write attention out, with all its
scores in memory: a BERT without padding then takes half as much memory again, and longer than
without a compiler. Such a mask is often true everywhere, which the graph tells.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_MOST_NODES = 64
_ARGUMENT = 3  # of attention: the place of its mask
_PLAIN = {
    *(operator.add, operator.sub, operator.mul, operator.getitem, operator.and_, operator.or_),
    *(operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne),
    *(torch.arange, torch.ones, torch.full, torch.logical_and, torch.logical_or),
}
_METHODS = {"expand", "view", "reshape", "unsqueeze", "bool", "new_ones"}


def simplify_masks(module: fx.GraphModule) -> None:
    """Change the masks of a graph that Dynamo captured so that fused attention takes them."""
    graph, made = module.graph, dict[fx.Node, fx.Node | None]()
    for node in graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        is_keyword = "attn_mask" in node.kwargs
        mask = node.kwargs["attn_mask"] if is_keyword else (*node.args, *[None] * 4)[_ARGUMENT]
        if isinstance(mask, fx.Node):
            if mask not in made:
                made[mask] = _simpler(graph, mask)
            if is_keyword:
                node.update_kwarg("attn_mask", made[mask])
            else:
                node.update_arg(_ARGUMENT, made[mask])
    if made:
        graph.eliminate_dead_code()
        module.recompile()


def _simpler(graph: fx.Graph, mask: fx.Node) -> fx.Node | None:
    """A mask that attention takes; None for one that masks nothing."""
    val = mask.meta.get("example_value")
    if not isinstance(val, torch.Tensor):
        return mask
    if val.dtype is torch.bool and _is_true(mask):
        return None
    if val.stride(-1) == 1:
        return mask
    with graph.inserting_after(mask):
        made = graph.call_method("contiguous", (mask,))
    made.meta = {**mask.meta, "example_value": val.contiguous()}
    return made


def _is_true(mask: fx.Node) -> bool:
    """Whether a mask depends on nothing that the model is given, and is true everywhere."""
    needed: set[fx.Node] = set()
    todo = [mask]
    while todo and len(needed) <= _MOST_NODES:
        node = todo.pop()
        is_method = node.op == "call_method" and node.target in _METHODS
        if not is_method and not (node.op == "call_function" and node.target in _PLAIN):
            return False
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    if todo:
        return False
    found: dict[fx.Node, Any] = {}
    for node in mask.graph.nodes:
        if node in needed:
            args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
            if node.target == "expand":  # the same again and again
                found[node] = args[0]
            elif node.op == "call_method":
                found[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            else:
                found[node] = node.target(*args, **kwargs)
    return bool(torch.as_tensor(found[mask]).all())
