"""`rekindle run` as users call it: what it shows and writes, what it refuses, what it finds."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import run
from support.tiny_step import ABOUT, tiny_step

import rekindle
from rekindle.core.graph.serial import load_plan, save_profile
from rekindle.studies import model_runs

# Deep enough for a planner to find something to drop, and random, so that a copy could differ.
TRAIN = """
import torch
from torch import nn


def train_step(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make(batch=256):
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    model = nn.Sequential(*layers)
    return train_step, model, torch.optim.Adam(model.parameters()), torch.randn(batch, 16)


def broken():
    def step(model, optimizer, batch):
        raise ValueError("no loss today\\nand none tomorrow")

    return step, *make()[1:]


def silent():
    def step(model, optimizer, batch):
        assert batch is None

    return step, *make()[1:]


def chatty():
    def step(model, optimizer, batch):
        print("a step")
        return train_step(model, optimizer, batch)

    return step, *make()[1:]


def without_a_batch_size():
    def step(model, optimizer, batch):
        return train_step(model, optimizer, torch.ones(8, 16) * batch)

    return step, *make()[1:3], torch.tensor(2.0)
"""
# This planner does not look at times, which differ from run to run.
WITHIN = ("--budget", "75%", "--planner", "chen-sqrt", "--steps", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with a step of their own and a saved profile."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "train.py").write_text(TRAIN)
    graph, profile, _ = tiny_step()
    save_profile(folder / "saved.json.gz", graph, profile, ABOUT)
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles are cached in that folder, too."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


def run_as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and what one command writes as JSON."""
    code, out, _ = run(capsys, "run", *arguments, "--json", "-")
    data: dict[str, Any] = json.loads(out)
    return code, data


def test_a_step_of_the_users_own_within_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "run", "train.py:make", *WITHIN)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "train.py:make: batch 256, fp32, on cpu"
    for label in ("peak, measured", "peak, forecast", "step, measured", "step, forecast"):
        assert sum(line.strip().startswith(label) for line in lines) == 1
    assert "  equal   after 2 steps, bit for bit: 2 losses, 8 parameters, " in out
    assert re.search(r"^  within  the budget of .* below it", out, flags=re.MULTILINE)
    assert "  plan    chen-sqrt drops " in out
    assert lines[-1] == "The same, bit for bit, and within the budget: train.py:make."
    assert max(map(len, lines)) <= 80


def test_a_zoo_model_within_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    budget = ("--budget", "85%", "--planner", "chen-sqrt", "--steps", "1")
    options = ("--batch", "8", "--precision", "bf16", "--device", "cpu")
    code, data = run_as_json(capsys, "resnet-tiny", *budget, *options)
    assert code == 0
    assert (data["model"], data["batch"], data["precision"]) == ("resnet-tiny", 8, "bf16")
    assert data["measured"]["planned"]["peak_bytes"] <= data["budget_bytes"]
    assert data["dropped"]["all"]["dropped"] > 0


def test_the_json_has_all_that_plan_gives_and_what_was_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    code, out, _ = run(capsys, "run", "train.py:make", *WITHIN, "--json", str(path))
    assert code == 0
    assert "within the budget" in out
    found = json.loads(path.read_text())
    _, out, _ = run(capsys, "plan", "train.py:make", *WITHIN[:4], "--json", "-")
    planned = json.loads(out)
    assert set(found) >= set(planned)
    same = ("schema", "versions", "model", "batch", "precision", "device", "planner")
    assert {name: found[name] for name in same} == {name: planned[name] for name in same}
    assert found["plain"]["peak_bytes"] == planned["plain"]["peak_bytes"]
    assert found["budget_bytes"] == int(found["plain"]["peak_bytes"] * 0.75)
    assert set(found["planned"]) == {"peak_bytes", "step_us", "recompute_us"}
    assert (found["equal"], found["is_within_budget"], found["steps"]) == (True, True, 2)
    assert found["differences"] == []
    assert found["compared"]["generator"] == 1
    measured = found["measured"]
    for name in ("plain", "planned"):
        assert measured[name]["peak_bytes"] == found[name]["peak_bytes"]
        assert measured[name]["step_us"] > 0
        assert len(measured[name]["samples_us"]) == 2


def test_json_on_standard_output_stands_there_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """What the user's step prints goes to standard error."""
    code, out, err = run(capsys, "run", "train.py:chatty", "--steps", "1", "--json", "-")
    assert code == 0
    data = json.loads(out)
    assert (data["model"], data["device"], data["equal"]) == ("train.py:chatty", "cpu", True)
    assert set(err.splitlines()) == {"a step"}


def test_without_a_budget_the_step_is_captured_and_replayed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    code, out, err = run(capsys, "run", "mlp", "--batch", "4", "--steps", "1", "--json", str(path))
    assert (code, err) == (0, "")
    assert "budget" not in out
    assert out.endswith("The same, bit for bit: mlp.\n")
    assert max(map(len, out.splitlines())) <= 80
    data = json.loads(path.read_text())
    assert (data["model"], data["batch"], data["budget_bytes"]) == ("mlp", 4, None)
    assert set(data["measured"]) == {"plain", "captured"}
    assert (data["equal"], data["is_within_budget"]) == (True, True)


def test_on_a_gpu_both_trainings_are_deterministic_and_the_setting_is_put_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_set = torch.are_deterministic_algorithms_enabled
    assert run_as_json(capsys, "train.py:make", *WITHIN)[1]["is_deterministic"] is False
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    seen: list[bool] = []
    compare = model_runs.compare

    def looking(make: Any, *args: Any, **options: Any) -> Any:
        make()
        seen.append(is_set())
        monkeypatch.delattr(torch.nn.Parameter, "is_cuda")
        return compare(make, *args, **options)

    monkeypatch.setattr(model_runs, "compare", looking)
    code, out, _ = run(capsys, "run", "train.py:make", *WITHIN)
    assert code == 0
    assert out.splitlines()[0] == "train.py:make: batch 256, fp32, on cpu, deterministic"
    assert (seen, is_set()) == ([True], False)


def test_a_batch_that_does_not_show_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "run", "train.py:without_a_batch_size", "--steps", "1")
    assert code == 0
    assert out.splitlines()[0] == "train.py:without_a_batch_size: fp32, on cpu"


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_a_saved_plan_is_trained_by(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    path = str(tmp_path / name)
    code, _, _ = run(capsys, "plan", "train.py:make", *WITHIN[:4], "--save", path)
    assert code == 0
    code, data = run_as_json(capsys, "train.py:make", "--plan", path, "--steps", "2")
    assert code == 0
    plan = load_plan(path)
    assert (data["planner"], data["budget_bytes"]) == ("chen-sqrt", plan.budget_bytes)
    assert data["planned"]["peak_bytes"] == data["measured"]["planned"]["peak_bytes"]
    assert data["planned"]["peak_bytes"] == plan.peak_bytes < data["plain"]["peak_bytes"]


def test_a_plan_of_another_step_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "plan.json")
    run(capsys, "plan", "train.py:make", *WITHIN[:4], "--save", path)
    options = ("--plan", path, "--batch", "8", "--steps", "1")
    code, out, err = run(capsys, "run", "train.py:make", *options)
    assert (code, out) == (2, "")
    assert err == (
        "rekindle: the plan is of another step than train.py:make: give the --batch, --precision "
        "and --device that it was made with, or rekindle plan train.py:make --budget B --save "
        "FILE.\n"
    )


@pytest.mark.parametrize("how", ["budget", "plan"])
def test_the_page_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, how: str) -> None:
    pytest.importorskip("plotly")
    page, plan = str(tmp_path / "page.html"), str(tmp_path / "plan.json")
    options = WITHIN
    if how == "plan":
        run(capsys, "plan", "train.py:make", *WITHIN[:4], "--save", plan)
        options = ("--plan", plan, "--steps", "2")
    code, out, err = run(capsys, "run", "train.py:make", *options, "--html", page)
    assert (code, err) == (0, "")
    assert out.endswith(f"Written: {page}\n")
    text = Path(page).read_text(encoding="utf-8")
    assert "<title>train.py:make, batch 256, fp32 – Rekindle plan</title>" in text
    assert "Where everything lies" in text


def test_a_budget_that_cannot_be_met_names_one_that_can(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--planner", "chen-sqrt", "--steps", "1")
    code, out, err = run(capsys, "run", "train.py:make", "--budget", "5%", *options)
    assert (code, out) == (2, "")
    assert err.startswith("rekindle: no plan stays within ")
    assert err.count("\n") == 1
    advice = re.search(r"give (--budget \S+) or more", err)
    assert advice is not None
    code, out, err = run(capsys, "run", "train.py:make", *advice[1].split(), *options)
    assert (code, err) == (0, "")
    assert "within  the budget of " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mlpp"], "no model named 'mlpp', did you mean 'mlp'?"),
        (["nowhere.py:make"], "no file 'nowhere.py'"),
        (["[/b].py:make"], "no file '[/b].py'"),
        (["train.py:mak"], "has no function 'mak', did you mean 'make'?"),
        (["saved.json.gz"], "saved.json.gz is a saved profile, which cannot be run: name its"),
        (["mlp", "--device", "H200"], "run with --device cpu or cuda, or see what rekindle plan"),
        (["mlp", "--precision", "fp8"], "precision"),
        (["mlp", "--budget", "nonsense"], "'nonsense' is not a budget: write a number and a unit"),
        (["mlp", "--budget", "60%", "--planner", "autoo"], "no planner named 'autoo', did you"),
        (["mlp", "--budget", "60%", "--plan", "x.json"], "give --budget or --plan, not both"),
        (["mlp", "--planner", "auto", "--plan", "x.json"], "give --planner or --plan, not both"),
        (["mlp", "--planner", "auto"], "--planner is for a plan, which needs a budget: add"),
        (["mlp", "--html", "x.html"], "--html is for a plan, which needs a budget: add --budget"),
        (["mlp", "--plan", "nowhere.json"], "there is no file nowhere.json"),
        (["mlp", "--plan", "train.py"], "train.py is not a saved plan"),
        (["mlp", "--steps", "0"], "--steps"),
        (["mlp", "--budget", "60%", "--html", "no/folder/x.html"], "no folder no/folder"),
        ([], "Missing argument 'MODEL'"),
    ],
)
def test_bad_input_is_told_in_one_line_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was trained")

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", refuse)
    code, out, err = run(capsys, "run", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("rekindle: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "run", "mlp", "--device", "cuda")
    assert (code, err.count("\n")) == (2, 1)
    assert "torch finds no GPU here: use cpu" in err


def test_a_page_without_plotly_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    code, _, err = run(capsys, "run", "no-such-model", "--budget", "60%", "--html", "x.html")
    assert (code, err.count("\n")) == (2, 1)
    assert 'the page needs plotly: pip install "rekindle[report]"' in err


@pytest.mark.parametrize(
    ("function", "problem"),
    [("broken", "ValueError: no loss today"), ("silent", "AssertionError")],
)
def test_a_step_that_raises_is_named_with_its_line(
    capsys: pytest.CaptureFixture[str], function: str, problem: str
) -> None:
    code, out, err = run(capsys, "run", f"train.py:{function}", *WITHIN)
    assert (code, out) == (2, "")
    start = TRAIN[: TRAIN.index(f"def {function}")].count("\n") + 1
    expected = f"rekindle: the step of train.py:{function} raises {problem} (train.py:{start + 2})"
    assert err == f"{expected}\n"


def test_a_step_that_cannot_be_captured_says_what_to_write_instead(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    text = TRAIN.replace("    return loss\n", "    return loss.item()\n")
    (folder / "reads.py").write_text(text)
    code, out, err = run(capsys, "run", "reads.py:make", "--steps", "1")
    assert (code, out) == (2, "")
    assert "reads.py:11: reads the value of a tensor" in err
    assert "loss = step(batch); loss.item()" in err


def test_a_parameter_that_differs_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    optimize = rekindle.optimize

    def spoilt(step: Any, model: torch.nn.Module, *others: Any, **options: Any) -> Any:
        weight = model.get_parameter("3.0.bias")
        weight.data[0] = torch.nextafter(weight.data[0], torch.tensor(9.0))
        return optimize(step, model, *others, **options)

    monkeypatch.setattr(rekindle, "optimize", spoilt)
    code, out, _ = run(capsys, "run", "train.py:make", *WITHIN)
    assert code == 1
    assert "different  after 2 steps: " in out
    assert out.endswith("Not the same: train.py:make.\n")
    code, data = run_as_json(capsys, "train.py:make", *WITHIN)
    assert (code, data["equal"], data["is_within_budget"]) == (1, False, True)
    assert "parameter 3.0.bias" in data["differences"]


def test_a_peak_above_the_budget_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = model_runs.compare

    def too_much(*args: Any, **options: Any) -> Any:
        found = compare(*args, **options)
        assert found.budget_bytes is not None
        return dataclasses.replace(found, captured_peak_bytes=found.budget_bytes + 2048)

    monkeypatch.setattr(model_runs, "compare", too_much)
    code, out, _ = run(capsys, "run", "train.py:make", *WITHIN)
    assert code == 1
    assert "the peak 2.00 KiB above it" in out
    assert out.endswith("Over the budget: train.py:make.\n")
    code, data = run_as_json(capsys, "train.py:make", *WITHIN)
    assert (code, data["equal"], data["is_within_budget"]) == (1, True, False)


@pytest.mark.parametrize("columns", [40, 60, 140])
def test_it_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(capsys, "run", "train.py:make", *WITHIN)
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out


def test_a_plain_step_that_does_not_fit_is_said_and_no_failure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The model's function is called twice: the first training is Rekindle's."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from pathlib import Path\n"
        "mark = Path(__file__).with_name('made')\n"
        "def train_step(model, optimizer, batch):\n"
        "    loss = model(batch).square().mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    return loss\n"
        "def plain_step(model, optimizer, batch):\n"
        "    raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "def make():\n"
        "    step = plain_step if mark.exists() else train_step\n"
        "    mark.touch()\n"
        "    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    return step, model, optimizer, torch.randn(256, 8)\n"
    )
    path = tmp_path / "run.json"
    model = f"{tmp_path}/train.py:make"
    code, out, err = run(capsys, "run", model, "--budget", "100%", "--json", str(path))
    assert (code, err) == (0, "")
    assert "does not fit" in out
    assert "Within the budget, where the plain step does not fit" in out
    data = json.loads(path.read_text())
    assert data["equal"] is None
    assert data["measured"]["plain"] is None
    assert data["measured"]["planned"]["peak_bytes"] <= data["budget_bytes"]


def test_without_a_deterministic_algorithm_it_starts_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses such an operator in the strict mode, and warns in the other."""
    compare = model_runs.compare
    modes: list[bool] = []

    def refusing(make: Any, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
        make()
        monkeypatch.delattr(torch.nn.Parameter, "is_cuda")
        modes.append(torch.is_deterministic_algorithms_warn_only_enabled())
        if not modes[-1]:
            raise RuntimeError("this_op does not have a deterministic implementation, but …")
        return compare(make, *args, **options)

    monkeypatch.setattr(model_runs, "compare", refusing)
    code, _, _ = run(capsys, "run", "train.py:make", *WITHIN)
    assert (code, modes) == (0, [False, True])
