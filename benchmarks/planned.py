"""The planned step against the plain one and checkpoints, on a GPU: peaks and times in one run.

    python benchmarks/planned.py --out FILE [--case NAME] [--engine python cudagraph]

Each case runs in a process of its own. For each budget, a share of the plain step's measured peak:
the peak, reserved memory and time of the planned step, beside the forecast and the plain step's in
the same run. Then the same without a budget, and of the small batch with the least budget there is;
and the time from the call of `optimize` to the end of the first step. `zoo` compares the step
without a budget with the plain one for every model of the zoo; `equal` trains a few steps under
deterministic algorithms and compares every bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write
from peers import checkpoint_every_block

sys.path.insert(0, str(ROOT / "src"))

import rekindle
from rekindle import models
from rekindle.fx.cudagraph import Graphed
from rekindle.fx.timing import Measurement, measure

CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "resnet152_b128": ("resnet152", 128, ("75%", "60%", "49%", "40%", "30%")),
    "bert-large_b32": ("bert-large", 32, ("75%", "64%", "48%", "40%", "35%")),
    "bert-large_b8": ("bert-large", 8, ("90%", "76%", "60%")),
}
# The most time, of the plain step's, that a case may take at a budget.
TARGETS = {
    "resnet152_b128": {"75%": 0.99, "60%": 1.04, "49%": 1.09, "40%": 1.18},
    "bert-large_b32": {"64%": 1.08, "48%": 1.15, "40%": 1.24},
    "bert-large_b8": {"76%": 0.72},
}
ZOO = {
    **{"mlp": 256, "resnet18": 64, "resnet50": 64, "resnet152": 32, "vit": 32, "lstm": 64},
    **{"bert-base": 16, "bert-large": 8, "gpt2": 4},
}
EQUAL = [("resnet50", 64, "50%"), ("bert-base", 32, "50%"), ("vit", 64, "50%"), ("gpt2", 4, "70%")]
ALL = [*CASES, "equal", "zoo"]
DEVICE = torch.device("cuda")


def run_case(case: str, engines: list[str]) -> Iterator[dict[str, Any]]:
    """All rows of one case, as they come: plain, planned, and with checkpoints."""
    name, batch, budgets = CASES[case]

    def plainly(parts: Any) -> Measurement:
        _settle()
        return measure(lambda: parts[0](*parts[1:]), device=DEVICE, steps=8, warmup=2)

    plain = plainly(_built(name, batch))
    reserved = torch.cuda.memory_reserved()
    head = {"case": case, "model": name, "batch": batch}
    share = round(reserved / plain.peak_bytes, 4)
    yield {**head, "way": "plain", **_figures(plain), "reserved_of_peak": share}
    _settle()
    parts = _built(name, batch)  # anew: where optimizer state lies would be the plain step's doing
    captured = rekindle.capture(*parts)
    start = time.perf_counter()
    profile = rekindle.profile(captured, cache=False)
    profile_s = time.perf_counter() - start
    del captured
    for engine in engines:
        least = [_least_bytes(parts, engine, profile)] if batch < 32 else []
        for budget in (*budgets, None, *least):
            yield {**head, **_planned(parts, case, budget, engine, profile, plain)}
    yield {**head, "way": "plain, again", **_figures(plainly(parts)), "profile_s": profile_s}
    if name.startswith("bert"):
        _settle()
        start = time.perf_counter()  # as a user calls it, with nothing measured before
        step = rekindle.optimize(*parts, budget=budgets[1], engine=engines[-1])
        step(parts[3])
        torch.cuda.synchronize()
        yield {**head, "way": "first step", "seconds": time.perf_counter() - start}
        del step
    checkpoint_every_block(parts[1])
    found = plainly(parts)
    row = {**head, "way": "checkpoint every block", **_figures(found)}
    row["peak_of_plain"] = round(found.peak_bytes / plain.peak_bytes, 4)
    row["time_of_plain"] = round(found.step_us / plain.step_us, 4)
    yield row


_SHOWN = (
    *(
        "way",
        "model",
        "equal",
        "seconds",
        "case",
        "budget",
        "updates",
        "engine",
        "reason",
        "peak_of_plain",
        "time_of_plain",
    ),
    *("holds", "forecast_peak_ratio", "forecast_time_ratio", "reserved_of_peak", "target"),
)


def _built(name: str, batch: int) -> Any:
    work = models.build(name, batch=batch, precision="bf16", device="cuda")
    return work.train_step, work.model, work.optimizer, work.batch


def _least_bytes(parts: Any, engine: str, profile: Any) -> int:
    """A budget that can just be met, with the margin that plans leave."""
    try:
        rekindle.optimize(*parts, budget=1, engine=engine, profile=profile)
    except rekindle.InfeasibleBudget as error:
        return int(error.least_peak_bytes * 1.006)
    raise AssertionError("a step fits into one byte")


def _planned(
    parts: Any, case: str, budget: str | int | None, engine: str, profile: Any, plain: Measurement
) -> dict[str, Any]:
    _settle()
    start = time.perf_counter()
    within = budget
    if isinstance(budget, str):
        within = int(float(budget.rstrip("%")) / 100 * plain.peak_bytes)
    costs = None if within is None else profile
    step = rekindle.optimize(*parts, budget=within, engine=engine, profile=costs)
    seconds = time.perf_counter() - start
    for _ in range(3):
        step(parts[3])
    torch.cuda.synchronize()
    runs = step.captured._first.engine
    reserved = torch.cuda.memory_reserved()
    found = measure(lambda: step(parts[3]), device=DEVICE, steps=8, warmup=1)
    is_graphed = isinstance(runs, Graphed)
    peak = max(found.peak_bytes, runs.peak_bytes if is_graphed else 0)
    found_row = {
        "way": "planned",
        "budget": budget if isinstance(budget, str) else "none" if budget is None else "least",
        "engine": engine,
        "reason": runs.reason if is_graphed else "",
        "budget_bytes": step.budget_bytes,
        "holds": within is None or peak <= within,
        "updates": sum(op.target == "rekindle.update" for op in step.graph.ops),
        "optimize_s": round(seconds, 2),
        **_figures(found),
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "peak_of_plain": round(peak / plain.peak_bytes, 4),
        "time_of_plain": round(found.step_us / plain.step_us, 4),
        "target": TARGETS[case].get(str(budget)),
        "reserved_of_peak": round(reserved / peak, 4),
    }
    plan, trace = step.plan, step.trace
    if plan is not None and trace is not None:
        found_row |= {
            "forecast": {"peak_bytes": trace.peak_bytes, "step_us": trace.step_us},
            "bound_us": plan.bound_us,
            "forecast_peak_ratio": round(trace.peak_bytes / peak, 4),
            "forecast_time_ratio": round(trace.step_us / found.step_us, 4),
        }
    return found_row


def _figures(found: Measurement) -> dict[str, Any]:
    return {
        "peak_bytes": found.peak_bytes,
        "step_us": found.step_us,
        "samples_us": list(found.samples_us),
    }


def _settle() -> None:
    """What was there before must not count: drop it, and let the allocator forget it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def without_budget(name: str, batch: int) -> dict[str, Any]:
    """The plain step and the same through `optimize`, with nothing dropped."""
    work = models.build(name, batch=batch, precision="bf16", device="cuda")
    parts = (work.train_step, work.model, work.optimizer, work.batch)
    _settle()
    plain = measure(lambda: work.train_step(*parts[1:]), device=DEVICE, steps=12, warmup=3)
    _settle()
    step = rekindle.optimize(*parts)
    for _ in range(3):
        step(work.batch)
    found = step.measure(work.batch, steps=12)
    row = {
        "way": "without a budget",
        "model": name,
        "batch": batch,
        "plain": _figures(plain),
        "found": _figures(found),
        "peak_of_plain": round(found.peak_bytes / plain.peak_bytes, 4),
        "time_of_plain": round(found.step_us / plain.step_us, 4),
        "reserved_of_peak": round(torch.cuda.memory_reserved() / found.peak_bytes, 4),
    }
    return row


def equal(name: str, batch: int, budget: str, engine: str) -> dict[str, Any]:
    """Whether a planned training ends with the plain one's bits."""
    torch.use_deterministic_algorithms(True)
    try:
        work = models.build(name, batch=batch, precision="bf16", device="cuda")
        parts = (work.train_step, work.model, work.optimizer, work.batch)
        found = rekindle.verify(*parts, budget=budget, steps=5, engine=engine)
    finally:
        torch.use_deterministic_algorithms(False)
    return {
        "way": "equal",
        "model": name,
        "batch": batch,
        "budget": budget,
        "engine": engine,
        "equal": found.equal,
        "differences": list(found.differences[:8]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--engine", nargs="+", default=["cudagraph"])
    parser.add_argument("--alone", action="store_true", help="one case, in this process")
    given = parser.parse_args()
    if given.alone:
        rows: list[dict[str, Any]] = []
        for row in _rows(given.case[0], given.engine):
            rows.append(row)
            write(given.out, "planned", rows)  # a run that is stopped leaves what it has
            shown = {key: value for key, value in row.items() if key in _SHOWN}
            print(json.dumps(shown), flush=True)
        return
    rows = []
    for case in given.case:
        out = given.out.with_suffix(f".{case}.json")
        command = [sys.executable, __file__, "--alone", "--case", case, "--out", str(out)]
        done = subprocess.run([*command, "--engine", *given.engine], check=False)
        if out.exists():
            rows += json.loads(out.read_text())["cases"]
            out.unlink()
        if done.returncode:
            rows.append({"case": case, "failed": done.returncode})
        write(given.out, "planned", rows)


def _rows(case: str, engines: list[str]) -> Iterator[dict[str, Any]]:
    if case == "equal":
        yield from (equal(*each, engine=name) for each in EQUAL for name in engines)
    elif case == "zoo":
        yield from (without_budget(*each) for each in ZOO.items())
    else:
        yield from run_case(case, engines)


if __name__ == "__main__":
    main()
