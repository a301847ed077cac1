"""`rekindle schemes` as users call it: several sizes, one size, steps that are run, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import commands
from support.tiny_step import ABOUT, tiny_step

from rekindle.core.graph.serial import save_profile
from rekindle.report.schemes_report import SCHEMES, schemes_data
from rekindle.studies.schemes import compare_schemes

NAMES = [scheme.name for scheme in SCHEMES]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of `rekindle schemes`."""
    return commands.run(capsys, "schemes", *arguments)


@pytest.mark.slow
def test_several_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = run(
        capsys,
        *("lstm", "--sizes", "3, 2,3", "--batch", "2", "--precision", "bf16"),
        *("--device", "RTX 4090", "--json", "found.json", "--png", "found.png"),
    )
    assert code == 0
    assert out.splitlines()[0].endswith(": batch 2, bf16, estimated for RTX 4090")
    assert all(scheme.label in out for scheme in SCHEMES)
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((tmp_path / "found.json").read_text())
    assert (data["schema"], data["model"], data["size_name"]) == (1, "lstm", "length")
    assert (data["batch"], data["precision"], data["device"]) == (2, "bf16", "RTX 4090")
    assert [row["size"] for row in data["sizes"]] == [2, 3]
    assert list(data["growth"]) == NAMES
    for row in data["sizes"]:
        assert list(row["schemes"]) == NAMES
        assert all(each["measured"] is None for each in row["schemes"].values())


@pytest.mark.slow
def test_depths(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    code, out, _ = run(capsys, "resnet", "--sizes", "14", "--batch", "1", "--json", "-")
    data = json.loads(out)
    assert (code, data["sizes"][0]["size"], data["growth"]) == (0, 14, {})


def test_a_saved_profile(capsys: pytest.CaptureFixture[str]) -> None:
    graph, profile, _ = tiny_step()
    save_profile(Path("tiny.json.gz"), graph, profile, ABOUT)
    code, out, _ = run(capsys, "tiny.json.gz", "--json", "-")
    assert code == 0
    data = json.loads(out)
    (row,) = data["sizes"]
    assert (data["model"], data["batch"], row["size"]) == ("tiny", 512, None)
    # the product 1 MiB, the activation 4 MiB, its gradient 1 MiB, and two scalars
    assert row["schemes"]["none"]["feature_bytes"] == (6 << 20) + 2 * 512


def test_a_function_of_one_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "from rekindle.models import build\n"
        "def make():\n"
        "    work = build('mlp', batch=4)\n"
        "    return work.train_step, work.model, work.optimizer, work.batch\n"
    )
    code, out, _ = run(capsys, "mine.py:make")
    assert code == 0
    assert "mine" in out.splitlines()[0]
    assert "estimated for H200" in out


@pytest.mark.slow
def test_steps_that_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    """What is measured is what was forecast, and in the order of the estimates."""
    arguments = ("lstm", "--sizes", "3", "--batch", "64", "--measure", "--json", "-")
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    data = json.loads(out)
    assert (data["device"], data["is_measured"]) == ("cpu", True)
    for row in data["sizes"]:
        taken = {name: each["measured"] for name, each in row["schemes"].items()}
        runs = {scheme.name for scheme in SCHEMES if scheme.runs}
        assert {name for name, found in taken.items() if found} == runs
        for name in runs:
            assert taken[name]["peak_bytes"] == pytest.approx(
                taken[name]["forecast_bytes"], rel=0.02
            )
        peaks = {name: taken[name]["peak_bytes"] for name in runs}
        assert min(peaks, key=lambda name: peaks[name]) == "auto"
        assert peaks["auto"] < peaks["sharing"]


def test_what_does_not_fit_is_not_run() -> None:
    study = compare_schemes(
        "mlp", measure=True, how={"batch": 4}, free_bytes=lambda device: 1 << 20
    )
    (row,) = schemes_data(study)["sizes"]
    assert all(each["measured"] is None for each in row["schemes"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnett"], "no model named 'resnett', did you mean 'resnet'?"),
        (["resnet", "--sizes", "50,100"], "100 is no such depth: take 98 or 101"),
        (["resnet", "--sizes", "fifty"], "'fifty' are no sizes"),
        (["resnet", "--sizes", ""], "'' are no sizes"),
        (["lstm", "--sizes", "0"], "0 is no such length"),
        (["resnet50", "--sizes", "50"], "has one size only: leave --sizes out, or name resnet"),
        (["mine.json.gz", "--measure"], "is a saved profile, which cannot be run"),
        (["lstm", "--measure", "--device", "H200"], "'H200' is no device of this machine"),
        (["lstm", "--device", "H2000"], "H2000"),
        (["lstm", "--precision", "fp8"], "unknown precision 'fp8'"),
        (["missing.py:make"], "no file 'missing.py'"),
    ],
)
def test_bad_input_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    commands.check_refused(capsys, message, "schemes", *arguments)
