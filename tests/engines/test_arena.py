"""Steering of captures, emulated: CPU tensors get addresses in a model of CUDA's allocator.

tests/gpu checks that CUDA's own allocator behaves like the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from support.square_step import square_step as train_step
from support.uncompiled import grouped, no_compiler, run_uncompiled
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rekindle
from rekindle.core.memory.allocator_steering import PAGE_BYTES, REST_BYTES, Arena
from rekindle.engines import select_engine
from rekindle.engines.cudagraph.arena import MemoryStats
from rekindle.engines.cudagraph.graph_engine import (
    CudaGraphEngine,
    CudaGraphOptions,
)
from rekindle.engines.inductor.group_compiler import CompiledGroup
from rekindle.measuring.bitwise_compare import compare

MIB = 1 << 20

Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Any]


class EmulatedPool:
    """A pool in which every new tensor of the CPU gets an address, as CUDA's allocator would."""

    id = (0, 1)

    def __init__(self, habit: str) -> None:
        self.habit = habit
        self.model = Arena({})
        self.plugs: set[int] = set()
        self.peak_bytes = 0
        self.most_bytes = 0  # the peak without plugs
        self.cublas_address = -1
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}  # by storage

    def serve(self, nbytes: int) -> int:
        self.free_expired()
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

    def free_expired(self) -> None:
        for key, (storage, address) in list(self.held.items()):
            if storage.expired():
                self.model.free(address)
                del self.held[key]

    def made(self, tensor: torch.Tensor) -> None:
        """An op has made a tensor; it may have allocated more."""
        storage = tensor.untyped_storage()
        if storage.nbytes() > REST_BYTES:
            temporary = self.serve_an_op(3 * MIB) if self.habit == "temporaries first" else None
            address = self.serve_an_op(storage.nbytes())
            self.held[storage._cdata] = (StorageWeakRef(storage), address)
            if self.habit == "temporaries last":
                temporary = self.serve_an_op(3 * MIB)
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
        self.free_expired()
        return self.model.segments, self.model.taken

    def stats(self) -> MemoryStats:
        self.free_expired()
        wrong = len(self.held) if self.habit == "miscounts" else 0
        large_bytes = self.model.taken_bytes + wrong
        return MemoryStats(large_bytes, large_bytes, self.peak_bytes)

    def reset_peak(self) -> None:
        self.peak_bytes = self.model.taken_bytes

    def cublas_workspace_bytes(self) -> int:
        return 8 * MIB

    def allocate_cublas_workspace(self) -> None:
        self.cublas_address = self.serve_an_op(8 * MIB)

    def address_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        return self.held[storage._cdata][1] if storage._cdata in self.held else 0


class EmulatedMeter:
    """A meter that shows the same workspace for every op, and nothing else."""

    def __init__(self, workspace_bytes: int) -> None:
        self.workspace_bytes = workspace_bytes
        self.n_asked = 0

    def stats(self) -> MemoryStats:
        self.n_asked += 1
        return MemoryStats(100 * MIB, 90 * MIB, 100 * MIB + self.workspace_bytes)

    def reset_peak(self) -> None:
        """Nothing to reset."""


class Watching(TorchDispatchMode):
    """Tells a pool of every new tensor."""

    def __init__(self, pool: EmulatedPool) -> None:
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
    """Work that ran when it was captured: it can be replayed once, for that step."""

    def __init__(self) -> None:
        self.n_replays = 0

    def replay(self) -> None:
        self.n_replays += 1
        assert self.n_replays == 1


class SteeredPlayer:
    """Captures by running the code; all parts in one pool."""

    device_type = "cpu"

    def __init__(self, habit: str, workspace_bytes: int = 0) -> None:
        self.pool = EmulatedPool(habit)
        self.counters = EmulatedMeter(workspace_bytes)
        self.n_captures = 0
        self.peak = 0
        self.steered: Any = None

    def memory_meter(self) -> EmulatedMeter:
        return self.counters

    def capture(
        self, run: Callable[[], list[Any]], generators: list[torch.Generator], steered: Any
    ) -> tuple[Any, list[Any]]:
        if not self.n_captures:
            steered.prepare(self.pool)
        self.n_captures += 1
        with steered.steering(self.pool), Watching(self.pool):
            results = run()
        if self.pool.cublas_address >= 0:  # the library's memory is cleared after every capture
            self.pool.model.free(self.pool.cublas_address)
            self.pool.cublas_address = -1
        self.peak = max(self.peak, steered.peak_bytes)
        self.steered = steered
        return Once(), results

    def peak_bytes(self) -> int:
        return self.peak


class Wide(nn.Module):
    """Large activations of several sizes."""

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


def use(
    recorder: SteeredPlayer,
    monkeypatch: pytest.MonkeyPatch,
    options: CudaGraphOptions | None = None,
) -> None:
    """Have every step that is made run from what this captures."""
    monkeypatch.setattr(
        select_engine.EngineFactory,
        "build",
        lambda self, program, *known: CudaGraphEngine(program, recorder, *known, options=options),
    )


def wide_parts(n_rows: int = 16384, *, cut: bool = False) -> Parts:
    model = Wide(cut=cut)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train_step, model, optimizer, torch.randn(n_rows, 32)


def steer(
    monkeypatch: pytest.MonkeyPatch,
    habit: str,
    *,
    cut: bool = False,
    n_rows: int = 16384,
    workspace_bytes: int = 0,
    options: CudaGraphOptions | None = None,
    **how: Any,
) -> tuple[SteeredPlayer, CudaGraphEngine]:
    """Two steps, the second captured and steered; they compute what plain steps do.

    The first seems to need a workspace for every op.
    """
    recorder = SteeredPlayer(habit, workspace_bytes)
    use(recorder, monkeypatch, options)
    made: list[rekindle.TrainStep] = []

    def make() -> Parts:
        return wide_parts(n_rows, cut=cut)

    def optimize(*given: Any) -> rekindle.TrainStep:
        made.append(rekindle.optimize(*given, **how))
        return made[-1]

    assert compare(make, optimize, steps=2).differences == ()
    assert recorder.n_captures > 0
    assert not recorder.pool.plugs
    engine = made[0].captured.first.engine
    assert isinstance(engine, CudaGraphEngine)
    return recorder, engine


@pytest.mark.parametrize("budget", [None, "80%"])
def test_a_steered_step_stays_in_its_arena(
    budget: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, engine = steer(monkeypatch, "behaves", budget=budget)
    if budget:
        arranged = engine.plan
        assert arranged is not None
        assert arranged.recompute_us > 0
    (arena_bytes,) = recorder.pool.model.segments.values()
    assert recorder.peak == recorder.pool.most_bytes
    assert recorder.peak <= arena_bytes <= 1.02 * recorder.peak + 2 * MIB
    assert recorder.steered._n_mismatches == 0


@pytest.mark.parametrize(
    "habit", ["temporaries first", "keeps blocks", "has no room", "miscounts", "cannot reserve"]
)
def test_an_unexpected_allocator_does_no_harm(
    habit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="rekindle"):
        recorder, _ = steer(monkeypatch, habit, options=CudaGraphOptions(max_mismatches=12))
    if habit == "cannot reserve":
        assert "there is no contiguous room" in caplog.text
    else:
        assert recorder.peak == recorder.pool.most_bytes
    assert ("no longer steered" in caplog.text) == (habit in ("has no room", "miscounts"))


def test_steering_goes_on_from_part_to_part(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, _ = steer(monkeypatch, "behaves", cut=True)
    assert recorder.n_captures > 1
    (arena_bytes,) = recorder.pool.model.segments.values()
    assert arena_bytes <= 1.02 * recorder.pool.most_bytes + 2 * MIB


def test_a_step_without_large_tensors_is_not_steered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedPool, "cublas_workspace_bytes", lambda self: 0)
    recorder, _ = steer(monkeypatch, "behaves", n_rows=64)
    assert recorder.pool.model.segments == {}


class Twofold(nn.Module):
    """One group of ops returns two large tensors of different sizes, for two matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.third = nn.Linear(32, 32).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = self.first(x).sin()
        return self.second(waves) + self.third(waves.cos().double())


@pytest.mark.parametrize("order", [[], [0, 1], [1, 0]])
def test_results_are_expected_in_the_order_of_allocation(
    order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(SteeredPlayer("behaves", 0), monkeypatch)
    monkeypatch.setattr(select_engine.EngineFactory, "prepare", lambda self, given: grouped(given))
    model = Twofold()

    def compile_and_watch(self: CompiledGroup) -> None:
        run_uncompiled(self)
        self.order = order

    with no_compiler(), mock.patch.object(CompiledGroup, "compile", compile_and_watch):
        parts = train_step, model, torch.optim.SGD(model.parameters(), lr=0.1)
        step = rekindle.optimize(*parts, torch.randn(16384, 32))
    engine = step.captured.first.engine
    assert isinstance(engine, CudaGraphEngine)
    assert engine.steered is not None
    requests = engine.steered.requests
    found = [
        [requests.requests[i].nbytes for i in blocks] for blocks in requests.blocks_of.values()
    ]
    pair = next(sizes for sizes in found if len(sizes) == 2)
    singles, doubles = 16384 * 32 * 4, 16384 * 32 * 8
    assert pair == ([doubles, singles] if order == [1, 0] else [singles, doubles])


def workspaces_of(engine: CudaGraphEngine) -> dict[fx.Node, int]:
    """The known workspaces of captured nodes that are 3 MiB."""
    assert engine.steered is not None
    blocks_of, requests = engine.steered.requests.blocks_of, engine.steered.requests.requests
    return {
        node: requests[block].nbytes
        for node, blocks in blocks_of.items()
        for block in blocks
        if requests[block].nbytes == 3 * MIB and requests[block].start == requests[block].end
    }


def nodes_of(engine: CudaGraphEngine) -> set[fx.Node]:
    assert engine.steered is not None
    return engine.steered.requests.nodes


def test_workspaces_of_the_first_step_become_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen, _ = steer(monkeypatch, "temporaries last")
    assert len(unseen.pool.model.segments) > 1
    recorder, engine = steer(monkeypatch, "temporaries last", workspace_bytes=3 * MIB)
    assert workspaces_of(engine).keys() == nodes_of(engine)
    (arena_bytes,) = recorder.pool.model.segments.values()
    assert recorder.peak == recorder.pool.most_bytes
    assert recorder.peak <= arena_bytes <= 1.02 * recorder.peak + 2 * MIB
    assert recorder.steered._n_mismatches == 0
    asked = recorder.counters.n_asked  # in one step, before and after each op, and at the end
    assert asked == 2 * len(nodes_of(engine)) + 1


def test_small_workspaces_are_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, engine = steer(monkeypatch, "behaves", workspace_bytes=REST_BYTES)
    assert recorder.counters.n_asked > 0
    assert engine.steered is not None
    assert engine.steered.requests.blocks_of.keys() < nodes_of(engine)


def test_with_a_profile_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, engine = steer(monkeypatch, "behaves", workspace_bytes=3 * MIB, budget="80%")
    assert recorder.counters.n_asked == 0
    assert not workspaces_of(engine)


def test_a_first_step_that_fails_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SteeredPlayer("behaves", workspace_bytes=3 * MIB)
    use(recorder, monkeypatch)
    parts = wide_parts()
    step = rekindle.optimize(*parts)
    stats, left = recorder.counters.stats, iter(range(20))

    def failing() -> MemoryStats:
        if next(left, None) is None:
            raise RuntimeError("in the middle")
        return stats()

    with monkeypatch.context() as patch:
        patch.setattr(recorder.counters, "stats", failing)
        with pytest.raises(RuntimeError, match="in the middle"):
            step(parts[3])
    for _ in range(2):
        step(parts[3])
    engine = step.captured.first.engine
    assert isinstance(engine, CudaGraphEngine)
    assert workspaces_of(engine).keys() == nodes_of(engine)


def test_the_peak_of_a_measured_step_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring resets the allocator's peak."""
    recorder = SteeredPlayer("behaves", workspace_bytes=3 * MIB)
    use(recorder, monkeypatch)
    parts = wide_parts()
    step = rekindle.optimize(*parts)
    step(parts[3])
    assert step.graphs_peak_bytes == 103 * MIB
    step(parts[3])
    assert step.graphs_peak_bytes == recorder.peak


def test_the_forecast_is_of_the_arena_while_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SteeredPlayer("behaves")
    use(recorder, monkeypatch)
    parts = wide_parts(24576)
    profile = rekindle.profile(rekindle.capture(*parts), device="H200")
    step = rekindle.optimize(*parts, budget="80%", profile=profile)
    engine = step.captured.first.engine
    assert isinstance(engine, CudaGraphEngine)
    assert engine.is_steered
    assert step.plan is not None
    for _ in range(3):  # before the first step, after it, and once there is the arena
        assert step.trace is not None
        assert 0.95 * step.plan.peak_bytes < step.trace.peak_bytes < step.plan.peak_bytes
        if not recorder.n_captures:
            step(parts[3])
    engine.give_up("it is a test")
    assert not engine.is_steered
    assert step.trace.peak_bytes == step.plan.peak_bytes


@pytest.mark.slow
def test_no_forecast_is_of_an_arena_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = steer(monkeypatch, "cannot reserve")
    assert engine.reason == ""
    assert not engine.is_steered
