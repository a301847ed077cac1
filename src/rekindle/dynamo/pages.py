"""The pages about compiled graphs: one for each plan, and a list where there are several."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.errors import ReportError
from rekindle.report.html import write_html
from rekindle.report.summary import summarize
from rekindle.units import format_bytes, format_us

if TYPE_CHECKING:
    from rekindle.dynamo.session import PlannedGraph

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Rekindle: {count} compiled graphs</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}}
table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;padding:.4rem .6rem;
border-bottom:1px solid #ddd;vertical-align:top}}td.n{{white-space:nowrap}}</style></head><body>
<h1>{count} compiled graphs</h1>
<p>The model was captured in several graphs, which share the budget: each gets a part in proportion
to its parameters and activations, and the last what is left.</p>
<table><tr><th>graph</th><th>budget</th><th>peak</th><th>kept</th><th>computed again</th>
<th>share</th></tr>
{rows}
</table></body></html>
"""


def write(path: Path, graphs: Sequence[PlannedGraph]) -> None:
    """Write the page of one graph, or of several, with a list of them at the path."""
    if not graphs:
        raise ReportError(
            "there is nothing to report before a graph is compiled: run one step of training."
        )
    if len(graphs) == 1:
        _write_one(path, graphs[0])
        return
    rows = []
    for number, graph in enumerate(graphs, 1):
        page = path.with_name(f"{path.stem}-{number}{path.suffix}")
        _write_one(page, graph)
        rows.append(_row(number, page.name, graph))
    path.write_text(_PAGE.format(count=len(graphs), rows="\n".join(rows)), encoding="utf-8")


def _write_one(path: Path, planned: PlannedGraph) -> None:
    summary = summarize(
        planned.graph,
        planned.profile,
        planned.trace,
        plan=planned.plan,
        plan_seconds=planned.seconds,
    )
    write_html(path, summary)


def _row(number: int, page: str, planned: PlannedGraph) -> str:
    plan = planned.plan
    numbers = (
        format_bytes(plan.budget_bytes),
        format_bytes(plan.peak_bytes),
        format_bytes(planned.kept_bytes),
        format_us(plan.recompute_us),
    )
    cells = "".join(f'<td class="n">{escape(each)}</td>' for each in numbers)
    link = f'<a href="{escape(page)}">{number}</a>'
    return f"<tr><td>{link}</td>{cells}<td>{escape(planned.note)}</td></tr>"
