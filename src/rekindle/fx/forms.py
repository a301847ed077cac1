"""The forms that a captured step can take without another number: see `core.improve`."""

from __future__ import annotations

from rekindle.core.improve import combine, update_early, write_in_place
from rekindle.core.ir import StepGraph
from rekindle.core.order import free_first
from rekindle.fx import together
from rekindle.fx.recording import Recording
from rekindle.fx.updates import find_updates


def improved(recording: Recording, graph: StepGraph) -> StepGraph:
    """The step with small ops done together, results written in place, and what frees first.

    `graph` is as captured.
    """
    return free_first(write_in_place(combine(graph, together.kinds(recording, graph))))


def with_early_updates(recording: Recording, form: StepGraph) -> StepGraph | None:
    """An improved step with parameters updated as their gradients come; None if that may not be."""
    updates = find_updates(recording, form)
    return None if updates is None else update_early(form, *updates)
