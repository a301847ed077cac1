"""The largest batches that a budget holds, on the terminal and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from rekindle.core.cost.batch_search import MOST, Fit, LargestBatch
from rekindle.core.cost.devices import find_device
from rekindle.errors import ProfileError
from rekindle.report.tables import indented, new_table
from rekindle.report.words import percent
from rekindle.units import format_budget, format_bytes, format_us

_ALLOCATOR_NOTE = "without fragmentation: the allocator needs up to 6% more, plain steps 13%"


def fit_summary(title: str, found: LargestBatch) -> RenderableType:
    """The batches, with peak and speed of each."""
    table = new_table("batch", "peak", "step", "samples/s", "of plain's", label="")
    plain, rows = found.plain, [("plain", found.plain), ("planned", found.planned)]
    if found.at_least is not None:
        rows.append((f"planned, ≥ {percent(found.at_least)}", found.quick))
    for label, fit in rows:
        if fit is None:
            table.add_row(label, "none fits")
            continue
        share = percent(fit.samples_per_s / plain.samples_per_s) if plain else ""
        cells = (f"{fit.batch:,}", format_bytes(fit.peak_bytes), format_us(fit.step_us))
        table.add_row(label, *cells, f"{fit.samples_per_s:,.1f}", share)
    budget = f"within {format_bytes(found.budget_bytes)}, on {found.device}"
    notes = [Text(f"forecast, {found.method}", style="dim")]
    if found.planned is not None and found.planned.batch >= MOST:
        notes.append(Text(f"batches of more than {MOST:,} are not tried", style="yellow"))
    if found.least_bytes is not None:
        least = format_budget(found.least_bytes)
        notes.append(Text(f"a budget of {least} would hold one sample", style="yellow"))
    if found.device != "cpu":
        notes.append(Text(_ALLOCATOR_NOTE, style="dim"))
    if (memory_bytes := _memory_bytes(found.device)) and found.budget_bytes > memory_bytes:
        notes.append(Text(f"{found.device} has {format_bytes(memory_bytes)}", style="yellow"))
    return Group(
        Text(f"{title}, {budget}", style="bold"), indented(table), *map(indented, notes), ""
    )


def _memory_bytes(device: str) -> int | None:
    """The memory of a GPU; None if it is not known, or the device is no GPU."""
    try:
        return find_device(device).memory_bytes
    except ProfileError:
        return None


def fit_data(found: LargestBatch) -> dict[str, Any]:
    """The largest batches as data."""
    return {
        "budget_bytes": found.budget_bytes,
        "device": found.device,
        "method": found.method,
        "at_least": found.at_least,
        "least_bytes": found.least_bytes,
        "plain": _fit_data(found.plain),
        "planned": _fit_data(found.planned),
        "quick": _fit_data(found.quick),
    }


def _fit_data(fit: Fit | None) -> dict[str, Any] | None:
    return None if fit is None else {**fit._asdict(), "samples_per_s": fit.samples_per_s}


def check_in_words(checked: dict[str, Any]) -> str:
    """A batch that was run: whether it fits, and why."""
    verdict = "fits" if checked["fits"] else "does not fit"
    if checked["peak_bytes"] is not None:
        reason = f"its peak is {format_bytes(checked['peak_bytes'])}"
    elif checked["least_peak_bytes"] is not None:
        reason = f"the least peak found is {format_bytes(checked['least_peak_bytes'])}"
    else:
        reason = "it ran out of memory"
    return f"a batch of {checked['batch']:,} {verdict}: {reason}"
