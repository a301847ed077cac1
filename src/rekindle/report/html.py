"""One self-contained page about a profiled step: everything is inside, nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.simulate import Trace
from rekindle.core.memory.layout import Layout
from rekindle.errors import ReportError
from rekindle.report.arena_map import map_data, map_words
from rekindle.report.page_data import page_data
from rekindle.report.palette import PHASES, colour
from rekindle.report.summary import Part, Summary, Work, summarize
from rekindle.report.words import (
    how_timed,
    meaning,
    peak_in_words,
    peak_place,
    percent,
    step_in_words,
)
from rekindle.units import format_bytes, format_count, format_us

_MOST_GROUPS = 8
_SCRIPTS = ("page.js", "map.js", "start.js")


def write_html(
    path: Path,
    graph: StepGraph,
    profile: Profile,
    trace: Trace,
    about: Mapping[str, Any] | None = None,
    *,
    layout: Layout | None = None,
) -> None:
    """Write the page; it opens in any browser, without a network.

    With the layout of the step, the page has a map of where everything lies.
    """
    summary = summarize(graph, profile, trace, about)
    data = page_data(graph, profile, trace, summary)
    content = page_content(graph, profile, summary)
    add_map(content, data, graph, trace, layout)
    write_page(path, content, data)


def add_map(
    content: dict[str, str],
    data: dict[str, Any],
    graph: StepGraph,
    trace: Trace,
    layout: Layout | None,
) -> None:
    """Give the page its map of the arena, if there is a layout with anything in it."""
    if layout is not None and len(layout.storage):
        content["map"] = _filled(asset("map.html"), map_words(layout))
        data["map"] = map_data(graph, trace, layout)


def page_content(graph: StepGraph, profile: Profile, summary: Summary) -> dict[str, str]:
    """What stands in the page's places, by their names."""
    return {
        "kind": "profile",
        "title": escape(summary.title),
        "words": escape(peak_in_words(summary)),
        "cards": cards(_facts(summary)),
        "method": escape(_method(summary)),
        "timeline_note": "",
        "map": "",
        "plan": "",
        "parts": _part_rows(summary),
        "place": escape(f"at {peak_place(summary)}"),
        "phases": _phase_rows(summary.phases),
        "time": escape(_time(summary)),
        "activation_groups": _activation_groups(summary),
        "footer": escape(_footer(graph, profile)),
    }


def write_page(path: Path, content: Mapping[str, str], data: Mapping[str, Any]) -> None:
    """Write a page from what stands in its places and what its script draws."""
    filled = {
        **content,
        "style": asset("page.css"),
        "n_bars": str(len(data["activations"])),
        "plotly": _plotly_js(),
        "data": _embedded(data),
        "script": "".join(asset(name) for name in _SCRIPTS),
    }
    path.write_text(_filled(asset("page.html"), filled), encoding="utf-8")


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ReportError(
            f'the page needs plotly ({error}): pip install "rekindle[report]"'
        ) from error
    return str(get_plotlyjs())


def asset(name: str) -> str:
    """The text of a file that comes with the package."""
    return (resources.files("rekindle.report") / "assets" / name).read_text(encoding="utf-8")


def _filled(template: str, content: Mapping[str, str]) -> str:
    """The template with each ``{{name}}`` replaced, once: what is put in is not looked through."""
    head, *rest = template.split("{{")
    pieces = [head]
    for piece in rest:
        name, _, tail = piece.partition("}}")
        pieces += [content[name], tail]
    return "".join(pieces)


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element, whatever the names in it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def cards(facts: Iterable[tuple[str, str]]) -> str:
    """Names and numbers, each on a card of its own."""
    return "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)


def _facts(summary: Summary) -> list[tuple[str, str]]:
    ratio = summary.backward_ratio
    facts = [
        ("peak memory", format_bytes(summary.peak.nbytes)),
        ("of it activations", percent(summary.peak.activation_share)),
        ("time of a step", format_us(summary.step_us)),
        ("ops", f"{summary.n_ops:,}"),
        ("FLOPs", format_count(summary.total.flops)),
    ]
    if ratio is not None:
        facts.append(("backward/forward", f"{ratio:.2f}"))
    return facts


def _method(summary: Summary) -> str:
    note = f" ({summary.method})" if summary.method else ""
    return f"Times are {how_timed(summary)}{note}."


def _part_rows(summary: Summary) -> str:
    return "".join(
        bar_row(
            f'<i style="background:{colour(part.label)}"></i>{escape(part.label)}'
            f"<small>{escape(meaning(part.label))}</small>",
            format_bytes(part.nbytes),
            part.share,
            colour(part.label),
        )
        for part in summary.peak.parts
    )


def _phase_rows(phases: Iterable[Work]) -> str:
    return "".join(
        bar_row(
            f"{escape(row.label)}<small>{row.ops:,} ops, {format_count(row.flops)} FLOPs, "
            f"{format_bytes(row.moved_bytes)} moved</small>",
            format_us(row.time_us),
            row.share,
            PHASES[row.label],
        )
        for row in phases
    )


def _time(summary: Summary) -> str:
    ratio = summary.backward_ratio
    if ratio is None:
        return step_in_words(summary)
    return (
        f"{step_in_words(summary)} The backward pass does {ratio:.2f} times the arithmetic of the "
        "forward pass; near 2 is usual, since each matrix product has two gradients."
    )


def _activation_groups(summary: Summary) -> str:
    if not summary.peak.activation_kinds:
        return ""
    return (
        '<section class="columns"><div><h2>Activations at the peak, by operator</h2>'
        f'<table class="bars">{_group_rows(summary.peak.activation_kinds)}</table>'
        '<p class="caption">The operators whose results are kept for the backward pass.</p></div>'
        "<div><h2>Activations at the peak, by module</h2>"
        f'<table class="bars">{_group_rows(summary.peak.activation_modules)}</table>'
        '<p class="caption">The modules that made them. A * stands for any number, so that the '
        "same module of repeated blocks is one row.</p></div></section>"
    )


def _group_rows(parts: tuple[Part, ...]) -> str:
    rest = parts[_MOST_GROUPS:]
    rows = [
        bar_row(
            f"{breakable(part.label)}<small>{tensors(part.count)}</small>",
            format_bytes(part.nbytes),
            part.share,
            colour("activation"),
        )
        for part in parts[:_MOST_GROUPS]
    ]
    if rest:
        nbytes, share = sum(p.nbytes for p in rest), sum(p.share for p in rest)
        label = f"{len(rest)} more<small>{tensors(sum(p.count for p in rest))}</small>"
        rows.append(bar_row(label, format_bytes(nbytes), share, colour("library workspace")))
    return "".join(rows)


def breakable(path: str) -> str:
    """A long name that a narrow screen breaks after a dot or an underscore."""
    return escape(path).replace(".", ".<wbr>").replace("_", "_<wbr>")


def tensors(count: int) -> str:
    """So many tensors."""
    return "1 tensor" if count == 1 else f"{count:,} tensors"


def bar_row(label: str, number: str, share: float, fill: str) -> str:
    """A line of a table of bars; the label is markup."""
    width = f"{min(share, 1.0) * 100:.2f}%"
    return (
        f'<tr><td class="label">{label}</td><td class="number">{escape(number)}</td>'
        f'<td class="share">{escape(percent(share))}</td>'
        f'<td class="bar"><div style="width:{width};background:{fill}"></div></td></tr>'
    )


def _footer(graph: StepGraph, profile: Profile) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    return f"Made by Rekindle. Graph {graph.fingerprint}" + (f"; {versions}." if versions else ".")
