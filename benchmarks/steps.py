"""What benchmarks of steps on a GPU share: how they are built and measured, and their figures."""

from __future__ import annotations

import atexit
import gc
import json
import os
import subprocess
import sys
import time
from typing import Any

import torch
from common import ROOT

sys.path.insert(0, str(ROOT / "src"))

import rekindle
from rekindle import models
from rekindle.engines.cudagraph.graph_engine import CudaGraphEngine
from rekindle.measuring.timing import Measurement, measure

DEVICE = torch.device("cuda")


def built(name: str, batch: int) -> Any:
    """A model of the zoo as (train_step, model, optimizer, batch), with nothing else around."""
    settle()
    work = models.build(name, batch=batch, precision="bf16", device="cuda")
    return work.train_step, work.model, work.optimizer, work.batch


def settle() -> None:
    """What was there before must not count: drop it, and let the allocator forget it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def figures(found: Measurement) -> dict[str, Any]:
    """A measurement as data, with its raw samples."""
    return {
        "peak_bytes": found.peak_bytes,
        "step_us": found.step_us,
        "samples_us": list(found.samples_us),
    }


def share_bytes(budget: str | int | None, of_bytes: int) -> int | None:
    """A budget in bytes; text is a share."""
    if isinstance(budget, str):
        return int(float(budget.rstrip("%")) / 100 * of_bytes)
    return budget


def apart(script: str, *arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """What a script prints as JSON in its last line, run in a process of its own.

    The process has its imports done already, unless it gets variables of its own. While it works,
    the next one does them: a GPU's time is dear.
    """
    if env is None:
        process = _waiting.pop() if _waiting else _wait()
        _waiting.append(_wait())
        said, errors = process.communicate(json.dumps([script, *arguments]) + "\n")
        code = process.returncode
    else:
        command = [sys.executable, script, *arguments]
        done = subprocess.run(
            command, env={**os.environ, **env}, capture_output=True, text=True, check=False
        )
        said, errors, code = done.stdout, done.stderr, done.returncode
    lines = said.strip().splitlines()
    if code or not lines:
        return {"failed": errors[-2000:]}
    return dict(json.loads(lines[-1]))


_IMPORTED = ("torchvision.models", "transformers.models.bert.modeling_bert", "torch._inductor")
_WAIT = f"""
import contextlib, importlib, json, runpy, sys
sys.path[:0] = {[str(ROOT / "benchmarks"), str(ROOT / "src")]!r}
for name in {("steps", *_IMPORTED)!r}:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
told = sys.stdin.readline()
if told:
    sys.argv = json.loads(told)
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
_waiting: list[subprocess.Popen[str]] = []


def _wait() -> subprocess.Popen[str]:
    """A process that waits to be told what to run."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", _WAIT], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


@atexit.register
def _end_waiting() -> None:
    while _waiting:
        _waiting.pop().communicate("")


def planned(
    parts: Any, within: int | None, engine: str, profile: Any
) -> tuple[rekindle.TrainStep, Measurement, dict[str, Any]]:
    """A step within a budget: itself, what it takes, and its row, forecast beside measured."""
    settle()
    start = time.perf_counter()
    costs = None if within is None else profile
    step = rekindle.optimize(*parts, budget=within, engine=engine, profile=costs)
    seconds = time.perf_counter() - start
    for _ in range(3):
        step(parts[3])
    torch.cuda.synchronize()
    runs = step.captured.first.engine
    reserved = torch.cuda.memory_reserved()
    found = measure(lambda: step(parts[3]), device=DEVICE, steps=8, warmup=1)
    is_graphed = isinstance(runs, CudaGraphEngine)
    peak = max(found.peak_bytes, runs.peak_bytes if is_graphed else 0)
    row = {
        "way": "planned",
        "engine": engine,
        "reason": runs.reason if is_graphed else "no graphs",
        "budget_bytes": step.budget_bytes,
        "holds": within is None or peak <= within,
        "optimize_s": round(seconds, 2),
        **figures(found),
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "reserved_of_peak": round(reserved / peak, 4),
    }
    trace = step.trace
    if trace is not None:
        row |= {
            "forecast": {"peak_bytes": trace.peak_bytes, "step_us": trace.step_us},
            "forecast_peak_ratio": round(trace.peak_bytes / peak, 4),
            "forecast_time_ratio": round(trace.step_us / found.step_us, 4),
        }
    return step, found, row
