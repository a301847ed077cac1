"""The batch as CUDA graphs read it: a copy at addresses that stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from rekindle.engines.cudagraph.graph_parts import Part
from rekindle.rewriting.apply_schedule import RewrittenStep
from rekindle.tracing.tape import Recording

_CAST = torch.ops.aten._to_copy.default


class StaticBatch:
    """Which tensors of a batch graphs read, and what they read in their place.

    A tensor that the step does nothing with but to cast it may be copied in its new type: the copy
    is the cast then, and the step holds the tensor no longer than it would without graphs.
    `casts` has the nodes that have nothing to do in graphs any more, by the tensor's index.
    """

    def __init__(
        self, recording: Recording, listing: RewrittenStep, parts: list[Part], *, may_cast: bool
    ) -> None:
        self.casts: dict[int, fx.Node] = {}
        self._read: list[int] = []
        metas = recording.tape.metas
        in_graphs = {node for part in parts if part.is_graph for node in part.nodes}
        for index, entered in enumerate(recording.batch_nodes):
            tensor = listing.renamed[entered]
            readers = [node for node in listing.nodes if tensor in node.all_input_nodes]
            if in_graphs.isdisjoint(readers):
                continue
            self._read.append(index)
            if len(readers) > 1 or not may_cast or not _is_cast(readers[0], tensor):
                continue
            was, made = metas[entered], metas[listing.calls[readers[0]].results[0]]
            if made.dtype != was.dtype and made.stride == was.stride:
                self.casts[index] = readers[0]

    def functions(
        self, inner: Mapping[fx.Node, Callable[..., Any]]
    ) -> dict[fx.Node, Callable[..., Any]]:
        """What to call for nodes; `inner` has what else to call in place of their targets."""
        return {**inner, **dict.fromkeys(self.casts.values(), _cast_once)}

    def room_for(self, batch: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Tensors to copy those of the batch into, by index."""
        room = {index: like(batch[index]) for index in self._read if index not in self.casts}
        for index, node in self.casts.items():
            dtype = node.kwargs["dtype"]
            assert isinstance(dtype, torch.dtype)
            room[index] = like(batch[index], dtype)
        return room


def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor in the form of another, of its type or another one."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=tensor.device
    )


def _is_cast(node: fx.Node, tensor: fx.Node) -> bool:
    return node.target is _CAST and node.args == (tensor,) and node.kwargs.keys() == {"dtype"}


def _cast_once(tensor: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor, unless it is a copy that was cast as it was made."""
    return tensor if tensor.dtype == dtype else _CAST(tensor, dtype=dtype)
