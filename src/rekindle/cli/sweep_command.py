"""`rekindle sweep`: a model at several batch sizes, plain, planned and as others run it.

Each case runs in a process of its own and leaves a record; what is there is not run again.
"""

from __future__ import annotations

import hashlib
import json as json_text
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import rekindle
from rekindle.cli.options import (
    AgainOption,
    BatchesOption,
    BudgetsOption,
    CapOption,
    EngineOption,
    FiguresOnlyOption,
    JsonOption,
    PeersOption,
    PlannerOption,
    PrecisionOption,
    RunDeviceOption,
    SweepFolderOption,
    SweepModelArgument,
    TimedOption,
    parse_batches,
    parse_budgets,
)
from rekindle.cli.output import new_console, print_written, write_json
from rekindle.engines.select_engine import check_engine
from rekindle.errors import ModelError, PlanError, ReportError
from rekindle.models.workload import check_device, check_precision
from rekindle.models.zoo.catalog import find
from rekindle.planners.registry import find_planner
from rekindle.report import sweep_figures, sweep_report
from rekindle.report.data import SCHEMA
from rekindle.report.sweep_report import (
    CHECKPOINT,
    COMPILE,
    FAILED,
    OUT_OF_MEMORY,
    PLAIN,
    PLANNED,
    Record,
)
from rekindle.studies.model_runs import check_can_run
from rekindle.studies.sweep_case import Case, write_atomically
from rekindle.units import parse_bytes

SHARES = (0.8, 0.5, 0.2)
"""What `torch.compile` may keep of the activations, where peers are asked for."""
INTERRUPTED = 128 + signal.SIGINT

_SWEEP = "sweep.json"
_CASES = "cases"
_START = "from rekindle.studies.sweep_case import main; main()"
_PATIENCE_S = 10.0


def sweep_batches(
    out: SweepFolderOption,
    model: SweepModelArgument = None,
    batches: BatchesOption = None,
    budget: BudgetsOption = None,
    peers: PeersOption = False,
    engine: EngineOption = None,
    planner: PlannerOption = None,
    precision: PrecisionOption = None,
    device: RunDeviceOption = None,
    cap: CapOption = None,
    steps: TimedOption = 10,
    again: AgainOption = False,
    figures_only: FiguresOnlyOption = False,
    json: JsonOption = None,
) -> None:
    """Measure memory and time at several batch sizes, plain and planned, and draw the figures.

    Each case runs in a process of its own. Where memory does not suffice, that is recorded as a
    result. A sweep that was interrupted goes on where it stopped: call it again.
    """
    folder = Path(out)
    if figures_only:
        _show(_read_sweep(folder), folder, json, draws=True)
        return
    how: dict[str, Any] = {
        "precision": precision,
        "device": device,
        "engine": engine or "auto",
        "planner": planner or "auto",
        "steps": steps,
        "cap_bytes": None if cap is None else parse_bytes(cap),
    }
    cases = _cases(model, batches, budget, peers, how)
    asked = {"batches": parse_batches(batches or ""), "budgets": parse_budgets(budget or "")}
    settings = {"model": model, **how, **asked}
    (folder / _CASES).mkdir(parents=True, exist_ok=True)
    is_whole = _run_all(cases, settings, folder, again=again)
    data = _read_sweep(folder)
    _show(data, folder, json, draws=find_spec("matplotlib") is not None)
    if not is_whole:
        raise typer.Exit(INTERRUPTED)
    if sweep_report.failed_cases(data) or sweep_report.over_budget(data):
        raise typer.Exit(1)


def _show(data: Mapping[str, Any], folder: Path, json: str | None, *, draws: bool) -> None:
    """Draw the figures of a sweep that was read, and print its table."""
    written = sweep_figures.write_sweep_pngs(folder, data) if draws else []
    console = new_console(json)
    console.print(sweep_report.sweep_table(data))
    if not draws:
        missing = 'No figures: they need matplotlib (pip install "rekindle[report]").'
        console.print(missing, markup=False)
    print_written(console, str(folder / _SWEEP), *(str(path) for path in written))
    write_json(json, {key: value for key, value in data.items() if key != "schema"})


def _cases(
    model: str | None, batches: str | None, budget: str | None, peers: bool, how: dict[str, Any]
) -> list[Case]:
    """All there is to run; what cannot be run is refused before the work starts."""
    if model is None or batches is None:
        missing = "a MODEL" if model is None else "--batches 32,64,128, for one"
        raise ModelError(f"what is to be run? Give {missing}; or --figures-only to draw only.")
    budgets = parse_budgets(budget or "")
    if not budgets:
        raise PlanError(
            "how much memory may planned steps take? Give --budget 8GiB, --budget 60% (of the "
            "plain step's own peak), or several, as in 80%,60%,40%."
        )
    check_engine(how["engine"])
    find_planner(how["planner"])
    common = _checked_model(model, how)
    ways: list[dict[str, Any]] = [{"way": PLAIN}]
    plan = {"engine": how["engine"], "planner": how["planner"]}
    ways += [{"way": PLANNED, "budget": each, **plan} for each in budgets]
    if peers:
        ways += [{"way": CHECKPOINT}, {"way": COMPILE}]
        ways += [{"way": COMPILE, "share": share} for share in SHARES]
    return [Case(batch=batch, **common, **way) for batch in parse_batches(batches) for way in ways]


def _checked_model(model: str, how: dict[str, Any]) -> dict[str, Any]:
    """The settings that all cases share."""
    check_can_run(model, how["device"])
    common = {name: how[name] for name in ("precision", "device", "steps", "cap_bytes")}
    if common["precision"] is not None:
        check_precision(common["precision"])
    if common["device"] is not None:
        check_device(common["device"])
    if ":" not in model and not model.endswith(".py"):
        find(model)
        common["device"] = common["device"] or "cpu"
        return {"model": model, **common}
    file, _, function = model.rpartition(":")
    if not file or not function:
        bare = model.rstrip(":")
        raise ModelError(f"{model!r} names a file but no function: write {bare}:function")
    if not Path(file).is_file():
        raise ModelError(f"no file {file!r}, from {model!r}: expected path/to/file.py:function")
    common["source"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    return {"model": model, **common}


def _run_all(cases: list[Case], settings: Mapping[str, Any], folder: Path, *, again: bool) -> bool:
    """Run what has no record yet, and write down how far it is each time; False if interrupted."""
    for case in cases if again else ():
        (folder / _CASES / case.file_name).unlink(missing_ok=True)
    found = {case: _kept(folder, case) for case in cases}

    def write() -> None:
        records = [record for record in found.values() if record is not None]
        data = sweep_report.sweep_data(settings, records)
        write_atomically(folder / _SWEEP, {"schema": SCHEMA, **data})

    write()
    left = [case for case, record in found.items() if record is None]
    with _progress(len(cases), len(cases) - len(left)) as tell:
        try:
            for place, case in enumerate(left):
                tell(sweep_report.case_in_words(asdict(case)), place, len(left))
                found[case] = run_alone(case, folder / _CASES / case.file_name)
                write()
        except KeyboardInterrupt:
            found |= {case: found[case] or _kept(folder, case) for case in left}
            write()  # the one that was interrupted may just have ended
            return False
        tell("done", len(left), len(left))
    return True


@contextmanager
def _progress(total: int, kept: int) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error: what runs now, and how many cases are left."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[left]} left"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, completed=kept, left=total - kept)

        def tell(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=kept + done, left=of - done)

        yield tell


def run_alone(case: Case, target: Path) -> Record:
    """Run a case in a process of its own, which leaves its record at `target`."""
    target.unlink(missing_ok=True)
    here = str(Path(rekindle.__file__).parents[1])
    paths = os.pathsep.join(path for path in (here, os.environ.get("PYTHONPATH")) if path)
    command = [sys.executable, "-P", "-c", _START, json_text.dumps(asdict(case)), str(target)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": paths}
        )
        try:
            code = process.wait()
        except BaseException:
            _end(process)
            raise
        record = _read(target)
        if record is not None:
            return record
        record = _of_the_dead(case, code, log)
        write_atomically(target, record)
        return record


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _of_the_dead(case: Case, code: int, log: IO[bytes]) -> dict[str, Any]:
    """The record of a process that left none: who is killed has most likely taken all memory."""
    log.seek(0)
    said = log.read()[-4000:].decode(errors="replace").strip()
    record = {"case": asdict(case), "status": FAILED, "traceback": said, "environment": None}
    if code == -signal.SIGKILL:
        message = "the process was killed: there was no memory left for it, most likely"
        return {**record, "status": OUT_OF_MEMORY, "kind": "killed", "message": message}
    reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    last = said.splitlines()[-1] if said else "it said nothing"
    return {**record, "kind": reason, "message": f"the process ended with {reason}: {last}"}


def _kept(folder: Path, case: Case) -> Record | None:
    """The record of a case that need not be run; what failed may do better the next time."""
    record = _read(folder / _CASES / case.file_name)
    if record is None or record.get("case") != asdict(case):
        return None
    return None if record["status"] == FAILED else record


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json_text.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _read_sweep(folder: Path) -> dict[str, Any]:
    found = _read(folder / _SWEEP)
    cases = found.get("cases") if found is not None else None
    if found is None or not isinstance(cases, list) or not cases:
        raise ReportError(
            f"there is no sweep in {folder}: run one with rekindle sweep MODEL first."
        )
    return found
