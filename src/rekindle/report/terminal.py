"""Tables for the terminal: each function returns something that any rich console can print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rekindle.core.graph.comparison import Comparison
from rekindle.core.graph.graph import StepGraph
from rekindle.report.names import shorten_path
from rekindle.report.palette import colour
from rekindle.report.pieces import WIDE, Fitted, Middle, bar, indented, new_table
from rekindle.report.summary import Activation, Summary
from rekindle.report.words import how_timed, peak_place, percent
from rekindle.units import format_bytes, format_count, format_us

_MOST_DIFFERENCES = 8
_NOUNS = {  # singular, plural
    "result": ("loss", "losses"),
    "parameter": ("parameter", "parameters"),
    "gradient": ("gradient", "gradients"),
    "buffer": ("buffer", "buffers"),
    "optimizer": ("optimizer state tensor", "optimizer state tensors"),
    "generator": ("random state", "random states"),
}


def model_table(rows: Iterable[tuple[str, str, int, str | None]]) -> RenderableType:
    """The zoo: name, summary, default batch and the package a model needs."""
    table = new_table()
    table.add_column("model", style="bold", no_wrap=True)
    table.add_column("what it is")
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("needs", no_wrap=True)
    for name, summary, batch, needs in rows:
        table.add_row(name, summary, str(batch), needs or "")
    return table


def graph_summary(graph: StepGraph) -> RenderableType:
    """What a step holds: ops and FLOPs by phase, bytes by role; side by side if there is room."""
    return Columns([_phase_table(graph), _role_table(graph)], padding=(0, 4))


def comparison_summary(title: str, comparison: Comparison) -> RenderableType:
    """A plain and a captured training of one model: the graph, what was compared, the times."""
    return Group(
        Text(title, style="bold"),
        indented(graph_summary(comparison.graph)),  # brings an empty line above and below
        indented(_findings(comparison)),
        "",
    )


def profile_summary(summary: Summary, *, most: int = 8) -> RenderableType:
    """A profiled step: its peak and what that is made of, and where time and bytes go."""
    parts: list[RenderableType] = [
        Text(f"{summary.title}, {how_timed(summary)}", style="bold"),
        indented(_headline(summary)),
        indented(Fitted(lambda width: _peak_and_time(summary, width))),
    ]
    if summary.operators:
        parts += [Text("Operators with the most time", style="bold")]
        parts += [indented(_operator_table(summary, most))]
    if summary.activations:
        title = "Activations with the most bytes × idle time, between forward and backward use"
        parts += [Text(title, style="bold")]
        parts += [indented(Fitted(lambda width: _activation_table(summary, most, width)))]
    return Group(*parts)


def _headline(summary: Summary) -> Table:
    ratio = summary.backward_ratio
    flops = f"{format_count(summary.total.flops)} FLOPs" + (
        f", backward/forward {ratio:.2f}" if ratio is not None else ""
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    peak = Text.assemble((format_bytes(summary.peak.nbytes), "bold"))
    grid.add_row("peak", peak.append(f", {percent(summary.peak.activation_share)} activations"))
    grid.add_row("", f"at {peak_place(summary)}")
    grid.add_row("step", f"{format_us(summary.step_us)}, {summary.n_ops} ops, {flops}")
    if summary.method:
        grid.add_row("times", summary.method)
    return grid


def _peak_and_time(summary: Summary, width: int) -> RenderableType:
    if width < WIDE:
        return Group(_peak_table(summary, 22), _time_table(summary))
    return Columns([_peak_table(summary, 8), _time_table(summary)], padding=(0, 2))


def _peak_table(summary: Summary, bar_width: int) -> Table:
    table = new_table()
    table.add_column("at the peak", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", width=bar_width, no_wrap=True)
    for part in summary.peak.parts:
        drawn = Text(bar(part.share, bar_width), style=colour(part.label))
        table.add_row(part.label, format_bytes(part.nbytes), percent(part.share), drawn)
    return table


def _time_table(summary: Summary) -> Table:
    table = new_table()
    table.show_footer = True
    total = summary.total
    table.add_column("phase", "all", no_wrap=True)
    table.add_column("ops", str(total.ops), justify="right", no_wrap=True)
    table.add_column("time", format_us(total.time_us), justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("FLOPs", format_count(total.flops), justify="right", no_wrap=True)
    table.add_column("moved", format_bytes(total.moved_bytes), justify="right", no_wrap=True)
    table.add_column("FLOPs/B", _ratio(total.intensity), justify="right", no_wrap=True)
    for row in summary.phases:
        work = (format_count(row.flops), format_bytes(row.moved_bytes), _ratio(row.intensity))
        table.add_row(row.label, str(row.ops), format_us(row.time_us), percent(row.share), *work)
    return table


def _operator_table(summary: Summary, most: int) -> Table:
    table = new_table()
    table.add_column("operator")
    for header in ("calls", "time", "share", "average", "FLOPs/B"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in summary.operators[:most]:
        times = (format_us(row.time_us), percent(row.share), format_us(row.mean_us))
        table.add_row(Middle(row.label), str(row.ops), *times, _ratio(row.intensity))
    return table


def _activation_table(summary: Summary, most: int, width: int) -> Table:
    is_wide = width >= WIDE
    table = new_table()
    table.add_column("made by")
    table.add_column("in module")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("idle", justify="right", no_wrap=True)
    if is_wide:
        table.add_column("from op → to", justify="right", no_wrap=True)
    table.add_column("source line")
    for row in summary.activations[:most]:
        size = [format_bytes(row.nbytes), format_us(row.idle_us)]
        if is_wide:
            size += [_between(row)]
        source = row.source if is_wide else row.source.rpartition("/")[2]
        module = Middle(row.module, 18, shorten_path)
        table.add_row(Middle(row.kind), module, *size, Middle(source, 16))
    return table


def _between(row: Activation) -> str:
    return "–" if row.first_backward is None else f"{row.last_forward} → {row.first_backward}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _phase_table(graph: StepGraph) -> Table:
    counts, flops = graph.count_by_phase(), graph.flops_by_phase()
    table = new_table()
    table.show_footer = True
    table.add_column("phase", footer="all")
    table.add_column("ops", str(sum(counts.values())), justify="right")
    table.add_column("FLOPs", format_count(sum(flops.values())), justify="right")
    for phase, count in counts.items():
        table.add_row(phase.value, str(count), format_count(flops[phase]))
    return table


def _role_table(graph: StepGraph) -> Table:
    """Only roles with bytes. There is no sum: these storages are not all alive at once."""
    table = new_table()
    table.add_column("role")
    table.add_column("bytes in one step", justify="right")
    for role, nbytes in graph.bytes_by_role().items():
        if nbytes:
            table.add_row(role.value, format_bytes(nbytes))
    return table


def _findings(comparison: Comparison) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(*verdict(comparison))
    if comparison.budget_bytes is not None:
        table.add_row(*budget_verdict(comparison))
    plain, captured = comparison.plain_peak_bytes, comparison.captured_peak_bytes
    table.add_row("peak", f"{format_bytes(plain)} plain, {format_bytes(captured)} captured")
    times = (
        f"captured in {format_us(comparison.capture_us)}; a step takes "
        f"{format_us(comparison.plain_us)} plain, {format_us(comparison.captured_us)} captured"
    )
    table.add_row("time", times)
    return table


def verdict(comparison: Comparison) -> tuple[Text, Text]:
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
    return Text("different", style="bold red"), Text(differing)  # names may hold brackets


def budget_verdict(comparison: Comparison) -> tuple[Text, str]:
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
