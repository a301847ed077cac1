"""A planned step in plain sentences."""

from __future__ import annotations

from rekindle.report.plan_summary import PlanSummary
from rekindle.report.words import percent, place_of
from rekindle.units import format_bytes, format_us


def fine_percent(share: float) -> str:
    """A share in percents to a tenth; what is there but rounds to nothing is shown as such.

    >>> fine_percent(0.0672), fine_percent(0.0), fine_percent(0.0002), fine_percent(1.2)
    ('6.7%', '0%', '<0.1%', '120.0%')
    """
    if not share:
        return "0%"
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def plan_in_words(summary: PlanSummary) -> str:
    """What the plan does, what it brings, and what it costs."""
    dropped, plain = summary.dropped, summary.plain
    peak = _peak_in_words(plain.peak.nbytes, summary.peak.nbytes)
    if not dropped.dropped:
        return f"Nothing has to be dropped. {peak}."
    return (
        f"Of {dropped.count:,} activations, {dropped.dropped:,} are dropped after their last use "
        f"in the forward pass ({format_bytes(dropped.freed_bytes)} in all) and computed again when "
        f"the backward pass needs them. {peak}, and a step takes {format_us(summary.step_us)} "
        f"rather than {format_us(plain.step_us)}: {fine_percent(summary.added_share)} more."
    )


def _peak_in_words(plain_bytes: int, planned_bytes: int) -> str:
    before, after = format_bytes(plain_bytes), format_bytes(planned_bytes)
    if before == after:
        return f"The peak stays at {before}"
    verb = "falls" if planned_bytes < plain_bytes else "rises"
    return f"The peak {verb} from {before} to {after}"


def budget_in_words(summary: PlanSummary) -> str:
    """The budget, and what share of the plain step's peak it is."""
    share = percent(summary.budget_share)
    return f"{format_bytes(summary.budget_bytes)}, {share} of the plain step's peak"


def bound_in_words(summary: PlanSummary) -> str | None:
    """How far from the best possible the plan is at most; None where nothing is known."""
    bound = summary.bound_share
    if bound is None:
        return None
    if not summary.recompute_us:
        return "the best possible: nothing is computed again"
    gap = max(summary.added_share - bound, 0.0)
    if not gap:
        return "the best possible: no plan within the budget adds less time"
    return (
        f"at most {fine_percent(gap)} of the plain step from the best possible: "
        f"no plan within the budget adds less than {fine_percent(max(bound, 0.0))}"
    )


def planned_peak_place(summary: PlanSummary) -> str:
    """Where the peak now is, and whether something is computed again there."""
    place = place_of(summary.peak.op, summary.plain.n_ops)
    return f"{place}, computed again" if summary.is_peak_recomputing else place
