"""A plain training next to a captured one: measured next to forecast, for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rekindle.core.graph.comparison import Comparison
from rekindle.report.data import step_data
from rekindle.report.summary import Summary
from rekindle.report.tables import ForWidth, indented, new_table
from rekindle.report.terminal import graph_summary
from rekindle.report.words import percent
from rekindle.units import format_bytes, format_us

_MOST_DIFFERENCES = 8
_COLUMNS_FOR_SHARES = 52
_DRAWS_MASKS = "rekindle.draw_seeds"
_NOUNS = {  # singular, plural
    "result": ("loss", "losses"),
    "parameter": ("parameter", "parameters"),
    "gradient": ("gradient", "gradients"),
    "buffer": ("buffer", "buffers"),
    "optimizer": ("optimizer state tensor", "optimizer state tensors"),
    "generator": ("random state", "random states"),
}


def run_summary(
    title: str, comparison: Comparison, summary: Summary | None = None
) -> RenderableType:
    """What was compared, peaks and times; with a plan, next to its forecast and its budget."""
    findings: list[RenderableType] = [_findings(comparison, summary)]
    if summary is not None:
        findings.insert(0, ForWidth(lambda width: _measured_table(comparison, summary, width)))
    return Group(
        Text(title, style="bold"),
        indented(graph_summary(comparison.graph)),  # has an empty line above and below
        *map(indented, findings),
        "",
    )


def run_conclusion(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The last line, from the rows of `run_data`: the promises that held, or those that did not."""
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


def run_data(comparison: Comparison, summary: Summary | None = None) -> dict[str, Any]:
    """What was measured and compared; with a plan, after what `step_data` has.

    Of a plain step that does not fit, nothing was measured, and nothing was compared with it.
    """
    plain = _timing(comparison.plain_peak_bytes, comparison.plain_us, comparison.plain_samples_us)
    captured = _timing(
        comparison.captured_peak_bytes, comparison.captured_us, comparison.captured_samples_us
    )
    graph, planned = comparison.graph, {} if summary is None else step_data(summary)
    flops = graph.flops_by_phase()
    return {
        **planned,
        "steps": comparison.steps,
        "measured": {
            "plain": plain if comparison.plain_fits else None,
            "planned" if planned else "captured": captured,
        },
        "equal": comparison.equal if comparison.compared else None,
        "is_compiled": comparison.is_compiled,
        "rounding": comparison.rounding,
        "budget_bytes": comparison.budget_bytes,
        "is_within_budget": comparison.is_within_budget,
        "differences": list(comparison.differences),
        "plain_differences": list(comparison.plain_differences),
        "compared": dict(comparison.compared),
        "capture_us": comparison.capture_us,
        "graph": {
            "fingerprint": graph.fingerprint,
            "phases": {
                phase.value: {"ops": count, "flops": flops[phase]}
                for phase, count in graph.count_by_phase().items()
            },
            "role_bytes": {role.value: nbytes for role, nbytes in graph.bytes_by_role().items()},
        },
    }


def _timing(peak_bytes: int, step_us: float, samples_us: Sequence[float]) -> dict[str, Any]:
    return {"peak_bytes": peak_bytes, "step_us": step_us, "samples_us": list(samples_us)}


def _measured_table(comparison: Comparison, summary: Summary, width: int) -> Table:
    peaks = (comparison.plain_peak_bytes, comparison.captured_peak_bytes)
    times = (comparison.plain_us, comparison.captured_us)
    rows: tuple[tuple[str, tuple[float, float], Callable[[Any], str]], ...] = (
        ("peak, measured", peaks, format_bytes),
        ("peak, forecast", (summary.plain.peak.nbytes, summary.peak.nbytes), format_bytes),
        ("step, measured", times, format_us),
        ("step, forecast", (summary.plain.step_us, summary.step_us), format_us),
    )
    shown = ("plain", "planned", "of plain")[: 3 if width >= _COLUMNS_FOR_SHARES else 2]
    table = new_table(*shown, label="")
    for label, (plain, planned), write in rows:
        cells = (write(plain), write(planned), percent(planned / (plain or 1.0)))
        if "measured" in label and not comparison.plain_fits:
            cells = ("does not fit", write(planned), "")
        table.add_row(label, *cells[: len(shown)])
    return table


def _findings(comparison: Comparison, summary: Summary | None) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(*_verdict(comparison))
    if summary is not None and comparison.rounding is not None:
        grid.add_row("rounding", _rounding_in_words(comparison, comparison.rounding))
    if comparison.budget_bytes is not None or summary is not None:
        grid.add_row(*_budget_verdict(comparison))
    if summary is not None:
        grid.add_row("plan", _plan_in_short(summary))
        grid.add_row("setup", f"{format_us(comparison.capture_us)}, once, before the first step")
        return grid
    plain, captured = comparison.plain_peak_bytes, comparison.captured_peak_bytes
    grid.add_row("peak", f"{format_bytes(plain)} plain, {format_bytes(captured)} captured")
    times = (
        f"captured in {format_us(comparison.capture_us)}; a step takes "
        f"{format_us(comparison.plain_us)} plain, {format_us(comparison.captured_us)} captured"
    )
    grid.add_row("time", times)
    return grid


def _rounding_in_words(comparison: Comparison, rounding: float) -> str:
    masks = any(op.target == _DRAWS_MASKS for op in comparison.graph.ops)
    why = "; its dropout draws other masks" if masks else ""
    share = f"by {rounding:.1e} of them" if rounding else "in nothing"
    return f"compiled, results differ from the plain ones {share}{why}"


def _plan_in_short(summary: Summary) -> str:
    dropped, planner = summary.dropped, summary.plan.planner if summary.plan else "none"
    if not dropped.dropped:
        return f"{planner} drops nothing"
    again = summary.recomputed_ops
    ops = "1 op runs" if again == 1 else f"{again:,} ops run"
    return (
        f"{planner} drops {dropped.dropped:,} of {dropped.activations:,} activations, "
        f"{format_bytes(dropped.freed_bytes)} in all; {ops} again"
    )


def _verdict(comparison: Comparison) -> tuple[Text, Text]:
    """Whether two trainings are the same: a word, and what was compared or what differs."""
    steps = "1 step" if comparison.steps == 1 else f"{comparison.steps} steps"
    if not comparison.compared:
        words = "the plain step does not fit into this device's memory"
        return Text("not compared", style="bold yellow"), Text(words)
    if comparison.equal:
        to_what = " to the compiled step that drops nothing" if comparison.is_compiled else ""
        counts = f"after {steps}, bit for bit{to_what}: {_counts(comparison)}"
        return Text("equal", style="bold green"), Text(counts)
    differing = f"after {steps}: {_names(comparison.differences)}"
    if not comparison.is_deterministic:
        differing += (
            "; but the plain step is not deterministic, two plain trainings differ in "
            f"{_names(comparison.plain_differences)}"
        )
    return Text("different", style="bold red"), Text(differing)  # names may hold brackets


def _budget_verdict(comparison: Comparison) -> tuple[Text, str]:
    """Whether a training has stayed within its budget: a word, and by how much."""
    budget_bytes = comparison.budget_bytes or 0
    room = budget_bytes - comparison.captured_peak_bytes
    words = f"the budget of {format_bytes(budget_bytes)}, the peak"
    if room < 0:
        return Text("over", style="bold red"), f"{words} {format_bytes(-room)} above it"
    place = f"{format_bytes(room)} below it" if room else "exactly at it"
    return Text("within", style="bold green"), f"{words} {place}"


def _names(differences: Sequence[str]) -> str:
    more = len(differences) - _MOST_DIFFERENCES
    return ", ".join(differences[:_MOST_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")


def _counts(comparison: Comparison) -> str:
    return ", ".join(
        f"{count} {_NOUNS.get(kind, (kind, kind))[count != 1]}"
        for kind, count in comparison.compared.items()
    )
