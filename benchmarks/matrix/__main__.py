"""`python -m benchmarks.matrix`: run the matrix in parts, or collect its results.

Each model leaves a JSON file; a cell that is in there is not run again. Models run in a process
that is replaced if it dies or takes too long.

    python -m benchmarks.matrix                    # all models that have no result yet
    python -m benchmarks.matrix --part 1/2         # every other one, to run two at once
    python -m benchmarks.matrix --only vit         # those with "vit" in their names
    python -m benchmarks.matrix --collect          # write benchmarks/results/matrix_cpu.json
    python -m benchmarks.matrix --list             # find the models that train, into models.json
    python -m benchmarks.matrix --list timm        # those of one library
    python -m benchmarks.matrix --budgets none --folder build/quick
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import environment, write
from benchmarks.matrix import BUDGETS
from benchmarks.matrix.pool import Pool, answer_requests, be_quiet, trains
from benchmarks.matrix.zoo import LIBRARIES, Case

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models.json"
ROOT = HERE.parents[1]
RESULT = ROOT / "benchmarks" / "results" / "matrix_cpu.json"
LIMIT_S = 180.0  # for one model
LIST_LIMIT_S = 60.0  # for one step of plain training, with the model's making
MAX_CANDIDATE_S = 2.0  # a model whose plain step takes longer is not for a matrix


def cases() -> list[Case]:
    """The models of the matrix."""
    return [Case(*row) for row in json.loads(MODELS.read_text(encoding="utf-8"))["models"]]


def make_list(libraries: Sequence[str]) -> None:
    """Add models to the list: the first recipe of each candidate that trains quickly.

    Candidates that are in the list, or left out of it, are not tried again.
    """
    from benchmarks.matrix.zoo import candidates

    be_quiet()
    pool = Pool(trains, LIST_LIMIT_S)
    found = cases()
    left_out = json.loads(MODELS.read_text(encoding="utf-8"))["left_out"]
    for recipes in candidates(libraries):
        if {case.name for case in recipes} & {*left_out, *(case.name for case in found)}:
            continue
        for case in recipes:
            answer = pool.ask(case)
            if answer.get("seconds", 99.0) < MAX_CANDIDATE_S:
                found.append(case)
                left_out.pop(recipes[0].name, None)
                break
            left_out.setdefault(recipes[0].name, json.dumps(answer)[:200])
            if "died" in answer:
                break
        print(f"{len(found)} {recipes[0].name} {left_out.get(recipes[0].name, '')}", flush=True)
        rows = ",\n  ".join(json.dumps(case) for case in found)
        others = json.dumps(left_out, indent=1)
        MODELS.write_text(f'{{"models": [\n  {rows}\n ],\n "left_out": {others}\n}}\n')
    pool.end()


def run_all(wanted: Iterable[Case], folder: Path, budgets: Sequence[str] = BUDGETS) -> None:
    """Run the cells that have no result yet."""
    folder.mkdir(parents=True, exist_ok=True)
    pool, commit = Pool(answer_requests, LIMIT_S), environment()["commit"]
    for case in wanted:
        path = folder / f"{case.name}.json"
        known = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else {}
        missing = [budget for budget in budgets if budget not in known]
        if not missing:
            continue
        start = time.perf_counter()
        answer = pool.ask(case, missing)
        if "died" in answer:
            answer = {b: {"outcome": "error", "reason": answer["died"]} for b in missing}
        seconds = round(time.perf_counter() - start, 1)
        known |= {budget: {**cell, "commit": commit} for budget, cell in answer.items()}
        result = {"case": case, "cells": known}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        outcomes = " ".join(f"{b}:{cell['outcome']}" for b, cell in answer.items())
        reason = next((c["reason"] for c in answer.values() if "reason" in c), "")
        print(f"{seconds:6.1f} s  {case.name}  {outcomes}  {reason[:150]!r}", flush=True)
    pool.end()


def _results(folder: Path) -> Iterator[dict[str, Any]]:
    for case in cases():
        path = folder / f"{case.name}.json"
        if path.exists():
            yield json.loads(path.read_text(encoding="utf-8"))


def collect(folder: Path) -> None:
    """Write all results into one file, and print how many cells came out how."""
    found = list(_results(folder))
    write(RESULT, "matrix", [{**result, "case": list(result["case"])} for result in found])
    print(summary(found))


def summary(found: list[dict[str, Any]]) -> str:
    """The numbers of cells by outcome, and every one that is not equal, with its reason."""
    cells = [(r["case"], b, cell) for r in found for b, cell in r["cells"].items()]
    counts = Counter((budget, cell["outcome"]) for _, budget, cell in cells)
    lines = [f"{len(found)} models, {len(cells)} cells"]
    lines += [f"  {budget:8} {outcome:10} {n}" for (budget, outcome), n in sorted(counts.items())]
    refused = {tuple(case) for case, _, cell in cells if cell["outcome"] == "refused"}
    lines.append(f"{len(found) - len(refused)} of {len(found)} models accepted")
    for case, budget, cell in cells:
        if cell["outcome"] != "equal":
            reason = cell.get("reason", "").replace("\n", " ")
            lines.append(f"{cell['outcome']} {budget} {case[0]}-{case[1]}: {reason[:300]}")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--only", default="")
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--list", nargs="*", choices=LIBRARIES)
    asked = parser.parse_args()
    part, n_parts = map(int, asked.part.split("/"))
    if asked.list is not None:
        make_list(asked.list or LIBRARIES)
    elif asked.collect:
        collect(asked.folder)
    elif asked.summary:
        print(summary(list(_results(asked.folder))))
    else:
        wanted = [case for case in cases() if asked.only in case.name]
        run_all(wanted[part - 1 :: n_parts], asked.folder, asked.budgets.split(","))


if __name__ == "__main__":
    main()
