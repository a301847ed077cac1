"""A plain training and one within a budget: measured beside forecast, for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rekindle.core.graph.comparison import Comparison
from rekindle.report.data import comparison_data
from rekindle.report.pieces import Fitted, indented, new_table
from rekindle.report.plan_data import plan_data
from rekindle.report.plan_summary import PlanSummary
from rekindle.report.terminal import budget_verdict, graph_summary, verdict
from rekindle.report.words import percent
from rekindle.units import format_bytes, format_us

_ROOM_FOR_SHARES = 52  # columns
_DRAWS_MASKS = "rekindle.draw_seeds"


def run_summary(title: str, comparison: Comparison, summary: PlanSummary) -> RenderableType:
    """Peaks and step times, what was compared, and whether the promises held."""
    return Group(
        Text(title, style="bold"),
        indented(graph_summary(comparison.graph)),  # brings an empty line above and below
        indented(Fitted(lambda width: _measured_table(comparison, summary, width))),
        indented(_findings(comparison, summary)),
        "",
    )


def run_conclusion(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The last line, of what `run_data` returns: whether every promise held."""
    broken = {
        "Not the same": [row["model"] for row in rows if row["equal"] is False],
        "Over the budget": [row["model"] for row in rows if not row["is_within_budget"]],
    }
    found = [f"{what}: {', '.join(names)}." for what, names in broken.items() if names]
    if found:
        return Text(" ".join(found), style="bold red")
    names = ", ".join(row["model"] for row in rows)
    if any(row["equal"] is None for row in rows):
        return Text(f"Within the budget, where the plain step does not fit: {names}.", style="bold")
    kept = ", and within the budget" if any(row["budget_bytes"] for row in rows) else ""
    return Text(f"The same, bit for bit{kept}: {names}.", style="bold green")


def run_data(comparison: Comparison, summary: PlanSummary) -> dict[str, Any]:
    """What `plan_data` has, and what was measured and compared."""
    return {**plan_data(summary), **_found(comparison, "planned")}


def replay_data(comparison: Comparison) -> dict[str, Any]:
    """What was measured and compared where nothing was planned."""
    return _found(comparison, "captured")


def _found(comparison: Comparison, second: str) -> dict[str, Any]:
    """What `comparison_data` has; what was measured stands apart from what was forecast."""
    data = comparison_data(comparison)
    measured = {"plain": data.pop("plain"), second: data.pop("captured")}
    return {"steps": comparison.steps, "measured": measured, **data}


def _measured_table(comparison: Comparison, summary: PlanSummary, width: int) -> Table:
    peaks = (comparison.plain_peak_bytes, comparison.captured_peak_bytes)
    times = (comparison.plain_us, comparison.captured_us)
    rows: tuple[tuple[str, tuple[float, float], Callable[[Any], str]], ...] = (
        ("peak, measured", peaks, format_bytes),
        ("peak, forecast", (summary.plain.peak.nbytes, summary.peak.nbytes), format_bytes),
        ("step, measured", times, format_us),
        ("step, forecast", (summary.plain.step_us, summary.step_us), format_us),
    )
    shown = ("plain", "planned", "of plain")[: 3 if width >= _ROOM_FOR_SHARES else 2]
    table = new_table()
    table.add_column(no_wrap=True)
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for label, (plain, planned), write in rows:
        cells = (write(plain), write(planned), percent(planned / (plain or 1.0)))
        if "measured" in label and not comparison.plain_fits:
            cells = ("does not fit", write(planned), "")
        table.add_row(label, *cells[: len(shown)])
    return table


def _findings(comparison: Comparison, summary: PlanSummary) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(*verdict(comparison))
    if comparison.rounding is not None:
        share = f"{comparison.rounding:.1e}" if comparison.rounding else "not at all"
        masks = any(op.target == _DRAWS_MASKS for op in comparison.graph.ops)
        why = "; its dropout draws other masks" if masks else ""
        grid.add_row(
            "rounding", f"compiled, results are off the plain ones by {share} of them{why}"
        )
    grid.add_row(*budget_verdict(comparison))
    grid.add_row("plan", _plan_in_short(summary))
    grid.add_row("setup", f"{format_us(comparison.capture_us)}, once, before the first step")
    return grid


def _plan_in_short(summary: PlanSummary) -> str:
    dropped = summary.dropped
    if not dropped.dropped:
        return f"{summary.planner} drops nothing"
    again = summary.recomputed_ops
    ops = "1 op runs" if again == 1 else f"{again:,} ops run"
    return (
        f"{summary.planner} drops {dropped.dropped:,} of {dropped.count:,} activations, "
        f"{format_bytes(dropped.freed_bytes)} in all; {ops} again"
    )
