"""One self-contained page about a step: everything is inside, nothing is fetched.

The data that its script draws are columns rather than rows, and every text is written once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.files import write_at_once
from rekindle.core.graph.graph import Phase
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import Trace
from rekindle.core.memory.layout import Layout, Piece
from rekindle.errors import ReportError
from rekindle.report.names import shorten, shorten_path, source_line
from rekindle.report.palette import MEANINGS, ORDER, PHASE_BANDS, PHASES, colour
from rekindle.report.summary import (
    Activation,
    DecisionRow,
    Dropped,
    PeakPart,
    Summary,
    first_values,
    phase_bands,
    stacked,
    summarize,
    with_rest,
)
from rekindle.report.words import (
    bound_in_words,
    budget_in_words,
    fine_percent,
    how_timed,
    peak_in_words,
    peak_place,
    percent,
    plan_in_words,
    step_in_words,
)
from rekindle.units import format_bytes, format_count, format_us

_MOST_GROUPS = 8
_SCRIPTS = ("page.js", "map.js", "start.js")
_RECOMPUTED = "#b2182b"
MOST_POSITIONS = 20_000
MOST_ACTIVATIONS = 60
_LABEL_WIDTH = 40
_KIND_WIDTH = 18


def write_html(path: Path, summary: Summary, *, layout: Layout | None = None) -> None:
    """Write the page of a profile or a plan; it opens in any browser, without a network.

    With the layout of the step, the page has a map of the arena.
    """
    if layout is not None and not len(layout.storage):
        layout = None
    data = page_data(summary, layout)
    filled = {
        **_content(summary),
        "map": "" if layout is None else _filled(_asset("map.html"), map_words(layout)),
        "style": _asset("page.css"),
        "n_bars": str(len(data["activations"])),
        "plotly": _plotly_js(),
        "data": _embedded(data),
        "script": "".join(_asset(name) for name in _SCRIPTS),
    }
    page = _filled(_asset("page.html"), filled)
    write_at_once(path, page.encode(errors="backslashreplace"))


def _content(summary: Summary) -> dict[str, str]:
    """The texts of the page, by the names of their places in the template."""
    plan, method = summary.plan, f" ({summary.method})" if summary.method else ""
    content = {
        "title": escape(summary.title),
        "method": escape(f"Times are {how_timed(summary)}{method}."),
        "parts": _part_rows(summary),
        "place": escape(f"at {peak_place(summary)}"),
        "activation_groups": _activation_groups(summary),
        "footer": escape(_footer(summary)),
    }
    if plan is None:
        return content | {
            "kind": "profile",
            "words": escape(peak_in_words(summary)),
            "cards": _cards(_profile_facts(summary)),
            "timeline_note": "",
            "plan": "",
            "phases": _phase_rows(summary),
            "time": escape(_time(summary)),
        }
    return content | {
        "kind": "plan",
        "words": escape(_plan_words(summary)),
        "cards": _cards(_plan_facts(summary, plan)),
        "timeline_note": _asset("plan_note.html"),
        "plan": _plan_section(summary),
        "phases": _phase_rows(summary) + _recomputed_row(summary),
        "time": escape(step_in_words(summary)),
    }


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ReportError(
            f'the page needs plotly ({error}): pip install "rekindle[report]"'
        ) from error
    return str(get_plotlyjs())


def _asset(name: str) -> str:
    """The text of a file of the package."""
    return (resources.files("rekindle.report") / "assets" / name).read_text(encoding="utf-8")


def _filled(template: str, content: Mapping[str, str]) -> str:
    """The template with each ``{{name}}`` replaced; inserted texts are not searched again."""
    head, *rest = template.split("{{")
    pieces = [head]
    for piece in rest:
        name, _, tail = piece.partition("}}")
        pieces += [content[name], tail]
    return "".join(pieces)


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _cards(facts: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)


def _profile_facts(summary: Summary) -> list[tuple[str, str]]:
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


def _plan_facts(summary: Summary, plan: Plan) -> list[tuple[str, str]]:
    dropped, bound = summary.dropped, summary.bound_share
    facts = [
        ("budget", format_bytes(plan.budget_bytes)),
        ("peak memory", format_bytes(summary.peak.nbytes)),
        ("of plain", percent(summary.peak_share)),
        ("time of a step", format_us(summary.step_us)),
        ("added time", fine_percent(summary.added_share)),
        ("dropped", f"{dropped.dropped:,} of {dropped.activations:,}"),
        ("planner", plan.planner),
    ]
    if bound is not None:
        facts.insert(5, ("least possible", fine_percent(max(bound, 0.0))))
    return facts


def _plan_words(summary: Summary) -> str:
    bound = bound_in_words(summary)
    words = f"The budget is {budget_in_words(summary)}. {plan_in_words(summary)}"
    return words if bound is None else f"{words} That is {bound}."


def _part_rows(summary: Summary) -> str:
    return "".join(
        _bar_row(
            f'<i style="background:{colour(part.label)}"></i>{escape(part.label)}'
            f"<small>{escape(MEANINGS[part.label])}</small>",
            format_bytes(part.nbytes),
            part.share,
            colour(part.label),
        )
        for part in summary.peak.parts
    )


def _phase_rows(summary: Summary) -> str:
    whole = summary.step_us or 1.0
    return "".join(
        _bar_row(
            f"{escape(row.label)}<small>{row.ops:,} ops, {format_count(row.flops)} FLOPs, "
            f"{format_bytes(row.moved_bytes)} moved</small>",
            format_us(row.time_us),
            row.time_us / whole,
            PHASES[row.label],
        )
        for row in summary.phases
    )


def _recomputed_row(summary: Summary) -> str:
    label = f"computed again<small>{summary.recomputed_ops:,} ops, in the backward pass</small>"
    time_us = summary.trace.recompute_us
    return _bar_row(label, format_us(time_us), time_us / (summary.step_us or 1.0), _RECOMPUTED)


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
    return _two_tables(
        ("Activations at the peak, by operator", _activation_rows(summary.peak.activation_kinds)),
        "The operators whose results are kept for the backward pass.",
        ("Activations at the peak, by module", _activation_rows(summary.peak.activation_modules)),
        "The modules that made them. A * stands for any number, so that the "
        "same module of repeated blocks is one row.",
    )


def _plan_section(summary: Summary) -> str:
    groups = ""
    if summary.dropped_kinds:
        groups = _two_tables(
            ("What is dropped, by operator", _dropped_rows(summary.dropped_kinds)),
            "The bytes that are not held between forward and backward pass, and "
            "the share of all that is dropped.",
            ("What is dropped, by module", _dropped_rows(summary.dropped_modules)),
            "A * stands for any number, so that the same module of repeated blocks is one row.",
        )
    return groups + _asset("decisions.html")


def _two_tables(
    left: tuple[str, str], left_note: str, right: tuple[str, str], right_note: str
) -> str:
    """Two tables of bars side by side; each is its title and its rows."""
    columns = "".join(
        f'<div><h2>{title}</h2><table class="bars">{rows}</table>'
        f'<p class="caption">{note}</p></div>'
        for (title, rows), note in ((left, left_note), (right, right_note))
    )
    return f'<section class="columns">{columns}</section>'


def _activation_rows(parts: Sequence[PeakPart]) -> str:
    rows = []
    for place, part in enumerate(with_rest(parts, _MOST_GROUPS)):
        fill = colour("activation" if place < _MOST_GROUPS else "library workspace")
        text = f"{_breakable(part.label)}<small>{_tensors(part.count)}</small>"
        rows.append(_bar_row(text, format_bytes(part.nbytes), part.share, fill))
    return "".join(rows)


def _dropped_rows(groups: Sequence[Dropped]) -> str:
    total = sum(group.freed_bytes for group in groups) or 1
    rows = []
    for group in with_rest(groups, _MOST_GROUPS):
        count, again = _tensors(group.activations), format_us(group.added_us)
        note = f"{group.dropped:,} of {count}, {again} to compute again"
        text, freed = f"{_breakable(group.label)}<small>{note}</small>", group.freed_bytes
        rows.append(_bar_row(text, format_bytes(freed), freed / total, colour("activation")))
    return "".join(rows)


def _breakable(path: str) -> str:
    """A long name that may break after a dot or an underscore."""
    return escape(path).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count:,} tensors"


def _bar_row(label: str, number: str, share: float, fill: str) -> str:
    """A row of a table of bars; `label` is HTML."""
    width = f"{min(share, 1.0) * 100:.2f}%"
    return (
        f'<tr><td class="label">{label}</td><td class="number">{escape(number)}</td>'
        f'<td class="share">{escape(percent(share))}</td>'
        f'<td class="bar"><div style="width:{width};background:{fill}"></div></td></tr>'
    )


def _footer(summary: Summary) -> str:
    versions = ", ".join(f"{name} {each}" for name, each in summary.profile.versions.items())
    made = f"Made by Rekindle. Graph {summary.graph.fingerprint}"
    return made + (f"; {versions}." if versions else ".")


def map_words(layout: Layout) -> dict[str, str]:
    """The texts around the map: the arena's size, and how far it is from the lower bound."""
    arena, bound, count = layout.arena_bytes, layout.lower_bound_bytes, len(layout.storage)
    if arena == bound:
        close = "exactly the most bytes that are live at once (the dotted line): none is smaller"
    else:
        close = (
            f"{fine_percent(layout.ratio - 1)} above the most bytes that are live at once (the "
            f"dotted line, {format_bytes(bound)}), and no arena is smaller than those"
        )
    pieces = "1 piece" if count == 1 else f"{count:,} pieces"
    words = (
        f"Everything that the step makes, {pieces} of memory, can lie in one block, the arena, at "
        "addresses that are known before the step runs. The arena takes "
        f"{format_bytes(arena)}: {close}."
    )
    again = (
        " What is computed again is hatched; point at it, and a dashed frame shows where it was "
        "before."
    )
    return {"words": escape(words), "again": escape(again) if (layout.copy > 0).any() else ""}


def page_data(summary: Summary, layout: Layout | None = None) -> dict[str, Any]:
    """All data of the page, ready for JSON; with a layout, the map of the arena."""
    graph, plan = summary.graph, summary.plan
    rows = summary if plan is None else summarize(graph, summary.profile, summary.unplanned)
    phases = [phase.value for phase in Phase]
    targets, target = _numbered(op.target for op in graph.ops)
    modules, module = _numbered(op.source.module for op in graph.ops)
    sources, source = _numbered(source_line(op.source) for op in graph.ops)
    columns = {
        "name": [op.name for op in graph.ops],
        "target": target,
        "phase": [phases.index(op.phase.value) for op in graph.ops],
        "module": module,
        "source": source,
        "time_us": summary.profile.times_us.round(3).tolist(),
        "workspace_bytes": summary.profile.workspaces_bytes.tolist(),
        "flops": [op.flops for op in graph.ops],
        "moved_bytes": rows.moved_bytes.tolist(),
    }
    data: dict[str, Any] = {
        "plain": _run_data(summary.unplanned),
        "phases": phases,
        "targets": targets,
        "modules": modules,
        "sources": sources,
        "ops": columns,
        "band_colours": PHASE_BANDS,
        "activations": [_bar(row) for row in _longest_idle(rows)],
        "operators": [
            {**asdict(row), "mean_us": row.mean_us, "intensity": row.intensity}
            for row in rows.operators
        ],
    }
    if plan is not None:
        data["planned"] = _run_data(summary.trace)
        data["budget_bytes"] = plan.budget_bytes
        data["decisions"] = [_decision(row) for row in summary.decisions]
    if layout is not None:
        data["map"] = map_data(summary.trace, layout)
    return data


def _numbered(texts: Iterable[str]) -> tuple[list[str], list[int]]:
    """The different texts, and for each text its number among them."""
    numbers: dict[str, int] = {}
    column = [numbers.setdefault(text, len(numbers)) for text in texts]
    return list(numbers), column


def _run_data(trace: Trace) -> dict[str, Any]:
    """Memory over one run of the step; without recomputation, position i is op i."""
    is_planned = len(trace.ops) != len(trace.graph.ops) or bool(trace.copies.any())
    return {
        "ops": trace.ops.tolist() if is_planned else None,
        "copies": trace.copies.tolist() if is_planned else None,
        "peak": {
            "bytes": trace.peak_bytes,
            "position": trace.peak_position if trace.graph.ops else 0,
        },
        "step_us": trace.step_us,
        "starts_us": trace.starts_us.round(3).tolist(),
        "live_bytes": trace.live_bytes.tolist(),
        "positions": positions(trace.live_bytes),
        "stack": _stack(trace),
        "bands": phase_bands(trace),
    }


def positions(live_bytes: NDArray[np.int64], most: int = MOST_POSITIONS) -> list[int] | None:
    """The positions to draw, None for all: of a very long step, the highest of each stretch."""
    n_ops = len(live_bytes)
    if n_ops <= most:
        return None
    edges = np.linspace(0, n_ops, most + 1).astype(int)
    return [int(a + np.argmax(live_bytes[a:b])) for a, b in pairwise(edges)]


def _longest_idle(summary: Summary) -> list[Activation]:
    """Those with the most bytes × idle time, in the order in which they become idle."""
    top = [row for row in summary.activations if row.byte_us > 0][:MOST_ACTIVATIONS]
    return sorted(top, key=lambda row: (row.last_forward or 0, row.storage))


def _stack(trace: Trace) -> list[dict[str, Any]]:
    rows = []
    for label, sizes in stacked(trace):
        is_constant = bool((sizes == sizes[0]).all())
        amounts: Any = int(sizes[0]) if is_constant else sizes.tolist()
        rows.append({"label": label, "colour": colour(label), "bytes": amounts})
    return rows


def _bar(row: Activation) -> dict[str, Any]:
    kind = shorten(row.kind, _KIND_WIDTH)
    where = shorten_path(row.module, _LABEL_WIDTH - len(kind) - 2)
    return {
        "label": f"{where}, {kind}" if where else shorten(row.name, _LABEL_WIDTH),
        "name": row.name,
        "module": row.module,
        "source": row.source,
        "shape": list(row.shape),
        "dtype": row.dtype,
        "bytes": row.nbytes,
        "idle_us": round(row.idle_us, 3),
        "from": row.last_forward,
        "to": row.first_backward,
    }


def _decision(row: DecisionRow) -> dict[str, Any]:
    return {
        "verb": "keep" if row.is_kept else "drop",
        "name": row.name,
        "operator": row.kind,
        "module": row.module,
        "source": row.source,
        "bytes": row.nbytes,
        "added_us": None if row.is_kept else round(row.added_us, 3),
        "reason": row.reason,
    }


def map_data(trace: Trace, layout: Layout) -> dict[str, Any]:
    """The map of the arena as columns of integers, one row per piece of the layout.

    Offsets and sizes are multiples of `unit_bytes`. A piece is made by the op that runs where it
    starts, and mostly has its name, or that name with a suffix: `names` has rows of (True if the
    text is such a suffix, text).
    """
    _check_layout(trace, layout)
    graph = trace.graph
    values = first_values(graph)
    makers = [graph.ops[op].name for op in trace.ops[layout.start].tolist()]
    names: dict[tuple[bool, str], int] = {}

    def named(storage: int, maker: str) -> int:
        name = values[storage].name
        is_suffix = name.startswith(maker)
        row = (is_suffix, name.removeprefix(maker) if is_suffix else name)
        return names.setdefault(row, len(names))

    storages = layout.storage.tolist()
    roles = [graph.storages[storage].role.value for storage in storages]
    shown = [label for label in ORDER if label in set(roles)]
    pieces = {
        Piece(*row): i for i, row in enumerate(zip(storages, layout.copy.tolist(), strict=True))
    }
    unit = int(np.gcd.reduce(np.concatenate([layout.offset, layout.nbytes, [0]]))) or 1
    return {
        "arena_bytes": layout.arena_bytes,
        "bound_bytes": layout.lower_bound_bytes,
        "unit_bytes": unit,
        "roles": [{"label": label, "colour": colour(label)} for label in shown],
        "role": [shown.index(label) for label in roles],
        "start": layout.start.tolist(),
        "end": layout.end.tolist(),
        "offset": (layout.offset // unit).tolist(),
        "size": (layout.nbytes // unit).tolist(),
        "name": [named(*pair) for pair in zip(storages, makers, strict=True)],
        "names": [list(row) for row in names],
        "over": [[pieces[reuse.result], pieces[reuse.over]] for reuse in layout.reuses],
    }


def _check_layout(trace: Trace, layout: Layout) -> None:
    """Raise for the layout of another run of the step: its positions would name the wrong ops."""
    is_longer = int(layout.end.max(initial=-1)) >= len(trace.ops)
    if is_longer or (trace.copies[layout.start] != layout.copy).any():
        raise ReportError(
            "the layout is not of the step that the page shows: make it with "
            "rekindle.layout(graph, plan), of the same plan as the trace."
        )
