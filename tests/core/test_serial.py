"""Saved profiles: the way to a file and back, and files that are not what they should be."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hand_made import profile_of
from support.tiny_step import ABOUT, tiny_graph, tiny_profile, tiny_step

import rekindle
from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.graph.graph import Source, StepGraph
from rekindle.core.graph.serial import (
    graph_from_json,
    graph_to_json,
    load_profile,
    profile_from_json,
    profile_to_json,
    save_profile,
)
from rekindle.core.graph.simulate import simulate
from rekindle.errors import ProfileError


def through_text(data: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(data))


def without_sources(graph: StepGraph) -> StepGraph:
    ops = tuple(dataclasses.replace(op, source=Source("", "", 0)) for op in graph.ops)
    return dataclasses.replace(graph, ops=ops)


def real_graph() -> StepGraph:
    """With views, in-place and random ops, a scalar, gradients and optimizer state."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Dropout(0.4), torch.nn.Linear(9, 3))

    def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        loss = model(batch).relu_().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    optimizer = torch.optim.Adam(model.parameters())
    return rekindle.capture(train_step, model, optimizer, torch.randn(5, 6)).graph


@pytest.mark.parametrize("make", [tiny_graph, real_graph])
def test_a_graph_comes_back_the_same(make: Callable[[], StepGraph]) -> None:
    graph = make()
    back = graph_from_json(through_text(graph_to_json(graph)))
    assert back.fingerprint == graph.fingerprint
    assert back.storages == graph.storages
    assert back.values == graph.values
    assert back.outputs == graph.outputs
    assert without_sources(back).ops == without_sources(graph).ops
    for op, same in zip(graph.ops, back.ops, strict=True):
        assert op.source.filename.endswith(same.source.filename)
        assert (op.source.module, op.source.lineno) == (same.source.module, same.source.lineno)
    again = graph_from_json(through_text(graph_to_json(back)))
    assert again.ops == back.ops


def test_a_profile_comes_back_the_same() -> None:
    """Times to the nanosecond."""
    profile = Profile(
        device="Toy",
        fingerprint="abc",
        costs=(OpCost(1.234, 5, True), OpCost(0.001, 0, False), OpCost(123456.789)),
        allocator="cuda",
        overhead_bytes=7,
        transfer_latency_us=1.5,
        to_host_bytes_per_us=2.25,
        to_device_bytes_per_us=3.125,
        method="by hand",
        versions={"torch": "9.9", "cuda": "1"},
    )
    assert profile_from_json(through_text(profile_to_json(profile))) == profile


def test_times_are_kept_to_the_nanosecond() -> None:
    graph = tiny_graph()
    profile = profile_of(graph, times_us=[1 / 3] * len(graph.ops))
    back = profile_from_json(through_text(profile_to_json(profile)))
    assert back.times_us == pytest.approx(profile.times_us, abs=0.0005)


def test_a_file_comes_back_the_same(tmp_path: Path) -> None:
    graph, profile, trace = tiny_step()
    save_profile(tmp_path / "x.json.gz", graph, profile, ABOUT)
    saved = load_profile(tmp_path / "x.json.gz")
    assert saved.graph.fingerprint == graph.fingerprint
    assert saved.profile == profile
    assert saved.about == ABOUT
    assert rekindle.simulate(saved.graph, saved.profile).peak_bytes == trace.peak_bytes


def test_the_same_bytes_each_time(tmp_path: Path) -> None:
    graph, profile, _ = tiny_step()
    for name in ("a.json.gz", "b.json.gz"):
        save_profile(tmp_path / name, graph, profile, ABOUT)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json.gz", "b.json.gz"]


def test_saved_over_a_damaged_file(tmp_path: Path) -> None:
    graph, profile, _ = tiny_step()
    path = tmp_path / "x.json.gz"
    path.write_bytes(b"half of som")
    save_profile(path, graph, profile, ABOUT)
    assert load_profile(path).profile == profile


def test_a_profile_of_another_graph_is_not_saved(tmp_path: Path) -> None:
    graph = tiny_graph(mm="other")
    with pytest.raises(ProfileError, match="another step"):
        save_profile(tmp_path / "x.json.gz", graph, tiny_profile(tiny_graph()), {})
    assert not list(tmp_path.iterdir())


# No path of the machine


@pytest.mark.parametrize(
    ("filename", "kept"),
    [
        ("/home/me/project/models/net.py", "models/net.py"),
        ("/opt/venv/lib/python3.11/site-packages/torch/nn/x.py", "torch/nn/x.py"),
        ("net.py", "net.py"),
        ("/net.py", "net.py"),
        ("<stdin>", "<stdin>"),
        ("", ""),
    ],
)
def test_source_files_are_shortened(filename: str, kept: str) -> None:
    graph = tiny_graph(first=Source("layers.0", filename, 7))
    back = graph_from_json(through_text(graph_to_json(graph)))
    assert back.ops[0].source == Source("layers.0", kept, 7)
    assert back.fingerprint == graph.fingerprint


def test_no_path_of_this_machine_is_saved(tmp_path: Path) -> None:
    graph = real_graph()
    assert any(op.source.filename == __file__ for op in graph.ops)
    save_profile(tmp_path / "x.json.gz", graph, profile_of(graph), {})
    text = gzip.decompress((tmp_path / "x.json.gz").read_bytes()).decode()
    assert "core/test_serial.py" in text
    for place in (Path(__file__).parents[2], Path.home(), Path(torch.__file__).parents[1]):
        assert f"{place}/" not in text


# Files that are not what they should be


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    graph, profile, _ = tiny_step()
    save_profile(tmp_path / "x.json.gz", graph, profile, ABOUT)
    return tmp_path / "x.json.gz"


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(gzip.decompress(path.read_bytes()))
    change(data)
    path.write_bytes(gzip.compress(json.dumps(data).encode()))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "without its end": lambda path: path.write_bytes(path.read_bytes()[:-4]),
    "empty": lambda path: path.write_bytes(b""),
    "not gzip": lambda path: path.write_bytes(b"hello"),
    "not JSON": lambda path: path.write_bytes(gzip.compress(b"hello")),
    "not text": lambda path: path.write_bytes(gzip.compress(b"\xff\xfe\xfd")),
    "not an object": lambda path: path.write_bytes(gzip.compress(b"[1, 2]")),
    "no schema": lambda path: changed(path, lambda data: data.pop("schema")),
    "wrong schema": lambda path: changed(path, lambda data: data.update(schema=99)),
    "no graph": lambda path: changed(path, lambda data: data.pop("graph")),
    "no costs": lambda path: changed(path, lambda data: data["profile"].pop("costs")),
    "an unknown role": lambda path: changed(
        path, lambda data: data["graph"]["storages"][0].__setitem__(1, "HAT")
    ),
    "a short row": lambda path: changed(path, lambda data: data["graph"]["ops"][0].pop()),
    "one cost too few": lambda path: changed(path, lambda data: data["profile"]["costs"].pop()),
    "another graph": lambda path: changed(
        path, lambda data: data["graph"]["storages"][0].__setitem__(0, 12345)
    ),
    "missing": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_by_name(saved: Path, damage: str) -> None:
    DAMAGE[damage](saved)
    with pytest.raises(ProfileError) as caught:
        load_profile(saved)
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_any_byte_may_be_wrong(saved: Path) -> None:
    """Whichever byte has changed: refused, or read as it was (gzip's header has bytes to spare)."""
    whole = saved.read_bytes()
    _, profile, _ = tiny_step()
    n_refused = 0
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        saved.write_bytes(damaged)
        try:
            found = load_profile(saved).profile
        except ProfileError:
            n_refused += 1
        else:
            assert found == profile
    assert n_refused > 0.9 * len(whole)


MEASURED = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "path", sorted((MEASURED / "profiles").glob("*.json.gz")), ids=lambda p: p.name
)
def test_the_committed_profiles_forecast_what_was_measured(path: Path) -> None:
    """Measured on an H200: the simulated peak is the one that the plain step had there."""
    graph, profile, about = load_profile(path)
    cases = json.loads((MEASURED / "results" / "profiles_h200.json").read_text())["cases"]
    keys = ("model", "batch", "precision")
    case = next(c for c in cases if all(c[key] == about[key] for key in keys))
    trace = simulate(graph, profile)
    assert trace.peak_bytes == pytest.approx(case["plain"]["peak_bytes"], rel=0.01)
    assert profile.step_us == pytest.approx(case["graph_step_us"], rel=0.05)
    assert "H200" in profile.device
    assert all(cost.is_measured for cost in profile.costs)
