"""The planned step against the plain one, on a GPU: does the budget hold, and what does it cost?

    python benchmarks/planned.py --out FILE [--case NAME]

For each case and budget: the measured peak and time of the plain step and of the planned one in
the same run, beside the forecast; and whether a training of a few steps under deterministic
algorithms ends with the same bits.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write

sys.path.insert(0, str(ROOT / "src"))

import rekindle
from rekindle import models
from rekindle.fx.timing import measure

CASES = [
    ("resnet152", 128, ("75%", "60%", "49%", "40%")),
    ("bert-large", 32, ("64%", "48%", "40%")),
    ("bert-large", 8, ("76%",)),
]
EQUAL = [("resnet50", 64, "50%"), ("bert-base", 32, "50%"), ("vit", 64, "50%"), ("gpt2", 4, "70%")]


def run_case(name: str, batch: int, budgets: tuple[str, ...]) -> list[dict[str, Any]]:
    device = torch.device("cuda")
    gc.collect()  # what the case before left behind would count as memory of this one
    torch.cuda.empty_cache()
    work = models.build(name, batch=batch, precision="bf16", device="cuda")
    parts = (work.train_step, work.model, work.optimizer, work.batch)
    plain = measure(lambda: work.train_step(*parts[1:]), device=device, steps=8, warmup=3)
    profile = rekindle.profile(rekindle.capture(*parts))
    rows = []
    for budget in budgets:
        gc.collect()
        torch.cuda.empty_cache()
        start = time.perf_counter()
        step = rekindle.optimize(*parts, budget=budget, profile=profile)
        seconds = time.perf_counter() - start
        plan, trace = step.plan, step.trace
        assert plan is not None
        assert trace is not None
        found = measure(lambda s=step: s(work.batch), device=device, steps=8, warmup=3)  # type: ignore[misc]
        again = measure(lambda: work.train_step(*parts[1:]), device=device, steps=4, warmup=1)
        peak, plain_peak = found.peak_bytes or 0, plain.peak_bytes or 1
        row = {
            "model": name,
            "batch": batch,
            "budget": budget,
            "budget_bytes": plan.budget_bytes,
            "holds": peak <= plan.budget_bytes,
            "optimize_s": round(seconds, 2),
            "plain": {"peak_bytes": plain_peak, "samples_us": plain.samples_us},
            "plain_again_us": again.samples_us,
            "planned": {"peak_bytes": peak, "samples_us": found.samples_us},
            "forecast": {"peak_bytes": plan.peak_bytes, "step_us": trace.step_us},
            "peak_of_plain": round(peak / plain_peak, 4),
            "time_of_plain": round(found.step_us / plain.step_us, 4),
            "forecast_peak_ratio": round(plan.peak_bytes / peak, 4),
            "forecast_time_ratio": round(trace.step_us / found.step_us, 4),
        }
        print(
            f"{name:>10} ×{batch:<4} {budget:>4}  peak {row['peak_of_plain']:.3f} of plain "
            f"(holds: {row['holds']}, forecast ×{row['forecast_peak_ratio']})  time "
            f"×{row['time_of_plain']:.3f} (forecast ×{row['forecast_time_ratio']})  {seconds:.1f} s"
        )
        rows.append(row)
    return rows


def equal(name: str, batch: int, budget: str) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    try:
        work = models.build(name, batch=batch, precision="bf16", device="cuda")
        parts = (work.train_step, work.model, work.optimizer, work.batch)
        found = rekindle.verify(*parts, budget=budget, steps=3)
    finally:
        torch.use_deterministic_algorithms(False)
    print(f"{name:>10} ×{batch:<4} {budget:>4}  equal: {found.equal} {found.differences[:3]}")
    return {"model": name, "batch": batch, "budget": budget, "equal": found.equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", help="only models of this name")
    given = parser.parse_args()
    chosen = [case for case in CASES if given.case in (None, case[0])]
    same = [equal(*case) for case in EQUAL if given.case in (None, case[0])]
    rows = [row for case in chosen for row in run_case(*case)]
    write(given.out, "planned", [*same, *rows])


if __name__ == "__main__":
    main()
