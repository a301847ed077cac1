"""Forecasts, which need no GPU: what peaks consist of, and the largest batches."""

from __future__ import annotations

from typing import Any

import rekindle
from rekindle import models
from rekindle.core.cost.batch_scaling import Growth, Sized
from rekindle.core.cost.devices import find_device
from rekindle.core.cost.roofline import analytic_profile
from rekindle.core.graph.simulate import simulate
from rekindle.report.fit_report import fit_data
from rekindle.report.summary import peak_of
from rekindle.studies.model_runs import find_largest_batch

_CAPTURED_BATCHES = (8, 16)  # the graphs of all other batch sizes follow from these


def find_shares(settings: dict[str, Any], before: object, save: object) -> dict[str, Any]:
    """What the plain step's peak consists of at several batch sizes, as a GPU would run it."""
    small, large = (_captured(settings, batch) for batch in _CAPTURED_BATCHES)
    growth = Growth(
        Sized(_CAPTURED_BATCHES[0], small.graph), Sized(_CAPTURED_BATCHES[1], large.graph)
    )
    device = find_device(settings["gpu"])
    rows = []
    for batch in settings["batches"]:
        graph = growth.at(batch)
        peak = peak_of(simulate(graph, analytic_profile(graph, device)))
        parts = {part.label: part.nbytes for part in peak.parts}
        rows.append({"batch": batch, "peak_bytes": peak.nbytes, "parts": parts})
    return {"model": settings["model"], "batches": rows}


def find_fits(settings: dict[str, Any], before: object, save: object) -> dict[str, Any]:
    """The largest batches of a model that a budget holds, plain and planned."""
    found, _ = find_largest_batch(
        settings["model"],
        settings["budget"],
        device=settings["gpu"],
        precision=settings["precision"],
        at_least=settings["at_least"],
    )
    return fit_data(found)


def _captured(settings: dict[str, Any], batch: int) -> rekindle.CapturedStep:
    work = models.build(settings["model"], batch=batch, precision=settings["precision"])
    step = (work.train_step, work.model, work.optimizer, work.batch)
    return rekindle.capture(*step, as_on_gpu=True)
