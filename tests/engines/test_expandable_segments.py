"""When a step uses expandable segments; the allocator is emulated."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.played import Player
from support.square_step import square_step as train_step
from torch import nn

import rekindle
from rekindle import pipeline
from rekindle.engines import select_engine
from rekindle.engines.cudagraph.graph_engine import CudaGraphEngine
from rekindle.engines.process_settings import ExpandableSegments, expandable_segments_for
from rekindle.measuring.meters import available_bytes, release_cached_memory

GPU = torch.device("cuda", 0)
ON, OFF = "expandable_segments:True", "expandable_segments:False"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that the allocator is given."""
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    return settings


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The answers of a GPU's allocator."""
    says = SimpleNamespace(
        backend="native", free=400, total=1000, fraction=1.0, reserved=100, allocated=50
    )
    says.settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}
    says.emptied = 0

    def empty() -> None:
        says.emptied += 1

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: says.backend)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (says.free, says.total))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: says.fraction)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: says.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: says.allocated)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    monkeypatch.setattr(
        torch.cuda.memory, "_snapshot", lambda device=None: {"allocator_settings": says.settings}
    )
    return says


@pytest.mark.parametrize(
    ("changed", "peak_bytes", "is_used"),
    [
        ({}, 400, False),  # 500 bytes are there for it
        ({}, 401, True),
        ({"free": 900}, 700, False),
        ({"free": 900, "fraction": 0.5}, 700, True),  # a cap on what this process may use
        ({"backend": "cudaMallocAsync"}, 500, False),
        ({"settings": {"expandable_segments": True}}, 500, False),
    ],
)
def test_segments_are_expandable_if_memory_is_short(
    changed: dict[str, Any], peak_bytes: int, is_used: bool, gpu: SimpleNamespace
) -> None:
    vars(gpu).update(changed)
    assert (expandable_segments_for(peak_bytes, GPU) is not None) is is_used


def test_the_cpu_has_no_segments() -> None:
    assert expandable_segments_for(1 << 60, torch.device("cpu")) is None
    release_cached_memory(torch.device("cpu"))


@pytest.mark.usefixtures("gpu")
def test_other_settings_are_told_again(gpu: SimpleNamespace, told: list[str]) -> None:
    kept = "max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2]"
    gpu.settings["PYTORCH_CUDA_ALLOC_CONF"] = f"{kept},expandable_segments:False"
    segments = expandable_segments_for(500, GPU)
    assert segments is not None
    seen = []
    with suppress(RuntimeError), segments():
        seen.append(segments.is_on)
        raise RuntimeError
    assert [*seen, segments.is_on] == [True, False]
    assert told == [f"{kept},{ON}", f"{kept},{OFF}"]


def test_torch_does_as_it_is_told() -> None:
    """Without a stand-in: other settings stay, and the kind of segments changes."""

    def settings() -> tuple[bool, int]:
        found = torch.cuda.memory._snapshot()["allocator_settings"]
        return found["expandable_segments"], found["max_split_size"]

    before = torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    kept = "max_split_size_mb:64, expandable_segments:False"
    try:
        torch._C._accelerator_setAllocatorSettings(kept)
        with ExpandableSegments(kept)():
            assert settings() == (True, 64 << 20)
        assert settings() == (False, 64 << 20)
    finally:
        torch._C._accelerator_setAllocatorSettings(before or OFF)


@pytest.mark.parametrize(("reserved", "emptied"), [(150, 0), (170, 0), (250, 1)])
def test_a_large_cache_is_given_back(reserved: int, emptied: int, gpu: SimpleNamespace) -> None:
    gpu.reserved = reserved
    release_cached_memory(GPU)
    assert gpu.emptied == emptied


def planned(monkeypatch: pytest.MonkeyPatch, segments: ExpandableSegments) -> tuple[Any, ...]:
    """A planned step that is short of memory, and its parts."""
    monkeypatch.setattr(pipeline, "expandable_segments_for", lambda peak_bytes, device: segments)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 8)
    return rekindle.optimize(train_step, model, optimizer, batch, budget="100%"), optimizer, batch


def test_code_uses_expandable_segments_in_every_step(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    segments = ExpandableSegments("")
    step, optimizer, batch = planned(monkeypatch, segments)
    seen: list[bool] = []
    optimizer.register_step_pre_hook(lambda *given: seen.append(segments.is_on))
    for _ in range(3):
        step(batch)
    assert told == [ON, OFF] * 3
    assert seen == [True] * 3


class Watching(Player):
    """Notes whether segments are expandable while graphs are captured."""

    def __init__(self, segments: ExpandableSegments) -> None:
        super().__init__()
        self.segments = segments
        self.seen: list[bool] = []

    def capture(self, *given: Any) -> Any:
        self.seen.append(self.segments.is_on)
        return super().capture(*given)


@pytest.mark.parametrize("fails_at", [-1, 0])
def test_graphs_are_captured_without_expandable_segments(
    fails_at: int, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    segments = ExpandableSegments("")
    player = Watching(segments)
    player.fails_at = fails_at
    monkeypatch.setattr(
        select_engine.EngineFactory,
        "build",
        lambda self, program, *known: CudaGraphEngine(program, player, *known),
    )
    step, optimizer, batch = planned(monkeypatch, segments)
    in_optimizer: list[bool] = []
    optimizer.register_step_pre_hook(lambda *given: in_optimizer.append(segments.is_on))
    step(batch)
    assert told == [ON, OFF]  # the one part that is to be captured
    step(batch)
    step(batch)
    assert player.seen == [False]
    if fails_at < 0:  # from graphs since
        assert told == [ON, OFF]
        assert in_optimizer == [False] * 3
    else:  # as code: the part that could not be captured, then whole steps
        assert told == [ON, OFF] * 3
        assert in_optimizer == [False, False, True]


def test_the_numbers_stay_within_what_there_is(gpu: SimpleNamespace) -> None:
    assert available_bytes(GPU) == 500
    gpu.fraction = 0.3
    assert available_bytes(GPU) == 300
