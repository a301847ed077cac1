"""Errors name the user's own line and say what to write instead; nothing is changed."""

from __future__ import annotations

import inspect
import logging
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.equality import differences, snapshot
from torch import nn
from torch.optim.lr_scheduler import StepLR

import rekindle

MARK = "# " + "here"


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


BATCH = (torch.linspace(-1, 1, 30).view(5, 6), torch.tensor([0, 1, 2, 0, 1]))


def finish(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def marked_line(function: Callable[..., Any]) -> int:
    """The number of the one marked line in a function's source; its first line if none is."""
    lines, start = inspect.getsourcelines(function)
    marked = [number for number, line in enumerate(lines, start) if MARK in line]
    assert len(marked) <= 1
    return marked[0] if marked else start


def refusal(
    train_step: Callable[..., Any],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    batch: Any = BATCH,
) -> rekindle.CaptureError:
    """The error that capturing raises; checks that nothing has changed."""
    if model is None or optimizer is None:
        model, optimizer = made()
    before = snapshot(model, optimizer), random.getstate(), str(np.random.get_state())
    with pytest.raises(rekindle.CaptureError) as info:
        rekindle.optimize(train_step, model, optimizer, batch)
    error = info.value
    assert type(error) is rekindle.CaptureError
    assert not differences(before[0], snapshot(model, optimizer))
    assert (random.getstate(), str(np.random.get_state())) == before[1:]
    assert str(error) == f"{error.filename}:{error.lineno}: {error.problem}\n  {error.advice}"
    return error


# Reading values


def item(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = finish(optimizer, loss_of(model, batch))
    return loss.item()  # here


def to_float(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = finish(optimizer, loss_of(model, batch))
    print(float(loss))  # here
    return loss


def branch(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = loss_of(model, batch)
    if loss > 1:  # here
        loss = loss * 2
    return finish(optimizer, loss)


def to_bool(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    finite = bool(torch.isfinite(model(batch[0])).all())  # here
    return finish(optimizer, loss_of(model, batch)), finite


def to_list(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    logits = model(batch[0])
    shown = logits[0].tolist()  # here
    return finish(optimizer, F.cross_entropy(logits, batch[1])), shown


def to_nested_list(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    logits = model(batch[0])
    shown = logits.tolist()  # here
    return finish(optimizer, F.cross_entropy(logits, batch[1])), shown


def index_by_tensor(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    names = ["a", "b", "c"]
    best = names[model(batch[0])[0].argmax()]  # here
    return finish(optimizer, loss_of(model, batch)), best


def formatted(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = finish(optimizer, loss_of(model, batch))
    print(f"{loss:.3f}")  # here
    return loss


def parameter_value(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = loss_of(model, batch)
    if model[0].bias.sum() > 0:  # here
        loss = loss * 2
    return finish(optimizer, loss)


VALUE = "reads the value of a tensor"


@pytest.mark.parametrize(
    "train_step",
    [
        item,
        to_float,
        branch,
        to_bool,
        to_list,
        to_nested_list,
        index_by_tensor,
        formatted,
        parameter_value,
    ],
    ids=lambda f: f.__name__,
)
def test_reading_a_value(train_step: Callable[..., Any]) -> None:
    error = refusal(train_step)
    assert (error.filename, error.lineno) == (__file__, marked_line(train_step))
    assert error.problem.startswith(VALUE)
    assert "outside" in error.advice
    assert "loss = step(batch)" in error.advice
    assert "torch.where" in error.advice or train_step is formatted


def to_numpy(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    logits = model(batch[0])
    logits.detach().numpy()  # here
    return finish(optimizer, F.cross_entropy(logits, batch[1]))


def data_ptr(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    logits = model(batch[0])
    np.asarray(logits.detach())  # here
    return finish(optimizer, F.cross_entropy(logits, batch[1]))


@pytest.mark.parametrize("train_step", [to_numpy, data_ptr], ids=lambda f: f.__name__)
def test_reading_memory(train_step: Callable[..., Any]) -> None:
    error = refusal(train_step)
    assert (error.filename, error.lineno) == (__file__, marked_line(train_step))
    assert error.problem.startswith("reads a tensor's memory (.numpy()")
    assert "stay with torch operators, or do it outside the step" in error.advice


def parameter_list(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = loss_of(model, batch)
    if model[0].bias.tolist()[0] > 0:  # here
        loss = loss * 2
    return finish(optimizer, loss)


def parameter_array(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = loss_of(model, batch)
    scale = float(np.asarray(model[1].running_mean).sum())  # here
    return finish(optimizer, loss * scale)


@pytest.mark.parametrize("train_step", [parameter_list, parameter_array], ids=lambda f: f.__name__)
def test_reading_a_parameters_memory(train_step: Callable[..., Any]) -> None:
    """A parameter is a real tensor even in a capture, and its values will change."""
    error = refusal(train_step)
    assert (error.filename, error.lineno) == (__file__, marked_line(train_step))


# Shapes that depend on data


def nonzero(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    rows = torch.nonzero(model(batch[0]) > 0)  # here
    return finish(optimizer, loss_of(model, batch)), rows


def mask(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    logits = model(batch[0])
    kept = logits[logits > 0]  # here
    return finish(optimizer, kept.square().mean())


def unique(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    classes = torch.unique(model(batch[0]).argmax(1))  # here
    return finish(optimizer, loss_of(model, batch)), classes


def masked_select(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    logits = model(batch[0])
    kept = torch.masked_select(logits, logits > 0)  # here
    return finish(optimizer, kept.square().mean())


@pytest.mark.parametrize(
    ("train_step", "operator"),
    [
        (nonzero, "nonzero"),
        (mask, "nonzero"),
        (unique, "_unique2"),
        (masked_select, "masked_select"),
    ],
    ids=["nonzero", "mask", "unique", "masked_select"],
)
def test_shapes_that_depend_on_data(train_step: Callable[..., Any], operator: str) -> None:
    error = refusal(train_step)
    assert (error.filename, error.lineno) == (__file__, marked_line(train_step))
    assert operator in error.problem
    assert "shape or value depends on data" in error.problem
    assert "write torch.where(...) or a mask of fixed shape" in error.advice
    assert error.__cause__ is not None


# Rules for a step


def no_backward(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = loss_of(model, batch)
    optimizer.step()
    return loss


def no_optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = loss_of(model, batch)
    loss.backward()
    return loss


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    def compute() -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return optimizer.step(compute)  # here


def closure_by_name(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step(closure=lambda: loss)  # here
    return loss


def changes_rate(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = finish(optimizer, loss_of(model, batch))
    optimizer.param_groups[0]["lr"] *= 0.9
    return loss


def seeds(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    torch.manual_seed(3)  # here
    return finish(optimizer, loss_of(model, batch))


def draws_python(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    return finish(optimizer, loss_of(model, batch) * random.random())  # here


def draws_numpy(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    return finish(optimizer, loss_of(model, batch) * float(np.random.rand()))  # here


draw, reseed = random.random, torch.default_generator.manual_seed


def draws_by_another_name(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    return finish(optimizer, loss_of(model, batch) * draw())


def seeds_by_another_name(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    reseed(12345)
    return finish(optimizer, loss_of(model, batch))


def goes_on_after_a_refusal(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = finish(optimizer, loss_of(model, batch))
    try:
        return loss * loss.item()  # here
    except Exception:
        return loss


OUTSIDER = torch.ones(3, requires_grad=True)


def reaches_outside(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    return finish(optimizer, F.cross_entropy(model(batch[0]) * OUTSIDER, batch[1]))


def opaque_result(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    return finish(optimizer, loss_of(model, batch)), types.SimpleNamespace(best=1)


RULES: dict[Callable[..., Any], tuple[str, str]] = {
    no_backward: ("the step never calls backward()", "calls loss.backward() and optimizer.step()"),
    no_optimizer_step: (
        "does not call optimizer.step()",
        "on the optimizer that you pass to",
    ),
    closure: ("calls optimizer.step with an argument", "without a closure: compute the loss and"),
    closure_by_name: ("calls optimizer.step with an argument", "loss.backward() before it"),
    changes_rate: ("the step changes the optimizer's settings", "between steps, outside"),
    seeds: ("the step seeds a random generator", "Call torch.manual_seed outside the step"),
    draws_python: ("draws from Python's or numpy's random generator", "torch.rand, torch.randint"),
    draws_numpy: ("draws from Python's or numpy's random generator", "torch.rand, torch.randint"),
    draws_by_another_name: ("draws from Python's or numpy's random generator", "torch.rand"),
    seeds_by_another_name: ("the step seeds a random generator", "outside the step"),
    goes_on_after_a_refusal: ("reads the value of a tensor", "Return the tensor"),
    reaches_outside: ("neither in the model nor in the optimizer", "requires_grad_(False)"),
    opaque_result: ("the step returns a SimpleNamespace", "Return tensors, in tuples, lists"),
}


@pytest.mark.parametrize("train_step", RULES, ids=lambda f: f.__name__)
def test_rules_of_a_step(train_step: Callable[..., Any]) -> None:
    problem, advice = RULES[train_step]
    error = refusal(train_step)
    assert (error.filename, error.lineno) == (__file__, marked_line(train_step))
    assert problem in error.problem
    assert advice in error.advice
    assert OUTSIDER.grad is None


def test_scheduler_inside_the_step() -> None:
    model, optimizer = made()
    scheduler = StepLR(optimizer, 1)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = finish(optimizer, loss_of(model, batch))
        scheduler.step()  # here
        return loss

    before = scheduler.state_dict()
    error = refusal(train_step, model, optimizer)
    assert (error.filename, error.lineno) == (__file__, marked_line(train_step))
    assert error.problem == "steps a learning-rate scheduler inside the training step"
    assert "Call scheduler.step() after step(batch), outside" in error.advice
    assert scheduler.state_dict() == before


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    return finish(optimizer, loss_of(model, batch))


def test_two_devices() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3, device="meta"))
    before = model[0].weight.detach().clone()
    with pytest.raises(rekindle.CaptureError) as info:
        rekindle.capture(plain_step, model, torch.optim.SGD(model.parameters(), lr=0.1), BATCH)
    error = info.value
    assert (error.filename, error.lineno) == (__file__, marked_line(plain_step))
    assert error.problem == "the model is on 2 devices: cpu, meta"
    assert "move the model with model.to(" in error.advice
    assert torch.equal(model[0].weight, before)


def test_sparse_gradients() -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = model(batch).square().mean()
        loss.backward()  # here
        optimizer.step()
        return loss

    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    error = refusal(train_step, model, optimizer, torch.tensor([1, 2]))
    assert (error.filename, error.lineno) == (__file__, marked_line(train_step))
    assert "sparse" in error.problem
    assert "sparse=False" in error.advice


def test_opaque_batch() -> None:
    error = refusal(plain_step, batch=(*BATCH, {"meta": [Path("image.png")]}))
    assert (error.filename, error.lineno) == (__file__, marked_line(plain_step))
    assert error.problem.startswith("the batch contains a ")
    assert "Path, which Rekindle cannot look into" in error.problem
    assert error.advice == "Pass tensors and plain numbers, in tuples, lists, dicts or dataclasses."


@pytest.mark.parametrize("form", ["method", "callable", "lambda"])
def test_every_form_of_a_step_has_a_line(form: str) -> None:
    """Errors about the whole step name the line where it is defined."""

    class Trainer:
        def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
            return no_backward(model, optimizer, batch)

        def __call__(self, *args: Any) -> Any:
            return no_backward(*args)

    trainer = Trainer()
    step: Callable[..., Any] = {
        "method": trainer.step,
        "callable": trainer,
        "lambda": lambda model, optimizer, batch: no_backward(model, optimizer, batch),
    }[form]
    function = Trainer.__call__ if form == "callable" else step
    error = refusal(step)
    assert (error.filename, error.lineno) == (__file__, function.__code__.co_firstlineno)


# Lines in models and libraries


def test_value_read_in_the_model(tmp_path: Path) -> None:
    """The line that reads the value is in the model's file, not in the step's."""

    class Adaptive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            if x.abs().max() > 10:  # here
                x = x / 10
            return x

    model = Adaptive()
    error = refusal(plain_step, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (error.filename, error.lineno) == (__file__, marked_line(Adaptive.forward))


def install(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a library importable, in a folder where pip would put it."""
    libraries = folder / "site-packages"
    libraries.mkdir()
    (libraries / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(libraries)


def test_an_operator_whose_fake_fails() -> None:
    """With an error that no kernel raises."""

    def train_step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
        odd = torch.pixel_shuffle(torch.zeros(0, 1, 8, 8), 2)  # here
        return finish(optimizer, loss_of(model, batch) + odd.sum())

    error = refusal(train_step)
    assert error.lineno == marked_line(train_step)
    assert "AssertionError" in str(error)


TYPED = """
def train_step(model, optimizer, batch):
    loss = model(batch[0]).sum()
    loss.item()
    return loss
"""


@pytest.mark.parametrize("filename", ["<stdin>", "<string>", "<ipython-input-1-abc>"])
def test_code_that_was_typed(filename: str) -> None:
    """Names of the files of interpreters and notebooks are no reason to name another line."""
    scope: dict[str, Any] = {}
    exec(compile(TYPED, filename, "exec"), scope)
    assert str(refusal(scope["train_step"])).startswith(f"{filename}:4: ")


def test_value_read_in_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's call into an installed library is named, not the library's line."""
    source = "def accuracy(a, b):\n    return (a.argmax(1) == b).float().mean().item()\n"
    install("metrics", source, tmp_path, monkeypatch)
    import metrics  # type: ignore[import-not-found]

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        logits = model(batch[0])
        metrics.accuracy(logits, batch[1])  # here
        return finish(optimizer, F.cross_entropy(logits, batch[1]))

    try:
        error = refusal(train_step)
    finally:
        del sys.modules["metrics"]
    assert (error.filename, error.lineno) == (__file__, marked_line(train_step))
    assert error.problem.startswith(VALUE)
    assert "metrics.py:2" in error.problem


@pytest.mark.parametrize("kind", ["scaler", "distribution"])
def test_advice_for_what_reads_the_value(kind: str) -> None:
    """Parts of torch that read values have a switch, or something in their place."""
    scaler = torch.amp.GradScaler("cpu")
    torch.distributions.Distribution.set_default_validate_args(True)  # libraries switch it off

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = loss_of(model, batch)
        if kind == "distribution":
            scale = model(batch[0]).exp()
            return finish(optimizer, -torch.distributions.Normal(0.0, scale).entropy().mean())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        return loss

    error = refusal(train_step)
    assert error.filename == __file__
    expected = {
        "scaler": ("grad_scaler.py", "bfloat16"),
        "distribution": ("distribution.py", "validate_args"),
    }
    assert expected[kind][0] in error.problem
    assert expected[kind][1] in error.advice


def test_a_dynamic_shape_in_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for an error of torch, whose traceback is searched."""
    install("picking", "def pick(a, b):\n    return a[a[:, 0] > b]\n", tmp_path, monkeypatch)
    import picking  # type: ignore[import-not-found]

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        kept = picking.pick(model(batch[0]), batch[1])  # here
        return finish(optimizer, kept.square().mean())

    try:
        error = refusal(train_step)
    finally:
        del sys.modules["picking"]
    assert (error.filename, error.lineno) == (__file__, marked_line(train_step))
    assert "picking.py:2" in error.problem


def test_the_users_own_exception() -> None:
    """An error that the model raises reaches the user unchanged, in the capture and later."""

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) < 5:
                raise ValueError(f"{len(x)} rows are too few")
            return self.linear(x)

    model = Picky()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    few = (BATCH[0][:2], BATCH[1][:2])
    with pytest.raises(ValueError, match="2 rows are too few") as info:
        rekindle.optimize(plain_step, model, optimizer, few)
    assert type(info.value) is ValueError
    step = rekindle.optimize(plain_step, model, optimizer, BATCH)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="2 rows are too few"):
        step(few)
    assert not differences(before, snapshot(model, optimizer))
    step(BATCH)


def test_an_error_in_a_later_capture_leaves_the_step_usable() -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = loss_of(model, batch)
        if len(batch[0]) == 2:
            loss.item()  # here
        return finish(optimizer, loss)

    model, optimizer = made()
    step = rekindle.optimize(train_step, model, optimizer, BATCH)
    with pytest.raises(rekindle.CaptureError) as info:
        step((BATCH[0][:2], BATCH[1][:2]))
    assert (info.value.filename, info.value.lineno) == (__file__, marked_line(train_step))
    assert torch.isfinite(step(BATCH))
    assert step.n_captures == 1


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.n_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        return self.linear(x)


def test_a_counter_that_only_counts_goes_on_counting(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, logger="rekindle"):
        step = rekindle.optimize(plain_step, model, optimizer, BATCH)
    assert model[0].n_calls == 0
    for count in range(1, 4):
        step(BATCH)
        assert model[0].n_calls == count
    assert step.n_captures == 1
    assert not caplog.records


def test_nothing_is_logged_for_an_ordinary_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="rekindle"):
        step = rekindle.optimize(plain_step, *made(), BATCH)
        step(BATCH)
        step(BATCH)
    assert not [record for record in caplog.records if record.name.startswith("rekindle")]
