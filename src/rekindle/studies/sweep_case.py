"""One case of a sweep, in a process of its own: a model at one batch size, run in one way.

The process gets the case as JSON and leaves one record. Whatever goes wrong is in it: memory that
does not suffice is a result, and any other error says what it was.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import rekindle
from rekindle import models
from rekindle.errors import InfeasibleBudget
from rekindle.measuring.measure import device_name
from rekindle.measuring.timing import Measurement, measure, resident_tensors
from rekindle.report.sweep_report import (
    CHECKPOINT,
    COMPILE,
    DONE,
    FAILED,
    OUT_OF_MEMORY,
    PLANNED,
)
from rekindle.studies import peers
from rekindle.studies.model_runs import named
from rekindle.train_step import TrainStep
from rekindle.units import format_bytes

_WARM_UP = 2
_PACKAGES = ("rekindle", "torch", "torchvision", "transformers", "numpy", "triton")
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Case:
    """What is run. A setting that does not matter for the way it runs is None.

    `share` is what `torch.compile` may keep of the activations; `source` tells one version of a
    user's own file from the next.
    """

    model: str
    batch: int
    way: str
    steps: int
    precision: str | None = None
    device: str | None = None
    budget: str | None = None
    engine: str | None = None
    planner: str | None = None
    share: float | None = None
    cap_bytes: int | None = None
    source: str | None = None

    @property
    def file_name(self) -> str:
        """A name that can be read, and that no other case has."""
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        within = self.budget or (None if self.share is None else str(self.share))
        readable = "-".join(part for part in (f"b{self.batch}", self.way, within) if part)
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', readable)}-{digest}.json"


def run_case(case: Case, when_ready: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Run a case; the record has what was measured, or what went wrong.

    `when_ready` is called once the step has run for the first time, before it is measured.
    """
    record: dict[str, Any] = {"case": asdict(case), "status": DONE, "kind": None, "message": None}
    try:
        record |= _measured(case, when_ready)
    except Exception as error:
        record |= _what_went_wrong(error)
    return record | {"environment": _environment(case)}


def write_atomically(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that the file is there as a whole, or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


class _Ready(NamedTuple):
    """A step that can be trained with, and the parts it was made of."""

    step: Any
    work: models.Workload

    def measure(self, steps: int) -> Measurement:
        work = self.work
        if isinstance(self.step, TrainStep):
            return self.step.measure(work.batch, steps)
        return measure(
            partial(self.step, work.batch),
            device=torch.device(work.device),
            steps=steps,
            warmup=_WARM_UP,
            resident=lambda: resident_tensors(work.model, work.optimizer, work.batch),
        )


def _measured(case: Case, when_ready: Callable[[], object]) -> dict[str, Any]:
    _cap_memory(case)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    asked = {"batch": case.batch, "precision": case.precision, "device": case.device}
    work = models.load(case.model, **asked)  # type: ignore[arg-type]
    device = torch.device(work.device)
    on_cuda = device.type == "cuda"
    gc.collect()
    with named(case.model):
        start = time.perf_counter()
        ready = _Ready(_prepared(case, work), work)
        ready.step(work.batch)
        if on_cuda:
            torch.cuda.synchronize(device)
        setup_s = time.perf_counter() - start
        when_ready()
        start = time.perf_counter()
        found = ready.measure(case.steps)
        measuring_s = time.perf_counter() - start
    if case.cap_bytes is not None and found.peak_bytes > case.cap_bytes:
        return _above_the_cap(found.peak_bytes, case.cap_bytes)
    return {
        "device": device_name(device),
        "precision": work.precision,
        "peak_bytes": found.peak_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if on_cuda else None,
        "step_us": found.step_us,
        "samples_us": list(found.samples_us),
        "samples_per_s": (work.batch_size or case.batch) / found.step_us * 1e6,
        "setup_s": setup_s,
        "measuring_s": measuring_s,
        **_planned_facts(ready.step, found.peak_bytes),
    }


def _prepared(case: Case, work: models.Workload) -> Any:
    """The step that takes a batch, made as this way makes it."""
    parts = (work.train_step, work.model, work.optimizer, work.batch)
    if case.way == PLANNED:
        how = {"planner": case.planner or "auto", "engine": case.engine or "auto"}
        return rekindle.optimize(*parts, budget=case.budget, **how)  # type: ignore[arg-type]
    model = work.model
    if case.way == CHECKPOINT:
        peers.checkpoint_every_block(model)
    elif case.way == COMPILE:
        model = peers.compiled(model, case.share)
    return partial(work.train_step, model, work.optimizer)


def _planned_facts(step: Any, peak_bytes: int) -> dict[str, Any]:
    """The forecast and the budget, of a step that has them."""
    trace = step.trace if isinstance(step, TrainStep) else None
    budget_bytes = step.budget_bytes if isinstance(step, TrainStep) else None
    return {
        "forecast": {"peak_bytes": trace.peak_bytes, "step_us": trace.step_us} if trace else None,
        "budget_bytes": budget_bytes,
        "is_within_budget": None if budget_bytes is None else peak_bytes <= budget_bytes,
    }


def _cap_memory(case: Case) -> None:
    """Let the allocator hand out no more than the cap, on a GPU; the CPU's cannot be told."""
    device = _gpu(case)
    if case.cap_bytes is None or device is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, case.cap_bytes / total), device)


def _gpu(case: Case) -> torch.device | None:
    """The GPU that a case may use: a user's function that is told of no device may choose one."""
    if case.device == "cpu" or not torch.cuda.is_available():
        return None
    device = torch.device(case.device or "cuda")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _above_the_cap(peak_bytes: int, cap_bytes: int) -> dict[str, Any]:
    message = f"took {format_bytes(peak_bytes)}, and may take {format_bytes(cap_bytes)}"
    return {"status": OUT_OF_MEMORY, "kind": "above the cap", "message": message}


def _what_went_wrong(error: Exception) -> dict[str, Any]:
    """Whether memory did not suffice, or what else happened."""
    if isinstance(error, InfeasibleBudget):
        least = {"least_peak_bytes": error.least_peak_bytes, "budget_bytes": error.budget_bytes}
        kind = type(error).__name__
        return {"status": OUT_OF_MEMORY, "kind": kind, "message": str(error), **least}
    shortage = next((each for each in _chain(error) if _is_shortage(each)), None)
    if shortage is not None:
        first = str(shortage).strip().splitlines()[:1]
        kind = type(shortage).__name__
        return {"status": OUT_OF_MEMORY, "kind": kind, "message": first[0] if first else kind}
    return {
        "status": FAILED,
        "kind": type(error.__cause__ or error).__name__,
        "message": str(error) or type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
    }


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def _environment(case: Case) -> dict[str, Any]:
    """The machine and the versions that a record belongs to."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions |= {"rekindle": rekindle.__version__, "torch": str(torch.__version__)}
    device, gpu = _gpu(case), None
    if device is not None:
        properties = torch.cuda.get_device_properties(device)
        gpu = {"name": properties.name, "total_bytes": properties.total_memory}
        versions["cuda"] = str(torch.version.cuda)
    cpu = {"machine": platform.machine(), "threads": torch.get_num_threads()}
    return {"gpu": gpu, "cpu": cpu, "versions": versions}


def main() -> None:
    """Run the case that the first argument describes; the record goes to the second."""
    settings, target = sys.argv[1:]
    write_atomically(Path(target), run_case(Case(**json.loads(settings))))
