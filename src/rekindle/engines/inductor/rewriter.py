"""What recorded steps are rewritten with: calls made once, tensors in the order asked for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import fx

from rekindle.engines.inductor import decompositions
from rekindle.engines.inductor.functionalizable import Replaceable
from rekindle.engines.inductor.recording_builder import Builder
from rekindle.engines.inductor.strides import contiguous_stride, in_memory, is_dense
from rekindle.tracing.tape import Call, Recording

aten = torch.ops.aten


class Rewriting:
    """A step that is being written anew. `lead` goes from recorded nodes to those in their places.

    `old` is what was recorded, and `known` what may be made of it.
    """

    def __init__(self, recording: Recording) -> None:
        self.build = Builder(recording)
        self.old = recording.tape
        self.lead = self.build.lead
        self.computed: dict[Hashable, Call] = {}  # by what is computed
        self.outdated: set[fx.Node] = set()  # new nodes from before the optimizer's last call
        self.known = Replaceable(recording, self.build.calls())
        self.pinned = self.known.pinned
        entries = (entry.node for entry in self.old.entries)
        pinned = (node for node in entries if self.old.metas[node].storage in self.pinned)
        # the new storages of what is pinned
        self.in_place = {self.build.meta(self.lead[node]).storage for node in pinned}

    def _emit(
        self, target: Any, args: tuple[Any, ...], like: Call, kwargs: dict[str, Any] | None = None
    ) -> Call:
        """Add a call without side effects."""
        return self.build.emit(target, args, kwargs or {}, like, writes=(), is_random=False)

    def _once(self, target: Any, args: Any, kwargs: Any, like: Call) -> fx.Node:
        """What a call without side effects returns, made once unless it may have changed."""
        if self._is_in_place(args):
            return self._emit(target, args, like, kwargs).results[0]
        key = (target, repr(args), repr(kwargs))
        if key not in self.computed:
            self.computed[key] = self._emit(target, args, like, kwargs)
        return self.computed[key].results[0]

    def _is_in_place(self, args: Iterable[Any]) -> bool:
        """Whether one of these new nodes may be written to."""
        nodes = (arg for arg in args if isinstance(arg, fx.Node))
        return any(self.build.meta(node).storage in self.in_place for node in nodes)

    def _laid_out(self, node: fx.Node, order: torch.memory_format, like: Call) -> fx.Node:
        """A copy in another order. What was cast (a weight) is cast to that order at once."""
        is_cast = node.target is aten._to_copy.default and node not in self.outdated
        if is_cast and not self._is_in_place(node.args):
            kwargs = {**node.kwargs, "memory_format": order}
            return self._once(aten._to_copy.default, node.args, kwargs, like)
        return self._once(aten.clone.default, (node,), {"memory_format": order}, like)

    def _as_recorded(self, node: fx.Node, like: Call) -> None:
        """Have a tensor in memory in the order in which it was recorded."""
        lead = self.lead[node]
        meta, now = self.old.metas[node], self.build.meta(lead)
        contiguous = meta._replace(stride=contiguous_stride(meta.shape))
        wanted = meta if is_dense(meta) else contiguous
        if in_memory(now) in (in_memory(meta), in_memory(wanted)):
            return
        if in_memory(wanted) == in_memory(contiguous):
            self.lead[node] = self._laid_out(lead, torch.contiguous_format, like)
        else:
            self.lead[node] = self._once(
                decompositions.in_order, (lead, list(meta.stride)), {}, like
            )

    def _exactly_as_recorded(self, node: fx.Node, like: Call) -> None:
        """The same for what others get to see: optimizers compare strides that do not matter."""
        self._as_recorded(node, like)
        lead, meta = self.lead[node], self.old.metas[node]
        if self.build.meta(lead).stride == meta.stride or not is_dense(meta):
            return
        if meta.stride == contiguous_stride(meta.shape):
            for shape in ([size for size in meta.shape if size != 1], list(meta.shape)):
                (lead,) = self._emit(aten.view.default, (lead, shape), like).results
            self.lead[node] = lead
        else:
            self.lead[node] = self._once(
                decompositions.in_order, (lead, list(meta.stride)), {}, like
            )
