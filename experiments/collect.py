"""Collects one piece of the experiments, and writes what it finds as JSON.

    python -m experiments.collect --list
    python -m experiments.collect --piece NAME --out FOLDER [--seconds 570] [--config h200]

Every task runs in a process of its own. The file is written after each of them; tasks that it has,
or that the file of the same name under `experiments/results` has, are not run again: a call that
was stopped can be repeated. No task is started that would not end within `--seconds`. `COMMIT` in
the environment names the commit where there is no git. To measure again, delete the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import RESULTS, ROOT
from experiments.config import CONFIGS, Config
from experiments.pieces import pieces
from experiments.runner import WORKER, Runner
from experiments.tasks import DONE, Piece, Row, Rows, is_final, key_of, several, together_s

SCHEMA = 1
USUAL_S = 570.0


def collect(
    piece: Piece,
    config: Config,
    out: Path,
    *,
    seconds: float = USUAL_S,
    alone: bool = True,
    command: Sequence[str] = WORKER,
) -> bool:
    """Run the tasks that are left of a piece; True if all of it is collected.

    Each task has a process of its own, started with `command`, unless not `alone`.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{piece.name}.json"
    rows: dict[str, Row] = dict(_kept(piece, config, out))
    head = {"schema": SCHEMA, "experiment": piece.name, "config": config.name, **environment()}
    end = time.monotonic() + seconds

    def rows_of(name: str) -> Rows:
        here = out / f"{name}.json"
        return read_rows(here if here.exists() else RESULTS / here.name)

    with Runner(alone=alone, command=command) as runner:
        for asked in piece.tasks(rows, rows_of):
            tasks = [task for task in several(asked) if not is_final(rows.get(task.key))]
            if not tasks:
                continue
            left = end - time.monotonic()
            if left < together_s(tasks):
                words = ", ".join(task.words for task in tasks)
                print(f"no time is left for {words}: call again", flush=True)
                return False
            limit_s = min(left, 3 * together_s(tasks) + 60)
            befores = [rows.get(task.key) for task in tasks]
            answers = runner.perform_together(tasks, befores, limit_s)
            for task, answer in zip(tasks, answers, strict=True):
                about = {"kind": task.kind, "settings": dict(task.settings)}
                rows[task.key] = {**about, "commit": head["commit"], **answer}
                _write(path, head, rows)
                print(f"{answer['seconds']:6.1f} s  {answer['status']}: {task.words}", flush=True)
    return bool(rows) and all(is_final(row) for row in rows.values())


def environment() -> dict[str, Any]:
    """The machine, the versions and the commit, as the benchmarks note them."""
    path = ROOT / "benchmarks" / "common.py"  # a folder of scripts, and no package
    spec = importlib.util.spec_from_file_location("benchmarks_common", path)
    assert spec is not None
    assert spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    return dict(common.environment())


def _kept(piece: Piece, config: Config, out: Path) -> Rows:
    """The rows of a piece: from the folder it is written to, or else from the results."""
    path = out / f"{piece.name}.json"
    path = path if path.exists() else RESULTS / path.name
    if path.exists() and json.loads(path.read_text(encoding="utf-8"))["config"] == config.name:
        return read_rows(path)
    return {}


def read_rows(path: Path) -> Rows:
    """The rows of a file by the keys of their tasks; none where there is no file."""
    if not path.exists():
        return {}
    return {key_of(row): row for row in json.loads(path.read_text(encoding="utf-8"))["cases"]}


def _write(path: Path, head: dict[str, Any], rows: Rows) -> None:
    """Write the whole file, one line per row."""
    lines = ",\n".join(json.dumps(_rounded(row), ensure_ascii=False) for row in rows.values())
    about = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(f'{about},\n "cases": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    unfinished.replace(path)


def _rounded(value: Any) -> Any:
    """The value with floats rounded to six digits: no measurement has more."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def about_seconds(piece: Piece) -> float:
    """The estimated time of a piece, if every task succeeds."""
    done: dict[str, Row] = {}
    seconds = 0.0
    for asked in piece.tasks(done, lambda name: read_rows(RESULTS / f"{name}.json")):
        done |= {task.key: {"status": DONE} for task in several(asked)}
        seconds += together_s(several(asked))
    return seconds


def _list(config: Config) -> None:
    """Print the pieces, and about how long each takes."""
    total = 0.0
    for piece in pieces(config).values():
        seconds = about_seconds(piece)
        total += seconds if piece.needs_gpu else 0.0
        where = "GPU" if piece.needs_gpu else "no GPU"
        print(f"{piece.name:24} {seconds:5.0f} s  {where:6}  {piece.about}")
    print(f"{'on the GPU, in all':24} {total:5.0f} s")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--piece", nargs="+", default=[])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=USUAL_S)
    parser.add_argument("--config", choices=list(CONFIGS), default="h200")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    config = CONFIGS[given.config]
    if given.list or not given.piece:
        _list(config)
        return
    end = time.monotonic() + given.seconds
    known = pieces(config)
    whole = [
        collect(known[name], config, given.out, seconds=end - time.monotonic())
        for name in given.piece
    ]
    raise SystemExit(0 if all(whole) else 1)


if __name__ == "__main__":
    main()
