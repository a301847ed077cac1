"""Attention masks that keep torch from using a fused kernel, simplified or removed.

Fused kernels need a mask that is contiguous in its last dimension. If a model expands a column into
its mask, the compiler writes attention out, with all scores in memory: a BERT without padding then
takes half as much memory again, and is slower than without a compiler. Such a mask is often true
everywhere, and the graph shows it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_MAX_NODES = 64
_MASK_ARGUMENT = 3  # its position in a call of attention
_CONSTANT_CALLS: dict[str, set[Any]] = {
    "call_function": {
        *(operator.add, operator.sub, operator.mul, operator.getitem, operator.and_, operator.or_),
        *(operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne),
        *(torch.arange, torch.ones, torch.full, torch.logical_and, torch.logical_or),
    },
    "call_method": {"expand", "view", "reshape", "unsqueeze", "bool", "new_ones"},
}


def simplify_masks(module: fx.GraphModule) -> None:
    """Change the attention masks of a captured graph so that fused kernels take them."""
    graph, made = module.graph, dict[fx.Node, fx.Node | None]()
    for node in graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        is_keyword = "attn_mask" in node.kwargs
        positional = (*node.args, *[None] * 4)[_MASK_ARGUMENT]
        mask = node.kwargs["attn_mask"] if is_keyword else positional
        if isinstance(mask, fx.Node):
            if mask not in made:
                made[mask] = _simplified(graph, mask)
            if is_keyword:
                node.update_kwarg("attn_mask", made[mask])
            else:
                node.update_arg(_MASK_ARGUMENT, made[mask])
    for mask in made:
        _erase_unused(graph, mask)
    if made:
        module.recompile()


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a mask that nothing reads, and what only it was computed from.

    Not all dead code: to FX, a method that changes a buffer in place is dead.
    """
    if not node.users and node.target in _CONSTANT_CALLS.get(node.op, ()):
        read = node.all_input_nodes
        graph.erase_node(node)
        for each in read:
            _erase_unused(graph, each)


def _simplified(graph: fx.Graph, mask: fx.Node) -> fx.Node | None:
    """A mask that fused kernels take; None if it masks nothing."""
    val = mask.meta.get("example_value")
    if not isinstance(val, torch.Tensor):
        return mask
    if val.dtype is torch.bool and _is_always_true(mask):
        return None
    if val.stride(-1) == 1:
        return mask
    with graph.inserting_after(mask):
        made = graph.call_method("contiguous", (mask,))
    made.meta = {**mask.meta, "example_value": val.contiguous()}
    return made


def _is_always_true(mask: fx.Node) -> bool:
    """True if a mask depends on no input of the model and is true everywhere."""
    needed: set[fx.Node] = set()
    todo = [mask]
    while todo and len(needed) <= _MAX_NODES:
        node = todo.pop()
        if node.target not in _CONSTANT_CALLS.get(node.op, ()):
            return False
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    if todo:
        return False
    computed: dict[fx.Node, Any] = {}
    for node in mask.graph.nodes:
        if node in needed:
            args, kwargs = fx.map_arg((node.args, node.kwargs), computed.__getitem__)
            if node.target == "expand":  # adds no other values
                computed[node] = args[0]
            elif node.op == "call_method":
                computed[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            else:
                computed[node] = node.target(*args, **kwargs)
    return bool(torch.as_tensor(computed[mask]).all())
