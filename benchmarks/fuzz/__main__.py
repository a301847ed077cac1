"""`python -m benchmarks.fuzz`: train random programs with Rekindle, or show one of them.

Each program leaves a line of JSON; programs that have one are not run again. They run in a process
that is replaced if it dies or takes too long.

    python -m benchmarks.fuzz --seconds 600            # programs that no run has seen
    python -m benchmarks.fuzz --seeds 0:2000           # these, but for those that have a result
    python -m benchmarks.fuzz --seed 123               # print one, and run it here
    python -m benchmarks.fuzz --collect                # write benchmarks/results/fuzz_cpu.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.fuzz.worker import answer_requests
from benchmarks.matrix.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "fuzz_cpu.json"
LIMIT_S = 120.0  # for one program
N_PER_PROCESS = 400
BAD = ("wrong", "over", "raw", "died")
Json = dict[str, Any]


def run_all(seeds: Iterable[int], lines: Path, seconds: float) -> bool:
    """Run programs until the time is up, and append a line for each; True if all were right."""
    lines.parent.mkdir(parents=True, exist_ok=True)
    known = {result["seed"] for result in _results(lines)}
    pool = Pool(answer_requests, LIMIT_S, n_per_process=N_PER_PROCESS)
    start = time.monotonic()
    counts: Counter[str] = Counter()
    bad: list[int] = []
    for seed in seeds:
        if time.monotonic() - start > seconds:
            break
        if seed in known:
            continue
        cells = pool.ask((seed,))
        if "died" in cells:
            cells = {"none": {"outcome": "died", "reason": cells["died"]}}
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"seed": seed, "cells": cells}) + "\n")
        outcomes = [cell.get("outcome", "invalid") for cell in cells.values()]
        counts.update(outcomes)
        for budget, cell in cells.items():
            if cell.get("outcome") in BAD:
                bad += [seed] if seed not in bad else []
                reason = cell["reason"].replace("\n", " ")[:300]
                print(f"seed {seed} {budget} {cell['outcome']}: {reason}", flush=True)
    pool.end()
    print(f"cells: {dict(counts)}")
    print(f"failing seeds: {bad}" if bad else "no failing seed")
    return not bad


def _results(lines: Path) -> Iterator[Json]:
    if lines.exists():
        for line in lines.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def collect(lines: Path) -> None:
    """Write the counts of all results, with every cell that is not right, into one file."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from common import write

    from benchmarks.fuzz.cell import kind_of

    found = list(_results(lines))
    valid = [result for result in found if "invalid" not in result["cells"]]
    cells = [(r["seed"], b, cell) for r in valid for b, cell in r["cells"].items()]
    refusals = Counter(kind_of(cell) for _, _, cell in cells if cell["outcome"] == "refused")
    case = {
        "programs": len(valid),
        "invalid_programs": len(found) - len(valid),
        "cells": len(cells),
        "outcomes": dict(Counter(cell["outcome"] for _, _, cell in cells)),
        "outcomes_by_budget": dict(Counter(f"{b} {cell['outcome']}" for _, b, cell in cells)),
        "refused_by_reason": dict(refusals.most_common()),
        "failures": [
            {"seed": seed, "budget": budget, **cell}
            for seed, budget, cell in cells
            if cell["outcome"] in BAD
        ],
    }
    write(RESULT, "fuzz", [case])
    print(json.dumps(case, indent=1))


def show(seed: int) -> bool:
    """Print a program and what becomes of it."""
    from benchmarks.fuzz.cell import run
    from benchmarks.fuzz.programs import source
    from benchmarks.fuzz.snippets import PRELUDE

    print(source(seed).removeprefix(PRELUDE))
    cells = run(seed)
    print(json.dumps(cells, indent=1))
    return not any(cell.get("outcome") in BAD for cell in cells.values())


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="", help="FIRST:END; new ones if not given")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--lines", type=Path, default=ROOT / "build" / "fuzz.jsonl")
    parser.add_argument("--collect", action="store_true")
    asked = parser.parse_args()
    if asked.collect:
        collect(asked.lines)
        return
    if asked.seed is not None:
        sys.exit(not show(asked.seed))
    if asked.seeds:
        first, end = map(int, asked.seeds.split(":"))
        seeds: Iterable[int] = range(first, end)
    else:
        system = random.SystemRandom()
        seeds = iter(lambda: system.randrange(1 << 32), None)
    sys.exit(not run_all(seeds, asked.lines, asked.seconds))


if __name__ == "__main__":
    main()
