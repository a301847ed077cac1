"""Benchmarks the captured step against the plain function: time and peak memory, in one run.

    python benchmarks/replay.py [--out FILE] [--rounds N] [--case NAME]

Plain and captured steps alternate on the same model, so that other load on the machine affects
both. The ratio of times is the median over rounds of the ratio of medians; peaks are those of
`torch.cuda.max_memory_allocated` (there is none on the CPU).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write

sys.path.insert(0, str(ROOT / "src"))

import rekindle
from rekindle import models
from rekindle.measuring.timing import measure

CASES: dict[str, list[dict[str, Any]]] = {
    "cuda": [
        {"model": "resnet152", "batch": 128, "precision": "bf16"},
        {"model": "resnet152", "batch": 32, "precision": "bf16"},
        {"model": "resnet152", "batch": 128, "precision": "fp32"},
        {"model": "bert-large", "batch": 32, "precision": "bf16"},
        {"model": "bert-large", "batch": 8, "precision": "bf16"},
        {"model": "gpt2", "batch": 16, "precision": "bf16"},
        {"model": "vit", "batch": 128, "precision": "bf16"},
        {"model": "lstm", "batch": 64, "precision": "bf16"},
    ],
    "cpu": [
        {"model": "resnet18", "batch": 8, "precision": "fp32"},
        {"model": "resnet50", "batch": 4, "precision": "fp32"},
        {"model": "bert-tiny", "batch": 16, "precision": "fp32"},
        {"model": "vit-tiny", "batch": 16, "precision": "fp32"},
        {"model": "lstm", "batch": 16, "precision": "fp32"},
        {"model": "mlp", "batch": 256, "precision": "fp32"},
    ],
}


def run_case(case: dict[str, Any], device: str, rounds: int, steps: int) -> dict[str, Any]:
    """Measure one case, plain and captured in turns."""
    work = models.build(
        case["model"], batch=case["batch"], precision=case["precision"], device=device
    )
    start = time.perf_counter()
    captured = rekindle.capture(work.train_step, work.model, work.optimizer, work.batch)
    capture_s = time.perf_counter() - start

    ways = {
        "plain": lambda: work.train_step(work.model, work.optimizer, work.batch),
        "captured": lambda: captured(work.batch),
    }
    found: dict[str, list[Any]] = {way: [] for way in ways}
    for index in range(rounds):
        order = list(ways) if index % 2 == 0 else list(ways)[::-1]
        for way in order:
            warmup = 3 if index == 0 else 1
            found[way].append(
                measure(ways[way], device=torch.device(device), steps=steps, warmup=warmup)
            )

    def summary(way: str) -> dict[str, Any]:
        peaks = [m.peak_bytes for m in found[way] if m.peak_bytes is not None]
        return {
            "step_us": statistics.median(m.step_us for m in found[way]),
            "peak_bytes": max(peaks, default=None),
            "samples_us": [[round(s, 1) for s in m.samples_us] for m in found[way]],
        }

    plain, replayed = summary("plain"), summary("captured")
    pairs = zip(found["captured"], found["plain"], strict=True)
    return {
        **case,
        "device": device,
        "ops": len(captured.graph.ops),
        "capture_s": round(capture_s, 3),
        "plain": plain,
        "captured": replayed,
        "time_ratio": round(statistics.median(c.step_us / p.step_us for c, p in pairs), 4),
        "peak_ratio": (
            round(replayed["peak_bytes"] / plain["peak_bytes"], 4) if plain["peak_bytes"] else None
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--case", action="append", help="only models of this name")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = options.out or ROOT / "benchmarks" / "results" / f"replay_{device}.json"
    results = []
    for case in CASES[device]:
        if options.case and case["model"] not in options.case:
            continue
        result = run_case(case, device, options.rounds, options.steps)
        results.append(result)
        peak = f"{result['peak_ratio']:.4f}" if result["peak_ratio"] else "-"
        print(
            f"{case['model']:>12} ×{case['batch']:<4} {case['precision']}  "
            f"captured in {result['capture_s']:5.2f} s  "
            f"plain {result['plain']['step_us'] / 1e3:8.2f} ms  "
            f"time ×{result['time_ratio']:.4f}  peak ×{peak}",
            flush=True,
        )
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    write(out, "replay", results)


if __name__ == "__main__":
    main()
