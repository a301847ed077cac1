"""`rekindle.compile` against eager, checkpoints, `torch.compile` and its own budget, on a GPU.

    python benchmarks/partitioned.py --out FILE [--case NAME] [--peaks FILE] [--kernels FOLDER]

Every way of every case runs in its own process. All ways of a case compile at the same time, which
is slow and needs no GPU; their first steps, in which kernels are tuned, take turns, a few at a
time. Then they are measured one after the other in several rounds, every second one in reverse
order, while the others wait, so that drifts of the machine affect all alike. A way that ran out of
memory next to the others is measured again alone.

Rekindle's budgets are shares of the peak of `torch.compile`, measured first or taken from an
earlier result (`--peaks`). `partition_s` is the time of partitioning. With `--kernels`, the slowest
kernels of both compilers are written to a folder, and `kernels_us` is the time of all kernels.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write
from steps import DEVICE, built, figures, settle, share_bytes
from torch._dynamo.callback import on_compile_end, on_compile_start

import rekindle
from rekindle.measuring.timing import measure
from rekindle.studies.peers import checkpoint_every_block

SETTINGS = (0.7, 0.5, 0.3, 0.1)  # of torch's own knob
ROUNDS, STEPS = 4, 5
TURNS = {"resnet152_b128": 3, "bert-large_b32": 1, "gpt2_b16": 3}  # so that memory suffices
REFERENCE = "torch.compile"
# model, batch, and for each share of torch.compile's peak the most time it may take, of its
CASES: dict[str, tuple[str, int, dict[str, float | None]]] = {
    "resnet152_b128": ("resnet152", 128, {"70%": 1.00, "55%": None, "40%": 1.05}),
    "bert-large_b32": ("bert-large", 32, {"70%": None, "50%": 1.15, "40%": None}),
    "gpt2_b16": ("gpt2", 16, {"70%": None, "50%": 1.15, "40%": None}),
}


def run_way(name: str, way: str, budget_bytes: int | None, kernels: Path | None) -> None:
    """Build a model and change it in one way; say when it is compiled, measure it when told."""
    model_name, batch, _ = CASES[name]
    train_step, model, optimizer, data = built(model_name, batch)
    kind, _, setting = way.partition(" ")
    if kind == "checkpoint":
        checkpoint_every_block(model)
    elif kind == REFERENCE:
        if setting:
            torch._functorch.config.activation_memory_budget = float(setting)
        model = torch.compile(model)
    elif kind == "rekindle":
        assert budget_bytes is not None
        model = rekindle.compile(model, budget=budget_bytes, optimizer=optimizer)
    settle()
    start = time.perf_counter()
    with Turn() as turn:
        on_compile_start(turn.leave)
        on_compile_end(turn.take)
        for _ in range(3 + 3 * (kind == "rekindle")):  # where it is watched, and planned again
            train_step(model, optimizer, data)
        optimizer.zero_grad()
        settle()
    _say({"ready_s": round(time.perf_counter() - start, 1)})
    for number in range(ROUNDS):
        sys.stdin.readline()
        found = measure(
            lambda: train_step(model, optimizer, data), device=DEVICE, steps=STEPS, warmup=3
        )
        row = {**figures(found), "reserved_bytes": torch.cuda.memory_reserved()}
        if kind == "rekindle":
            row |= _forecast(model, found.peak_bytes)
        if kernels and not number and (kind == "rekindle" or way == REFERENCE):
            label = f"{name} {way}".replace(" ", "_").replace("%", "")
            step = partial(train_step, model, optimizer, data)
            row["kernels_us"] = _write_kernels(step, kernels / f"{label}.txt")
        optimizer.zero_grad()
        settle()
        _say(row)


class Turn:
    """One of a few turns on the GPU: a lock on one of several files."""

    def __init__(self) -> None:
        self._files = [Path(each).open("w") for each in os.environ["TURNS"].split(":")]  # noqa: SIM115
        self._mine: Any = None

    def take(self, *_: Any) -> None:
        """Wait for a turn."""
        while self._mine is None:
            for file in self._files:
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._mine = file
                    return
            time.sleep(0.1)

    def leave(self, *_: Any) -> None:
        """Release the turn and unused memory."""
        if self._mine is not None:
            settle()
            fcntl.flock(self._mine, fcntl.LOCK_UN)
            self._mine = None

    def __enter__(self) -> Turn:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def _forecast(model: Any, peak_bytes: int) -> dict[str, Any]:
    plans = [planned.plan for planned in model.plans]
    return {
        "forecast_peak_ratio": round(max(plan.peak_bytes for plan in plans) / peak_bytes, 4),
        "partition_s": round(sum(planned.seconds for planned in model.plans), 2),
        "n_graphs": len(plans),
        "n_replans": model.session.tries,
        "note": model.plans[-1].note,
    }


def _write_kernels(step: Any, path: Path) -> float:
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profiler:
        step()
        torch.cuda.synchronize()
    found = profiler.key_averages()
    path.write_text(found.table(sort_by="self_cuda_time_total", row_limit=40), encoding="utf-8")
    on_gpu = (each for each in found if each.device_type == torch.autograd.DeviceType.CUDA)
    return sum(each.self_device_time_total for each in on_gpu if not each.is_user_annotation)


def _say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


class Way:
    """One way of one case, in a process that compiles at once and measures when told."""

    def __init__(
        self, turns: str, case: str, way: str, budget_bytes: int | None, kernels: Path | None
    ) -> None:
        within = () if budget_bytes is None else ("--bytes", str(budget_bytes))
        seen = () if kernels is None else ("--kernels", str(kernels))
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--case", case, "--way", way, *within, *seen],
            env={"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ, "TURNS": turns},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answers: list[dict[str, Any]] = []

    def wait(self) -> None:
        """Wait until the model is compiled and tuned."""
        self._listen()

    def measure(self) -> None:
        """Measure once more."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            self._listen()

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.append(json.loads(line))
                return
        self._process.wait()

    @property
    def row(self) -> dict[str, Any]:
        """The samples of all rounds, and the largest peak."""
        rows = [each for each in self._answers if "peak_bytes" in each]
        if not rows or self._process.poll():
            self._errors.seek(0)
            return {"failed": self._errors.read()[-2000:]}
        samples = [sample for row in rows for sample in row["samples_us"]]
        most = {key: max(row[key] for row in rows) for key in ("peak_bytes", "reserved_bytes")}
        return {
            **self._answers[0],
            **rows[0],
            **most,
            "step_us": statistics.median(samples),
            "samples_us": samples,
        }


def run_case(
    name: str, out: Path, rows: list[dict[str, Any]], peak_bytes: int | None, kernels: Path | None
) -> None:
    """All ways of one case."""
    _, batch, budgets = CASES[name]
    peers = ["eager", REFERENCE, "checkpoint every block"]
    peers += [f"{REFERENCE} {setting}" for setting in SETTINGS]
    start = time.perf_counter()
    folder = Path(tempfile.mkdtemp())
    turns = ":".join(str(folder / str(number)) for number in range(TURNS[name]))
    ways = {way: Way(turns, name, way, None, kernels) for way in peers}
    if peak_bytes is None:
        first = Way(turns, name, REFERENCE, None, None)
        first.wait()
        first.measure()
        peak_bytes = first.row.get("peak_bytes")
        first.end()
    within = {budget: share_bytes(budget, peak_bytes) for budget in budgets} if peak_bytes else {}
    for budget, nbytes in within.items():
        ways[f"rekindle {budget}"] = Way(turns, name, f"rekindle {budget}", nbytes, kernels)
    for way in ways.values():
        way.wait()
    print(f"{name}: ready in {time.perf_counter() - start:.0f} s", flush=True)
    for number in range(ROUNDS):
        for way in list(ways.values())[:: -1 if number % 2 else 1]:
            way.measure()
    for label, way in ways.items():
        if "out of memory" in way.row.get("failed", ""):  # the others have ended
            ways[label] = again = Way(
                turns, name, label, within.get(label.partition(" ")[2]), kernels
            )
            again.wait()
            for _ in range(ROUNDS):
                again.measure()
    reference = ways[REFERENCE].row
    for label, way in ways.items():
        kind, _, budget = label.partition(" ")
        row = {"case": name, "batch": batch, "way": label, **way.row}
        if "failed" not in row and "failed" not in reference and label not in ("eager", REFERENCE):
            row["peak_of"] = round(row["peak_bytes"] / reference["peak_bytes"], 4)
            row["time_of"] = round(row["step_us"] / reference["step_us"], 4)
        if kind == "rekindle":
            row |= {"way": kind, "budget": budget, "target": budgets[budget]}
            row["budget_bytes"] = within[budget]
            row["holds"] = row.get("peak_bytes", within[budget] + 1) <= within[budget]
        rows.append(row)
        write(out, "partitioned", rows)
        shown = {k: v for k, v in row.items() if k not in ("samples_us", "case", "batch")}
        print(json.dumps(shown), flush=True)
    print(f"{name}: done in {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--peaks", type=Path, help="an earlier result, for torch.compile's peaks")
    parser.add_argument("--kernels", type=Path, help="a folder for what took the most time")
    parser.add_argument("--way", help="one way of one case, in this process")
    parser.add_argument("--bytes", type=int)
    given = parser.parse_args()
    if given.way:
        run_way(given.case[0], given.way, given.bytes, given.kernels)
        return
    known = json.loads((ROOT / given.peaks).read_text("utf-8"))["cases"] if given.peaks else []
    peaks = {row["case"]: row["peak_bytes"] for row in known if row["way"] == REFERENCE}
    rows: list[dict[str, Any]] = []
    for name in given.case:
        run_case(name, given.out, rows, peaks.get(name), given.kernels)


if __name__ == "__main__":
    main()
