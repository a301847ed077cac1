"""A step in plain sentences, for readers who have never seen a memory profile."""

from __future__ import annotations

from rekindle.core.graph.graph import Role
from rekindle.report.names import source_line
from rekindle.report.summary import PeakPart, Summary
from rekindle.units import format_bytes, format_us

_MOST_KINDS = 2


def percent(share: float) -> str:
    """A share in whole percent; a share that rounds to 0% or 100% without being it is marked.

    >>> percent(0.925), percent(0.001), percent(0.0), percent(0.999)
    ('92%', '<1%', '0%', '99.9%')
    """
    if 0 < share < 0.005:
        return "<1%"
    if 0.995 <= share < 1:
        return f"{min(share, 0.999):.1%}"
    return f"{share:.0%}"


def fine_percent(share: float) -> str:
    """A share in percent to a tenth; a positive share that rounds to 0.0% is marked.

    >>> fine_percent(0.0672), fine_percent(0.0), fine_percent(0.0002), fine_percent(1.2)
    ('6.7%', '0%', '<0.1%', '120.0%')
    """
    if not share:
        return "0%"
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def peak_in_words(summary: Summary) -> str:
    """Two sentences: how many bytes are live at the peak, and what most of them are."""
    peak = summary.peak
    if not peak.parts:
        return "The step has no ops, and holds no memory."
    first = peak.parts[0]
    largest = "" if first.label == Role.ACTIVATION.value else f"; most is {_part(first)}"
    if not peak.activation_share:
        return f"At its peak the step holds {format_bytes(peak.nbytes)}{largest}."
    kinds = " and ".join(
        f"{part.label} ({format_bytes(part.nbytes)})"
        for part in peak.activation_kinds[:_MOST_KINDS]
    )
    return (
        f"At its peak the step holds {format_bytes(peak.nbytes)}, {percent(peak.activation_share)}"
        f" of it activations, results of the forward pass that wait for the backward pass{largest}."
        f" Of these, the most bytes are results of {kinds}, and the module"
        f" with the most is {_part(peak.activation_modules[0])}."
    )


def _part(part: PeakPart) -> str:
    return f"{part.label} ({format_bytes(part.nbytes)}, {percent(part.share)})"


def peak_place(summary: Summary) -> str:
    """The op that runs at the peak, with its phase, module and source line."""
    op = summary.peak.op
    if op is None:
        return "nowhere"
    where = ", ".join(place for place in (op.source.module, source_line(op.source)) if place)
    place = f"op {op.index} of {summary.n_ops}, {op.name}, {op.phase.value}"
    place = f"{place}: {where}" if where else place
    return f"{place}, computed again" if summary.peak.is_recomputing else place


def how_timed(summary: Summary) -> str:
    """Whether the times are measured or estimated, and the device: ``measured on NVIDIA H200``."""
    verb = "measured on" if summary.is_measured else "estimated for"
    return f"{verb} {summary.device}"


def step_in_words(summary: Summary) -> str:
    """The time of the step in one sentence: next to the plain step's, or the slowest phase's."""
    text = f"A step takes {format_us(summary.step_us)} ({how_timed(summary)})"
    if summary.plan is not None:
        return f"{text}, the plain step {format_us(summary.plain.step_us)}."
    slowest = max(summary.phases, key=lambda phase: phase.time_us, default=None)
    if slowest is None or not slowest.time_us:
        return text + "."
    return f"{text}, {percent(slowest.share)} of it in the {slowest.label} phase."


def plan_in_words(summary: Summary) -> str:
    """What the plan does, the memory it saves and the time it costs."""
    dropped, plain = summary.dropped, summary.plain
    before, after = format_bytes(plain.peak.nbytes), format_bytes(summary.peak.nbytes)
    verb = "falls" if summary.peak.nbytes < plain.peak.nbytes else "rises"
    change = f"stays at {before}" if before == after else f"{verb} from {before} to {after}"
    if not dropped.dropped:
        return f"Nothing has to be dropped. The peak {change}."
    return (
        f"Of {dropped.activations:,} activations, {dropped.dropped:,} are dropped after their last "
        f"use in the forward pass ({format_bytes(dropped.freed_bytes)} in all) and computed again "
        f"when the backward pass needs them. The peak {change}, and a step takes "
        f"{format_us(summary.step_us)} rather than {format_us(plain.step_us)}: "
        f"{fine_percent(summary.added_share)} more."
    )


def budget_in_words(summary: Summary) -> str:
    """The budget, and its share of the plain step's peak."""
    budget_bytes = summary.plan.budget_bytes if summary.plan is not None else 0
    share = percent(budget_bytes / max(summary.plain.peak.nbytes, 1))
    return f"{format_bytes(budget_bytes)}, {share} of the plain step's peak"


def bound_in_words(summary: Summary) -> str | None:
    """The largest possible distance from the optimum; None where there is no bound."""
    bound = summary.bound_share
    if bound is None:
        return None
    if not summary.trace.recompute_us:
        return "the best possible: nothing is computed again"
    gap = max(summary.added_share - bound, 0.0)
    if not gap:
        return "the best possible: no plan within the budget adds less time"
    return (
        f"at most {fine_percent(gap)} of the plain step from the best possible: "
        f"no plan within the budget adds less than {fine_percent(max(bound, 0.0))}"
    )
