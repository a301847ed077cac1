"""The page: what it embeds, and what a real browser makes of it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from support.browser import check_alone, look, needs_browser, opened
from support.tiny_step import ABOUT, NASTY, PEAK_BYTES, nasty_graph, tiny_step

from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.graph.graph import Op, Phase, Role, StepGraph, Storage, Value
from rekindle.core.graph.simulate import simulate
from rekindle.core.memory.layout import layout
from rekindle.errors import ReportError
from rekindle.report.html import positions, write_html
from rekindle.report.summary import phase_bands, summarize

pytest.importorskip("plotly")

# What a person does with the page.
USE = """
  const kinds = () => column("operators", 1), names = () => column("operators", 2);
  const head = (title) => all("#operators th button").find((b) => b.textContent === title);
  seen.traces = timeline.data.map((trace) => trace.name);
  seen.areas = timeline.querySelectorAll(".scatterlayer .trace").length;
  seen.top = Math.max(...timeline.data.at(-1).y);
  seen.unit = timeline.layout.yaxis.title.text;
  seen.hover = timeline.data.at(-1).text[4];
  seen.endOfTime = timeline.layout.xaxis.range[1];
  seen.bars = all("#activations .bars .point").length;
  seen.wide = root.scrollWidth <= window.innerWidth;
  click("input[name=axis][value=op]");
  seen.endOfOps = timeline.layout.xaxis.range[1];
  seen.kinds = kinds();
  head("average").click();
  seen.byAverage = kinds();
  head("average").click();
  seen.byAverageUpwards = kinds();
  click("input[name=rows][value=ops]");
  seen.ops = names();
  type("search", "LAYERS.0");
  seen.found = names();
  seen.shown = document.getElementById("shown").textContent;
"""


@needs_browser
def test_in_a_browser(tmp_path: Path) -> None:
    page = tmp_path / "profile.html"
    write_html(page, summarize(*tiny_step(), ABOUT))
    seen = look(page, USE)
    roles = [
        *("parameter", "input", "library workspace", "activation", "weight gradient"),
        *("activation gradient", "temporary", "output"),
    ]
    assert seen["traces"] == [*roles, "all"]
    assert seen["areas"] == len(roles) + 1
    assert seen["unit"] == "MiB"
    assert seen["top"] == pytest.approx(PEAK_BYTES / 2**20)
    assert seen["labels"] == [
        "forward",
        "loss",
        "backward",
        "optimizer",
        "peak 7.10 MiBthreshold_backward",
    ]
    assert "7.10 MiB" in seen["hover"]
    assert seen["hover"].endswith("layers.1.act<br>models/net.py:8")
    assert (seen["endOfTime"], seen["endOfOps"]) == (500, 7)
    assert seen["bars"] == 1
    assert seen["wide"] is True
    by_time = ["mm", "add_", "neg", "threshold_backward", "relu", "sum"]
    assert seen["kinds"] == seen["byAverage"] == by_time
    assert seen["byAverageUpwards"] == by_time[::-1]
    assert len(seen["ops"]) == 7
    assert seen["ops"][:3] == ["mm_1", "mm", "add_"]
    assert seen["found"] == ["mm_1", "mm"]
    assert seen["shown"] == "2 of 2 rows shown."


@needs_browser
def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    page = tmp_path / "profile.html"
    about = {"model": f"a & b {NASTY}", "batch": 1}
    write_html(page, summarize(*tiny_step(nasty_graph()), about))
    seen = look(page, USE)
    assert seen["images"] == 0
    assert seen["found"] == ["mm_1", NASTY]


@needs_browser
def test_a_step_without_ops_in_a_browser(tmp_path: Path) -> None:
    graph = StepGraph((), (), (), ())
    profile = Profile("cpu", graph.fingerprint, ())
    page = tmp_path / "empty.html"
    write_html(page, summarize(graph, profile, simulate(graph, profile)))
    notes = opened(page)
    assert (notes["ready"], notes["errors"]) == ("yes", "")


@needs_browser
def test_an_error_on_the_console_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "profile.html"
    write_html(page, summarize(*tiny_step(), ABOUT))
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("const nOps = ops.name", "const nOps = ops.nome"))
    assert "Cannot read properties of undefined" in opened(page)["errors"]


def test_the_page_fetches_nothing_and_says_the_peak(tmp_path: Path) -> None:
    page = tmp_path / "profile.html"
    write_html(page, summarize(*tiny_step(), ABOUT))
    text = page.read_text(encoding="utf-8")
    check_alone(text)
    assert "At its peak the step holds 7.10 MiB, 56% of it activations" in text


def test_a_very_long_step_is_thinned_and_keeps_its_peak() -> None:
    live = np.arange(100, dtype=np.int64)
    live[41] = 1_000
    assert positions(live, most=100) is None
    kept = positions(live, most=10)
    assert kept == [9, 19, 29, 39, 41, 59, 69, 79, 89, 99]


def test_phases_that_take_turns_become_a_few_bands() -> None:
    ops = tuple(
        Op(i, f"op{i}", "aten.relu.default", phase, (0,), ())
        for i, phase in enumerate([Phase.FORWARD, Phase.BACKWARD] * 40 + [Phase.OPTIMIZER] * 5)
    )
    graph = StepGraph(ops, (Value(0, "x", 0, (1,), "float32"),), (Storage(0, 4, Role.PARAM),), ())
    profile = Profile("cpu", graph.fingerprint, tuple(OpCost(1.0) for _ in ops))
    found = phase_bands(simulate(graph, profile))
    assert len(found) == 24
    assert found == sorted(found, key=lambda band: band[1])
    assert ("optimizer", 80, 84) in found


def test_a_page_of_ten_thousand_ops_stays_small(tmp_path: Path) -> None:
    from plotly.offline import get_plotlyjs

    ops = tuple(
        Op(i, f"relu_{i}", "aten.relu.default", Phase.FORWARD, (i,), (i + 1,))
        for i in range(10_000)
    )
    values = tuple(
        Value(i, f"v{i}", i, (256,), "float32", i - 1 if i else None) for i in range(10_001)
    )
    storages = tuple(Storage(i, 1024, Role.TEMP if i else Role.PARAM) for i in range(10_001))
    graph = StepGraph(ops, values, storages, ())
    profile = Profile("cpu", graph.fingerprint, tuple(OpCost(1.5) for _ in ops))
    page = tmp_path / "long.html"
    write_html(page, summarize(graph, profile, simulate(graph, profile)), layout=layout(graph))
    assert page.stat().st_size - len(get_plotlyjs()) < 2_000_000


def test_without_plotly_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ReportError, match=r'pip install "rekindle\[report\]"'):
        write_html(tmp_path / "profile.html", summarize(*tiny_step()))
    assert not list(tmp_path.iterdir())
