"""Trains one random program plainly and with Rekindle, without a budget and with two.

A cell's outcome is one of: "equal" (the same bits), "refused" (an error of Rekindle's), "wrong"
(other bits, or no error where the plain step raises), "over" (a step took more than its budget),
"raw" (any other error), or "unstable" (two plain trainings differ). A program that fails plainly in
its first step is "invalid".
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import re
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import rekindle
from benchmarks.fuzz.programs import N_STEPS, Objects, forget, load, source
from rekindle.core.cost.profile import Profile
from rekindle.errors import InfeasibleBudget, RekindleError
from rekindle.measuring.bitwise_compare import same, state_of
from rekindle.torch_internals import FakeTensor, pytree

BUDGETS = ("none", "halfway", "least")
# Most programs are planned in milliseconds; some by the default planner, in seconds.
PLANNERS = (*(("mutwo", "all", "mutwo", "chen-sqrt", "mutwo") * 3), "auto")
LOG = logging.getLogger("rekindle")
N_REPEATS = 4  # of the plain training, before bits are called wrong
Json = dict[str, Any]
Step = Callable[[Any], Any]


class Training:
    """What a training leaves: results, batches and state, and the error that it ended in."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Any]] = []
        self.error: Exception | None = None
        self.n_steps = 0

    def note(self, name: str, value: Any) -> None:
        """Keep copies of all leaves of a value."""
        leaves = pytree.tree_flatten_with_path(value)[0]
        for path, leaf in leaves:
            if isinstance(leaf, FakeTensor):
                raise AssertionError(f"a fake tensor is left in {name}")
            self.found.append((f"{name}{pytree.keystr(path)}", _copied(leaf)))

    def differences(self, other: Training) -> list[str]:
        """The names of values that differ, or that one of the trainings lacks."""
        mine, others = dict(self.found), dict(other.found)
        names = dict.fromkeys((*mine, *others))
        return [
            n for n in names if n not in mine or n not in others or not _same(mine[n], others[n])
        ]


def run(seed: int, budgets: tuple[str, ...] = BUDGETS) -> Json:
    """The outcome of each cell of a program."""
    make = load(seed, source(seed))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _cells(make, budgets, PLANNERS[seed % len(PLANNERS)])
    finally:
        forget(seed)
        gc.collect()


def _cells(make: Callable[[], Objects], budgets: tuple[str, ...], planner: str) -> Json:
    try:
        plain = _trained(make, None)
    except Exception as error:  # not even its objects can be made, or changed
        return {"invalid": _described(error)}
    if plain.n_steps == 0:
        return {"invalid": _described(plain.error)}
    cells: Json = {"none": _cell(make, plain, {})}
    others = [budget for budget in budgets if budget != "none"]
    if not others or cells["none"]["outcome"] not in ("equal", "wrong"):
        return cells
    try:
        profile, plain_bytes, least_bytes = _range(make, planner)
    except RekindleError as error:
        return cells | {budget: {"outcome": "refused", **_described(error)} for budget in others}
    except Exception as error:
        return cells | {budget: {"outcome": "raw", **_described(error)} for budget in others}
    options = {"profile": profile, "planner": planner}
    for budget in others:
        # A later batch, of another shape, may need more.
        for _ in range(N_STEPS):
            limit = {"halfway": (plain_bytes + least_bytes) // 2, "least": least_bytes}[budget]
            cells[budget] = _cell(make, plain, options | {"budget": limit})
            needed = cells[budget].pop("needed_bytes", 0)
            if needed <= limit:
                break
            least_bytes, plain_bytes = max(least_bytes, needed), max(plain_bytes, needed)
        cells[budget]["budget_bytes"] = limit
    return cells


def _trained(make: Callable[[], Objects], options: Json | None) -> Training:
    """Train a few steps. An error of a step ends the training; one of `optimize` is raised."""
    objects = make()
    model, optimizer, train_step, batch_of, change, look = objects
    torch.manual_seed(1)
    training = Training()

    def plain(batch: Any) -> Any:
        return train_step(model, optimizer, batch)

    step: Step = plain
    if options is not None:
        first = batch_of(0)
        kept = copy.deepcopy(look())
        before = _whole_state(objects)
        try:
            step = rekindle.optimize(train_step, model, optimizer, first, **options)
        except Exception as error:
            training.error = error
            _check_trace(objects, before, kept)
            return training
        _check_trace(objects, before, kept)
    for i in range(N_STEPS):
        batch = batch_of(i)
        try:
            result = step(batch)
        except Exception as error:
            training.error = error
            break
        training.n_steps += 1
        training.note(f"result {i}", result)
        training.note(f"batch {i}", vars(batch) if hasattr(batch, "__dict__") else batch)
        training.note(f"Python state {i}", look())
        _note_state(training, f"after step {i}: ", objects)
        del result, batch
        change(i)
    return training


def _whole_state(objects: Objects) -> Training:
    state = Training()
    _note_state(state, "", objects)
    return state


def _note_state(training: Training, prefix: str, objects: Objects) -> None:
    model, optimizer = objects.model, objects.optimizer
    for name, value in state_of(model, optimizer).items():
        training.note(f"{prefix}{name}", value)
    for name, param in model.named_parameters():
        training.note(f"{prefix}requires_grad {name}", param.requires_grad)
    for name, module in model.named_modules():
        training.note(f"{prefix}training {name}", module.training)
        if hasattr(module, "calls"):
            training.note(f"{prefix}calls {name}", module.calls)


def _check_trace(objects: Objects, before: Training, kept: Any) -> None:
    """A capture changes nothing of the user's."""
    changed = before.differences(_whole_state(objects))
    now, then = Training(), Training()
    now.note("Python state", objects.look())
    then.note("Python state", kept)
    changed += then.differences(now)
    if changed:
        raise AssertionError(f"the capture left a trace: {', '.join(changed)[:300]}")


class _Overshoots(logging.Handler):
    """The warnings about steps that took more than their budget."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def __enter__(self) -> _Overshoots:
        LOG.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        LOG.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("the step took"):
            self.found.append(record.getMessage())


def _cell(make: Callable[[], Objects], plain: Training, options: Json) -> Json:
    with _Overshoots() as overshoots:
        outcome = _outcome(make, plain, options)
    if overshoots.found and outcome["outcome"] == "equal":
        return {"outcome": "over", "reason": overshoots.found[0]}
    return outcome


def _outcome(make: Callable[[], Objects], plain: Training, options: Json) -> Json:
    try:
        found = _trained(make, options)
    except AssertionError as error:
        return {"outcome": "wrong", "reason": str(error)}
    changed = plain.differences(found)
    if found.error is not None:
        before = [n for n in changed if n in dict(found.found)]  # until then, all must be equal
        if before:
            changed = before
        elif isinstance(found.error, InfeasibleBudget):
            return {
                "outcome": "refused",
                "needed_bytes": found.error.least_peak_bytes,
                **_described(found.error),
            }
        elif isinstance(found.error, RekindleError):
            return {"outcome": "refused", **_described(found.error)}
        elif plain.error is None or type(plain.error) is not type(found.error):
            return {"outcome": "raw", **_described(found.error)}
        elif found.n_steps == plain.n_steps:
            return {"outcome": "equal", "error": type(plain.error).__name__}
    elif plain.error is not None:
        reason = f"no error in step {plain.n_steps}: {plain.error!r}"[:300]
        return {"outcome": "wrong", "reason": reason}
    if not changed:
        return {"outcome": "equal"}
    is_stable = not any(plain.differences(_trained(make, None)) for _ in range(N_REPEATS))
    outcome = "wrong" if is_stable else "unstable"
    return {"outcome": outcome, "reason": ", ".join(changed)[:500]}


def _range(make: Callable[[], Objects], planner: str) -> tuple[Profile, int, int]:
    """A profile of the step, its plain peak, and the least peak that a plan reaches."""
    model, optimizer, train_step, batch_of, *_ = make()
    batch = batch_of(0)
    captured = rekindle.capture(train_step, model, optimizer, batch)
    profile = rekindle.profile(captured, cache=False, runs=1)
    plain_bytes = rekindle.simulate(captured.graph, profile).peak_bytes
    try:
        rekindle.optimize(
            train_step, model, optimizer, batch, budget=1, profile=profile, planner=planner
        )
    except InfeasibleBudget as error:
        return profile, plain_bytes, error.least_peak_bytes
    raise AssertionError("a byte is enough")


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    if isinstance(leaf, (set, np.ndarray)):
        return leaf.copy()
    return leaf


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same(a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg())
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.array_equal(a, b)
    if isinstance(a, (int, float, str, bool, type(None), set, frozenset)):
        with contextlib.suppress(TypeError):
            return type(a) is type(b) and repr(a) == repr(b)
    return type(a) is type(b)


def _described(error: Exception | None) -> Json:
    assert error is not None
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{last.filename.rpartition('site-packages/')[2].rpartition('/src/')[2]}:{last.lineno}"
    return {"reason": f"{type(error).__name__}: {error}"[:400], "at": place}


def kind_of(cell: Json) -> str:
    """The reason of a refusal, without what differs from program to program."""
    reason = re.sub(r"^(\w+): (\S+:\d+: )?", r"\1: ", cell.get("reason", "")).split("\n")[0]
    reason = re.sub(r"\b[a-z_]+\d+\b", "NAME", reason)
    return re.sub(r"\d+(\.\d+)?", "N", reason)[:120]
