"""The forms that a captured step can take without another number: see `core.improve`."""

from __future__ import annotations

from rekindle.core.graph.graph import StepGraph
from rekindle.core.rewrite.backward_order import free_first
from rekindle.core.rewrite.improve import combine, update_early, write_in_place
from rekindle.rewriting import multi_tensor
from rekindle.rewriting.early_updates import find_updates
from rekindle.tracing.tape import Recording


def improved(recording: Recording, graph: StepGraph) -> StepGraph:
    """The step with small ops done together, results written in place, and what frees first.

    `graph` is as captured.
    """
    return free_first(write_in_place(combine(graph, multi_tensor.kinds(recording, graph))))


def with_early_updates(recording: Recording, form: StepGraph) -> StepGraph | None:
    """An improved step with parameters updated as their gradients come; None if that may not be."""
    updates = find_updates(recording, form)
    return None if updates is None else update_early(form, *updates)
