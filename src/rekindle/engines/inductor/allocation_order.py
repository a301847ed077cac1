"""In which order code asks a GPU's allocator for memory for its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rekindle.torch_internals import (
    is_memory_history_enabled,
    memory_snapshot,
    record_memory_history,
)


def order_of_results(function: Callable[[], Sequence[Any]], device: torch.device) -> list[int]:
    """Call a function; returns the indices of its results as memory was asked for them.

    The allocator is watched, unless somebody else is watching it: then nothing is known, and
    nothing returned.
    """
    if is_memory_history_enabled():
        return []
    index = torch.cuda.current_device() if device.index is None else device.index
    record_memory_history("all", context=None, clear_history=True)
    try:
        results = function()
        entries = memory_snapshot(device)["device_traces"][index]
    finally:
        record_memory_history(None)
    asked = [entry["addr"] for entry in entries if entry["action"] == "alloc"]
    return in_order(asked, [address_of(each) for each in results])


def in_order(asked: Sequence[int], addresses: Sequence[int | None]) -> list[int]:
    """The indices of addresses as they were handed out; those that were not are left out.

    An address may have been handed out more than once, if something is freed on the way: the last
    time counts.

    >>> in_order([512, 0, 1024, 512], [1024, None, 512, 7])
    [0, 2]
    """
    when = {address: time for time, address in enumerate(asked)}
    known = [(when[a], index) for index, a in enumerate(addresses) if a in when]
    return [index for _, index in sorted(known)]


def address_of(result: Any) -> int | None:
    """Where a result's memory starts; None if it has none."""
    return result.untyped_storage().data_ptr() if isinstance(result, torch.Tensor) else None
