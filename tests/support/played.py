"""Graphs that are played on the CPU, in place of CUDA graphs.

A played graph behaves as a CUDA graph does: capturing changes nothing, a replay does the same calls
on the very same tensors, with the numbers it was captured with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Played(TorchDispatchMode):
    """Writes down every call with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_tensor(leaf)]
        for tensor in known:
            pointer = tensor.untyped_storage().data_ptr()
            if pointer not in self.before:
                self.before[pointer] = (tensor, tensor.detach().clone())
        result = func(*args, **kwargs)
        pointers = {tensor.untyped_storage().data_ptr() for tensor in known}
        made = [leaf for leaf in pytree.tree_leaves(result) if is_tensor(leaf)]
        fresh = [t for t in made if t.untyped_storage().data_ptr() not in pointers]
        for tensor in fresh:
            self.before.setdefault(tensor.untyped_storage().data_ptr(), (tensor, tensor.clone()))
        self.calls.append((func, args, kwargs, made))
        return result

    def undo(self) -> None:
        for tensor, value in self.before.values():
            tensor.copy_(value)

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            again = [t for t in pytree.tree_leaves(func(*args, **kwargs)) if is_tensor(t)]
            for old, new in zip(made, again, strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


class Player:
    """Captures graphs that are played on the CPU."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.graphs: list[Played] = []
        self.peaks = 0
        self.fails_at = -1

    def memory_meter(self) -> None:
        return None

    def capture(
        self, run: Callable[[], list[Any]], generators: list[torch.Generator], steered: Any
    ) -> tuple[Any, list[Any]]:
        if self.fails_at == len(self.graphs):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        random_state = torch.get_rng_state()
        played = Played()
        with played:
            results = run()
        played.undo()
        torch.set_rng_state(random_state)
        self.graphs.append(played)
        return played, results

    def peak_bytes(self) -> int:
        self.peaks += 1
        return self.peaks
