"""`rekindle profile` as users call it, on saved profiles, the zoo and files of their own."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
from support.commands import check_refused, run
from support.tiny_step import ABOUT, PEAK_BYTES, tiny_step

from rekindle.core.graph.serial import load_profile, save_profile


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A saved profile of a step made by hand."""
    graph, profile, _ = tiny_step()
    path = tmp_path / "tiny.json.gz"
    save_profile(path, graph, profile, ABOUT)
    return str(path)


def test_a_saved_profile(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    code, out, err = run(capsys, "profile", saved)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "tiny, batch 512, fp32, measured on Toy GPU"
    assert lines[1].strip() == "peak   7.10 MiB, 56% activations"
    assert max(map(len, lines)) <= 80
    for title in ("at the peak", "phase", "operator", "made by"):
        assert any(line.strip().startswith(title) for line in lines)


def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    code, out, err = run(capsys, "profile", saved, "--json", "-")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["schema"] == 1
    assert (data["model"], data["batch"], data["device"]) == ("tiny", 512, "Toy GPU")
    assert data["peak"]["bytes"] == PEAK_BYTES
    assert len(data["ops"]) == 7


def test_everything_it_writes(
    capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    page, figure, table, data, again = (
        str(tmp_path / f"out.{ending}") for ending in ("html", "png", "csv", "json", "json.gz")
    )
    options = ["--html", page, "--png", figure, "--csv", table, "--json", data, "--save", again]
    code, out, err = run(capsys, "profile", saved, *options)
    assert (code, err) == (0, "")
    assert out.rstrip().endswith(f"Written: {page}, {figure}, {table}, {again}")
    text = Path(page).read_text(encoding="utf-8")
    assert "<title>tiny, batch 512, fp32 – Rekindle profile</title>" in text
    assert "Where everything lies" in text
    assert Path(figure).read_bytes().startswith(b"\x89PNG")
    assert len(list(csv.reader(Path(table).read_text().splitlines()))) == 8
    assert json.loads(Path(data).read_text())["step_us"] == 500.0
    assert load_profile(Path(again)).about == ABOUT
    assert Path(again).read_bytes() == Path(saved).read_bytes()


def test_a_zoo_model_measured_on_the_cpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mlp.json.gz"
    options = ["--batch", "8", "--runs", "1", "--no-cache", "--json", "-", "--save", str(path)]
    code, out, _ = run(capsys, "profile", "mlp", *options)
    assert code == 0
    data = json.loads(out)
    assert (data["model"], data["batch"], data["precision"]) == ("mlp", 8, "fp32")
    assert data["is_measured"] is True
    assert data["peak"]["bytes"] > 0
    assert min(row["time_us"] for row in data["phases"]) > 0
    assert 1.5 < data["backward_forward_flops"] < 2
    assert load_profile(path).graph.fingerprint == data["fingerprint"]


def test_a_forecast_for_a_named_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "profile", "mlp", "--device", "h200")
    assert code == 0
    assert out.splitlines()[0] == "mlp, batch 64, fp32, estimated for H200"


def test_a_function_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def train_step(model, optimizer, batch):\n"
        "    model(batch).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "def make():\n"
        "    model = torch.nn.Linear(4, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    return train_step, model, optimizer, torch.ones(8, 4)\n"
    )
    code, out, _ = run(capsys, "profile", f"{path}:make", "--no-cache", "--json", "-")
    assert code == 0
    data = json.loads(out)
    assert data["batch"] == 8
    assert any(row["source"].endswith("mine.py:3") for row in data["ops"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile"], "Missing argument"),
        (["profile", "no-such-model"], "no model named 'no-such-model'"),
        (["profile", "mlp", "--device", "H2000"], "unknown device 'H2000'"),
        (["profile", "mlp", "--device", "H2000"], "A100-80GB"),
        (["profile", "mlp", "--precision", "fp7"], "unknown precision 'fp7'"),
        (["profile", "mlp", "--batch", "0"], "--batch"),
        (["profile", "mlp", "--html", "no/such/folder/x.html"], "no folder no/such/folder"),
        (["profile", "mlp", "--png", "."], ". is a folder"),
        (["profile", "mlp", "--save", "x.json"], "x.json must end in .json.gz"),
        (["profile", "nowhere.json.gz"], "there is no file nowhere.json.gz"),
    ],
)
def test_bad_input_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    check_refused(capsys, message, *arguments)


@pytest.mark.parametrize("option", ["--batch", "--precision", "--runs"])
def test_a_saved_profile_cannot_be_changed(
    capsys: pytest.CaptureFixture[str], saved: str, option: str
) -> None:
    code, out, err = run(capsys, "profile", saved, option, "1")
    assert (code, out) == (2, "")
    assert f"is a saved profile, which {option} cannot change" in err


def test_a_saved_profile_on_another_gpu(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    """The graph is the saved one; what it costs is estimated for the GPU that is named."""
    code, out, _ = run(capsys, "profile", saved, "--device", "rtx 4090")
    assert code == 0
    assert "estimated for RTX 4090" in out
    code, out, err = run(capsys, "profile", saved, "--device", "RTX 9999")
    assert (code, out) == (2, "")
    assert "unknown device 'RTX 9999'" in err


@pytest.mark.parametrize("damage", ["cut", "not gzip", "not a profile", "other schema"])
def test_a_damaged_file(capsys: pytest.CaptureFixture[str], saved: str, damage: str) -> None:
    path = Path(saved)
    whole = path.read_bytes()
    with gzip.open(path, "rt", encoding="utf-8") as file:
        data = json.load(file)
    damaged = {
        "cut": whole[: len(whole) // 2],
        "not gzip": b"hello",
        "not a profile": gzip.compress(b'{"schema": 1}'),
        "other schema": gzip.compress(json.dumps({**data, "schema": 99}).encode()),
    }
    path.write_bytes(damaged[damage])
    code, out, err = run(capsys, "profile", saved)
    assert (code, out) == (2, "")
    assert err.startswith(f"rekindle: {saved} ")
    assert "save" in err
    assert err.count("\n") == 1
