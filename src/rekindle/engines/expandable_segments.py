"""Memory that torch's allocator can put together from what is free.

The allocator takes memory from a GPU in segments, and a hole that is left between two tensors is of
no use to a larger one. A step that takes nearly all there is may so fail for want of a piece,
although there are bytes enough. Segments that grow are made of pages, and free pages can be used
elsewhere; moving them takes time, and CUDA graphs are steered in segments of the other kind. So the
allocator is told to use them only where a step runs as code and leaves little room.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rekindle.measuring.meters import available_bytes
from rekindle.torch_internals import memory_snapshot, set_allocator_settings

_ROOM = 1.25  # of a step's peak: with so much, holes have not mattered
_KIND = "expandable_segments"


class Growing:
    """Has the allocator take memory in segments that grow while a step runs as code.

    `is_on` says whether it does now.
    """

    def __init__(self, told: str) -> None:
        """`told` are all settings that the allocator has: it forgets what it is not told again."""
        parts = (part.strip() for part in told.split(","))
        self._kept = [part for part in parts if part and not part.startswith(_KIND)]
        self.is_on = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Use them now, and no more afterwards."""
        self._tell(grow=True)
        try:
            yield
        finally:
            self._tell(grow=False)

    def _tell(self, *, grow: bool) -> None:
        settings = ",".join((*self._kept, f"{_KIND}:{grow}"))
        set_allocator_settings(settings)
        self.is_on = grow


def growing_for(peak_bytes: int, device: torch.device) -> Growing | None:
    """What a step needs that takes so much; None if there is room for holes anyway.

    Nor can it be had where the user has chosen another allocator, or segments that grow.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return None
    if available_bytes(device) >= _ROOM * peak_bytes:
        return None
    settings = memory_snapshot()["allocator_settings"]
    if settings.get(_KIND):
        return None
    return Growing(settings.get("PYTORCH_CUDA_ALLOC_CONF", ""))
