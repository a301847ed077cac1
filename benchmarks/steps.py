"""What benchmarks of steps on a GPU share: building and measuring them, one case a process."""

from __future__ import annotations

import atexit
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write

sys.path.insert(0, str(ROOT / "src"))

import rekindle
from rekindle import models
from rekindle.measuring.timing import Measurement, measure

DEVICE = torch.device("cuda")


def built(name: str, batch: int) -> Any:
    """A model of the zoo as (train_step, model, optimizer, batch), on an otherwise empty GPU."""
    settle()
    work = models.build(name, batch=batch, precision="bf16", device="cuda")
    return work.train_step, work.model, work.optimizer, work.batch


def settle() -> None:
    """Free all garbage and the allocator's cache, so that they do not count."""
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
    """A budget in bytes; text is a share of `of_bytes`."""
    if isinstance(budget, str):
        return int(float(budget.rstrip("%")) / 100 * of_bytes)
    return budget


def apart(script: str, *arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """What a script prints as JSON in its last line, run in its own process.

    Unless it needs other environment variables, the process is one that has done its imports
    already, while the previous one was running: GPU time is expensive.
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


def run_alone(name: str, rows: Iterator[dict[str, Any]], out: Path, shown: Sequence[str]) -> None:
    """Write the rows of one case as they come, so that a stopped run leaves what it has."""
    found: list[dict[str, Any]] = []
    for row in rows:
        found.append(row)
        write(out, name, found)
        print(json.dumps({key: row[key] for key in row if key in shown}), flush=True)


def run_each_apart(script: str, name: str, cases: Sequence[str], out: Path, *options: str) -> None:
    """Run each case of a benchmark in its own process, and collect the rows."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        part = out.with_suffix(f".{case}.json")
        command = [sys.executable, script, "--alone", "--case", case, "--out", str(part), *options]
        done = subprocess.run(command, check=False)
        if part.exists():
            rows += json.loads(part.read_text())["cases"]
            part.unlink()
        if done.returncode:
            rows.append({"case": case, "failed": done.returncode})
        write(out, name, rows)


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
    """A process that has done its imports and waits for a script to run."""
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
    """A step within a budget, its measurement, and a row with the forecast next to it."""
    settle()
    start = time.perf_counter()
    costs = None if within is None else profile
    step = rekindle.optimize(*parts, budget=within, engine=engine, profile=costs)
    seconds = time.perf_counter() - start
    for _ in range(3):
        step(parts[3])
    torch.cuda.synchronize()
    runs = step.engine_info
    reserved = torch.cuda.memory_reserved()
    found = measure(lambda: step(parts[3]), device=DEVICE, steps=8, warmup=1)
    peak = max(found.peak_bytes, runs.graphs_peak_bytes)
    row = {
        "way": "planned",
        "engine": engine,
        "reason": runs.reason,
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
