"""`rekindle plan` as users call it: one plan, whole curves, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from support.commands import run
from support.tiny_step import ABOUT, PEAK_BYTES, tiny_plan, tiny_step

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.serial import load_plan, save_profile
from rekindle.errors import InfeasibleBudget
from rekindle.planners.registry import PLANNERS

MEASURED = Path(__file__).parents[1] / "benchmarks" / "profiles"
LEAST = PEAK_BYTES - 1000


def by_hand(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
    """A planner with a bound and a least peak, which its plans claim to have."""
    if budget_bytes < LEAST:
        raise InfeasibleBudget(budget_bytes=budget_bytes, least_peak_bytes=LEAST)
    us = 120.0 * (budget_bytes < PEAK_BYTES)
    return dataclasses.replace(
        tiny_plan(graph),
        budget_bytes=budget_bytes,
        peak_bytes=budget_bytes,
        recompute_us=us,
        bound_us=us / 2,
    )


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "auto", by_hand)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A saved profile of a step made by hand."""
    graph, profile, _ = tiny_step()
    path = tmp_path / "tiny.json.gz"
    save_profile(path, graph, profile, ABOUT)
    return str(path)


def test_one_plan(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    code, out, err = run(capsys, "plan", saved, "--budget", "100%")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "tiny, batch 512, fp32, measured on Toy GPU"
    assert lines[1].split()[:2] == ["planner", "by"]
    assert "budget   7.10 MiB, 100% of the plain step's peak" in out
    assert "step     620 µs, 24.0% more than 500 µs; 2 ops run again" in out
    assert max(map(len, lines)) <= 80


def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    command = ["plan", saved, "--budget", "8MiB", "--planner", "none", "--json", "-"]
    code, out, err = run(capsys, *command)
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["schema"] == 1
    assert set(data) >= {
        *("model", "batch", "precision", "device", "planner", "budget_bytes"),
        *("plain", "planned", "bound_us", "plan_seconds"),
    }
    assert data["plain"] == {"peak_bytes": PEAK_BYTES, "step_us": 500.0}
    assert data["planned"] == {"peak_bytes": PEAK_BYTES, "step_us": 500.0, "recompute_us": 0.0}
    assert (data["planner"], data["budget_bytes"], data["bound_us"]) == ("none", 8 << 20, None)
    assert data["plan_seconds"] > 0


def test_everything_it_writes(
    capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    page, figure, plan, data = (
        str(tmp_path / f"out.{ending}") for ending in ("html", "png", "plan.json.gz", "json")
    )
    options = ["--html", page, "--png", figure, "--save", plan, "--json", data]
    code, out, err = run(capsys, "plan", saved, "--budget", "100%", *options)
    assert (code, err) == (0, "")
    assert out.rstrip().endswith(f"Written: {page}, {figure}, {plan}")
    text = Path(page).read_text(encoding="utf-8")
    assert "Rekindle plan</title>" in text
    assert "Where everything lies" in text
    assert Path(figure).read_bytes().startswith(b"\x89PNG")
    load_plan(Path(plan)).check(tiny_step()[0])
    assert json.loads(Path(data).read_text())["planned"]["recompute_us"] == 120.0


def test_curves(capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure, data = str(tmp_path / "curve.png"), str(tmp_path / "curve.json")
    options = ["--planners", "auto, none", "--points", "3", "--png", figure, "--json", data]
    code, out, err = run(capsys, "plan", saved, "--pareto", *options)
    assert (code, err) == (0, "")
    assert re.search(r"budget +of plain +auto +none +bound", out)
    assert Path(figure).read_bytes().startswith(b"\x89PNG")
    found = json.loads(Path(data).read_text())
    assert [curve["planner"] for curve in found["curves"]] == ["auto", "none"]
    points = found["curves"][0]["points"]
    assert [point["budget_bytes"] for point in points] == [PEAK_BYTES, PEAK_BYTES - 500, LEAST]
    assert [point["recompute_us"] for point in points] == [0.0, 120.0, 120.0]
    assert len(found["curves"][1]["points"]) == 1


def test_the_curve_of_one_planner(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    code, out, _ = run(capsys, "plan", saved, "--pareto", "--json", "-")
    assert code == 0
    (curve,) = json.loads(out)["curves"]
    assert (curve["planner"], len(curve["points"])) == ("auto", 20)


def test_a_budget_that_cannot_be_met(capsys: pytest.CaptureFixture[str]) -> None:
    """The line says what to type instead, and that works."""
    path = str(MEASURED / "gpt2_b16_bf16_h200.json.gz")
    code, out, err = run(capsys, "plan", path, "--planner", "none", "--budget", "1GiB")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("rekindle: no plan stays within 1GiB: the least peak found is ")
    advice = re.search(r"give (--budget \S+) or more", err)
    assert advice is not None
    code, _, err = run(capsys, "plan", path, "--planner", "none", *advice[1].split())
    assert (code, err) == (0, "")


def test_a_forecast_for_a_named_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "h200", "--planner", "none", "--budget", "100%"]
    code, out, _ = run(capsys, "plan", "mlp", *options)
    assert code == 0
    assert out.splitlines()[0] == "mlp, batch 64, fp32, estimated for H200"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--budget 8GiB, --budget 60% (of the plain step's own peak)"),
        (["--budget", "lots"], "'lots' is not a budget: write a number and a unit ('8GiB'"),
        (["--budget", "0%"], "'0%' is not a budget"),
        (["--budget", "-5GiB"], "'-5GiB' is not a budget"),
        (["--budget", "60%", "--planner", "autoo"], "did you mean 'auto'? There are none, all"),
        (["--budget", "60%", "--planners", "none"], "--planners is for the trade-off curve"),
        (["--budget", "60%", "--points", "5"], "--points is for the trade-off curve"),
        (["--pareto", "--budget", "60%"], "--pareto goes through all budgets, and --budget"),
        (["--pareto", "--html", "x.html"], "--pareto goes through all budgets, and --html"),
        (["--pareto", "--save", "x.json"], "--pareto goes through all budgets, and --save"),
        (["--pareto", "--planner", "none", "--planners", "all"], "leave one out"),
        (["--pareto", "--planners", "none,,all"], "no planner named ''"),
        (["--pareto", "--points", "1"], "--points"),
        (["--budget", "60%", "--save", "plan.txt"], "plan.txt must end in .json or .json.gz"),
        (["--budget", "60%", "--batch", "4"], "is a saved profile, which --batch cannot change"),
    ],
)
def test_bad_input_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], saved: str, arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, "plan", saved, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("rekindle: ")
    assert message in err
    assert err.count("\n") == 1


def test_an_unknown_planner_is_refused_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "no-such-model", "--budget", "60%", "--planner", "x")
    assert "no planner named 'x'" in run(capsys, *arguments)[2]
