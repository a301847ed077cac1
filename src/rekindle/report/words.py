"""A profiled step in plain sentences, for people who have never seen a memory profile."""

from __future__ import annotations

from rekindle.core.graph.graph import Op, Role
from rekindle.report.names import source_line
from rekindle.report.palette import MEANINGS
from rekindle.report.summary import Part, Summary
from rekindle.units import format_bytes, format_us

_MOST_KINDS = 2


def percent(share: float) -> str:
    """A share as whole percents; what is there but rounds to nothing is shown as such.

    >>> percent(0.925), percent(0.001), percent(0.0), percent(0.999)
    ('92%', '<1%', '0%', '99.9%')
    """
    if 0 < share < 0.005:
        return "<1%"
    if 0.995 <= share < 1:
        return f"{min(share, 0.999):.1%}"
    return f"{share:.0%}"


def peak_in_words(summary: Summary) -> str:
    """Two sentences: how much the step holds at its peak, and what most of it is."""
    peak = summary.peak
    if not peak.parts:
        return "The step has no ops, and holds no memory."
    first = peak.parts[0]
    largest = "" if first.label == Role.ACTIVATION.value else f"; most is {_part(first)}"
    if not peak.activation_share:
        return f"At its peak the step holds {format_bytes(peak.nbytes)}{largest}."
    return (
        f"At its peak the step holds {format_bytes(peak.nbytes)}, {percent(peak.activation_share)}"
        f" of it activations, results of the forward pass that wait for the backward pass{largest}."
        f" Of these, the most bytes are results of {_kinds(peak.activation_kinds)}, and the module"
        f" with the most is {_part(peak.activation_modules[0])}."
    )


def peak_place(summary: Summary) -> str:
    """Where the peak is: the op, its phase, module and source line."""
    return place_of(summary.peak.op, summary.n_ops)


def place_of(op: Op | None, n_ops: int) -> str:
    """An op's place in the step, its phase, module and source line."""
    if op is None:
        return "nowhere"
    places = [op.source.module, source_line(op.source)]
    where = ", ".join(place for place in places if place)
    place = f"op {op.index} of {n_ops}, {op.name}, {op.phase.value}"
    return f"{place}: {where}" if where else place


def how_timed(summary: Summary) -> str:
    """Whether the times were measured, and on what: ``measured on NVIDIA H200``."""
    verb = "measured on" if summary.is_measured else "estimated for"
    return f"{verb} {summary.device}"


def step_in_words(summary: Summary) -> str:
    """One sentence on time: ``A step takes 106 ms (measured on NVIDIA H200), 61% of it …``."""
    slowest = max(summary.phases, key=lambda phase: phase.time_us, default=None)
    text = f"A step takes {format_us(summary.step_us)} ({how_timed(summary)})"
    if slowest is None or not slowest.time_us:
        return text + "."
    return f"{text}, {percent(slowest.share)} of it in the {slowest.label} phase."


def meaning(label: str) -> str:
    """What a role is, in a few words."""
    return MEANINGS[label]


def _kinds(kinds: tuple[Part, ...]) -> str:
    return " and ".join(
        f"{part.label} ({format_bytes(part.nbytes)})" for part in kinds[:_MOST_KINDS]
    )


def _part(part: Part) -> str:
    return f"{part.label} ({format_bytes(part.nbytes)}, {percent(part.share)})"
