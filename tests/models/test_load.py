"""A user's own function becomes a workload, and each way to get it wrong has its message."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rekindle.errors import ModelError
from rekindle.models import load

Write = Callable[[str], Path]

GOOD = """
import torch
from torch import nn
from torch.optim import SGD

def train_step(model, optimizer, batch):
    loss = model(batch["x"]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

def plain():
    model = nn.Linear(3, 1)
    return train_step, model, SGD(model.parameters(), lr=0.1), {"x": torch.ones(5, 3)}

def sized(batch=5):
    *rest, _ = plain()
    return *rest, {"x": torch.ones(batch, 3)}

def anything(**settings):
    assert settings == {"batch": 2, "precision": "bf16", "device": "cpu"}, settings
    return sized(settings["batch"])

def needs_batch(batch):
    return sized(batch)

def needs_more(path):
    return plain()

def nothing():
    plain()

def three():
    return plain()[:3]

def swapped():
    train_step, model, optimizer, batch = plain()
    return train_step, optimizer, model, batch

def no_step():
    _, model, optimizer, batch = plain()
    return model, model, optimizer, batch

def no_optimizer():
    train_step, model, _, batch = plain()
    return train_step, model, "adam", batch

def fails():
    raise ValueError("no such dataset")

constant = 3
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def test_a_zoo_name() -> None:
    work = load("mlp")
    assert (work.name, work.batch_size, work.precision, work.device) == ("mlp", 64, "fp32", "cpu")
    work = load("mlp", batch=3, precision="bf16", device="cpu")
    assert (work.batch_size, work.precision) == (3, "bf16")


def test_a_function_in_a_file(write: Write) -> None:
    spec = f"{write(GOOD)}:plain"
    work = load(spec)
    assert (work.name, work.batch_size, work.precision, work.device) == (spec, 5, "fp32", "cpu")
    losses = [work.train_step(work.model, work.optimizer, work.batch) for _ in range(2)]
    assert losses[0] != losses[1]


def test_a_function_gets_only_what_was_asked_for(write: Write) -> None:
    path = write(GOOD)
    assert load(f"{path}:sized").batch_size == 5
    assert load(f"{path}:sized", batch=2).batch["x"].shape == (2, 3)
    work = load(f"{path}:anything", batch=2, precision="bf16", device="cpu")
    assert (work.batch_size, work.precision) == (2, "bf16")


def test_a_file_may_import_its_neighbour(write: Write, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_train.py").write_text(GOOD, encoding="utf-8")
    before = list(sys.path)
    assert load(f"{write('from neighbour_of_train import plain')}:plain").batch_size == 5
    assert sys.path == before
    del sys.modules["neighbour_of_train"]


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        (
            "plian",
            {},
            r"train.py has no function 'plian', did you mean 'plain'\? known: train_step",
        ),
        ("constant", {}, r"train.py has no function 'constant'; known: train_step, plain"),
        (
            "plain",
            {"batch": 7},
            r"plain takes no argument 'batch', so that batch 7 cannot reach it",
        ),
        ("sized", {"precision": "bf16"}, r"sized takes no argument 'precision'"),
        ("sized", {"device": "cpu"}, r"sized takes no argument 'device'"),
        ("sized", {"batch": -1}, r"whole number of at least 1, not -1"),
        ("anything", {"precision": "int3"}, r"unknown precision 'int3': use fp32 or bf16"),
        ("anything", {"device": "abacus"}, r"unknown device 'abacus': use cpu or cuda"),
        ("needs_batch", {}, r"needs_batch needs 'batch': give --batch, or a default"),
        ("needs_more", {}, r"needs_more needs an argument 'path', which cannot be given here"),
        (
            "nothing",
            {},
            r"nothing must return \(train_step, model, optimizer, batch\), but it returned None$",
        ),
        ("three", {}, r"but it returned 3 things: \(function, Linear, SGD\)$"),
        ("swapped", {}, r"but its model is of type SGD, not a torch.nn.Module$"),
        ("no_step", {}, r"but its train_step is of type Linear, not a function$"),
        ("no_optimizer", {}, r"but its optimizer is of type str, not a torch.optim.Optimizer$"),
        ("fails", {}, r"train.py:fails raised ValueError: no such dataset$"),
    ],
)
def test_what_is_wrong_with_a_function(
    write: Write, function: str, settings: dict, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(f"{write(GOOD)}:{function}", **settings)


def test_cuda_without_a_gpu(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for spec in ("mlp", f"{write(GOOD)}:anything"):
        with pytest.raises(ModelError, match="'cuda' was asked for, but torch finds no GPU here"):
            load(spec, device="cuda")


def test_what_is_wrong_with_a_file(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no file 'missing.py', from 'missing.py:make'"):
        load("missing.py:make")
    with pytest.raises(ModelError, match=r"names a file but no function: write train.py:function"):
        load("train.py")
    with pytest.raises(ModelError, match=r"names a file but no function: write train.py:function"):
        load("train.py:")
    with pytest.raises(ModelError, match=r"train.py cannot be imported: SyntaxError"):
        load(f"{write('def make(:')}:make")
    with pytest.raises(ModelError, match=r"train.py has no function 'make', nor any other$"):
        load(f"{write('import torch')}:make")
    notes = tmp_path / "notes.txt"
    notes.write_text("", encoding="utf-8")
    with pytest.raises(ModelError, match=r"is not a Python file: its name must end in .py"):
        load(f"{notes}:make")


def test_an_unknown_name_offers_the_zoo_and_a_file() -> None:
    with pytest.raises(ModelError) as caught:
        load("bert_base")
    message = str(caught.value)
    assert "did you mean 'bert-base'?" in message
    assert "known: mlp, lstm, resnet-tiny" in message
    assert message.endswith("or path/to/file.py:function for one of your own")
