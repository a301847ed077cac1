"""The plan of one compiled graph, and the HTML report on all graphs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rekindle.core.cost.profile import Profile
from rekindle.core.files import write_at_once
from rekindle.core.graph.graph import Phase, StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import Trace, simulate
from rekindle.errors import ReportError
from rekindle.report.html import write_html
from rekindle.report.summary import summarize
from rekindle.units import format_bytes, format_us

Key = tuple[object, ...]


@dataclass(frozen=True)
class PlannedGraph:
    """A compiled graph: its step and costs, its plan, and the tensors its forward pass keeps.

    `budget_bytes` is what a step may take; the plan may have been made for less. `kept` are the
    tensors that the forward pass leaves to the backward pass, with their bytes. `share` is the
    graph's part of the memory that static tensors and earlier graphs leave, and `note` the reason;
    `seconds` is the time that planning took. `key` identifies the graph when it is recompiled.
    """

    graph: StepGraph
    profile: Profile
    plan: Plan
    budget_bytes: int
    kept: dict[str, int]
    share: float
    note: str
    seconds: float
    key: Key = ()

    @property
    def kept_bytes(self) -> int:
        """The bytes held from the forward pass to the backward pass."""
        return sum(self.kept.values())

    @property
    def output_bytes(self) -> int:
        """The bytes of the forward pass's outputs."""
        graph = self.graph
        made_by = ((value, graph.values[value].producer) for value in graph.outputs)
        return sum(
            graph.storage_of(value).nbytes
            for value, op in made_by
            if op is not None and graph.ops[op].phase is Phase.FORWARD
        )

    @property
    def recompute_ratio(self) -> float:
        """The time of recomputation, relative to the graph's own."""
        return self.plan.recompute_us / max(sum(cost.time_us for cost in self.profile.costs), 1e-9)

    @property
    def trace(self) -> Trace:
        """Forecast bytes and microseconds at every position of the planned graph."""
        return simulate(self.graph, self.profile, self.plan)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Rekindle: {count} compiled graphs</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}}
table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;padding:.4rem .6rem;
border-bottom:1px solid #ddd;vertical-align:top}}td.n{{white-space:nowrap}}</style></head><body>
<h1>{count} compiled graphs</h1>
<p>The model was captured in several graphs, which share the budget: each gets a part in proportion
to its parameters and activations, and the last what is left.</p>
<table><tr><th>graph</th><th>budget</th><th>peak</th><th>kept</th><th>recomputed</th>
<th>share</th></tr>
{rows}
</table></body></html>
"""


def write_report(path: Path, graphs: Sequence[PlannedGraph]) -> None:
    """Write the page of one graph; of several, one page each, and a list of them at the path."""
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
    listed = _PAGE.format(count=len(graphs), rows="\n".join(rows))
    write_at_once(path, listed.encode(errors="backslashreplace"))


def _write_one(path: Path, planned: PlannedGraph) -> None:
    given = planned.graph, planned.profile, planned.trace
    write_html(path, summarize(*given, plan=planned.plan, plan_seconds=planned.seconds))


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
