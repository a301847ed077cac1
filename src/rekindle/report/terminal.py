"""Tables for the terminal: each function returns something that any rich console can print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rekindle.core.comparison import Comparison
from rekindle.core.ir import StepGraph
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
    table = _table()
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
        _indented(graph_summary(comparison.graph)),  # brings an empty line above and below
        _indented(_findings(comparison)),
        "",
    )


def conclusion(names: Iterable[str], differing: Iterable[str]) -> RenderableType:
    """The last line: whether every training was the same, and if not, which was not."""
    differing = list(differing)
    if differing:
        return Text(f"Not the same: {', '.join(differing)}.", style="bold red")
    return Text(f"The same, bit for bit: {', '.join(names)}.", style="bold green")


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")


def _phase_table(graph: StepGraph) -> Table:
    counts, flops = graph.count_by_phase(), graph.flops_by_phase()
    table = _table()
    table.show_footer = True
    table.add_column("phase", footer="all")
    table.add_column("ops", str(sum(counts.values())), justify="right")
    table.add_column("FLOPs", format_count(sum(flops.values())), justify="right")
    for phase, count in counts.items():
        table.add_row(phase.value, str(count), format_count(flops[phase]))
    return table


def _role_table(graph: StepGraph) -> Table:
    """Only roles with bytes. There is no sum: these storages are not all alive at once."""
    table = _table()
    table.add_column("role")
    table.add_column("bytes in one step", justify="right")
    for role, nbytes in graph.bytes_by_role().items():
        if nbytes:
            table.add_row(role.value, format_bytes(nbytes))
    return table


def _findings(comparison: Comparison) -> Table:
    steps = "1 step" if comparison.steps == 1 else f"{comparison.steps} steps"
    table = Table.grid(padding=(0, 2))
    if comparison.equal:
        verdict = Text("equal", style="bold green")
        table.add_row(verdict, f"after {steps}, bit for bit: {_counts(comparison)}")
    else:
        verdict = Text("different", style="bold red")
        table.add_row(verdict, f"after {steps}: {_names(comparison.differences)}")
    times = (
        f"captured in {format_us(comparison.capture_us)}; a step takes "
        f"{format_us(comparison.plain_us)} plain, {format_us(comparison.captured_us)} captured"
    )
    table.add_row("time", times)
    return table


def _names(differences: Sequence[str]) -> str:
    more = len(differences) - _MOST_DIFFERENCES
    return ", ".join(differences[:_MOST_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")


def _counts(comparison: Comparison) -> str:
    return ", ".join(
        f"{count} {_NOUNS.get(kind, (kind, kind))[count != 1]}"
        for kind, count in comparison.compared.items()
    )


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))
