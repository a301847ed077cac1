"""The page about a planned step: that of the profile, and what was decided and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.simulate import Trace
from rekindle.core.memory.layout import Layout
from rekindle.report.html import (
    add_map,
    asset,
    bar_row,
    breakable,
    cards,
    page_content,
    tensors,
    write_page,
)
from rekindle.report.page_data import page_data, run_data
from rekindle.report.palette import colour
from rekindle.report.plan_summary import DecisionRow, Dropped, PlanSummary
from rekindle.report.plan_words import (
    bound_in_words,
    budget_in_words,
    fine_percent,
    plan_in_words,
    planned_peak_place,
)
from rekindle.report.summary import summarize
from rekindle.report.words import how_timed, percent
from rekindle.units import format_bytes, format_us

_MOST_GROUPS = 8
_RECOMPUTED = "#b2182b"


def write_plan_html(
    path: Path,
    graph: StepGraph,
    profile: Profile,
    plain: Trace,
    planned: Trace,
    summary: PlanSummary,
    *,
    layout: Layout | None = None,
) -> None:
    """Write the page; it opens in any browser, without a network.

    With the layout of the planned step, the page has a map of where everything lies.
    """
    whole = summary.step_us or 1.0
    phases = tuple(replace(row, share=row.time_us / whole) for row in summary.plain.phases)
    view = replace(summary.plain, peak=summary.peak, phases=phases)
    content = page_content(graph, profile, view)
    content |= {
        "kind": "plan",
        "words": escape(_words(summary)),
        "cards": cards(_facts(summary)),
        "timeline_note": asset("plan_note.html"),
        "plan": _plan_section(summary),
        "place": escape(f"at {planned_peak_place(summary)}"),
        "phases": content["phases"] + _recomputed_row(summary),
        "time": escape(_time(summary)),
    }
    data = page_data(graph, profile, plain, summarize(graph, profile, plain))
    data["planned"] = run_data(graph, planned)
    data["budget_bytes"] = summary.budget_bytes
    data["decisions"] = [_decision(row) for row in summary.decisions]
    add_map(content, data, graph, planned, layout)
    write_page(path, content, data)


def _words(summary: PlanSummary) -> str:
    bound = bound_in_words(summary)
    words = f"The budget is {budget_in_words(summary)}. {plan_in_words(summary)}"
    return words if bound is None else f"{words} That is {bound}."


def _facts(summary: PlanSummary) -> list[tuple[str, str]]:
    dropped, bound = summary.dropped, summary.bound_share
    facts = [
        ("budget", format_bytes(summary.budget_bytes)),
        ("peak memory", format_bytes(summary.peak.nbytes)),
        ("of plain", percent(summary.peak_share)),
        ("time of a step", format_us(summary.step_us)),
        ("added time", fine_percent(summary.added_share)),
        ("dropped", f"{dropped.dropped:,} of {dropped.count:,}"),
        ("planner", summary.planner),
    ]
    if bound is not None:
        facts.insert(5, ("least possible", fine_percent(max(bound, 0.0))))
    return facts


def _recomputed_row(summary: PlanSummary) -> str:
    label = f"computed again<small>{summary.recomputed_ops:,} ops, in the backward pass</small>"
    share = summary.recompute_us / (summary.step_us or 1.0)
    return bar_row(label, format_us(summary.recompute_us), share, _RECOMPUTED)


def _time(summary: PlanSummary) -> str:
    return (
        f"A step takes {format_us(summary.step_us)} ({how_timed(summary.plain)}), the plain step "
        f"{format_us(summary.plain.step_us)}."
    )


def _plan_section(summary: PlanSummary) -> str:
    groups = ""
    if summary.kinds:
        groups = (
            '<section class="columns"><div><h2>What is dropped, by operator</h2>'
            f'<table class="bars">{_group_rows(summary.kinds)}</table>'
            '<p class="caption">The bytes that are not held between forward and backward pass, and '
            "the share of all that is dropped.</p></div>"
            "<div><h2>What is dropped, by module</h2>"
            f'<table class="bars">{_group_rows(summary.modules)}</table>'
            '<p class="caption">A * stands for any number, so that the same module of repeated '
            "blocks is one row.</p></div></section>"
        )
    return groups + asset("decisions.html")


def _group_rows(groups: Iterable[Dropped]) -> str:
    groups = list(groups)
    total = sum(group.freed_bytes for group in groups) or 1

    def row(label: str, members: list[Dropped]) -> str:
        dropped, freed = sum(g.dropped for g in members), sum(g.freed_bytes for g in members)
        count, added = sum(g.count for g in members), sum(g.added_us for g in members)
        note = f"{dropped:,} of {tensors(count)}, {format_us(added)} to compute again"
        text = f"{label}<small>{note}</small>"
        return bar_row(text, format_bytes(freed), freed / total, colour("activation"))

    rows = [row(breakable(group.label), [group]) for group in groups[:_MOST_GROUPS]]
    rest = groups[_MOST_GROUPS:]
    return "".join([*rows, row(f"{len(rest)} more", rest)] if rest else rows)


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
