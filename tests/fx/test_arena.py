"""Steering, on paper: results of ops on the CPU get addresses in a model of CUDA's allocator.

Whether CUDA's own allocator does as the model does is for tests/gpu to see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from square_step import square_step as train_step
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rekindle
from rekindle.core.rehearsal import PAGE_BYTES
from rekindle.core.steering import REST_BYTES, Arena
from rekindle.fx import arena, engines
from rekindle.fx.arena import Counts
from rekindle.fx.compare import compare
from rekindle.fx.cudagraph import Graph, Graphed

MIB = 1 << 20

Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Any]


class PaperPool:
    """A pool in which every new tensor of the CPU gets an address, as CUDA's allocator would."""

    id = (0, 1)

    def __init__(self, habit: str) -> None:
        self.habit = habit
        self.model = Arena({})
        self.plugs: set[int] = set()
        self.peak_bytes = 0
        self.most_bytes = 0  # that were in use, plugs not counted
        self.library_address = -1
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}  # by storage

    def serve(self, nbytes: int) -> int:
        self.let_go()
        address = self.model.allocate(nbytes)
        if address is None:
            start = 1000 * MIB * (1 + len(self.model.segments))
            size = -(-max(nbytes, 20 * MIB) // PAGE_BYTES) * PAGE_BYTES
            self.model = Arena({**self.model.segments, start: size}, self.model.taken)
            address = self.model.allocate(nbytes)
            assert address is not None
        self.peak_bytes = max(self.peak_bytes, self.model.taken_bytes)
        return address

    def serve_an_op(self, nbytes: int) -> int:
        address = self.serve(nbytes)
        in_plugs = sum(self.model.taken[plug] for plug in self.plugs)
        self.most_bytes = max(self.most_bytes, self.model.taken_bytes - in_plugs)
        return address

    def let_go(self) -> None:
        for key, (storage, address) in list(self.held.items()):
            if storage.expired():
                self.model.free(address)
                del self.held[key]

    def made(self, tensor: torch.Tensor) -> None:
        """An op has made a tensor; it may have asked for more."""
        storage = tensor.untyped_storage()
        if storage.nbytes() > REST_BYTES:
            temporary = self.serve_an_op(3 * MIB) if self.habit == "temporaries first" else None
            address = self.serve_an_op(storage.nbytes())
            self.held[storage._cdata] = (StorageWeakRef(storage), address)
            if temporary is not None:
                self.model.free(temporary)
            if self.habit == "keeps blocks" and len(self.held) % 5 == 0:
                self.serve_an_op(2 * MIB)

    def allocate(self, nbytes: int) -> int | None:
        address = self.serve(nbytes)
        self.plugs.add(address)
        return None if self.habit == "has no room" else address

    def free(self, address: int) -> None:
        self.plugs.remove(address)
        self.model.free(address)

    def free_all(self) -> None:
        for plug in list(self.plugs):
            self.free(plug)

    def reserve(self, nbytes: int) -> int:
        if self.habit == "cannot reserve":
            raise torch.OutOfMemoryError("no room")
        self.model = Arena({4096: nbytes})
        return 4096

    def blocks(self) -> tuple[dict[int, int], dict[int, int]]:
        self.let_go()
        return self.model.segments, self.model.taken

    def counts(self) -> Counts:
        self.let_go()
        wrong = len(self.held) if self.habit == "miscounts" else 0
        return Counts(self.model.taken_bytes + wrong, self.peak_bytes)

    def reset_peak(self) -> None:
        self.peak_bytes = self.model.taken_bytes

    def library_bytes(self) -> int:
        return 8 * MIB

    def take_library(self) -> None:
        self.library_address = self.serve_an_op(8 * MIB)

    def address_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        return self.held[storage._cdata][1] if storage._cdata in self.held else 0


class Watching(TorchDispatchMode):
    """Tells a pool of every tensor that is made."""

    def __init__(self, pool: PaperPool) -> None:
        super().__init__()
        self.pool = pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {leaf.untyped_storage()._cdata for leaf in map_tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in map_tensors(result):
            if tensor.untyped_storage()._cdata not in known:
                self.pool.made(tensor)
        return result


def map_tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Once:
    """Work that was done when it was captured: it can be replayed once, for that step."""

    def __init__(self) -> None:
        self.n_replays = 0

    def replay(self) -> None:
        self.n_replays += 1
        assert self.n_replays == 1


class SteeredPlayer:
    """Captures by running, which frees what it frees; all parts in one pool."""

    device_type = "cpu"

    def __init__(self, habit: str) -> None:
        self.pool = PaperPool(habit)
        self.n_captures = 0
        self.peak = 0
        self.steered: Any = None

    def capture(
        self, run: Callable[[], list[Any]], generators: list[torch.Generator], steered: Any
    ) -> tuple[Graph, list[Any]]:
        if not self.n_captures:
            steered.start(self.pool)
        self.n_captures += 1
        with steered.steering(self.pool), Watching(self.pool):
            results = run()
        if self.pool.library_address >= 0:  # the library's memory is cleared after every capture
            self.pool.model.free(self.pool.library_address)
            self.pool.library_address = -1
        self.peak = max(self.peak, steered.peak_bytes)
        self.steered = steered
        return Once(), results

    def peak_bytes(self) -> int:
        return self.peak


class Wide(nn.Module):
    """Activations of several sizes, all of them large ones."""

    def __init__(self, *, cut: bool = False) -> None:
        super().__init__()
        self.cut = cut
        widths = [32, 128, 160, 192, 128, 224, 64]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.cut and layer.in_features == 192:  # work on the host, between two graphs
                x = checkpoint(layer, x, use_reentrant=False)
            x = torch.tanh(layer(x) if not self.cut or layer.in_features != 192 else x) * 1.5
        return x


def steer(
    monkeypatch: pytest.MonkeyPatch,
    habit: str,
    *,
    cut: bool = False,
    n_rows: int = 16384,
    **how: Any,
) -> tuple[SteeredPlayer, Graphed]:
    """Two steps, the second captured and steered; they compute what plain steps do."""
    recorder = SteeredPlayer(habit)
    monkeypatch.setattr(
        engines.EngineMaker,
        "make",
        lambda self, program, *known: Graphed(program, recorder, *known),
    )
    made: list[rekindle.TrainStep] = []

    def make() -> Parts:
        model = Wide(cut=cut)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return train_step, model, optimizer, torch.randn(n_rows, 32)

    def optimize(*given: Any) -> rekindle.TrainStep:
        made.append(rekindle.optimize(*given, **how))
        return made[-1]

    assert compare(make, optimize, steps=2).differences == ()
    assert recorder.n_captures > 0
    assert not recorder.pool.plugs
    engine = made[0].captured._first.engine
    assert isinstance(engine, Graphed)
    return recorder, engine


@pytest.mark.parametrize("budget", [None, "80%"])
def test_a_steered_step_stays_in_its_arena(
    budget: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, engine = steer(monkeypatch, "behaves", budget=budget)
    if budget:
        arranged = engine._known[1]
        assert arranged is not None
        assert arranged.recompute_us > 0
    (arena_bytes,) = recorder.pool.model.segments.values()
    assert recorder.peak == recorder.pool.most_bytes
    assert recorder.peak <= arena_bytes <= 1.02 * recorder.peak + 2 * MIB
    assert recorder.steered._n_mismatches == 0


@pytest.mark.parametrize(
    "habit", ["temporaries first", "keeps blocks", "has no room", "miscounts", "cannot reserve"]
)
def test_an_allocator_that_does_otherwise_does_no_harm(
    habit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arena, "_MOST_MISMATCHES", 12)
    with caplog.at_level(logging.INFO, logger="rekindle"):
        recorder, _ = steer(monkeypatch, habit)
    if habit == "cannot reserve":
        assert "there is no room in one piece" in caplog.text
    else:
        assert recorder.peak == recorder.pool.most_bytes
    assert ("not steered any more" in caplog.text) == (habit in ("has no room", "miscounts"))


def test_steering_goes_on_from_part_to_part(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, _ = steer(monkeypatch, "behaves", cut=True)
    assert recorder.n_captures > 1
    (arena_bytes,) = recorder.pool.model.segments.values()
    assert arena_bytes <= 1.02 * recorder.pool.most_bytes + 2 * MIB


def test_a_step_without_large_tensors_is_not_steered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaperPool, "library_bytes", lambda self: 0)
    recorder, _ = steer(monkeypatch, "behaves", n_rows=64)
    assert recorder.pool.model.segments == {}
