"""The plain step's peak by role, measured at one batch size and estimated at others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import drawing
from experiments.page import ABSENT, Page, not_measured, paragraphs, table, title_of
from rekindle.core.graph.graph import Role
from rekindle.report.figures import GREY, new_figure
from rekindle.report.palette import MARKERS, ORDER, SERIES, colour
from rekindle.report.words import percent
from rekindle.units import format_bytes

STATED = (0.70, 0.85)
"""The share of activations in the peak as it is often stated."""
_SHARES_INCHES = (10.5, 4.8)
_ACTIVATION = Role.ACTIVATION.value

Found = dict[str, Any]


def section(page: Page) -> str:
    """The peak by role, and the share of activations against the batch size."""
    measured, on_paper = page.results.found("statistics"), page.results.found("shares")
    parts = [_breakdown(measured) if measured else not_measured("statistics")]
    if not on_paper:
        return paragraphs(*parts, not_measured("shares"))
    picture = page.picture("shares", "The peak by role, by batch size", shares_figure(on_paper))
    sentences = "\n".join(f"- {_verdict(found)}" for found in on_paper)
    return paragraphs(*parts, picture, _share_table(on_paper), sentences)


def share_of(row: Found) -> float:
    """The share of activations in a peak."""
    return float(row["parts"].get(_ACTIVATION, 0) / row["peak_bytes"])


def _breakdown(every: Sequence[Found]) -> str:
    """The peak of the profiled steps, one row per role."""
    columns = [{part["label"]: part for part in found["peak"]["parts"]} for found in every]
    rows = []
    for label in ORDER:
        cells = [
            _cell(parts.get(label), found) for parts, found in zip(columns, every, strict=True)
        ]
        if any(cell != ABSENT for cell in cells):
            rows.append((label, *cells))
    rows.sort(key=lambda row: row[0] != _ACTIVATION)
    forecast = [format_bytes(found["peak"]["bytes"]) for found in every]
    measured = [format_bytes(found["measured"]["peak_bytes"]) for found in every]
    where = [f"`{found['peak']['op']}` ({found['peak']['phase']})" for found in every]
    rows += [("**all**", *forecast), ("measured", *measured), ("at the op", *where)]
    return table(("", *(title_of(found["model"], found["batch"]) for found in every)), rows)


def _cell(part: Found | None, found: Found) -> str:
    if part is None:
        return ABSENT
    return f"{format_bytes(part['bytes'])} ({percent(part['bytes'] / found['peak']['bytes'])})"


def _share_table(every: Sequence[Found]) -> str:
    batches = sorted({row["batch"] for found in every for row in found["batches"]})
    rows = []
    for found in every:
        shares = {row["batch"]: percent(share_of(row)) for row in found["batches"]}
        cells = (shares.get(batch, ABSENT) for batch in batches)
        rows.append((title_of(found["model"]), *cells))
    return table(("activations, of the peak", *(f"×{batch:,}" for batch in batches)), rows)


def _verdict(found: Found) -> str:
    """A sentence on the batch sizes at which the share is as often stated."""
    low, high = STATED
    shares = {row["batch"]: share_of(row) for row in found["batches"]}
    within = [f"×{batch:,}" for batch, share in shares.items() if low <= share <= high]
    least, most = (percent(pick(shares.values())) for pick in (min, max))
    name = title_of(found["model"])
    stated = f"{low:.0%} to {high:.0%}"
    where = f"it is {stated} at {', '.join(within)}" if within else f"it is never {stated}"
    return f"{name}: from {least} to {most} of the peak; of these batch sizes, {where}."


def shares_figure(every: Sequence[Found]) -> Any:
    """A panel per model with the peak by role at each batch size; the share of activations."""
    figure = new_figure("What the plain step's peak is made of", _SHARES_INCHES)
    panels = figure.subplots(1, len(every) + 1, width_ratios=[1.0] * len(every) + [1.2])
    for axes, found in zip(panels, every, strict=False):
        drawing.head(axes, title_of(found["model"]))
        _draw_roles(axes, found["batches"])
    last = panels[-1]
    drawing.head(last, "share of activations")
    last.axhspan(STATED[0] * 100, STATED[1] * 100, color=GREY, alpha=0.15, lw=0, label="70–85%")
    for index, found in enumerate(every):
        xs = [row["batch"] for row in found["batches"]]
        ys = [100 * share_of(row) for row in found["batches"]]
        style = {"color": SERIES[index], "marker": MARKERS[index], "ms": 5, "lw": 1.8}
        last.plot(xs, ys, label=title_of(found["model"]), **style)
    _number_batches(last, [row["batch"] for found in every for row in found["batches"]])
    last.set_ylim(0, 100)
    drawing.finish(last, "batch size", "% of the peak")
    last.legend(fontsize=8, frameon=False, loc="best")
    drawing.name_below(figure, *panels[:-1], columns=9)
    return figure


def _number_batches(axes: Any, batches: Sequence[int]) -> None:
    """A logarithmic axis, with every other batch size on it."""
    shown = sorted(set(batches))[::2]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{batch:,}" for batch in shown])


def _draw_roles(axes: Any, rows: Sequence[Found]) -> None:
    """Stacked bars, in percent of each peak."""
    bottoms = [0.0] * len(rows)
    for label in ORDER:
        shares = [100 * row["parts"].get(label, 0) / row["peak_bytes"] for row in rows]
        if max(shares) > 0.5:
            style = {"color": colour(label), "width": 0.85, "label": label}
            axes.bar(range(len(rows)), shares, bottom=bottoms, **style)
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axes.set_xticks(range(len(rows)), [f"{row['batch']}" for row in rows], rotation=60)
    axes.set_ylim(0, 100)
    drawing.finish(axes, "batch size", "% of the peak", grid="")
