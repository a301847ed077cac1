"""Benchmarks the planned step against the plain one and checkpointing, on a GPU.

    python benchmarks/planned.py --out FILE [--case NAME] [--engine python cudagraph]

Each case runs in its own process. Budgets are shares of the plain step's measured peak. For each,
the rows have the peak, reserved memory and time of the planned step, the forecast, and the plain
step of the same run. Further rows are without a budget, for the small batch with the least feasible
budget, and the time from the call of `optimize` to the end of the first step. `zoo` compares the
step without a budget with the plain one for every model of the zoo; `equal` trains a few steps
under deterministic algorithms and compares every bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from steps import DEVICE, built, figures, planned, run_alone, run_each_apart, settle, share_bytes

import rekindle
from rekindle import models
from rekindle.measuring.timing import Measurement, measure
from rekindle.studies.peers import checkpoint_every_block

CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "resnet152_b128": ("resnet152", 128, ("75%", "60%", "49%", "40%", "30%")),
    "bert-large_b32": ("bert-large", 32, ("75%", "64%", "48%", "40%", "35%")),
    "bert-large_b8": ("bert-large", 8, ("90%", "76%", "60%")),
}
# The time that a case may take at a budget, at most, relative to the plain step.
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


def run_case(case: str, engines: list[str]) -> Iterator[dict[str, Any]]:
    """All rows of one case, as they come: plain, planned, and with checkpoints."""
    name, batch, budgets = CASES[case]

    def plainly(parts: Any) -> Measurement:
        settle()
        return measure(lambda: parts[0](*parts[1:]), device=DEVICE, steps=8, warmup=2)

    plain = plainly(built(name, batch))
    reserved = torch.cuda.memory_reserved()
    head = {"case": case, "model": name, "batch": batch}
    share = round(reserved / plain.peak_bytes, 4)
    yield {**head, "way": "plain", **figures(plain), "reserved_of_peak": share}
    settle()
    parts = built(name, batch)  # new: the plain step has placed its optimizer state
    captured = rekindle.capture(*parts)
    start = time.perf_counter()
    profile = rekindle.profile(captured, cache=False)
    profile_s = time.perf_counter() - start
    del captured
    for engine in engines:
        least = [_least_bytes(parts, engine, profile)] if batch < 32 else []
        for budget in (*budgets, None, *least):
            yield {**head, **_planned(parts, case, budget, engine, profile, plain)}
    yield {**head, "way": "plain, again", **figures(plainly(parts)), "profile_s": profile_s}
    if name.startswith("bert"):
        settle()
        start = time.perf_counter()  # as a user calls it, with nothing measured before
        step = rekindle.optimize(*parts, budget=budgets[1], engine=engines[-1])
        step(parts[3])
        torch.cuda.synchronize()
        yield {**head, "way": "first step", "seconds": time.perf_counter() - start}
        del step
    checkpoint_every_block(parts[1])
    found = plainly(parts)
    row = {**head, "way": "checkpoint every block", **figures(found)}
    row["peak_of_plain"] = round(found.peak_bytes / plain.peak_bytes, 4)
    row["time_of_plain"] = round(found.step_us / plain.step_us, 4)
    yield row


_SHOWN = (
    *("way", "model", "equal", "seconds", "case", "budget", "updates", "engine", "reason"),
    *("peak_of_plain", "time_of_plain"),
    *("holds", "forecast_peak_ratio", "forecast_time_ratio", "reserved_of_peak", "target"),
)


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
    within = share_bytes(budget, plain.peak_bytes)
    step, found, row = planned(parts, within, engine, profile)
    return {
        **row,
        "budget": budget if isinstance(budget, str) else "none" if budget is None else "least",
        "updates": sum(op.kind.name == "UPDATE" for op in step.graph.ops),
        "bound_us": step.plan and step.plan.bound_us,
        "peak_of_plain": round(row["peak_bytes"] / plain.peak_bytes, 4),
        "time_of_plain": round(found.step_us / plain.step_us, 4),
        "target": TARGETS[case].get(str(budget)),
    }


def without_budget(name: str, batch: int) -> dict[str, Any]:
    """The plain step and the same through `optimize`, with nothing dropped."""
    work = models.build(name, batch=batch, precision="bf16", device="cuda")
    parts = (work.train_step, work.model, work.optimizer, work.batch)
    settle()
    plain = measure(lambda: work.train_step(*parts[1:]), device=DEVICE, steps=12, warmup=3)
    settle()
    step = rekindle.optimize(*parts)
    for _ in range(3):
        step(work.batch)
    found = step.measure(work.batch, steps=12)
    row = {
        "way": "without a budget",
        "model": name,
        "batch": batch,
        "plain": figures(plain),
        "found": figures(found),
        "peak_of_plain": round(found.peak_bytes / plain.peak_bytes, 4),
        "time_of_plain": round(found.step_us / plain.step_us, 4),
        "reserved_of_peak": round(torch.cuda.memory_reserved() / found.peak_bytes, 4),
    }
    return row


def equal(name: str, batch: int, budget: str, engine: str) -> dict[str, Any]:
    """True in `equal` if a planned training ends with the plain one's bits."""
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
        run_alone("planned", _rows(given.case[0], given.engine), given.out, _SHOWN)
    else:
        run_each_apart(__file__, "planned", given.case, given.out, "--engine", *given.engine)


def _rows(case: str, engines: list[str]) -> Iterator[dict[str, Any]]:
    if case == "equal":
        yield from (equal(*each, engine=name) for each in EQUAL for name in engines)
    elif case == "zoo":
        yield from (without_budget(*each) for each in ZOO.items())
    else:
        yield from run_case(case, engines)


if __name__ == "__main__":
    main()
