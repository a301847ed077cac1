"""The page of a plan: what a real browser makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.browser import check_alone, look, needs_browser
from support.tiny_step import (
    MIB,
    PEAK_BYTES,
    nasty_graph,
    tiny_graph,
    tiny_plan,
    tiny_plan_summary,
    tiny_profile,
)

from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import simulate
from rekindle.planners.registry import PLANNERS
from rekindle.report.html import write_html
from rekindle.report.summary import phase_bands

pytest.importorskip("plotly")

# What a person does with the page.
USE = """
  const outline = () => timeline.data.find((trace) => trace.name === "plain step");
  seen.end = timeline.layout.xaxis.range[1];
  seen.planned = timeline.data.at(-1).y.length;
  seen.hover = timeline.data.at(-1).text[5];
  seen.plainEnd = outline().x.at(-1);
  seen.plainTop = Math.max(...outline().y);
  click("input[name=axis][value=op]");
  seen.places = outline().x;
  seen.verbs = column("decisions", 1);
  seen.reasons = column("decisions", 6);
  click("input[name=decided][value=keep]");
  seen.kept = column("decisions", 1);
  seen.shown = document.getElementById("decision-shown").textContent;
  click("input[name=decided][value=drop]");
  type("decision-search", "BY HAND");
  seen.found = column("decisions", 6);
  type("decision-search", "nothing");
  seen.none = column("decisions", 6);
  seen.operators = all("#operators tbody tr").length;
"""


def page_of(path: Path, plan: Plan, graph: Any = None) -> Path:
    write_html(path, tiny_plan_summary(plan, graph))
    return path


@needs_browser
def test_in_a_browser(tmp_path: Path) -> None:
    seen = look(page_of(tmp_path / "plan.html", tiny_plan()), USE)
    assert "peak 7.10 MiBrelu" in seen["labels"]
    assert "budget 8.00 MiB" in seen["labels"]
    assert (seen["end"], seen["plainEnd"]) == (620, 500)
    assert seen["planned"] == 10
    assert seen["hover"].startswith("<b>relu</b>, computed again<br>op 1, forward, 20.0 µs")
    assert seen["plainTop"] == pytest.approx(PEAK_BYTES / MIB)
    assert seen["places"] == [0, 1, 2, 3, 6, 7, 8, 9]
    assert seen["verbs"] == ["drop"]
    assert seen["reasons"] == seen["found"] == ["idle for 40.0 µs; computed again by hand"]
    assert (seen["kept"], seen["none"]) == ([], [])
    assert seen["shown"] == "0 of 0 rows shown."
    assert seen["operators"] == 6


@needs_browser
def test_a_plan_that_drops_nothing(tmp_path: Path) -> None:
    graph = tiny_graph()
    plan = PLANNERS["none"](graph, tiny_profile(graph), 1 << 60)
    seen = look(page_of(tmp_path / "plan.html", plan), USE)
    assert seen["end"] == seen["plainEnd"] == 500
    assert seen["verbs"] == seen["kept"] == ["keep"]
    assert not any(label.startswith("budget") for label in seen["labels"])


@needs_browser
def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    graph = nasty_graph()
    seen = look(page_of(tmp_path / "plan.html", tiny_plan(graph), graph), USE)
    assert seen["images"] == 0


def test_the_page_says_what_the_plan_does(tmp_path: Path) -> None:
    text = page_of(tmp_path / "plan.html", tiny_plan()).read_text(encoding="utf-8")
    assert "<title>tiny, batch 512, fp32 – Rekindle plan</title>" in text
    assert "The budget is 8.00 MiB, 113% of the plain step&#x27;s peak. Of 1 activations" in text
    assert "What is dropped, by module" in text
    check_alone(text)


def test_what_is_computed_again_belongs_to_the_phase_it_is_for() -> None:
    graph = tiny_graph()
    profile = tiny_profile(graph)
    assert phase_bands(simulate(graph, profile)) == [
        ("forward", 0, 1),
        ("loss", 2, 3),
        ("backward", 4, 5),
        ("optimizer", 6, 6),
    ]
    assert phase_bands(simulate(graph, profile, tiny_plan(graph))) == [
        ("forward", 0, 1),
        ("loss", 2, 3),
        ("backward", 4, 7),
        ("optimizer", 8, 8),
    ]
