"""Forecast against measurement on a GPU, for the profiler and the simulator.

    python benchmarks/profiles.py --out FILE [--save DIR]

For each case: the plain step's peak, measured and simulated; the sum of op times and the time of
the step in a CUDA graph; the analytic and the measured profile; and the time of profiling. One case
is profiled again with the process's memory capped below the plain step's peak. `--save`
writes the profiles themselves, graph and costs, for use without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write

sys.path.insert(0, str(ROOT / "src"))

import rekindle
from rekindle import models
from rekindle.core.graph.graph import Phase, Role
from rekindle.core.graph.serial import save_profile
from rekindle.measuring.measure import inputs, preserved, run_ops
from rekindle.measuring.meters import CudaMeter
from rekindle.measuring.timing import measure
from rekindle.tracing import batch_tree

CASES = [
    ("resnet152", 128, "bf16"),
    ("resnet152", 32, "bf16"),
    ("bert-large", 32, "bf16"),
    ("bert-large", 8, "bf16"),
    ("gpt2", 16, "bf16"),
    ("vit", 128, "bf16"),
    ("lstm", 2048, "bf16"),
    ("resnet152", 128, "fp32"),
    ("resnet152", 32, "fp32"),
    ("bert-large", 32, "fp32"),
    ("bert-large", 8, "fp32"),
    ("lstm", 2048, "fp32"),
]
CAPPED = ("resnet152", 128, "bf16")


def run_case(name: str, batch: int, precision: str, save: Path | None) -> dict[str, Any]:
    device = torch.device("cuda")
    work = models.build(name, batch=batch, precision=precision, device="cuda")
    plain = measure(
        lambda: work.train_step(work.model, work.optimizer, work.batch),
        device=device,
        steps=5,
        warmup=3,
    )
    captured = rekindle.capture(work.train_step, work.model, work.optimizer, work.batch)
    start = time.perf_counter()
    profile = rekindle.profile(captured, cache=False)
    profile_s = time.perf_counter() - start
    trace = rekindle.simulate(captured.graph, profile)
    analytic = rekindle.profile(captured, device="H200")
    batch_tensors = batch_tree.flatten(work.batch).tensors
    with preserved(captured.recording):
        graph_us = CudaMeter(device).step_us(
            lambda around: run_ops(
                captured.recording, inputs(captured.recording, batch_tensors), around
            )
        )
    scale = re.search(r"scaled by ([0-9.]+)", profile.method)
    flops = captured.graph.flops_by_phase()
    result = {
        "model": name,
        "batch": batch,
        "precision": precision,
        "ops": len(captured.graph.ops),
        "plain": {
            "peak_bytes": plain.peak_bytes,
            "step_us": plain.step_us,
            "samples_us": list(plain.samples_us),
        },
        "profile_s": round(profile_s, 2),
        "simulated_peak_bytes": trace.peak_bytes,
        "peak_ratio": round(trace.peak_bytes / (plain.peak_bytes or 1), 4),
        "activation_share": round(trace.peak_by_role()[Role.ACTIVATION] / trace.peak_bytes, 4),
        "peak_op": captured.graph.ops[trace.peak_op].name,
        "graph_step_us": graph_us,
        "sum_of_ops_us": profile.step_us,
        "time_ratio": round(profile.step_us / graph_us, 4) if graph_us else None,
        "kernel_sum_ratio": round(1 / float(scale.group(1)), 4) if scale else None,
        "analytic_step_us": analytic.step_us,
        "analytic_time_ratio": round(analytic.step_us / profile.step_us, 4),
        "backward_to_forward_flops": round(flops[Phase.BACKWARD] / max(flops[Phase.FORWARD], 1), 3),
        "method": profile.method,
        "to_host_gb_per_s": round(profile.to_host_bytes_per_us / 1e3, 1),
        "to_device_gb_per_s": round(profile.to_device_bytes_per_us / 1e3, 1),
    }
    if (name, batch, precision) == CAPPED:
        result["capped"] = capped(captured, plain.peak_bytes or 0, profile.step_us)
    if save is not None and precision == "bf16":
        about = {"model": name, "batch": batch, "precision": precision}
        path = save / f"{name}_b{batch}_{precision}_h200.json.gz"
        save_profile(path, captured.graph, profile, about)
    return result


def capped(captured: Any, peak_bytes: int, in_order_us: float) -> dict[str, Any]:
    """Profile the same step where its plain run would not fit."""
    total = torch.cuda.get_device_properties(0).total_memory
    cap_bytes = int(0.6 * peak_bytes)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(cap_bytes / total)
    try:
        start = time.perf_counter()
        profile = rekindle.profile(captured, cache=False)
        seconds = time.perf_counter() - start
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    trace = rekindle.simulate(captured.graph, profile)
    return {
        "cap_bytes": cap_bytes,
        "plain_peak_bytes": peak_bytes,
        "method": profile.method,
        "profile_s": round(seconds, 2),
        "sum_of_ops_us": profile.step_us,
        "against_in_order": round(profile.step_us / in_order_us, 4),
        "simulated_peak_ratio": round(trace.peak_bytes / peak_bytes, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    results = []
    for name, batch, precision in CASES:
        result = run_case(name, batch, precision, options.save)
        results.append(result)
        print(
            f"{name:>10} ×{batch:<4} {precision}  peak ×{result['peak_ratio']:.4f}"
            f"  time ×{result['time_ratio']}  kernels ×{result['kernel_sum_ratio']}"
            f"  analytic ×{result['analytic_time_ratio']:.3f}  {result['profile_s']:.1f} s",
            flush=True,
        )
        if "capped" in result:
            print("  capped:", result["capped"], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    write(options.out, "profiles", results)


if __name__ == "__main__":
    main()
