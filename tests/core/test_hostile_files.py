"""Files from others: one line that says what is wrong, or harmless text; never a traceback.

What loads must also be usable: simulated, planned, laid out and shown.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile_files import MARKUP, bombs, damaged, mutations
from support.made_up_sweep import made_up
from support.tiny_step import ABOUT, tiny_step

import rekindle
from rekindle.core.cost.profile import Profile
from rekindle.core.files import read_json, write_at_once
from rekindle.core.graph.graph import Source, StepGraph
from rekindle.core.graph.serial import (
    SCHEMA,
    graph_to_json,
    load_plan,
    load_profile,
    plan_to_json,
    profile_to_json,
    save_plan,
    save_profile,
)
from rekindle.errors import PlanError, ProfileError, RekindleError, ReportError
from rekindle.report.data import step_data
from rekindle.report.html import write_html
from rekindle.report.summary import Summary, summarize
from rekindle.report.sweep_report import sweep_table
from rekindle.report.tables import PlainConsole
from rekindle.report.terminal import step_summary
from rekindle.studies.sweep import read_sweep


def saved_profile() -> dict[str, Any]:
    graph, profile, _ = tiny_step()
    parts = {"graph": graph_to_json(graph), "profile": profile_to_json(profile)}
    return {"schema": SCHEMA, "about": dict(ABOUT), **parts}


def saved_plan() -> dict[str, Any]:
    graph, profile, _ = tiny_step()
    plan = rekindle.plan(graph, profile, budget="100%")
    return {"schema": SCHEMA, "plan": plan_to_json(plan)}


def with_own_fingerprint(data: Any, tmp_path: Path) -> Any:
    """The same file with its graph's fingerprint, as an attacker would write it."""
    from rekindle.core.graph.serial import graph_from_json

    try:
        data["profile"]["fingerprint"] = graph_from_json(data["graph"]).fingerprint
    except Exception:  # the graph is refused, whichever fingerprint the file has
        return data
    return data


def printed(summary: Summary) -> str:
    out = StringIO()
    PlainConsole(file=out, width=100, force_terminal=True).print(step_summary(summary))
    return out.getvalue()


def use(graph: StepGraph, profile: Profile, about: dict[str, Any]) -> None:
    """Everything that the command line does with a profile."""
    trace = rekindle.simulate(graph, profile)
    summary = summarize(graph, profile, trace, about)
    json.dumps(step_data(summary), allow_nan=False)
    printed(summary)
    try:
        plan = rekindle.plan(graph, profile, budget="90%")
    except PlanError:
        return
    rekindle.simulate(graph, profile, plan)
    rekindle.layout(graph, plan)
    printed(summarize(graph, profile, rekindle.simulate(graph, profile, plan), about, plan=plan))


def assert_one_line(error: RekindleError) -> None:
    text = str(error)
    assert "\n" not in text
    assert text.isprintable()
    assert len(text) < 1000


def try_profile(content: bytes, path: Path) -> bool:
    """True if the file was accepted, and could be used."""
    path.write_bytes(content)
    try:
        saved = load_profile(path)
    except ProfileError as error:
        assert_one_line(error)
        return False
    use(*saved)
    return True


def try_plan(content: bytes, path: Path) -> bool:
    path.write_bytes(content)
    graph, profile, _ = tiny_step()
    try:
        plan = load_plan(path)
    except PlanError as error:
        assert_one_line(error)
        return False
    try:
        plan.check(graph)
    except PlanError as error:
        assert_one_line(error)
        return False
    trace = rekindle.simulate(graph, profile, plan)
    printed(summarize(graph, profile, trace, plan=plan))
    return True


def test_the_generator_starts_from_valid_files(tmp_path: Path) -> None:
    assert try_profile(json.dumps(saved_profile()).encode(), tmp_path / "x")
    assert try_plan(json.dumps(saved_plan()).encode(), tmp_path / "x")


@pytest.mark.parametrize("seed", range(4))
def test_changed_profiles(seed: int, tmp_path: Path) -> None:
    found = []
    for data in mutations(saved_profile(), seed, 75):
        if isinstance(data, dict):
            data = with_own_fingerprint(data, tmp_path)
        found.append(try_profile(json.dumps(data).encode(), tmp_path / "x.json"))
    assert found.count(False) > 20
    assert found.count(True) > 2  # so that what is accepted is used, too


@pytest.mark.parametrize("seed", range(4))
def test_changed_plans(seed: int, tmp_path: Path) -> None:
    found = [
        try_plan(json.dumps(data).encode(), tmp_path / "x.json")
        for data in mutations(saved_plan(), seed, 75)
    ]
    assert found.count(False) > 20


@pytest.mark.parametrize("seed", range(2))
def test_damaged_files(seed: int, tmp_path: Path) -> None:
    profile, plan = (json.dumps(each()).encode() for each in (saved_profile, saved_plan))
    for content in damaged(profile, seed, 60):
        try_profile(content, tmp_path / "x.json.gz")
    for content in damaged(plan, seed, 60):
        try_plan(content, tmp_path / "x.json")


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_change(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """`make fuzz` runs many of these, on seeds that no run has seen."""
    folder = tmp_path_factory.getbasetemp()
    (profile,) = mutations(saved_profile(), seed, 1)
    if isinstance(profile, dict):
        profile = with_own_fingerprint(profile, folder)
    try_profile(json.dumps(profile).encode(), folder / "fuzzed-profile.json")
    (plan,) = mutations(saved_plan(), seed, 1)
    try_plan(json.dumps(plan).encode(), folder / "fuzzed-plan.json")


@pytest.mark.parametrize(("name", "content"), list(bombs()))
def test_bombs(name: str, content: bytes, tmp_path: Path) -> None:
    start = time.perf_counter()
    assert not try_profile(content, tmp_path / "x")
    assert not try_plan(content, tmp_path / "x")
    assert time.perf_counter() - start < 20


def test_what_is_no_file(tmp_path: Path) -> None:
    """A pipe would never end; a folder cannot be read."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ProfileError, match="no file"):
            load_profile(path)
        with pytest.raises(PlanError, match="no file"):
            load_plan(path)


# Names


@pytest.mark.parametrize("name", MARKUP)
def test_names_are_shown_as_they_are(name: str, tmp_path: Path) -> None:
    graph, profile, _ = tiny_step()
    source = Source(name, f"{name}.py", 7)
    ops = tuple(replace(op, target=f"aten.{name}.default", source=source) for op in graph.ops)
    graph = replace(graph, ops=ops)
    profile = replace(profile, fingerprint=graph.fingerprint, device=name, method=name)
    about = {"model": name, "batch": 4, "precision": name}
    save_profile(tmp_path / "x.json.gz", graph, profile, about)
    saved = load_profile(tmp_path / "x.json.gz")
    use(*saved)
    text = printed(summarize(*saved[:2], rekindle.simulate(*saved[:2]), about))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the console's own colours
    assert name.replace("\x1b", "\ufffd").replace("\x07", "\ufffd")[:6] in plain
    assert "\x1b" not in plain
    assert "\x07" not in plain


@pytest.mark.parametrize("name", MARKUP)
def test_pages_hold_no_code_of_others(name: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    graph, profile, _ = tiny_step()
    ops = tuple(replace(op, source=Source(name, name, 7)) for op in graph.ops)
    graph = replace(graph, ops=ops)
    profile = replace(profile, method=name, versions={name: name})
    summary = summarize(graph, profile, rekindle.simulate(graph, profile), {"model": name})
    write_html(tmp_path / "page.html", summary, layout=rekindle.layout(graph))
    assert "<script>alert" not in (tmp_path / "page.html").read_text(encoding="utf-8")


# Writing


def test_writers_do_not_follow_links(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "plan.json"
    victim.write_text("mine")
    link.symlink_to(victim)
    for name in ("plan.json.part", ".plan.json.part"):
        (tmp_path / name).symlink_to(victim)
    graph, profile, _ = tiny_step()
    save_plan(link, rekindle.plan(graph, profile, budget="100%"))
    assert victim.read_text() == "mine"
    assert not link.is_symlink()
    load_plan(link).check(graph)


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    path = tmp_path / "x.json"

    def write(number: int) -> None:
        write_at_once(path, json.dumps([number] * 20_000).encode())
        assert len(set(read_json(path))) == 1  # whole, whoever wrote it

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(64)))
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_at_once(path, b"new")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


def test_a_device_stays_one() -> None:
    write_at_once(Path(os.devnull), b"x")
    assert not Path(os.devnull).is_file()


# Sweeps


@pytest.mark.parametrize("seed", range(2))
def test_changed_sweeps(seed: int, tmp_path: Path) -> None:
    found = []
    sweep = made_up(batches=(2, 4))
    for data in mutations(sweep, seed, 60):
        (tmp_path / "sweep.json").write_text(json.dumps(data), encoding="utf-8")
        try:
            read = read_sweep(tmp_path)
        except ReportError as error:
            assert_one_line(error)
            found.append(False)
            continue
        PlainConsole(file=StringIO(), width=100).print(sweep_table(read))
        found.append(True)
    assert found.count(False) > 10
    assert found.count(True) > 10
