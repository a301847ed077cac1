"""A sweep over batch sizes: plain steps, planned ones, and those of other memory techniques.

A case is a model at one batch size, run in one way. Each runs in a process of its own and leaves a
record: running out of memory is a result, and any other error is recorded, too. Cases that have a
record are not run again.
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
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rekindle
from rekindle import models
from rekindle.captured_step import TrainStep
from rekindle.core.files import in_one_line
from rekindle.engines.select_engine import check_engine
from rekindle.errors import InfeasibleBudget, ReportError
from rekindle.measuring.measure import device_name
from rekindle.measuring.timing import Measurement, measure, resident_tensors
from rekindle.models.load import split_spec
from rekindle.models.workload import check_settings
from rekindle.models.zoo.catalog import find
from rekindle.planners.registry import find_planner
from rekindle.report.data import JSON_SCHEMA
from rekindle.report.sweep_check import check_record, check_sweep
from rekindle.report.sweep_report import (
    CHECKPOINT,
    COMPILE,
    DONE,
    FAILED,
    OUT_OF_MEMORY,
    PLAIN,
    PLANNED,
    Record,
    case_in_words,
    sweep_data,
)
from rekindle.studies import peers
from rekindle.studies.isolated_process import Ended, Worker, read_json, serve, write_atomically
from rekindle.studies.model_runs import check_can_run, named
from rekindle.units import format_bytes

SHARES = (0.8, 0.5, 0.2)
"""The shares of the activations that `torch.compile` may keep, in comparisons."""
SWEEP_FILE = "sweep.json"
_CASES = "cases"
_START = "from rekindle.studies.sweep import run_case_process; run_case_process()"
_PATIENCE_S = 10.0
_WARM_UP_STEPS = 2
_PACKAGES = ("rekindle", "torch", "torchvision", "transformers", "numpy", "triton")
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its batch size and how it is run; settings that this way does not have are None.

    `share` is the share of the activations that `torch.compile` may keep; `source` is the hash of a
    user's own file.
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
        """A readable name that no other case has."""
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        within = self.budget or (None if self.share is None else str(self.share))
        readable = "-".join(part for part in (f"b{self.batch}", self.way, within) if part)
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', readable)}-{digest}.json"


def run_case(case: Case, when_ready: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Run a case in this process; the record has what was measured, or what went wrong.

    `when_ready` is called after the first step, before measuring.
    """
    record: dict[str, Any] = {"case": asdict(case), "status": DONE, "kind": None, "message": None}
    try:
        record |= _measured(case, when_ready)
    except Exception as error:
        record |= _status_of_error(error)
    return record | {"environment": _environment(case)}


def run_alone(case: Case, target: Path) -> Record:
    """Run a case in a process of its own, which leaves its record at `target`."""
    target.unlink(missing_ok=True)
    here = str(Path(rekindle.__file__).parents[1])
    paths = os.pathsep.join(path for path in (here, os.environ.get("PYTHONPATH")) if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    worker = Worker(["-P", "-c", _START], patience_s=_PATIENCE_S, env=environment)
    record = worker.perform(asdict(case), target)
    if isinstance(record, Ended):
        record = _record_of_the_ended(case, record)
        write_atomically(target, record)
    return record


def _record_of_the_ended(case: Case, ended: Ended) -> dict[str, Any]:
    """The record of a process that left none; one that was killed most likely ran out of memory."""
    code, said = ended
    record = {"case": asdict(case), "status": FAILED, "traceback": said, "environment": None}
    if code == -signal.SIGKILL:
        message = "the process was killed: there was no memory left for it, most likely"
        return {**record, "status": OUT_OF_MEMORY, "kind": "killed", "message": message}
    reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    last = said.splitlines()[-1] if said else "it printed nothing"
    return {**record, "kind": reason, "message": f"the process ended with {reason}: {last}"}


def run_case_process() -> None:
    """The process of one case."""
    serve(lambda request, save: run_case(Case(**request)))


def sweep_cases(
    model: str,
    batches: Sequence[int],
    budgets: Sequence[str],
    *,
    with_peers: bool,
    settings: Mapping[str, Any],
) -> list[Case]:
    """All cases of a sweep; settings that cannot be run are refused before the work starts."""
    check_engine(settings["engine"])
    find_planner(settings["planner"])
    common = _checked_settings(model, settings)
    ways: list[dict[str, Any]] = [{"way": PLAIN}]
    plan = {"engine": settings["engine"], "planner": settings["planner"]}
    ways += [{"way": PLANNED, "budget": each, **plan} for each in budgets]
    if with_peers:
        ways += [{"way": CHECKPOINT}, {"way": COMPILE}]
        ways += [{"way": COMPILE, "share": share} for share in SHARES]
    return [Case(batch=batch, **common, **way) for batch in batches for way in ways]


def _checked_settings(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that all cases share."""
    check_can_run(model, settings["device"])
    common = {name: settings[name] for name in ("precision", "device", "steps", "cap_bytes")}
    asked = {name: common[name] for name in ("precision", "device")}
    check_settings(**{name: value for name, value in asked.items() if value is not None})
    if ":" in model or model.endswith(".py"):
        path, _ = split_spec(model)
        common["source"] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    else:
        find(model)
        common["device"] = common["device"] or "cpu"
    return {"model": model, **common}


def run_sweep(
    cases: Sequence[Case],
    settings: Mapping[str, Any],
    folder: Path,
    *,
    again: bool,
    tell: Callable[[str, int, int], None],
    run: Callable[[Case, Path], Record],
) -> bool:
    """Run the cases without a record, and write the sweep after each; False if interrupted.

    `tell` gets the next case in words, and how many are done and left; `run` runs a case.
    """
    (folder / _CASES).mkdir(parents=True, exist_ok=True)
    for case in cases if again else ():
        (folder / _CASES / case.file_name).unlink(missing_ok=True)
    found = {case: _kept(folder, case) for case in cases}

    def write() -> None:
        records = [record for record in found.values() if record is not None]
        content = {"schema": JSON_SCHEMA, **sweep_data(settings, records)}
        write_atomically(folder / SWEEP_FILE, content)

    write()
    left = [case for case, record in found.items() if record is None]
    kept = len(cases) - len(left)
    try:
        for place, case in enumerate(left):
            tell(case_in_words(asdict(case)), kept + place, len(left) - place)
            found[case] = run(case, folder / _CASES / case.file_name)
            write()
    except KeyboardInterrupt:
        found |= {case: found[case] or _kept(folder, case) for case in left}
        write()  # the interrupted case may just have ended
        return False
    tell("done", len(cases), 0)
    return True


def _kept(folder: Path, case: Case) -> Record | None:
    """The record of a case that need not run; failed cases run again."""
    record = read_json(folder / _CASES / case.file_name)
    if record is None or record.get("case") != asdict(case):
        return None
    try:
        check_record(record)
    except (ValueError, KeyError, TypeError):
        return None  # damaged: it runs again
    return None if record["status"] == FAILED else record


def read_sweep(folder: Path) -> dict[str, Any]:
    """The sweep that was written into a folder."""
    found = read_json(folder / SWEEP_FILE) or {}
    cases = found.get("cases")
    if not isinstance(cases, list) or not cases:
        message = f"there is no sweep in {folder}: run one with rekindle sweep MODEL first."
        raise ReportError(message)
    try:
        check_sweep(found)
    except (ValueError, KeyError, TypeError) as error:
        path, problem = folder / SWEEP_FILE, in_one_line(error)
        raise ReportError(f"{path} is not a sweep, or is damaged ({problem}).") from error
    return found


def _measure(step: Any, work: models.Workload, steps: int) -> Measurement:
    if isinstance(step, TrainStep):
        return step.measure(work.batch, steps)
    return measure(
        partial(step, work.batch),
        device=torch.device(work.device),
        steps=steps,
        warmup=_WARM_UP_STEPS,
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
        step = _prepared(case, work)
        step(work.batch)
        if on_cuda:
            torch.cuda.synchronize(device)
        setup_s = time.perf_counter() - start
        when_ready()
        start = time.perf_counter()
        found = _measure(step, work, case.steps)
        measuring_s = time.perf_counter() - start
    if case.cap_bytes is not None and found.peak_bytes > case.cap_bytes:
        took, may = format_bytes(found.peak_bytes), format_bytes(case.cap_bytes)
        message = f"took {took}, and may take {may}"
        return {"status": OUT_OF_MEMORY, "kind": "above the cap", "message": message}
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
        **_planned_facts(step, found.peak_bytes),
    }


def _prepared(case: Case, work: models.Workload) -> Any:
    """The step that takes a batch, prepared in the way of the case."""
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
    """The forecast and the budget; None for a step without a plan."""
    trace = step.trace if isinstance(step, TrainStep) else None
    budget_bytes = step.budget_bytes if isinstance(step, TrainStep) else None
    return {
        "forecast": {"peak_bytes": trace.peak_bytes, "step_us": trace.step_us} if trace else None,
        "budget_bytes": budget_bytes,
        "is_within_budget": None if budget_bytes is None else peak_bytes <= budget_bytes,
    }


def _cap_memory(case: Case) -> None:
    """Limit the GPU's allocator to the cap; the CPU's has no limit to set."""
    device = _gpu(case)
    if case.cap_bytes is None or device is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, case.cap_bytes / total), device)


def _gpu(case: Case) -> torch.device | None:
    """The GPU that a case may use: without a device, a user's function may choose one."""
    if case.device == "cpu" or not torch.cuda.is_available():
        return None
    device = torch.device(case.device or "cuda")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _status_of_error(error: Exception) -> dict[str, Any]:
    """The status of a case that raised: out of memory, or failed."""
    if isinstance(error, InfeasibleBudget):
        least = {"least_peak_bytes": error.least_peak_bytes, "budget_bytes": error.budget_bytes}
        kind = type(error).__name__
        return {"status": OUT_OF_MEMORY, "kind": kind, "message": str(error), **least}
    cause = next((each for each in _chain(error) if _is_out_of_memory(each)), None)
    if cause is not None:
        first = str(cause).strip().splitlines()[:1]
        kind = type(cause).__name__
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


def _is_out_of_memory(error: BaseException) -> bool:
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
