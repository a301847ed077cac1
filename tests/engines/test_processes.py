"""Forked processes, and processes that train for long: nothing is shared, and nothing grows."""

from __future__ import annotations

import copy
import gc
import linecache
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.equality import differences, same, snapshot
from support.square_step import square_step
from torch import nn

import rekindle
from rekindle.planners.exact import milp
from rekindle.tracing import capture_thread

Made = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def made(width: int = 8, n_layers: int = 3) -> Made:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(n_layers)]
    model = nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)


def forked(function: Callable[[], Any], timeout_s: float = 60) -> Any:
    """What a function returns in a forked process; it must end in time."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            message = pickle.dumps(function())
        except BaseException:
            message = pickle.dumps(traceback.format_exc())
        os.write(writing, message)
        os._exit(0)
    os.close(writing)
    killer = threading.Timer(timeout_s, os.kill, (child, 9))
    killer.start()
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    killer.cancel()
    os.waitpid(child, 0)
    assert text, "the forked process did not answer in time"
    result = pickle.loads(text)
    assert not (isinstance(result, str) and "Traceback" in result), result
    return result


@contextmanager
def refused_by_autograd() -> Iterator[None]:
    """A backward pass in a forked process: torch refuses it if its parent has started threads.

    Whether it has depends on the devices that were known at its own first backward pass.
    """
    try:
        yield
    except rekindle.CaptureError as error:
        if "forked after its parent" not in str(error):
            raise


def test_a_forked_process_evaluates_and_trains_its_own_copy() -> None:
    plain, (model, optimizer) = made(), made()
    step = rekindle.optimize(square_step, model, optimizer, torch.ones(16, 8), budget="90%")
    step(torch.ones(16, 8))
    square_step(*plain, torch.ones(16, 8))

    def in_child() -> Any:
        with torch.no_grad():
            output = model(torch.ones(2, 8)).tolist()
        step(torch.ones(16, 8))
        step(torch.ones(16, 8))
        params = [param.tolist() for param in model.parameters()]
        with refused_by_autograd():
            step(torch.ones(24, 8))  # it has to be captured there
        step(torch.ones(16, 8))
        return output, params

    with torch.no_grad():
        expected = plain[0](torch.ones(2, 8)).tolist()
    before = snapshot(model, optimizer)
    output, params = forked(in_child)
    assert output == expected
    assert not differences(before, snapshot(model, optimizer))
    square_step(*plain, torch.ones(16, 8))
    step(torch.ones(16, 8))
    assert not differences(snapshot(*plain), snapshot(model, optimizer))
    square_step(*plain, torch.ones(16, 8))
    assert params == [param.tolist() for param in plain[0].parameters()]


def during_a_step_in_a_thread(step: Callable[..., Any], function: Callable[[], Any]) -> Any:
    """What a function returns while `step` is inside of the user's optimizer, or of a capture."""
    has_begun, is_done, errors = threading.Event(), threading.Event(), []

    def pause(*_: Any) -> None:
        has_begun.set()
        assert is_done.wait(100)

    def run() -> None:
        try:
            step(pause)
        except BaseException as error:
            errors.append(error)
            has_begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert has_begun.wait(100)
    try:
        return function()
    finally:
        is_done.set()
        thread.join()
        assert not errors


def test_a_process_forked_in_the_middle_of_a_step_refuses_it() -> None:
    model, optimizer = made()
    step = rekindle.optimize(square_step, model, optimizer, torch.ones(16, 8))
    other = rekindle.optimize(square_step, *made(), torch.ones(16, 8))

    def run(pause: Callable[..., None]) -> None:
        handle = optimizer.register_step_pre_hook(pause)
        step(torch.ones(16, 8))
        handle.remove()

    def in_child() -> Any:
        other(torch.ones(16, 8))
        with pytest.raises(rekindle.RekindleError, match="may be half updated"):
            step(torch.ones(16, 8))
        return "refused"

    assert during_a_step_in_a_thread(run, lambda: forked(in_child)) == "refused"
    step(torch.ones(16, 8))


def test_a_process_forked_during_a_capture_in_another_thread() -> None:
    """Its torch is the original one, and no lock is held there."""
    original = torch.autograd.backward, nn.Module.__call__, nn.Module.__init__

    def run(pause: Callable[..., None]) -> None:
        def train_step(*args: Any) -> Any:
            pause()
            return square_step(*args)

        rekindle.capture(train_step, *made(), torch.ones(16, 8))

    def in_child() -> Any:
        now = torch.autograd.backward, nn.Module.__call__, nn.Module.__init__
        with refused_by_autograd():
            rekindle.capture(square_step, *made(), torch.ones(16, 8))  # waits for no lock
        torch.compile(nn.Tanh(), backend="eager")(torch.ones(3))
        return now == original

    assert nn.Module.__call__ is original[1]
    square_step(*made(), torch.ones(16, 8))
    assert during_a_step_in_a_thread(run, lambda: forked(in_child)) is True
    assert capture_thread._installed == []


def solver_pid() -> int:
    program = milp.IntegerProgram()
    decision = program.decision(cost=1.0)
    program.peak_at(3, [(decision, -2.0)])
    assert program.cheapest_within(2) == [True]
    assert milp._SOLVER._process is not None
    return milp._SOLVER._process.pid


def test_a_forked_process_has_a_solver_of_its_own() -> None:
    own = solver_pid()
    others = {forked(solver_pid) for _ in range(2)}
    assert own not in others
    assert solver_pid() == own


# Copies


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("part", ["", "captured", "first", "engine", "recording", "guard"])
def test_what_is_bound_to_a_model_cannot_be_copied(copied: Any, part: str) -> None:
    step = rekindle.optimize(square_step, *made(), torch.ones(16, 8))
    found: Any = step if not part else step.captured
    if part not in ("", "captured"):
        found = found.first if part == "first" else getattr(found.first, part)
    with pytest.raises(TypeError, match=f"{type(found).__name__} cannot be pickled or copied"):
        copied(found)
    if copied is not copy.copy:
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            copied({"trainer": [found]})
    step(torch.ones(16, 8))


# Growth


def held() -> dict[str, int]:
    """What the process holds: tensors, their bytes, open files, and entries of dicts."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    real = [
        each.untyped_storage() for each in tensors if type(each) in (torch.Tensor, nn.Parameter)
    ]
    storages = {storage.data_ptr(): storage for storage in real}
    found = {
        "tensors": len(tensors),
        "bytes": sum(storage.nbytes() for storage in storages.values()),
        "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "sources": sum(name.startswith("<rekindle") for name in linecache.cache),
        "threads": threading.active_count(),
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("rekindle"):
            for key, value in vars(module).items():
                if not key.startswith("__") and isinstance(value, (Mapping, Set, list)):
                    found[f"{name}.{key}"] = len(value)
    return found


def train_for_long(n_steps: int, n_shapes: int, **asked: Any) -> tuple[dict[str, int], ...]:
    """What is held after each third of the steps, with shapes in turns; all train as plainly."""
    plain, (model, optimizer) = made(), made()
    batches = [torch.randn(rows, 8) for rows in range(16, 16 + 4 * n_shapes, 4)]
    step = rekindle.optimize(square_step, model, optimizer, batches[0], **asked)
    step.captured.max_captures = max(2, n_shapes // 3)  # so that captures come and go
    seen = []
    for number in range(n_steps):
        batch = batches[number // 2 % n_shapes]
        assert same(step(batch), square_step(*plain, batch))
        if (number + 1) % (n_steps // 3) == 0:
            seen.append(held())
    assert not differences(snapshot(*plain), snapshot(model, optimizer))
    assert step.n_captures == step.captured.max_captures
    return tuple(seen)


def assert_no_growth(seen: tuple[dict[str, int], ...]) -> None:
    """From the second third to the last: caches of operators fill up before."""
    before, after = seen[-2:]
    assert {key: (before.get(key), after[key]) for key in after if after[key] > before[key]} == {}


@pytest.mark.parametrize(
    "asked", [{}, {"budget": "100%", "planner": "none"}], ids=["plain", "planned"]
)
def test_no_growth_over_100_steps_of_10_shapes(asked: dict[str, Any]) -> None:
    assert_no_growth(train_for_long(120, 10, **asked))


@pytest.mark.exhaustive
def test_no_growth_over_3000_steps_of_50_shapes() -> None:
    assert_no_growth(train_for_long(3000, 50))
