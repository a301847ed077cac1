"""Saved plans: the way to a file and back, and files that are not what they should be."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_step import ABOUT, tiny_plan, tiny_step

from rekindle.core.graph.serial import (
    load_plan,
    load_profile,
    plan_to_json,
    save_plan,
    save_profile,
)
from rekindle.errors import PlanError
from rekindle.planners.registry import PLANNERS

MEASURED = Path(__file__).parents[2] / "benchmarks" / "profiles"


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
@pytest.mark.parametrize("bound_us", [None, 0.0, 12.345678])
def test_there_and_back(tmp_path: Path, name: str, bound_us: float | None) -> None:
    plan = dataclasses.replace(tiny_plan(), bound_us=bound_us)
    path = tmp_path / name
    save_plan(path, plan)
    assert load_plan(path) == plan
    assert path.read_bytes().startswith(b"\x1f\x8b") is name.endswith(".gz")
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_the_same_plan_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        save_plan(tmp_path / name, tiny_plan())
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_a_real_plan_is_small_and_still_valid(tmp_path: Path) -> None:
    graph, profile, _ = load_profile(MEASURED / "gpt2_b16_bf16_h200.json.gz")
    plan = PLANNERS["all"](graph, profile, 1 << 60)
    path = tmp_path / "plan.json.gz"
    save_plan(path, plan)
    found = load_plan(path)
    assert found == plan
    found.check(graph)
    assert path.stat().st_size < 40_000
    with pytest.raises(PlanError, match="another step"):
        found.check(tiny_step()[0])


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="there is no file"):
        load_plan(tmp_path / "nowhere.json")


def spoilt(**changes: Any) -> bytes:
    """A saved plan, but for some of its entries."""
    return json.dumps({"schema": 1, "plan": {**plan_to_json(tiny_plan()), **changes}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"[1, 2]",
        b"\xff\xfe",
        b'{"schema": 1}',
        b'{"schema": 99}',
        b'{"schema": 1, "plan": []}',
        gzip.compress(b'{"schema": 1', mtime=0)[:-9],
        spoilt(schedule=[0, 0, 1]),
        spoilt(schedule=[0, "0"]),
        spoilt(schedule=[0.5, 0]),
        spoilt(schedule={"0": 1}),
        spoilt(schedule=[True, 0]),
        spoilt(decisions=[[1, 2]]),
        spoilt(budget_bytes=None),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    message = str(caught.value)
    assert message.startswith(f"{path} ")
    assert "again with rekindle plan MODEL" in message
    assert "\n" not in message


def test_a_saved_profile_is_no_plan(tmp_path: Path) -> None:
    graph, profile, _ = tiny_step()
    path = tmp_path / "tiny.json.gz"
    save_profile(path, graph, profile, ABOUT)
    with pytest.raises(PlanError, match="is not a saved plan"):
        load_plan(path)
