"""Forecasts without a GPU against what an H200 measured; and how quick the analysis is.

    python benchmarks/forecast.py --measured benchmarks/results/profiles_h200.json --out FILE

Each model is built and captured on the CPU as a GPU would run it, and its peak and step time on an
H200 are forecast: the reference is the measured plain step and the measured profile of that file.
Also timed here: liveness and roofline of ResNet-152, and simulating a graph of 10,000 ops.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import ROOT, write

sys.path.insert(0, str(ROOT / "src"))

import rekindle
from rekindle import models
from rekindle.core.cost.devices import find_device
from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.cost.roofline import analytic_profile
from rekindle.core.graph.graph import Op, Phase, Role, StepGraph, Storage, Value
from rekindle.core.graph.liveness import analyze
from rekindle.core.graph.simulate import simulate


def forecast(case: dict[str, Any]) -> dict[str, Any]:
    """Peak and time of one case, forecast and measured."""
    work = models.build(case["model"], batch=case["batch"], precision=case["precision"])
    start = time.perf_counter()
    captured = rekindle.capture(
        work.train_step, work.model, work.optimizer, work.batch, as_on_gpu=True
    )
    capture_s = time.perf_counter() - start
    profile = rekindle.profile(captured, device="H200")
    trace = rekindle.simulate(captured.graph, profile)
    return {
        "model": case["model"],
        "batch": case["batch"],
        "precision": case["precision"],
        "capture_s": round(capture_s, 2),
        "forecast_peak_bytes": trace.peak_bytes,
        "measured_peak_bytes": case["plain"]["peak_bytes"],
        "peak_ratio": round(trace.peak_bytes / case["plain"]["peak_bytes"], 4),
        "forecast_step_us": profile.step_us,
        "measured_step_us": case["sum_of_ops_us"],
        "time_ratio": round(profile.step_us / case["sum_of_ops_us"], 4),
    }


def median_ms(run: Any, times: int = 9) -> tuple[float, list[float]]:
    samples = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        samples.append(round((time.perf_counter() - start) * 1e3, 3))
    return statistics.median(samples), samples


def chain(n_ops: int) -> StepGraph:
    """A chain of that many ops: forward, and backward over what it keeps."""
    half = n_ops // 2
    storages = [Storage(0, 4096, Role.PARAM)]
    values = [Value(0, "w", 0, (1024,), "float32")]
    ops = []
    for index in range(n_ops):
        is_forward = index < half
        inputs = (0, index) if is_forward else (index, max(0, n_ops - index - 1))
        role = Role.ACTIVATION if is_forward else Role.GRAD_MAP
        storages.append(Storage(index + 1, 4096, role))
        values.append(Value(index + 1, f"v{index}", index + 1, (1024,), "float32", index))
        phase = Phase.FORWARD if is_forward else Phase.BACKWARD
        ops.append(Op(index, f"op{index}", "aten.mul.Tensor", phase, inputs, (index + 1,)))
    return StepGraph(tuple(ops), tuple(values), tuple(storages), (n_ops,))


def speed() -> dict[str, Any]:
    """How long the analysis takes."""
    work = models.build("resnet152", batch=32, precision="bf16")
    graph = rekindle.capture(work.train_step, work.model, work.optimizer, work.batch).graph
    device = find_device("H200")

    def afresh() -> None:
        graph.__dict__.pop("_liveness", None)
        _ = analyze(graph).lifetimes
        analytic_profile(graph, device)

    long = chain(10_000)
    profile = Profile("none", long.fingerprint, (OpCost(1.0),) * 10_000, allocator="cuda")
    simulate(long, profile)
    analysis_ms, analysis = median_ms(afresh)
    simulate_ms, samples = median_ms(lambda: simulate(long, profile))
    return {
        "resnet152_liveness_and_roofline_ms": analysis_ms,
        "resnet152_samples_ms": analysis,
        "simulate_10000_ops_ms": simulate_ms,
        "simulate_samples_ms": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = ROOT / "benchmarks" / "results" / "profiles_h200.json"
    parser.add_argument("--measured", type=Path, default=default)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for case in json.loads(options.measured.read_text())["cases"]:
        result = forecast(case)
        results.append(result)
        print(
            f"{result['model']:>10} ×{result['batch']:<4} {result['precision']}"
            f"  peak ×{result['peak_ratio']:.4f}  time ×{result['time_ratio']:.3f}",
            flush=True,
        )
        gc.collect()
    timings = speed()
    print({key: value for key, value in timings.items() if key.endswith("_ms")})
    write(options.out, "forecast", [*results, {"speed": timings}])


if __name__ == "__main__":
    main()
