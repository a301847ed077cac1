"""The cache of measured profiles: it is used, and checked before use."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle.core.cost.profile import Profile
from rekindle.measuring import measure


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def captured(hidden: int = 6) -> rekindle.CapturedStep:
    model = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return rekindle.capture(train_step, model, optimizer, torch.ones(8, 4))


MEASURED: list[str] = []  # an item for each profile that was measured


def profile(step: rekindle.CapturedStep, *, cache: bool = True, **options: Any) -> Profile:
    """The step's profile, which may come from the cache however short the step is."""

    def progress(text: str) -> None:
        if text == "warming up":
            MEASURED.append(text)

    return measure.measured_profile(
        step.recording,
        step.graph,
        step.first_batch(),
        step.device,
        cache=cache,
        runs=1,
        progress=progress,
        **{"min_cached_cpu_us": 0.0, **options},
    )


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    MEASURED.clear()
    return tmp_path


def kept(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.is_file())


def test_the_second_time_nothing_is_measured(home: Path) -> None:
    first = profile(captured())
    [path] = kept(home)
    assert path.parent == home / "rekindle" / "profiles"
    assert profile(captured()) == first
    assert len(MEASURED) == 1
    profile(captured(), cache=False)
    assert len(MEASURED) == 2


def test_a_short_step_on_the_cpu_is_always_measured(home: Path) -> None:
    """Times from when the machine was busy would be far off."""
    profile(captured(), min_cached_cpu_us=1e9)
    (path,) = kept(home)
    written = path.stat().st_mtime_ns
    profile(captured(), min_cached_cpu_us=1e9)
    assert len(MEASURED) == 2
    assert kept(home)[0].stat().st_mtime_ns > written


def test_without_the_cache_nothing_is_read_or_written(home: Path) -> None:
    profile(captured(), cache=False)
    assert not kept(home)
    profile(captured())
    [path] = kept(home)
    written = path.read_bytes()
    profile(captured(), cache=False)
    assert len(MEASURED) == 3
    assert path.read_bytes() == written


def test_an_analytic_profile_is_not_cached(home: Path) -> None:
    rekindle.profile(captured(), device="H200")
    assert not kept(home)


def test_each_graph_has_its_own(home: Path) -> None:
    for hidden in (6, 7, 6, 7):
        profile(captured(hidden))
    assert len(MEASURED) == len(kept(home)) == 2


def test_each_version_has_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile(captured())
    monkeypatch.setattr(measure, "versions", lambda device: {"python": "3", "torch": "99.9"})
    profile(captured())
    profile(captured())
    assert len(MEASURED) == len(kept(home)) == 2


def test_each_device_has_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile(captured())
    monkeypatch.setattr(measure, "device_name", lambda device: "abacus")
    assert profile(captured()).device == "abacus"
    assert profile(captured()).device == "abacus"
    assert len(MEASURED) == len(kept(home)) == 2


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(gzip.decompress(path.read_bytes()))
    change(data)
    path.write_bytes(gzip.compress(json.dumps(data).encode()))


def overwritten(path: Path) -> None:
    """Overwrite a few bytes in the middle."""
    whole = bytearray(path.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 8] = b"\xff" * 8
    path.write_bytes(whole)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "bytes overwritten": overwritten,
    "empty": lambda path: path.write_bytes(b""),
    "not gzip": lambda path: path.write_bytes(b"hello"),
    "other schema": lambda path: changed(path, lambda data: data.update(schema=0)),
    "other versions": lambda path: changed(
        path, lambda data: data["profile"]["versions"].update(torch="0.1")
    ),
    "other device": lambda path: changed(
        path, lambda data: data["profile"].update(device="abacus")
    ),
    "other graph": lambda path: changed(
        path, lambda data: data["graph"]["storages"][0].__setitem__(0, 1)
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_invalid_file_is_ignored_and_overwritten(
    damage: str, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile(captured())
    [path] = kept(home)
    DAMAGE[damage](path)
    with caplog.at_level(logging.WARNING, logger="rekindle"):
        again = profile(captured())
    [record] = caplog.records
    assert "ignoring" in record.getMessage()
    assert str(path) in record.getMessage()
    assert len(MEASURED) == 2
    caplog.clear()
    assert profile(captured()) == again
    assert (len(MEASURED), len(caplog.records)) == (2, 0)


def test_a_folder_that_cannot_be_written_to(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file in place of the folder: permissions would not stop tests that run as root."""
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file"))
    with caplog.at_level(logging.WARNING, logger="rekindle"):
        assert profile(captured()).step_us > 0
    assert "could not cache the profile" in caplog.text
    assert len(MEASURED) == 1


def test_a_folder_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user's folder: even `exists` is refused."""

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    for name in ("stat", "mkdir", "open"):
        monkeypatch.setattr(measure.Path, name, refuse)
    assert profile(captured()).step_us > 0
    assert len(MEASURED) == 1


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(home / "me"))
    assert measure.cache_folder() == home / "me" / ".cache" / "rekindle" / "profiles"
