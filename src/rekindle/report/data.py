"""The same facts as on the terminal, as plain dicts for JSON."""

from __future__ import annotations

from typing import Any

from rekindle.core.graph.comparison import Comparison
from rekindle.core.graph.graph import StepGraph

SCHEMA = 1
"""The version of every JSON document; it grows when a key changes its meaning or goes away."""


def graph_data(graph: StepGraph) -> dict[str, Any]:
    """What a graph holds: ops and FLOPs by phase, bytes by role."""
    flops = graph.flops_by_phase()
    return {
        "fingerprint": graph.fingerprint,
        "phases": {
            phase.value: {"ops": count, "flops": flops[phase]}
            for phase, count in graph.count_by_phase().items()
        },
        "role_bytes": {role.value: nbytes for role, nbytes in graph.bytes_by_role().items()},
    }


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """A plain and a captured training, and the graph; None for what could not be compared."""
    return {
        "equal": comparison.equal if comparison.compared else None,
        "is_compiled": comparison.is_compiled,
        "rounding": comparison.rounding,
        "budget_bytes": comparison.budget_bytes,
        "is_within_budget": comparison.is_within_budget,
        "differences": list(comparison.differences),
        "compared": dict(comparison.compared),
        "capture_us": comparison.capture_us,
        "plain": {
            "peak_bytes": comparison.plain_peak_bytes,
            "step_us": comparison.plain_us,
            "samples_us": list(comparison.plain_samples_us),
        }
        if comparison.plain_fits
        else None,
        "captured": {
            "peak_bytes": comparison.captured_peak_bytes,
            "step_us": comparison.captured_us,
            "samples_us": list(comparison.captured_samples_us),
        },
        "graph": graph_data(comparison.graph),
    }
