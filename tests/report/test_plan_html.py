"""The page of a plan: what a real browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tiny_step import ABOUT, MIB, PEAK_BYTES, tiny_graph, tiny_plan, tiny_profile

from rekindle.core.ir import Source
from rekindle.core.schedule import Plan
from rekindle.core.simulate import simulate
from rekindle.plan import PLANNERS
from rekindle.report.page_data import bands
from rekindle.report.plan_html import write_plan_html
from rekindle.report.plan_summary import summarize_plan

pytest.importorskip("plotly")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1280,2000", "--virtual-time-budget=20000"),
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

# Runs in the page once it is drawn, uses it as a person would, and writes down what it sees.
LOOK = """
<script>
(function look() {
  const root = document.documentElement;
  if (root.dataset.ready !== "yes") { setTimeout(look, 50); return; }
  const all = (what) => [...document.querySelectorAll(what)];
  const column = (n) => all(`#decisions tbody td:nth-child(${n})`).map((c) => c.textContent);
  const click = (what) => document.querySelector(what).click();
  const timeline = document.getElementById("timeline");
  const outline = () => timeline.data.find((trace) => trace.name === "plain step");
  const seen = {};
  seen.labels = [...timeline.querySelectorAll(".annotation-text")].map((a) => a.textContent);
  seen.end = timeline.layout.xaxis.range[1];
  seen.planned = timeline.data.at(-1).y.length;
  seen.hover = timeline.data.at(-1).text[5];
  seen.plainEnd = outline().x.at(-1);
  seen.plainTop = Math.max(...outline().y);
  click("input[name=axis][value=op]");
  seen.places = outline().x;
  seen.verbs = column(1);
  seen.reasons = column(6);
  click("input[name=decided][value=keep]");
  seen.kept = column(1);
  seen.shown = document.getElementById("decision-shown").textContent;
  click("input[name=decided][value=drop]");
  const search = document.getElementById("decision-search");
  search.value = "BY HAND";
  search.dispatchEvent(new Event("input"));
  seen.found = column(6);
  search.value = "nothing";
  search.dispatchEvent(new Event("input"));
  seen.none = column(6);
  seen.operators = all("#operators tbody tr").length;
  seen.images = all("img").length;
  root.dataset.seen = JSON.stringify(seen);
})();
</script>
"""


def page_of(path: Path, plan: Plan, graph: Any = None) -> Path:
    graph = graph or tiny_graph()
    profile = tiny_profile(graph)
    plain, planned = simulate(graph, profile), simulate(graph, profile, plan)
    summary = summarize_plan(graph, profile, plain, plan, planned, ABOUT)
    write_plan_html(path, graph, profile, plain, planned, summary)
    return path


def look(page: Path) -> dict[str, Any]:
    """What a person sees on the page; an error on its console fails the test."""
    assert CHROMIUM is not None
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", LOOK + "</body>"), encoding="utf-8")
    profile = f"--user-data-dir={page.parent / 'browser'}"
    done = subprocess.run(
        [CHROMIUM, *OPTIONS, profile, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    root = re.search(r"<html[^>]*>", done.stdout)
    assert root is not None
    found = re.findall(r'data-(\w+)="([^"]*)"', root[0])
    notes = {name: unescape(note) for name, note in found}
    assert notes["errors"] == ""
    return json.loads(notes["seen"])


@needs_browser
def test_in_a_browser(tmp_path: Path) -> None:
    seen = look(page_of(tmp_path / "plan.html", tiny_plan()))
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
    seen = look(page_of(tmp_path / "plan.html", plan))
    assert seen["end"] == seen["plainEnd"] == 500
    assert seen["verbs"] == seen["kept"] == ["keep"]
    assert not any(label.startswith("budget") for label in seen["labels"])


@needs_browser
def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    nasty = '</script><img src=x onerror="console.error(1)">'
    graph = tiny_graph(Source(f"layers.0{nasty}", f"{nasty}.py", 3), mm=nasty)
    seen = look(page_of(tmp_path / "plan.html", tiny_plan(graph), graph))
    assert seen["images"] == 0


def test_the_page_says_what_the_plan_does(tmp_path: Path) -> None:
    text = page_of(tmp_path / "plan.html", tiny_plan()).read_text(encoding="utf-8")
    assert "<title>tiny, batch 512, fp32 – Rekindle plan</title>" in text
    assert "The budget is 8.00 MiB, 113% of the plain step&#x27;s peak. Of 1 activations" in text
    assert "What is dropped, by module" in text
    assert "{{" not in text.partition("<script>")[0]
    assert not re.search(r"<(script|img|iframe)[^>]+src=|<link[^>]+href=\"(?!data:)", text)
    assert "/home/me" not in text


def test_what_is_computed_again_belongs_to_the_phase_it_is_for() -> None:
    graph = tiny_graph()
    trace = simulate(graph, tiny_profile(graph), tiny_plan(graph))
    assert bands(graph) == [
        ("forward", 0, 1),
        ("loss", 2, 3),
        ("backward", 4, 5),
        ("optimizer", 6, 6),
    ]
    assert bands(graph, trace) == [
        ("forward", 0, 1),
        ("loss", 2, 3),
        ("backward", 4, 7),
        ("optimizer", 8, 8),
    ]
