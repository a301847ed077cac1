"""Which result of a group may be written over which of its inputs.

Element by element: each element of the result must follow from the element in its place and from
nothing else of that input, nor may any other result follow from it. Otherwise compiled code might
read what it has written over already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rekindle.engines.inductor.call_index import CallIndex
from rekindle.engines.inductor.fusibility import is_simple
from rekindle.engines.inductor.strides import contiguous_stride
from rekindle.passes.fx_nodes import RESHAPES

aten = torch.ops.aten


class Path:
    """How the results of a group follow from one of its inputs, which lies in a storage of its own.

    `is_inside` tells what the group computes; all else it is given.
    """

    def __init__(
        self, units: CallIndex, root: fx.Node, is_inside: Callable[[fx.Node], bool]
    ) -> None:
        self._units = units
        self._root = root
        self._is_inside = is_inside
        self._depends: dict[fx.Node, bool] = {}

    def leads_to(self, node: fx.Node) -> bool:
        """Whether a result depends on the input at all."""
        if node not in self._depends:
            is_view = self._units.root(node) is self._root
            args = self._units.maker[node].node.all_input_nodes if self._is_inside(node) else []
            self._depends[node] = is_view or any(map(self.leads_to, args))
        return self._depends[node]

    def is_straight(self, output: fx.Node) -> bool:
        """Whether each element of a result follows from the one in its place."""
        if not self._have_one_form(output):
            return False
        passed: set[fx.Node] = set()
        waiting = [output]
        while waiting:
            node = waiting.pop()
            if node is self._root or node in passed:
                continue
            passed.add(node)
            args = [a for a in self._units.maker[node].node.all_input_nodes if self.leads_to(a)]
            if not self._keeps_places(node, args):
                return False
            waiting += args
        has_edges = any(self._shape(node)[-1:] != self._shape(output)[-1:] for node in passed)
        rows = {math.prod(self._shape(node)[:-1]) for node in (self._root, *passed)}
        return len(rows) == 1 if has_edges else True

    def _keeps_places(self, node: fx.Node, args: list[fx.Node]) -> bool:
        """Whether a call leaves what comes from the input where it is, or cuts or adds its edge."""
        call = self._units.maker[node].node
        if call.target in RESHAPES:
            return True
        if call.target is aten.slice.Tensor:
            return _cuts_the_end(call, len(self._shape(node)))
        if call.target is aten.constant_pad_nd.default:
            pads: Any = call.args[1]
            return pads[0] == 0 and not any(pads[2:])
        return is_simple(call.target) and all(self._shape(a) == self._shape(node) for a in args)

    def _have_one_form(self, output: fx.Node) -> bool:
        """Whether input and result fill their storages alike."""
        metas, storages = self._units.tape.metas, self._units.tape.storages
        a, b = metas[self._root], metas[output]
        sizes = {self._units.nbytes(self._root), self._units.nbytes(output)}
        sizes |= {storages[each.storage].nbytes for each in (a, b)}
        devices = {storages[each.storage].device for each in (a, b)}
        is_alike = (a.shape, a.stride) == (b.shape, b.stride)
        are_plain = all(each.stride == contiguous_stride(each.shape) for each in (a, b))
        return a.dtype == b.dtype and len(sizes) == len(devices) == 1 and (is_alike or are_plain)

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        return self._units.tape.metas[node].shape


def _cuts_the_end(call: fx.Node, n_dims: int) -> bool:
    """Whether a slice takes the first of each row."""
    given: dict[str, Any] = dict(zip(("dim", "start", "end", "step"), call.args[1:], strict=False))
    is_last = given.get("dim", 0) in (-1, n_dims - 1)
    return is_last and given.get("start") in (0, None) and given.get("step", 1) == 1
