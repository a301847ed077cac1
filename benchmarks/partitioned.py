"""`rekindle.compile` against eager, checkpoints, `torch.compile` and its own budget, on a GPU.

    python benchmarks/partitioned.py --out FILE [--case NAME]

Every way of every case runs in a process of its own. Budgets of Rekindle are shares of the peak
that `torch.compile` was found to have. What partitioning takes is in `partition_s`.

With `--compile-first`, all ways are compiled first, several at a time, and thrown away but for the
compiler's cache on disk, so that those that are measured start quickly. What was tuned by running
kernels beside others is forgotten, and tuned again.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from common import write
from peers import checkpoint_every_block
from steps import DEVICE, apart, built, figures, settle, share_bytes
from torch._inductor.runtime.runtime_utils import cache_dir

import rekindle
from rekindle.fx.timing import measure

_AT_ONCE = 6  # the largest take 40 GB each; two of them at most, as they are in turns
SETTINGS = (0.7, 0.5, 0.3, 0.1)  # of torch's own knob
# model, batch, and for each share of torch.compile's peak the most time it may take, of its
CASES: dict[str, tuple[str, int, dict[str, float | None]]] = {
    "resnet152_b128": ("resnet152", 128, {"70%": 1.00, "55%": None, "40%": 1.05}),
    "bert-large_b32": ("bert-large", 32, {"70%": None, "50%": 1.15, "40%": None}),
    "gpt2_b16": ("gpt2", 16, {"70%": None, "50%": 1.15, "40%": None}),
}


def run_way(name: str, way: str, budget_bytes: int | None) -> dict[str, Any]:
    """Build a model, change it in one way, and measure its step."""
    model_name, batch, _ = CASES[name]
    train_step, model, optimizer, data = built(model_name, batch)
    kind, _, setting = way.partition(" ")
    if kind == "checkpoint":
        checkpoint_every_block(model)
    elif kind == "torch.compile":
        if setting:
            torch._functorch.config.activation_memory_budget = float(setting)
        model = torch.compile(model)
    elif kind == "rekindle":
        assert budget_bytes is not None
        model = rekindle.compile(model, budget=budget_bytes, optimizer=optimizer)
    settle()
    start = time.perf_counter()
    train_step(model, optimizer, data)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"first_step_s": round(time.perf_counter() - start, 1)}
    found = measure(
        lambda: train_step(model, optimizer, data),
        device=DEVICE,
        steps=8,
        warmup=3,
    )
    row |= {**figures(found), "reserved_bytes": torch.cuda.memory_reserved()}
    if kind == "rekindle":
        plans = [planned.plan for planned in model.plans]
        forecast = max(plan.peak_bytes for plan in plans)
        row |= {
            "budget_bytes": budget_bytes,
            "holds": budget_bytes is None or found.peak_bytes <= budget_bytes,
            "forecast_peak_ratio": round(forecast / found.peak_bytes, 4),
            "partition_s": round(sum(planned.seconds for planned in model.plans), 2),
            "n_graphs": len(plans),
        }
    return row


def run_case(name: str, out: Path, rows: list[dict[str, Any]]) -> None:
    """All ways of one case, as they come."""
    _, batch, budgets = CASES[name]
    head = {"case": name, "batch": batch}

    def run(way: str, budget_bytes: int | None = None, **more: Any) -> dict[str, Any]:
        within = () if budget_bytes is None else ("--bytes", str(budget_bytes))
        found = apart(__file__, "--way", way, "--case", name, *within)
        row = {**head, "way": way, **more, **found}
        rows.append(row)
        write(out, "partitioned", rows)
        return row

    run("eager")
    reference = run("torch.compile")
    run("checkpoint every block")
    for setting in SETTINGS:
        _beside(run(f"torch.compile {setting}"), reference)
    for budget, target in budgets.items():
        if "failed" in reference:
            break
        within = share_bytes(budget, reference["peak_bytes"])
        _beside(run("rekindle", within, budget=budget, target=target), reference)
    for row in rows[-len(SETTINGS) - len(budgets) :]:
        shown = {k: v for k, v in row.items() if k not in ("samples_us", "case", "batch")}
        print(json.dumps(shown), flush=True)
    write(out, "partitioned", rows)


def compile_first(names: list[str]) -> None:
    """Fill the compiler's cache with all that the cases need."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = pool.map(lambda name: _compiled(name, "torch.compile"), names)
        peaks = {name: row.get("peak_bytes") for name, row in zip(names, found, strict=True)}
        ways: list[tuple[str, str, int | None]] = [
            (name, f"torch.compile {setting}", None) for setting in SETTINGS for name in names
        ]
        for budgets in zip_longest(*(CASES[name][2] for name in names)):
            ways += [
                (name, "rekindle", share_bytes(budget, peaks[name]))
                for name, budget in zip(names, budgets, strict=True)
                if budget and peaks[name]
            ]
        for _ in pool.map(lambda way: _compiled(*way), ways):
            pass
    for tuned in Path(cache_dir()).rglob("*.best_config"):
        tuned.unlink()


def _compiled(name: str, way: str, budget_bytes: int | None = None) -> dict[str, Any]:
    start = time.perf_counter()
    within = () if budget_bytes is None else ("--bytes", str(budget_bytes))
    row = apart(__file__, "--way", way, "--case", name, *within)
    print(f"compiled {name}, {way}, in {time.perf_counter() - start:.0f} s", flush=True)
    return row


def _beside(row: dict[str, Any], reference: dict[str, Any]) -> None:
    """Add a row's figures as shares of `torch.compile`'s."""
    if "failed" not in row and "failed" not in reference:
        row["peak_of"] = round(row["peak_bytes"] / reference["peak_bytes"], 4)
        row["time_of"] = round(row["step_us"] / reference["step_us"], 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--way", help="one way of one case, in this process")
    parser.add_argument("--bytes", type=int)
    parser.add_argument(
        "--compile-first", action="store_true", help="several at a time, unmeasured"
    )
    given = parser.parse_args()
    if given.way:
        print(json.dumps(run_way(given.case[0], given.way, given.bytes)))
        return
    if given.compile_first:
        compile_first(given.case)
    rows: list[dict[str, Any]] = []
    for name in given.case:
        run_case(name, given.out, rows)


if __name__ == "__main__":
    main()
