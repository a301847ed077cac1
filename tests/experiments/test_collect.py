"""Pieces are collected task by task: results are kept, failed tasks are run again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from experiments import kinds
from experiments.collect import USUAL_S, about_seconds, collect, read_rows
from experiments.config import H200, TINY
from experiments.kinds import cases, planners
from experiments.pieces import FITS, beyond_task, check_task, compiled_task, fit_task, pieces
from experiments.runner import Runner
from experiments.tasks import (
    DONE,
    FAILED,
    OUT_OF_MEMORY,
    UNFINISHED,
    Piece,
    Rows,
    RowsOf,
    Task,
    several,
)

NOBODY: dict[str, Any] = {}


def of_tasks(*tasks: Task) -> Piece:
    return Piece("made-up", "", False, lambda done, rows_of: iter(tasks))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A kind of task that notes what it is asked, and fails for 13 the first time."""
    numbers: list[int] = []

    def double(settings: dict[str, Any], before: object, save: object) -> dict[str, Any]:
        numbers.append(settings["number"])
        if settings["number"] == 13 and numbers.count(13) == 1:
            raise ValueError("not that one")
        return {"double": 2 * settings["number"], "third": settings["number"] / 3}

    monkeypatch.setitem(kinds.KINDS, "double", double)
    return numbers


def test_what_is_there_is_not_run_again(asked: list[int], tmp_path: Path) -> None:
    piece = of_tasks(*(Task("double", {"number": n}, 0.0) for n in (7, 13)))
    assert not collect(piece, TINY, tmp_path, alone=False)
    first = json.loads((tmp_path / "made-up.json").read_text())
    assert [row["status"] for row in first["cases"]] == [DONE, FAILED]
    assert "not that one" in first["cases"][1]["message"]
    assert collect(piece, TINY, tmp_path, alone=False)
    assert asked == [7, 13, 13]
    content = json.loads((tmp_path / "made-up.json").read_text())
    assert content["experiment"], content["config"] == ("made-up", "tiny")
    assert {"gpu", "cpu", "versions", "commit"} <= content.keys()
    assert content["cases"][0]["found"] == {"double": 14, "third": 2.33333}
    assert [path.name for path in tmp_path.iterdir()] == ["made-up.json"]


def test_no_task_is_begun_that_has_no_time(asked: list[int], tmp_path: Path) -> None:
    piece = of_tasks(Task("double", {"number": 1}, 1.0), Task("double", {"number": 2}, 1e3))
    assert not collect(piece, TINY, tmp_path, seconds=100.0, alone=False)
    assert asked == [1]
    assert len(read_rows(tmp_path / "made-up.json")) == 1


def test_the_next_task_may_depend_on_the_last(asked: list[int], tmp_path: Path) -> None:
    def tasks(done: Rows, rows_of: RowsOf) -> Iterator[Task]:
        number = 1
        while number < 20:
            task = Task("double", {"number": number}, 0.0)
            yield task
            number = done[task.key]["found"]["double"] + 1

    assert collect(Piece("made-up", "", False, tasks), TINY, tmp_path, alone=False)
    assert asked == [1, 3, 7, 15]


@pytest.mark.slow
def test_each_task_has_a_process_of_its_own() -> None:
    settings = {"model": "mlp", "batches": [2, 4], "precision": "fp32", "gpu": "H200"}
    with Runner() as runner:
        answer = runner.perform(Task("shares", settings, 10.0), None, 120.0)
        assert answer["status"] == DONE, answer
        assert [row["batch"] for row in answer["found"]["batches"]] == [2, 4]
        assert answer["seconds"] > 0
        wrong = runner.perform(Task("nothing-like-that", {}, 1.0), None, 60.0)
        assert wrong["status"] == FAILED
        assert wrong["message"] == "KeyError: 'nothing-like-that'"
        waiting = runner.waiting
        assert waiting is not None
        assert waiting.process.poll() is None
    assert waiting.process.poll() is not None


NOTED = """
import sys, time
from pathlib import Path
from experiments import kinds
from experiments.runner import main
from experiments.turns import take_turn

def noted(settings, before, save):
    note = Path(settings["path"]).open("a", buffering=1)
    note.write("prepares\\n")
    time.sleep(settings["number"] / 5)
    if settings["number"] == 2:
        raise ValueError("not that one")
    take_turn()
    note.write("measures\\n")
    time.sleep(0.2)
    note.write("has measured\\n")
    return {"number": settings["number"]}

kinds.KINDS["noted"] = noted
main()
"""


@pytest.mark.slow
def test_several_prepare_at_once_and_measure_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    settings = [{"number": n, "path": str(path)} for n in range(4)]
    piece = Piece(
        "made-up", "", False, lambda *_: iter([tuple(Task("noted", s, 1.0) for s in settings)])
    )
    assert not collect(piece, TINY, tmp_path, seconds=120, command=("-c", NOTED))
    rows = json.loads((tmp_path / "made-up.json").read_text())["cases"]
    assert [row["status"] for row in rows] == [DONE, DONE, FAILED, DONE]
    assert [row["found"]["number"] for row in rows if "found" in row] == [0, 1, 3]
    said = path.read_text().splitlines()
    assert said[:4] == ["prepares"] * 4
    assert said[4:] == ["measures", "has measured"] * 3


def test_a_process_that_takes_too_long_is_ended() -> None:
    with Runner() as runner:
        answer = runner.perform(Task("shares", {}, 10.0), None, 0.2)
    assert answer["status"] == FAILED
    assert "code -9" in answer["message"]
    assert answer["seconds"] < 10


def test_a_batch_that_does_not_fit_is_tried_smaller() -> None:
    config = replace(TINY, retries=(1.0, 0.5, 0.25))
    (cap,) = config.caps
    fit = fit_task(config, "mlp", cap.memory)
    found = {"plain": {"batch": 100}, "quick": None, "planned": {"batch": 400}}
    row = {"kind": fit.kind, "settings": fit.settings, "status": DONE, "found": found}
    piece = pieces(config)[f"max-batch-{cap.memory}"]
    done: dict[str, Any] = {}
    for task in piece.tasks(done, lambda name: {fit.key: row} if name == FITS else {}):
        large = task.settings["case"]["batch"] > 60
        done[task.key] = {"status": OUT_OF_MEMORY if large else DONE}
    of = partial(check_task, config, cap.memory, "mlp")
    tried = [of("plain", 100), of("plain", 50), *(of("planned", n) for n in (400, 200, 100))]
    assert list(done) == [task.key for task in tried]


@pytest.mark.parametrize(("batch", "larger"), [(100, 102), (101, 104), (9, 10)])
def test_a_batch_beyond_the_largest_is_tried(batch: int, larger: int) -> None:
    (cap,) = TINY.caps
    fit = fit_task(TINY, "mlp", cap.memory)
    found = {"plain": {"batch": batch}, "quick": None, "planned": {"batch": 400}}
    row = {"kind": fit.kind, "settings": fit.settings, "status": DONE, "found": found}
    piece = pieces(TINY)[f"max-batch-{cap.memory}"]
    done: dict[str, Any] = {}
    for task in piece.tasks(done, lambda name: {fit.key: row} if name == FITS else {}):
        done[task.key] = {"status": DONE}
    tasks = [
        check_task(TINY, cap.memory, "mlp", way, n)
        for way, n in (("plain", batch), ("planned", 400))
    ]
    more = [
        beyond_task(TINY, cap.memory, "mlp", way, n)
        for way, n in (("plain", batch), ("planned", 400))
    ]
    assert list(done) == [tasks[0].key, more[0].key, tasks[1].key, more[1].key]
    assert more[0].settings["case"]["batch"] == larger


@pytest.mark.parametrize(
    ("largest", "peer", "planned"),
    [
        ({"compile": 200, "planned": 600}, (), (464, 512)),
        ({"compile": 180, "planned": 480}, (), (464, 512)),
        ({"compile": 160, "planned": 440}, (156,), (464, 431)),
        ({"compile": 100, "planned": 100}, (156,), (464, 431)),
    ],
)
def test_compiled_batches_rise_until_one_does_not_fit(
    largest: dict[str, int], peer: tuple[int, ...], planned: tuple[int, ...]
) -> None:
    config = replace(H200, compiled=H200.compiled[:1])
    done: dict[str, Any] = {}
    at_once = []
    for asked in pieces(config)["compiled-16GiB"].tasks(done, lambda name: NOBODY):
        at_once.append(len(several(asked)))
        for task in several(asked):
            case = task.settings["case"]
            fits = case["batch"] <= largest[case["way"]]
            done[task.key] = {"status": DONE if fits else OUT_OF_MEMORY}
    of = partial(compiled_task, config, "resnet152")
    first = (168, 176, 184, 192)
    tried = [*(of("compile", n) for n in (*first, *peer)), *(of("planned", n) for n in planned)]
    assert list(done) == [task.key for task in tried]
    assert at_once == [4] + [1] * (len(tried) - 4)


def test_a_compiled_batch_that_failed_is_not_tried_smaller() -> None:
    tasks = list(pieces(H200)["compiled-16GiB"].tasks(NOBODY, lambda name: NOBODY))
    done = {task.key: {"status": FAILED} for asked in tasks for task in several(asked)}
    assert list(pieces(H200)["compiled-16GiB"].tasks(done, lambda name: NOBODY)) == tasks


def test_compiled_cases() -> None:
    planned = compiled_task(H200, "bert-large", "planned", 24)
    case = planned.settings["case"]
    assert (case["engine"], case["planner"], case["budget"]) == ("inductor", "auto", "15.52GiB")
    assert planned.words == "case bert-large 24 compiled planned 15.52GiB"
    peer = compiled_task(H200, "bert-large", "compile", 10).settings["case"]
    assert [peer[key] for key in ("engine", "budget", "share")] == [None] * 3
    assert case["cap_bytes"] == peer["cap_bytes"] == 16 << 30


def test_what_was_to_be_compiled_and_was_not_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(function: object) -> None:
        raise RuntimeError("there is none")

    monkeypatch.setattr(
        "rekindle.engines.inductor.group_compiler.CompiledGroup.compile", no_compiler
    )
    case = {"model": "mlp", "batch": 4, "way": "planned", "steps": 1, "device": "cpu"}
    case |= {"budget": "100%", "planner": "mutwo"}
    record = cases.run_one_case({"case": {**case, "engine": "inductor"}}, None, None)
    assert record["status"] == FAILED
    assert record["message"] == f"{cases.UNCOMPILED}: there is none"
    assert cases.run_one_case({"case": {**case, "engine": "auto"}}, None, None)["status"] == DONE


def test_every_piece_can_be_listed() -> None:
    known = pieces(H200)
    gpu = [piece for piece in known.values() if piece.needs_gpu]
    assert {"statistics", "sweep-resnet152", "planners-bert-large", "schemes"} <= known.keys()
    assert all(about_seconds(piece) < USUAL_S for piece in gpu)
    keys = [
        task.key
        for piece in known.values()
        for asked in piece.tasks(NOBODY, lambda name: NOBODY)
        for task in several(asked)
    ]
    assert len(set(keys)) == len(keys)


SETTINGS = {
    **{"model": "resnet-tiny", "batch": 4, "precision": "fp32", "device": "cpu", "steps": 1},
    **{"planners": ["chen-sqrt", "none"], "percents": [90, 80], "limit_s": 100.0},
}


@pytest.mark.slow
def test_planners_go_on_where_they_stopped() -> None:
    saved: list[dict[str, Any]] = []
    late = planners.compare_planners({**SETTINGS, "limit_s": -1.0}, None, saved.append)
    assert late["status"] == UNFINISHED
    assert {row.get("not_run") for row in late["rows"] if row["status"] == "planned"} == {
        planners.NO_TIME
    }
    whole = planners.compare_planners(SETTINGS, None, saved.append)
    assert whole["status"] == DONE
    assert saved[-1]["rows"] == whole["rows"]
    ran = [row for row in whole["rows"] if "measured" in row]
    assert ran
    assert [row.get("same_as") for row in ran] == [None, 90]  # it has one plan only
    for row in ran:
        forecast, measured = row["forecast"]["peak_bytes"], row["measured"]["peak_bytes"]
        assert forecast == pytest.approx(measured, rel=0.01)
    again = planners.compare_planners(  # no time to run anything; measured times differ each time
        {**SETTINGS, "limit_s": -1.0}, whole, saved.append, same_time_ratio=math.inf
    )
    assert again["status"] == DONE
    assert [row.get("measured") for row in again["rows"]] == [
        row.get("measured") for row in whole["rows"]
    ]
