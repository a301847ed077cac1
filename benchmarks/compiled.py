"""Benchmarks the compiled planned step against eager, checkpointing and `torch.compile`, on a GPU.

    python benchmarks/compiled.py --out FILE [--case NAME]

Each case and each peer runs in its own process. Budgets are shares of the peak of the plain step or
of `torch.compile`. For each, the rows have the peak, reserved memory and time of the planned step,
the forecast, and the peers of the same run. `setup` measures the time from the call of `optimize`
to the end of the first step, with an empty compile cache and again in a new process with a full
one; `equal` compares every bit of a planned training with an unplanned one, both compiled.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from steps import DEVICE, apart, built, figures, planned, run_alone, run_each_apart, share_bytes

import rekindle
from rekindle.measuring.timing import measure
from rekindle.studies.peers import checkpoint_every_block


class Case(NamedTuple):
    """A model, the peer that budgets and times are relative to, and the target time by budget."""

    model: str
    batch: int
    against: str
    targets: dict[str, float | None]


CASES = {
    "bert-large_b32": Case(
        "bert-large", 32, "plain", {"100%": 0.76, "65%": 0.83, "48%": 0.90, "40%": None}
    ),
    "resnet152_b128": Case(
        "resnet152", 128, "torch.compile", {"90%": None, "70%": 0.97, "55%": None, "40%": 1.03}
    ),
    "gpt2_b16": Case(
        "gpt2", 16, "torch.compile", {"80%": None, "65%": None, "50%": 1.00, "40%": None}
    ),
    "vit_b128": Case(
        "vit", 128, "torch.compile", {"80%": None, "65%": None, "50%": 1.05, "40%": None}
    ),
}
EQUAL = [("bert-base", 16, "60%"), ("resnet50", 64, "60%"), ("gpt2", 4, "70%")]
PEERS = ("plain", "torch.compile", "checkpoint every block")
ALL = [*CASES, "setup", "equal"]
_SHOWN = (
    *("case", "way", "budget", "peak_of", "time_of", "target", "holds", "reserved_of_peak"),
    *("forecast_peak_ratio", "forecast_time_ratio", "seconds", "optimize_s", "equal", "model"),
    *("reason", "step_us", "failed"),
)


def run_case(name: str) -> Iterator[dict[str, Any]]:
    """All rows of one case, as they come: the peers, then the planned steps."""
    case = CASES[name]
    head = {"case": name, "model": case.model, "batch": case.batch}
    found = {}
    for way in PEERS:  # each in its own process: compiled code keeps its model alive
        found[way] = apart(__file__, "--peer", way, "--case", name)
        yield {**head, "way": way, **found[way]}
    reference = found[case.against]
    if "failed" in reference:
        return
    parts = built(case.model, case.batch)
    profile = None
    for budget in (None, *case.targets):
        row, profile = _planned(parts, budget, reference, profile)
        target = None if budget is None else case.targets[budget]
        yield {**head, "of": case.against, "target": target, **row}
    yield {**head, "way": "plain, again", **apart(__file__, "--peer", "plain", "--case", name)}


def peer(name: str, way: str) -> dict[str, Any]:
    """The step of a peer: plain, compiled or checkpointed."""
    train_step, model, optimizer, batch = built(CASES[name].model, CASES[name].batch)
    if way == "torch.compile":
        model = torch.compile(model)
    elif way == "checkpoint every block":
        checkpoint_every_block(model)
    start = time.perf_counter()
    train_step(model, optimizer, batch)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    found = measure(lambda: train_step(model, optimizer, batch), device=DEVICE, steps=8, warmup=3)
    return {**figures(found), "seconds": seconds}


def _planned(
    parts: Any, budget: str | None, reference: dict[str, Any], profile: Any
) -> tuple[dict[str, Any], Any]:
    within = share_bytes(budget, reference["peak_bytes"])
    step, found, row = planned(parts, within, "inductor", profile)
    row |= {
        "budget": budget or "none",
        "peak_of": round(row["peak_bytes"] / reference["peak_bytes"], 4),
        "time_of": round(found.step_us / reference["step_us"], 4),
    }
    return row, profile or step.plain_profile


def setup() -> Iterator[dict[str, Any]]:
    """The time to the first step, cold and warm, each in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "XDG_CACHE_HOME": folder}
        for way in ("cold", "warm"):
            yield {"case": "setup", "way": way, **apart(__file__, "--first-step", env=caches)}


def first_step() -> None:
    """Optimize BERT-large for 65% of its memory and run one step; prints the seconds."""
    parts = built("bert-large", 32)
    start = time.perf_counter()
    step = rekindle.optimize(*parts, budget="65%", engine="inductor")
    seconds = time.perf_counter() - start
    step(parts[3])
    torch.cuda.synchronize()
    print(json.dumps({"optimize_s": seconds, "seconds": time.perf_counter() - start}))


def equal(name: str, batch: int, budget: str) -> dict[str, Any]:
    """True in `equal` if planned and unplanned training end with the same bits, both compiled."""
    torch.use_deterministic_algorithms(True)
    try:
        parts = built(name, batch)
        found = rekindle.verify(*parts, budget=budget, steps=4, engine="inductor")
    finally:
        torch.use_deterministic_algorithms(False)
    return {
        **{"case": "equal", "way": "equal", "model": name, "batch": batch, "budget": budget},
        **{"equal": found.equal, "differences": list(found.differences[:8])},
    }


def _rows(case: str) -> Iterator[dict[str, Any]]:
    if case == "setup":
        yield from setup()
    elif case == "equal":
        yield from (equal(*each) for each in EQUAL)
    else:
        yield from run_case(case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--alone", action="store_true", help="one case, in this process")
    parser.add_argument("--first-step", action="store_true", help="what `setup` runs")
    parser.add_argument("--peer", choices=PEERS, help="one peer of one case, in this process")
    given = parser.parse_args()
    if given.peer:
        print(json.dumps(peer(given.case[0], given.peer)))
        return
    if given.first_step:
        first_step()
        return
    if given.alone:
        run_alone("compiled", _rows(given.case[0]), given.out, _SHOWN)
    else:
        run_each_apart(__file__, "compiled", given.case, given.out)


if __name__ == "__main__":
    main()
