"""Reports on the terminal: each function returns an object that any rich console can print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.planners.curve import Curve, bound_at
from rekindle.report.names import shorten_path
from rekindle.report.palette import ORDER, colour
from rekindle.report.summary import DecisionRow, Dropped, Summary, with_rest
from rekindle.report.tables import (
    ABSENT,
    WIDE_COLUMNS,
    ForWidth,
    Shortened,
    add_numbers,
    bar,
    indented,
    new_grid,
    new_table,
)
from rekindle.report.words import (
    bound_in_words,
    budget_in_words,
    fine_percent,
    how_timed,
    peak_place,
    percent,
)
from rekindle.units import format_bytes, format_count, format_us


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
    """Ops and FLOPs of a step by phase, its bytes by role; side by side if they fit."""
    return Columns([_phase_table(graph), _role_table(graph)], padding=(0, 4))


def step_summary(summary: Summary, *, most: int = 8) -> RenderableType:
    """A step on the terminal: its peak and its time; what a plan drops, or where both go."""
    parts: list[RenderableType] = [Text(f"{summary.title}, {how_timed(summary)}", style="bold")]
    if summary.plan is None:
        parts += [indented(_profile_head(summary))]
        parts += [indented(ForWidth(lambda width: _peak_and_time(summary, width)))]
        if summary.operators:
            parts += [Text("Operators with the most time", style="bold")]
            parts += [indented(_operator_table(summary, most))]
        if summary.activations:
            title = "Activations with the most bytes × idle time, between forward and backward use"
            parts += [Text(title, style="bold")]
            parts += [indented(ForWidth(lambda width: _activation_table(summary, most, width)))]
    else:
        parts += [indented(_plan_head(summary, summary.plan))]
        parts += [indented(ForWidth(lambda width: _plan_tables(summary, most, width)))]
        if summary.decisions:
            parts += [Text("The largest activations, and what becomes of them", style="bold")]
            parts += [indented(_decision_table(summary.decisions[:most]))]
    return Group(*parts)


def curve_table(plain: Summary, curves: Sequence[Curve]) -> RenderableType:
    """Added time at every budget, one column per planner; the bound where one is known."""
    times = ", ".join(f"{curve.planner} {format_us(curve.seconds * 1e6)}" for curve in curves)
    peak, step = format_bytes(plain.peak.nbytes), format_us(plain.step_us)
    return Group(
        Text(f"{plain.title}, {how_timed(plain)}", style="bold"),
        indented(f"plain step: peak {peak}, {step}; below, the time that each planner adds"),
        indented(ForWidth(lambda width: Group(*_curve_tables(plain, curves, width)))),
        indented(f"planning took: {times}"),
    )


def _curve_tables(plain: Summary, curves: Sequence[Curve], width: int) -> list[Table]:
    """One table, or several where the columns need more than the width."""
    whole = plain.step_us or 1.0
    lowest = min(curves, key=lambda curve: curve.plans[-1].budget_bytes)
    longest = max((lowest, *curves), key=lambda curve: len(curve.plans))
    rows = {plan.budget_bytes for curve in (lowest, longest) for plan in curve.plans}
    budgets = sorted(rows, reverse=True)
    columns: dict[str, list[float | None]] = {}
    for curve in curves:
        plans = [curve.at(budget) for budget in budgets]
        columns[curve.planner] = [None if p is None else p.recompute_us / whole for p in plans]
    bounds = [bound_at(curves, budget) for budget in budgets]
    if any(bound is not None for bound in bounds):
        columns["bound"] = [None if bound is None else bound / whole for bound in bounds]

    peak = max(plain.peak.nbytes, 1)
    tables = []
    for titles in _columns_that_fit(list(columns), width):
        table = new_table("budget", "of plain", *titles)
        for row, budget in enumerate(budgets):
            shares = [columns[title][row] for title in titles]
            cells = [ABSENT if share is None else fine_percent(share) for share in shares]
            table.add_row(format_bytes(budget), percent(budget / peak), *cells)
        tables.append(table)
    return tables


def _columns_that_fit(titles: list[str], width: int) -> list[list[str]]:
    """The columns in groups, each at most as wide as the terminal."""
    groups: list[list[str]] = []
    room = 0
    for title in titles:
        needed = max(len(title), 6) + 3
        if needed > room or not groups:
            groups.append([])
            room = width - 20  # for the budget and its share
        groups[-1].append(title)
        room -= needed
    return groups


def _profile_head(summary: Summary) -> Table:
    ratio = summary.backward_ratio
    backward = "" if ratio is None else f", backward/forward {ratio:.2f}"
    flops = f"{format_count(summary.total.flops)} FLOPs{backward}"
    grid = new_grid()
    peak = Text.assemble((format_bytes(summary.peak.nbytes), "bold"))
    grid.add_row("peak", peak.append(f", {percent(summary.peak.activation_share)} activations"))
    grid.add_row("", f"at {peak_place(summary)}")
    grid.add_row("step", f"{format_us(summary.step_us)}, {summary.n_ops} ops, {flops}")
    if summary.method:
        grid.add_row("times", summary.method)
    return grid


def _plan_head(summary: Summary, plan: Plan) -> Table:
    plain, dropped = summary.plain, summary.dropped
    grid = new_grid()
    seconds = summary.plan_seconds
    took = "" if seconds is None else f", in {format_us(seconds * 1e6)}"
    grid.add_row("planner", f"{plan.planner}{took}")
    grid.add_row("budget", budget_in_words(summary))
    peak = Text.assemble((format_bytes(summary.peak.nbytes), "bold"))
    share = percent(summary.peak_share)
    grid.add_row("peak", peak.append(f", {share} of {format_bytes(plain.peak.nbytes)}"))
    grid.add_row("", f"at {peak_place(summary)}")
    step = Text.assemble((format_us(summary.step_us), "bold"))
    if summary.trace.recompute_us:
        added = fine_percent(summary.added_share)
        step.append(f", {added} more than {format_us(plain.step_us)}")
        step.append(f"; {summary.recomputed_ops:,} ops run again")
    else:
        step.append(", as the plain step")
    grid.add_row("step", step)
    bound = bound_in_words(summary)
    if bound is not None:
        grid.add_row("bound", bound)
    freed = f", {format_bytes(dropped.freed_bytes)} in all" if dropped.dropped else ""
    grid.add_row("dropped", f"{dropped.dropped:,} of {dropped.activations:,} activations{freed}")
    if summary.method:
        grid.add_row("times", summary.method)
    return grid


def _peak_and_time(summary: Summary, width: int) -> RenderableType:
    if width < WIDE_COLUMNS:
        return Group(_peak_table(summary, 22), _time_table(summary))
    return Columns([_peak_table(summary, 8), _time_table(summary)], padding=(0, 2))


def _peak_table(summary: Summary, bar_width: int) -> Table:
    table = new_table("bytes", "share", label="at the peak")
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
    footers = {
        "ops": str(total.ops),
        "time": format_us(total.time_us),
        "share": "",
        "FLOPs": format_count(total.flops),
        "moved": format_bytes(total.moved_bytes),
        "FLOPs/B": _ratio(total.intensity),
    }
    for header, footer in footers.items():
        table.add_column(header, footer, justify="right", no_wrap=True)
    for row in summary.phases:
        work = (format_count(row.flops), format_bytes(row.moved_bytes), _ratio(row.intensity))
        table.add_row(row.label, str(row.ops), format_us(row.time_us), percent(row.share), *work)
    return table


def _operator_table(summary: Summary, most: int) -> Table:
    table = new_table()
    table.add_column("operator")
    add_numbers(table, "calls", "time", "share", "average", "FLOPs/B")
    for row in summary.operators[:most]:
        times = (format_us(row.time_us), percent(row.share), format_us(row.mean_us))
        table.add_row(Shortened(row.label), str(row.ops), *times, _ratio(row.intensity))
    return table


def _activation_table(summary: Summary, most: int, width: int) -> Table:
    is_wide = width >= WIDE_COLUMNS
    table = new_table()
    table.add_column("made by")
    table.add_column("in module")
    add_numbers(table, "bytes", "idle", *(["from op → to"] if is_wide else []))
    table.add_column("source line")
    for row in summary.activations[:most]:
        size = [format_bytes(row.nbytes), format_us(row.idle_us)]
        if is_wide:
            uses = f"{row.last_forward} → {row.first_backward}"
            size += [ABSENT if row.first_backward is None else uses]
        source = row.source if is_wide else row.source.rpartition("/")[2]
        module = Shortened(row.module, 18, shorten_path)
        table.add_row(Shortened(row.kind), module, *size, Shortened(source, 16))
    return table


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _plan_tables(summary: Summary, most: int, width: int) -> RenderableType:
    peak = _peaks_table(summary)
    if not summary.dropped_kinds:
        return peak
    by_operator = _dropped_table("dropped, by operator", summary.dropped_kinds, most)
    by_module = _dropped_table("dropped, by module", summary.dropped_modules, most)
    if width < WIDE_COLUMNS:
        return Group(peak, by_operator, by_module)
    return Group(Columns([peak, by_operator], padding=(0, 2)), by_module)


def _peaks_table(summary: Summary) -> Table:
    """What the peaks of the plain and the planned step are made of."""
    plain = {part.label: part.nbytes for part in summary.plain.peak.parts}
    planned = {part.label: part.nbytes for part in summary.peak.parts}
    table = new_table()
    table.show_footer = True
    table.add_column("at the peak", "all", no_wrap=True)
    for header, peak in (("plain", summary.plain.peak), ("planned", summary.peak)):
        table.add_column(header, format_bytes(peak.nbytes), justify="right", no_wrap=True)
    sizes = {label: (plain.get(label, 0), planned.get(label, 0)) for label in ORDER}
    for label in sorted(ORDER, key=lambda label: -max(sizes[label])):
        if any(sizes[label]):
            table.add_row(label, *map(format_bytes, sizes[label]))
    return table


def _dropped_table(title: str, groups: Sequence[Dropped], most: int) -> Table:
    table = new_table()
    table.add_column(title)
    add_numbers(table, "tensors", "bytes", "time added")
    for group in with_rest(groups, most):
        label = Shortened(group.label, 18, shorten_path)
        numbers = (format_bytes(group.freed_bytes), format_us(group.added_us))
        table.add_row(label, f"{group.dropped:,} of {group.activations:,}", *numbers)
    return table


def _decision_table(rows: Sequence[DecisionRow]) -> Table:
    table = new_table("bytes", "time added", label="")
    table.add_column("what it is, and why")
    for row in rows:
        verb = Text("keep", style="green") if row.is_kept else Text("drop", style="yellow")
        added = "" if row.is_kept else format_us(row.added_us)
        what = f"{row.kind} in {row.module}" if row.module else row.kind
        why = Text(row.reason, style="dim")
        table.add_row(verb, format_bytes(row.nbytes), added, Group(Shortened(what), why))
    return table


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
    """Roles with bytes. There is no total: these storages are not all live at once."""
    table = new_table()
    table.add_column("role")
    table.add_column("bytes in one step", justify="right")
    for role, nbytes in graph.bytes_by_role().items():
        if nbytes:
            table.add_row(role.value, format_bytes(nbytes))
    return table
