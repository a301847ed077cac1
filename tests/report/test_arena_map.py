"""The map of the arena: what the page embeds of a layout, and what a real browser makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.browser import check_alone, look, needs_browser, opened
from support.tiny_step import (
    ABOUT,
    MIB,
    nasty_graph,
    tiny_graph,
    tiny_plan,
    tiny_plan_summary,
    tiny_profile,
)

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import simulate
from rekindle.core.memory.layout import Layout, layout
from rekindle.errors import ReportError
from rekindle.report.html import map_data, map_words, write_html
from rekindle.report.palette import colour
from rekindle.report.summary import summarize

pytest.importorskip("plotly")

# What a person sees on the map.
USE = """
  seen.traces = map.data.map((trace) => ({
    name: trace.name, x: trace.x, y: trace.y, colour: trace.fillcolor,
    hatched: "fillpattern" in trace,
  }));
  seen.pixels = map.querySelector(".nsewdrag").getBoundingClientRect().toJSON();
  seen.ranges = [map.layout.xaxis.range, map.layout.yaxis.range];
  const lines = map.layout.shapes.filter((each) => each.yref === "y");
  seen.lines = lines.map((each) => [each.y0, each.line.dash]);
  const leftOut = () => document.getElementById("map-left-out").textContent;
  seen.leftOut = leftOut();
  const frames = () => all("#map-outline:not([hidden]), #map-twins > *").length;
"""


def in_place_graph() -> StepGraph:
    """The tiny step; neg may write over its input."""
    graph = tiny_graph()
    ops = [replace(op, may_overwrite=op.inputs) if op.name == "neg" else op for op in graph.ops]
    return replace(graph, ops=tuple(ops))


def plain_page(path: Path, graph: StepGraph | None = None) -> Path:
    graph = graph or tiny_graph()
    profile = tiny_profile(graph)
    summary = summarize(graph, profile, simulate(graph, profile), ABOUT)
    write_html(path, summary, layout=layout(graph))
    return path


def plan_page(path: Path) -> Path:
    write_html(path, tiny_plan_summary(), layout=layout(tiny_graph(), tiny_plan()))
    return path


def name_of(data: dict[str, Any], piece: int, maker: str) -> str:
    is_ending, text = data["names"][data["name"][piece]]
    return maker + text if is_ending else text


@pytest.mark.parametrize("plan", [None, tiny_plan()], ids=["plain", "planned"])
def test_the_data_is_the_layout(plan: Plan | None) -> None:
    graph = tiny_graph()
    trace, found = simulate(graph, tiny_profile(graph), plan), layout(graph, plan)
    data = map_data(trace, found)
    unit = data["unit_bytes"]
    assert data["start"] == found.start.tolist()
    assert data["end"] == found.end.tolist()
    assert [unit * at for at in data["offset"]] == found.offset.tolist()
    assert [unit * size for size in data["size"]] == found.nbytes.tolist()
    assert data["arena_bytes"] == found.arena_bytes
    assert data["bound_bytes"] == found.lower_bound_bytes
    for piece, storage in enumerate(found.storage):
        role = graph.storages[storage].role.value
        assert data["roles"][data["role"][piece]] == {"label": role, "colour": colour(role)}
        maker = graph.ops[trace.ops[found.start[piece]]].name
        first = next(value.name for value in graph.values if value.storage == storage)
        assert name_of(data, piece, maker) == first


def test_names_that_follow_from_their_op_are_not_written_out() -> None:
    graph = tiny_graph()
    names = {2: "mm_out0", 3: "held"}
    values = [replace(value, name=names.get(value.index, value.name)) for value in graph.values]
    graph = replace(graph, values=tuple(values))
    data = map_data(simulate(graph, tiny_profile(graph)), layout(graph))
    assert data["names"] == [[True, "_out0"], [False, "held"], [True, ""]]
    assert [data["name"][piece] for piece in range(3)] == [0, 1, 2]


def test_what_is_written_in_place_is_told_by_its_number() -> None:
    graph = in_place_graph()
    found = layout(graph)
    assert [(reuse.over.storage, reuse.result.storage) for reuse in found.reuses] == [(4, 5)]
    data = map_data(simulate(graph, tiny_profile(graph)), found)
    [[result, over]] = data["over"]
    assert (found.storage[result], found.storage[over]) == (5, 4)
    assert data["offset"][result] == data["offset"][over]


def test_a_layout_of_another_plan_is_refused() -> None:
    graph, plan = tiny_graph(), tiny_plan()
    profile = tiny_profile(graph)
    plain, planned = simulate(graph, profile), simulate(graph, profile, plan)
    for trace, found in ((plain, layout(graph, plan)), (planned, layout(graph))):
        with pytest.raises(ReportError, match="of the same plan as the trace"):
            map_data(trace, found)


def laid_out_with(arena_bytes: int, bound_bytes: int) -> Layout:
    found = layout(tiny_graph())
    return replace(found, arena_bytes=arena_bytes, lower_bound_bytes=bound_bytes)


def test_how_close_the_arena_is_in_words() -> None:
    exact = map_words(laid_out_with(5 * MIB, 5 * MIB))
    assert "6 pieces of memory" in exact["words"]
    assert "takes 5.00 MiB: exactly the most bytes that are live at once" in exact["words"]
    assert exact["again"] == ""
    near = map_words(laid_out_with(1013 * MIB, 1000 * MIB))["words"]
    assert "1.3% above the most bytes that are live at once (the dotted line, 0.977 GiB)" in near
    assert "hatched" in map_words(layout(tiny_graph(), tiny_plan()))["again"]


def test_without_a_layout_there_is_no_map(tmp_path: Path) -> None:
    graph = tiny_graph()
    profile = tiny_profile(graph)
    with_map = plain_page(tmp_path / "with.html").read_text(encoding="utf-8")
    check_alone(with_map)
    write_html(tmp_path / "without.html", summarize(graph, profile, simulate(graph, profile)))
    without = (tmp_path / "without.html").read_text(encoding="utf-8")
    for mark in ("Where everything lies", 'id="map"', '"arena_bytes"'):
        assert mark in with_map
        assert mark not in without


def expected(found: Layout, graph: StepGraph, starts_us: Any) -> list[tuple[str, list[float]]]:
    rows = []
    for piece, storage in enumerate(found.storage):
        again = ", computed again" if found.copy[piece] else ""
        label = graph.storages[storage].role.value + again
        x = [starts_us[found.start[piece]], starts_us[found.end[piece] + 1]]
        y = [found.offset[piece] / MIB, (found.offset[piece] + found.nbytes[piece]) / MIB]
        rows.append((label, [float(each) for each in (*x, *y)]))
    return rows


def check_drawn(seen: dict[str, Any], graph: StepGraph, plan: Plan | None) -> None:
    """Every piece is one rectangle, where the layout says, give or take half a pixel."""
    (_, end), (_, top) = seen["ranges"]
    half = [0.5 * end / seen["pixels"]["width"], 0.5 * top / seen["pixels"]["height"]]
    drawn = []
    for trace in seen["traces"]:
        for i in range(0, len(trace["x"]), 5):
            xs, ys = trace["x"][i : i + 4], trace["y"][i : i + 4]
            drawn.append((trace["name"], [min(xs), max(xs), min(ys), max(ys)]))
    trace = simulate(graph, tiny_profile(graph), plan)
    rows = expected(layout(graph, plan), graph, trace.starts_us)
    assert len(drawn) == len(rows)
    for (name, corners), (label, wanted) in zip(sorted(drawn), sorted(rows), strict=True):
        assert name == label
        np.testing.assert_allclose(corners[:2], wanted[:2], rtol=0, atol=half[0])
        np.testing.assert_allclose(corners[2:], wanted[2:], rtol=0, atol=half[1])


@needs_browser
def test_in_a_browser(tmp_path: Path) -> None:
    graph = tiny_graph()
    use = """
      seen.mm = pointAtMap(60, 4.5);
      const namesAt = (places) => places.map(([x, y]) => pointAtMap(x, y)[0]);
      seen.names = namesAt([[150, 2], [250, 4.5], [400, 0.5]]);
      seen.framed = frames();
      seen.nothing = pointAtMap(400, 3);
      seen.frames = frames();
      pointAtMap(60, 4.5);
      map.dispatchEvent(new PointerEvent("pointerleave", { pointerType: "mouse" }));
      seen.left = all("#map-label:not([hidden])").length;
      await Plotly.restyle(map, { visible: "legendonly" }, 0);
      seen.hidden = pointAtMap(150, 2);
      click("input[name=axis][value=op]");
      await drawn();
      seen.byOp = [map.layout.xaxis.range, ...namesAt([[1, 4.5], [4.5, 2], [5.5, 0.5]])];
      for (const button of all("[data-title='Reset axes']")) button.click();
      await drawn();
      seen.reset = [timeline.layout.xaxis.range, map.layout.xaxis.range];
      seen.wide = root.scrollWidth <= window.innerWidth;
    """
    seen = look(plain_page(tmp_path / "profile.html"), USE + use)
    check_drawn(seen, graph, None)
    roles = ["activation", "weight gradient", "activation gradient", "temporary", "output"]
    assert [each["name"] for each in seen["traces"]] == roles
    assert [each["colour"] for each in seen["traces"]] == [colour(role) for role in roles]
    assert not any(each["hatched"] for each in seen["traces"])
    assert seen["lines"] == [[layout(graph).lower_bound_bytes / MIB, "dot"]]
    assert seen["leftOut"] == ""
    assert seen["mm"] == [
        "mm",
        "temporary, 1.00 MiB",
        "made by op 0, mm, forward",
        "until op 1, relu, has run",
        "there for 120 µs, from 0 µs to 120 µs",
        "address 4.000 to 5.000 MiB",
        "layers.0.linear",
        "models/net.py:7",
    ]
    assert seen["names"] == ["relu", "threshold_backward", "mm_1"]
    assert (seen["framed"], seen["frames"], seen["left"]) == (1, 0, 0)
    assert seen["nothing"] == seen["hidden"] == []
    assert seen["byOp"] == [[0, 7], "mm", "relu", "mm_1"]
    assert seen["reset"] == [[0, 7], [0, 7]]  # not back to the axis that was drawn first
    assert seen["wide"] is True


@needs_browser
def test_planned_in_a_browser(tmp_path: Path) -> None:
    use = """
      seen.relu = pointAtMap(300, 2);
      seen.frames = frames();
      seen.first = pointAtMap(125, 2);
    """
    seen = look(plan_page(tmp_path / "plan.html"), USE + use)
    check_drawn(seen, tiny_graph(), tiny_plan())
    hatched = [each["name"] for each in seen["traces"] if each["hatched"]]
    assert hatched == ["activation, computed again", "temporary, computed again"]
    assert seen["relu"][:4] == [
        "relu",
        "activation, 4.00 MiB",
        "computed again",
        "made by op 1, relu, forward",
    ]
    assert seen["frames"] == 2
    assert seen["first"][:3] == ["relu", "activation, 4.00 MiB", "made by op 1, relu, forward"]


@needs_browser
def test_what_is_written_in_place_says_so(tmp_path: Path) -> None:
    use = """
      const zoom = (x, y) => Plotly.relayout(map, { "xaxis.range": x, "yaxis.range": y });
      const at = map.data.find((trace) => trace.name === "output").y[0];
      await zoom([120, 180], [at - 0.0001, at + 0.001]);
      await drawn();
      seen.result = pointAtMap(160, at + 0.0002);
      seen.over = pointAtMap(125, at + 0.0002);
    """
    seen = look(plain_page(tmp_path / "profile.html", in_place_graph()), USE + use)
    assert seen["result"][:3] == ["neg", "output, 512 B", "written in place over sum_1"]
    assert seen["over"][:3] == ["sum_1", "temporary, 512 B", "neg is written over it"]


@needs_browser
def test_what_is_too_small_appears_as_one_zooms_in(tmp_path: Path) -> None:
    graph = tiny_graph()
    storages = list(graph.storages)
    storages[3] = replace(storages[3], nbytes=4096 * MIB)
    graph = replace(graph, storages=tuple(storages))
    use = """
      const seenNow = () => map.data.map((trace) => trace.x.some((x) => x !== null));
      seen.whole = seenNow();
      await Plotly.relayout(map, { "xaxis.range": [120, 180], "yaxis.range": [4, 4.00001] });
      await drawn();
      seen.zoomed = [seenNow(), leftOut()];
      seen.legend = texts("#map .legendtext");
    """
    seen = look(plain_page(tmp_path / "profile.html", graph), USE + use)
    words = "Too small to be drawn at this scale: 2 pieces; their sizes add up to 1.00 KiB"
    assert seen["leftOut"] == f"{words}, and they would cover <1% of the coloured area."
    roles = [each["name"] for each in seen["traces"]]
    assert [role for role, there in zip(roles, seen["whole"], strict=True) if not there] == [
        "output"
    ]
    there, left_out = seen["zoomed"]
    assert dict(zip(roles, there, strict=True))["temporary"] is True
    assert left_out == ""
    assert set(roles) - {"output"} <= set(seen["legend"])


@needs_browser
def test_an_arena_above_the_bound_has_a_line_of_its_own(tmp_path: Path) -> None:
    graph = tiny_graph()
    profile = tiny_profile(graph)
    page = tmp_path / "profile.html"
    larger = laid_out_with(6 * MIB, 5 * MIB)
    write_html(page, summarize(graph, profile, simulate(graph, profile), ABOUT), layout=larger)
    seen = look(page, USE + 'seen.arena = texts("#map .annotation-text").at(-1);')
    assert [line[0] for line in seen["lines"]] == [5, 6]
    assert seen["arena"] == "arena 6.00 MiB"


@needs_browser
def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    use = "seen.name = pointAtMap(60, 4.5);"
    seen = look(plain_page(tmp_path / "profile.html", nasty_graph()), USE + use)
    assert seen["images"] == 0
    assert seen["name"][0].startswith("</script><img")


@needs_browser
def test_a_step_without_ops_has_no_map(tmp_path: Path) -> None:
    graph = StepGraph((), (), (), ())
    profile = Profile("cpu", graph.fingerprint, ())
    page = tmp_path / "empty.html"
    write_html(page, summarize(graph, profile, simulate(graph, profile)), layout=layout(graph))
    notes = opened(page)
    assert (notes["ready"], notes["errors"]) == ("yes", "")
    assert "Where everything lies" not in page.read_text(encoding="utf-8")
