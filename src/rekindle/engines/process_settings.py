"""Settings of the process while a step runs or is captured: allocator and garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rekindle.measuring.meters import available_bytes
from rekindle.torch_internals import memory_snapshot, set_allocator_settings

_ROOMY_RATIO = 1.25  # available memory to peak: above it, fragmentation has not mattered
_SETTING = "expandable_segments"


class ExpandableSegments:
    """The context in which the allocator uses expandable segments; `is_on` while it does.

    They avoid fragmentation, but take time and cannot be steered: see docs/decisions/022.
    """

    def __init__(self, settings: str) -> None:
        """Keep the other `settings`: setting one of the allocator's resets all others."""
        parts = (part.strip() for part in settings.split(","))
        self._kept = [part for part in parts if part and not part.startswith(_SETTING)]
        self.is_on = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Use expandable segments inside the context only."""
        self._switch(on=True)
        try:
            yield
        finally:
            self._switch(on=False)

    def _switch(self, *, on: bool) -> None:
        settings = ",".join((*self._kept, f"{_SETTING}:{on}"))
        set_allocator_settings(settings)
        self.is_on = on


def expandable_segments_for(peak_bytes: int, device: torch.device) -> ExpandableSegments | None:
    """Expandable segments for a step with this peak; None if not needed, or the user's choice."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return None
    if available_bytes(device) >= _ROOMY_RATIO * peak_bytes:
        return None
    settings = memory_snapshot()["allocator_settings"]
    if settings.get(_SETTING):
        return None
    return ExpandableSegments(settings.get("PYTORCH_CUDA_ALLOC_CONF", ""))


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect no reference cycles inside the context."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
