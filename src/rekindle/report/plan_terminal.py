"""Plans and trade-off curves on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rekindle.planners.curve import Curve, bound_at
from rekindle.report.names import shorten_path
from rekindle.report.palette import ORDER
from rekindle.report.pieces import WIDE, Fitted, Middle, indented, new_table
from rekindle.report.plan_summary import DecisionRow, Dropped, PlanSummary
from rekindle.report.plan_words import (
    bound_in_words,
    budget_in_words,
    fine_percent,
    planned_peak_place,
)
from rekindle.report.summary import Summary
from rekindle.report.words import how_timed, percent
from rekindle.units import format_bytes, format_us

_ABSENT = "–"


def plan_summary(summary: PlanSummary, *, most: int = 8) -> RenderableType:
    """A planned step: what it needs, what was dropped, the largest decisions and their reasons."""
    parts: list[RenderableType] = [
        Text(f"{summary.plain.title}, {how_timed(summary.plain)}", style="bold"),
        indented(_headline(summary)),
        indented(Fitted(lambda width: _tables(summary, most, width))),
    ]
    if summary.decisions:
        parts += [Text("The largest activations, and what becomes of them", style="bold")]
        parts += [indented(_decision_table(summary.decisions[:most]))]
    return Group(*parts)


def curve_table(plain: Summary, curves: Sequence[Curve]) -> RenderableType:
    """Added time at every budget, a column a planner; the bound where one is known."""
    times = ", ".join(f"{curve.planner} {format_us(curve.seconds * 1e6)}" for curve in curves)
    peak, step = format_bytes(plain.peak.nbytes), format_us(plain.step_us)
    return Group(
        Text(f"{plain.title}, {how_timed(plain)}", style="bold"),
        indented(f"plain step: peak {peak}, {step}; below, the time that each planner adds"),
        indented(Fitted(lambda width: Group(*_curve_tables(plain, curves, width)))),
        indented(f"planning took: {times}"),
    )


def _curve_tables(plain: Summary, curves: Sequence[Curve], width: int) -> list[Table]:
    """One table, or several where the columns need more than the width there is."""
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
    for titles in _that_fit(list(columns), width):
        table = new_table()
        for title in ("budget", "of plain", *titles):
            table.add_column(title, justify="right", no_wrap=True)
        for row, budget in enumerate(budgets):
            shares = [columns[title][row] for title in titles]
            cells = [_ABSENT if share is None else fine_percent(share) for share in shares]
            table.add_row(format_bytes(budget), percent(budget / peak), *cells)
        tables.append(table)
    return tables


def _that_fit(titles: list[str], width: int) -> list[list[str]]:
    """The columns in groups, each as wide as there is room for."""
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


def _headline(summary: PlanSummary) -> Table:
    plain, dropped = summary.plain, summary.dropped
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    seconds = summary.plan_seconds
    took = "" if seconds is None else f", in {format_us(seconds * 1e6)}"
    grid.add_row("planner", f"{summary.planner}{took}")
    grid.add_row("budget", budget_in_words(summary))
    peak = Text.assemble((format_bytes(summary.peak.nbytes), "bold"))
    share = percent(summary.peak_share)
    grid.add_row("peak", peak.append(f", {share} of {format_bytes(plain.peak.nbytes)}"))
    grid.add_row("", f"at {planned_peak_place(summary)}")
    step = Text.assemble((format_us(summary.step_us), "bold"))
    if summary.recompute_us:
        added = fine_percent(summary.added_share)
        step.append(f", {added} more than {format_us(plain.step_us)}")
        step.append(f"; {summary.recomputed_ops:,} ops run again")
    grid.add_row("step", step if summary.recompute_us else step.append(", as the plain step"))
    bound = bound_in_words(summary)
    if bound is not None:
        grid.add_row("bound", bound)
    freed = f", {format_bytes(dropped.freed_bytes)} in all" if dropped.dropped else ""
    grid.add_row("dropped", f"{dropped.dropped:,} of {dropped.count:,} activations{freed}")
    if plain.method:
        grid.add_row("times", plain.method)
    return grid


def _tables(summary: PlanSummary, most: int, width: int) -> RenderableType:
    peak = _peak_table(summary)
    if not summary.kinds:
        return peak
    groups = [
        _dropped_table("dropped, by operator", summary.kinds, most),
        _dropped_table("dropped, by module", summary.modules, most),
    ]
    if width < WIDE:
        return Group(peak, *groups)
    return Group(Columns([peak, groups[0]], padding=(0, 2)), groups[1])


def _peak_table(summary: PlanSummary) -> Table:
    plain = {part.label: part.nbytes for part in summary.plain.peak.parts}
    planned = {part.label: part.nbytes for part in summary.peak.parts}
    table = new_table()
    table.show_footer = True
    total = (format_bytes(summary.plain.peak.nbytes), format_bytes(summary.peak.nbytes))
    table.add_column("at the peak", "all", no_wrap=True)
    table.add_column("plain", total[0], justify="right", no_wrap=True)
    table.add_column("planned", total[1], justify="right", no_wrap=True)
    labels = [label for label in ORDER if label in plain or label in planned]
    for label in sorted(labels, key=lambda label: -max(plain.get(label, 0), planned.get(label, 0))):
        sizes = (format_bytes(plain.get(label, 0)), format_bytes(planned.get(label, 0)))
        table.add_row(label, *sizes)
    return table


def _dropped_table(title: str, groups: Sequence[Dropped], most: int) -> Table:
    table = new_table()
    table.add_column(title)
    for header in ("tensors", "bytes", "time added"):
        table.add_column(header, justify="right", no_wrap=True)
    for group in groups[:most]:
        table.add_row(
            Middle(group.label, 18, shorten_path),
            f"{group.dropped:,} of {group.count:,}",
            format_bytes(group.freed_bytes),
            format_us(group.added_us),
        )
    rest = groups[most:]
    if rest:
        table.add_row(
            f"{len(rest)} more",
            f"{sum(group.dropped for group in rest):,} of {sum(group.count for group in rest):,}",
            format_bytes(sum(group.freed_bytes for group in rest)),
            format_us(sum(group.added_us for group in rest)),
        )
    return table


def _decision_table(rows: Sequence[DecisionRow]) -> Table:
    table = new_table()
    table.add_column("", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("time added", justify="right", no_wrap=True)
    table.add_column("what it is, and why")
    for row in rows:
        verb = Text("keep", style="green") if row.is_kept else Text("drop", style="yellow")
        added = "" if row.is_kept else format_us(row.added_us)
        what = f"{row.kind} in {row.module}" if row.module else row.kind
        why = Text(row.reason, style="dim")
        table.add_row(verb, format_bytes(row.nbytes), added, Group(Middle(what), why))
    return table
