"""Steps that are built and measured, for all kinds of tasks."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch

from rekindle import models
from rekindle.measuring.timing import Measurement, measure, resident_tensors

Parts = tuple[Any, Any, Any, Any]
_WARM_UP_STEPS = 2


def built(settings: dict[str, Any]) -> models.Workload:
    """The model that the settings name, built after the memory of others is freed."""
    settle()
    how = {name: settings[name] for name in ("batch", "precision", "device")}
    return models.build(settings["model"], **how)


def parts_of(work: models.Workload) -> Parts:
    """A step as `rekindle.optimize` takes it."""
    return work.train_step, work.model, work.optimizer, work.batch


def settle() -> None:
    """Free the memory of steps before, also in the allocator's cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def plainly(work: models.Workload, steps: int) -> dict[str, Any]:
    """The measurements of the plain step."""
    model, optimizer, batch = work.model, work.optimizer, work.batch
    found = measure(
        partial(work.train_step, model, optimizer, batch),
        device=torch.device(work.device),
        steps=steps,
        warmup=_WARM_UP_STEPS,
        resident=lambda: resident_tensors(model, optimizer, batch),
    )
    return figures(found)


def figures(found: Measurement) -> dict[str, Any]:
    """A measurement as data, with its raw samples."""
    return {
        "peak_bytes": found.peak_bytes,
        "step_us": found.step_us,
        "samples_us": list(found.samples_us),
    }
