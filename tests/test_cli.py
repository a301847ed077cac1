"""The commands as users call them: what they print where, and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import check_refused, run

import rekindle
from rekindle import cli, models
from rekindle.errors import CaptureError, ModelError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write into a folder of their own, and keep no profiles of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo of one model that needs nothing but torch, and has nothing to drop."""
    monkeypatch.setattr(cli, "DEMO_MODELS", ("mlp",))
    monkeypatch.setattr(cli, "DEMO_BUDGET", "100%")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"rekindle {rekindle.__version__}\n", "")
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    for command in ("models", "demo", "profile", "plan", "run", "schemes"):
        assert f" {command} " in out
    assert run(capsys)[0] == 2


def test_models_lists_the_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "models")
    assert (code, err) == (0, "")
    listed = [line.split()[0] for line in out.splitlines() if line[1:2].strip(" ─")]
    assert listed[0] == "model"
    assert set(listed[1:]) >= {spec.name for spec in models.available()}


def test_models_as_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "models", "--json", "-")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["schema"] == 1
    assert data["versions"]["torch"] == str(torch.__version__)
    by_name = {row["name"]: row for row in data["models"]}
    assert list(by_name) == [spec.name for spec in models.available()]
    assert by_name["resnet18"]["needs"] == "torchvision"
    assert by_name["mlp"]["needs"] is None
    assert by_name["mlp"]["default_batch"] == 64
    assert by_name["mlp"]["sizes"]["hidden"] == 512


@pytest.mark.slow
def test_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "demo.json"
    code, out, err = run(capsys, "demo", "--steps", "2", "--json", str(path))
    assert (code, err) == (0, "")
    assert out.count("equal   after 2 steps, bit for bit: 2 losses") == 2
    assert out.count("within  the budget of ") == 2
    *_, conclusion, written = out.splitlines()
    assert conclusion == "The same, bit for bit, and within the budget: resnet-tiny, bert-tiny."
    pages = [Path("rekindle-demo") / f"{name}.html" for name in ("resnet-tiny", "bert-tiny")]
    assert written == f"Written: {pages[0]}, {pages[1]}"
    for page in pages:
        assert f"<title>{page.stem}, batch " in page.read_text(encoding="utf-8")
    assert max(map(len, out.splitlines())) <= 80

    data = json.loads(path.read_text())
    assert (data["schema"], data["steps"], data["equal"]) == (1, 2, True)
    assert [row["model"] for row in data["models"]] == ["resnet-tiny", "bert-tiny"]
    for row in data["models"]:
        plain, planned = row["measured"]["plain"], row["measured"]["planned"]
        assert row["equal"] is row["is_within_budget"] is True
        assert row["differences"] == []
        assert row["compared"]["generator"] == 1
        assert row["budget_bytes"] == int(row["plain"]["peak_bytes"] * 0.6)
        assert planned["peak_bytes"] <= row["budget_bytes"] < plain["peak_bytes"]
        assert len(plain["samples_us"]) == len(planned["samples_us"]) == 2
        assert min(row["capture_us"], plain["step_us"], planned["step_us"]) > 0
        assert row["dropped"]["all"]["dropped"] > 0
        assert row["graph"]["phases"]["backward"]["flops"] > 0
        assert row["graph"]["role_bytes"]["activation"] > 0


@pytest.mark.usefixtures("small_demo")
def test_demo_as_json_alone_on_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    pages = tmp_path / "pages"
    code, out, err = run(capsys, "demo", "--steps", "1", "--out", str(pages), "--json", "-")
    assert (code, err) == (0, "")
    assert json.loads(out)["models"][0]["model"] == "mlp"
    assert [page.name for page in pages.iterdir()] == ["mlp.html"]


@pytest.mark.usefixtures("small_demo")
def test_demo_fails_if_one_parameter_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    optimize = rekindle.optimize

    def spoilt(step: Any, model: torch.nn.Module, *others: Any, **options: Any) -> Any:
        weight = model.get_parameter("8.bias")
        weight.data[0] = torch.nextafter(weight.data[0], torch.tensor(9.0))
        return optimize(step, model, *others, **options)

    monkeypatch.setattr(rekindle, "optimize", spoilt)
    path = tmp_path / "demo.json"
    code, out, _ = run(capsys, "demo", "--steps", "1", "--json", str(path))
    assert code == 1
    assert "different  after 1 step: " in out
    assert "Not the same: mlp." in out
    data = json.loads(path.read_text())
    assert data["equal"] is False
    assert "parameter 8.bias" in data["models"][0]["differences"]


@pytest.mark.usefixtures("small_demo")
def test_demo_without_plotly_trains_all_the_same_and_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    code, out, err = run(capsys, "demo", "--steps", "1")
    assert (code, err) == (0, "")
    assert out.endswith('No pages: they need plotly (pip install "rekindle[report]").\n')
    assert not Path("rekindle-demo").exists()


def refuse_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(models, "load", fail)


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_train(monkeypatch)
    monkeypatch.setattr(os, "access", lambda *args: False)  # root may write anywhere
    expected = (
        "rekindle: Invalid value for '--out': rekindle-demo cannot be written to: "
        "name another folder. See rekindle --help.\n"
    )
    assert run(capsys, "demo") == (2, "", expected)
    Path("rekindle-demo").mkdir()
    assert run(capsys, "demo") == (2, "", expected)


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    refuse_to_train(monkeypatch)
    monkeypatch.setattr(Path, "mkdir", fail)
    expected = (
        "rekindle: there cannot be made (Read-only file system): name another folder with --out.\n"
    )
    assert run(capsys, "demo", "--out", "there") == (2, "", expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["capture"], "No such command 'capture'"),
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--stepps", "1"], "--stepps"),
        (["models", "extra"], "extra"),
        (["demo", "--json", "no/such/folder/x.json"], "no folder no/such/folder"),
        (["models", "--json", "."], ". is a folder"),
        (["demo", "--out", "no/such/folder"], "no folder no/such to make folder in"),
        (["demo", "--out", __file__], "is no folder"),
        (["demo", "--out", "-"], "only --json can go to standard output"),
    ],
)
def test_wrong_usage_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    check_refused(capsys, message, *arguments)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModelError("no such thing"), "rekindle: no such thing\n"),
        (
            CaptureError("reads", filename="a.py", lineno=3, advice="Do not."),
            "rekindle: a.py:3: reads\n  Do not.\n",
        ),
    ],
)
def test_an_error_of_ours_is_told_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    expected: str,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(models, "load", fail)
    assert run(capsys, "demo") == (2, "", expected)


def test_as_a_process_of_its_own() -> None:
    """The exit code and the streams are those of a real process, too."""
    command = [sys.executable, "-c", "from rekindle.cli import main; main()", "nonsense"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(cli.__file__).parents[2]), "PATH": ""},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rekindle: No such command 'nonsense'. See rekindle --help.\n"
