"""A step that is captured and measured while the user's own profiler is running."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.equality import differences, same, snapshot
from torch import nn

import rekindle
from rekindle.measuring.measure import measured_profile

PROFILERS: dict[str, Callable[[], Any]] = {
    "torch.profiler": lambda: torch.profiler.profile(acc_events=True),
    "with memory": lambda: torch.profiler.profile(acc_events=True, profile_memory=True),
    "autograd": torch.autograd.profiler.profile,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)
    ]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def images(size: int) -> torch.Tensor:
    return torch.randn(4, 4, size, size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("name", PROFILERS)
def test_a_new_shape_under_a_profiler(name: str) -> None:
    plain, (model, optimizer) = made(), made()
    step = rekindle.optimize(train_step, model, optimizer, images(8), budget="90%")
    with PROFILERS[name]() as profiler:
        for size in (8, 12, 8, 10):
            assert same(step(images(size)), train_step(*plain, images(size)))
    assert step.n_captures == 3
    assert not differences(snapshot(*plain), snapshot(model, optimizer))
    events = profiler.function_events if name == "autograd" else profiler.events()
    names = {event.name for event in events}  # theirs has gone on
    assert any("convolution" in each for each in names)


def test_the_same_workspaces_are_measured() -> None:
    captured = rekindle.capture(train_step, *made(), images(12))
    cpu = torch.device("cpu")
    given = (captured.recording, captured.graph, [images(12)], cpu)
    expected = measured_profile(*given, cache=False)
    with torch.profiler.profile(acc_events=True):
        found = measured_profile(*given, cache=False)
    assert expected.workspaces_bytes.sum() > 0
    assert found.workspaces_bytes.tolist() == expected.workspaces_bytes.tolist()


def test_a_profiler_in_another_thread() -> None:
    model, optimizer = made()
    has_begun, is_done = threading.Event(), threading.Event()
    found: list[int] = []

    def profile() -> None:
        with torch.profiler.profile(acc_events=True) as profiler:
            torch.ones(3).exp()
            has_begun.set()
            assert is_done.wait(60)
        found.append(len(profiler.events()))

    thread = threading.Thread(target=profile)
    thread.start()
    assert has_begun.wait(60)
    try:
        rekindle.optimize(train_step, model, optimizer, images(8), budget="90%")(images(8))
    finally:
        is_done.set()
        thread.join()
    assert found[0] > 0


def test_whole_steps_are_not_measured_then() -> None:
    model, optimizer = made()
    step = rekindle.optimize(train_step, model, optimizer, images(8))
    refused = pytest.raises(rekindle.ProfileError, match="a profiler is running")
    with torch.profiler.profile(acc_events=True), refused:
        step.measure(images(8))
    assert step.measure(images(8)).peak_bytes > 0


def test_an_error_in_the_measured_step_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised in the thread that measures."""
    model, optimizer = made()
    before = snapshot(model, optimizer)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("rekindle.measuring.meters._call_marked", fail)
    with torch.profiler.profile(acc_events=True), pytest.raises(MemoryError, match="no room"):
        rekindle.optimize(train_step, model, optimizer, images(8), budget="90%")
    assert not differences(before, snapshot(model, optimizer))
