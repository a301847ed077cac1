"""`rekindle sweep` as users call it: records, shortages, interruptions, figures, bad input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support import commands
from torch import nn

from rekindle.errors import ModelError
from rekindle.report import sweep_report
from rekindle.studies import peers, sweep
from rekindle.studies.isolated_process import write_atomically
from rekindle.studies.peers import checkpoint_every_block, repeated_blocks
from rekindle.studies.sweep import Case, run_alone, run_case

HERE = sys.modules[__name__]

# A chain whose activations are far more than its weights.
TRAIN = """
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn


def train_step(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make(batch):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)])
    return train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(batch, 16)


def slow(batch):
    while batch > 1000 and Path("slow").exists():
        time.sleep(0.05)
    return make(batch)


def with_step(step, batch):
    return step, *make(batch)[1:]


def broken(batch):
    def step(model, optimizer, batch):
        if batch.shape[0] > 1000:
            raise ValueError("no loss today\\nand none tomorrow")
        return train_step(model, optimizer, batch)

    return with_step(step, batch)


def large(batch):
    def step(model, optimizer, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB\\nand so on")

    return with_step(step, batch)


def wrapped(batch):
    def step(model, optimizer, batch):
        try:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        except RuntimeError as error:
            raise KeyError("compiler") from error

    return with_step(step, batch)


def doomed(batch):
    os.kill(os.getpid(), signal.SIGKILL)


def crashing(batch):
    print("something is wrong here", flush=True)
    os._exit(3)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("train.py").write_text(TRAIN)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Cases run here, which is quicker; those that were run are listed."""
    ran: list[Case] = []

    def run_here(case: Case, target: Path) -> dict[str, Any]:
        ran.append(case)
        write_atomically(target, run_case(case))
        found: dict[str, Any] = json.loads(target.read_text())
        return found

    monkeypatch.setattr(sweep, "run_alone", run_here)
    return ran


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of `rekindle sweep`, into `found`."""
    return commands.run(capsys, "sweep", *arguments, "--out", "found", "--steps", "2")


def records() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path("found/sweep.json").read_text())["cases"]
    return found


def ways(cases: list[Case]) -> list[tuple[int, str]]:
    return [(case.batch, case.way) for case in cases]


@pytest.mark.slow
def test_in_processes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "train.py:make", "--batches", "4096", "--budget", "60%", "--json", "here.json"
    )
    assert code == 0, out
    plain, planned = records()
    assert plain["case"]["way"] == "plain"
    assert (plain["forecast"], plain["budget_bytes"], plain["reserved_bytes"]) == (None,) * 3
    assert planned["case"]["budget"] == "60%"
    assert planned["peak_bytes"] <= planned["budget_bytes"] < 0.61 * plain["peak_bytes"]
    assert planned["forecast"]["peak_bytes"] == pytest.approx(planned["peak_bytes"], rel=0.02)
    assert planned["forecast"]["step_us"] > 0
    for record in (plain, planned):
        assert (record["status"], record["device"], len(record["samples_us"])) == ("done", "cpu", 2)
        assert min(record["samples_us"]) <= record["step_us"] <= max(record["samples_us"])
        assert record["samples_per_s"] == pytest.approx(4096e6 / record["step_us"])
        assert record["setup_s"] > 0
        assert record["environment"]["versions"]["torch"] == torch.__version__
        assert record["environment"]["gpu"] is None
    assert len(list(Path("found/cases").iterdir())) == 2
    written = json.loads(Path("here.json").read_text())
    assert (written["model"], written["batches"]) == ("train.py:make", [4096])
    assert (written["budgets"], written["cases"]) == (["60%"], records())
    for name in ("memory", "latency", "throughput", "trade-off"):
        assert Path(f"found/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"found/{name}.png" in out
    assert "Rekindle, 60%" in out


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet-tiny", "bert-tiny"])
def test_the_ways_to_run_a_step(model: str) -> None:
    pytest.importorskip("torchvision" if model == "resnet-tiny" else "transformers")

    def found(way: str, **how: Any) -> dict[str, Any]:
        record = run_case(Case(model, 16, way, steps=1, device="cpu", **how))
        assert record["status"] == "done", record
        return record

    plain = found("plain")["peak_bytes"]
    planned = found("planned", budget="80%", engine="python", planner="auto")
    assert planned["peak_bytes"] <= planned["budget_bytes"]
    assert planned["budget_bytes"] == pytest.approx(0.8 * plain, rel=0.02)
    assert found("checkpoint")["peak_bytes"] < plain


def test_torch_compile_gets_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config

    shares = []

    def compile_it(model: nn.Module) -> nn.Module:
        shares.append(config.activation_memory_budget)
        return model

    monkeypatch.setattr(peers.torch, "compile", compile_it)
    before = config.activation_memory_budget
    try:
        for share in (None, 0.5):
            record = run_case(Case("train.py:make", 64, "compile", steps=1, share=share))
            assert record["status"] == "done", record
    finally:
        config.activation_memory_budget = before
    assert shares == [before, 0.5]


@pytest.mark.slow
def test_peers(
    capsys: pytest.CaptureFixture[str],
    in_this_process: list[Case],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "compiled", lambda model, share: model)
    code, out, _ = run(
        capsys, "train.py:make", "--batches", "2048", "--budget", "80%,50%", "--peers"
    )
    assert code == 0, out
    settings = [(case.way, case.budget or case.share) for case in in_this_process]
    assert settings[:4] == [
        ("plain", None),
        ("planned", "80%"),
        ("planned", "50%"),
        ("checkpoint", None),
    ]
    assert settings[4:] == [
        ("compile", None),
        *(("compile", each) for each in sweep.SHARES),
    ]
    assert {case.engine for case in in_this_process} == {None, "auto"}


@pytest.mark.slow
def test_what_is_above_the_cap_does_not_fit(
    capsys: pytest.CaptureFixture[str], in_this_process: list[Case]
) -> None:
    """The plain step of the larger batch takes 4.2 MiB, and the planned one half of that."""
    arguments = ("train.py:make", "--batches", "4096,1024", "--budget", "60%", "--cap", "3MiB")
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert ways(in_this_process) == [
        (1024, "plain"),
        (1024, "planned"),
        (4096, "plain"),
        (4096, "planned"),
    ]
    small, _, large, planned = records()
    assert (small["status"], planned["status"]) == ("done", "done")
    assert (large["status"], large["kind"]) == ("out of memory", "above the cap")
    assert "and may take 3.00 MiB" in large["message"]
    assert "out of memory" in out
    assert "capped at 3.00 MiB" in out


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_is_a_result(
    capsys: pytest.CaptureFixture[str], in_this_process: list[Case]
) -> None:
    code, out, _ = run(capsys, "train.py:make", "--batches", "64", "--budget", "1KiB")
    assert code == 0
    _, planned = records()
    assert (planned["status"], planned["kind"]) == ("out of memory", "InfeasibleBudget")
    assert planned["least_peak_bytes"] > planned["budget_bytes"] == 1024
    assert "no plan fits" in out


@pytest.mark.parametrize(
    ("function", "kind"), [("large", "OutOfMemoryError"), ("wrapped", "RuntimeError")]
)
def test_a_shortage_is_recognised(function: str, kind: str) -> None:
    record = run_case(Case(f"train.py:{function}", 8, "plain", steps=1))
    assert (record["status"], record["kind"]) == ("out of memory", kind)
    assert "\n" not in record["message"]


def test_a_process_that_dies() -> None:
    Path("cases").mkdir()
    killed = run_alone(Case("train.py:doomed", 8, "plain", steps=1), Path("cases/a.json"))
    assert (killed["status"], killed["kind"]) == ("out of memory", "killed")
    assert json.loads(Path("cases/a.json").read_text()) == killed
    crashed = run_alone(Case("train.py:crashing", 8, "plain", steps=1), Path("cases/b.json"))
    assert (crashed["status"], crashed["kind"]) == ("failed", "exit code 3")
    assert "something is wrong here" in crashed["message"]


@pytest.mark.slow
def test_a_failing_model_is_recorded_and_tried_again(
    capsys: pytest.CaptureFixture[str], in_this_process: list[Case]
) -> None:
    arguments = ("train.py:broken", "--batches", "512,2048", "--budget", "90%")
    code, out, _ = run(capsys, *arguments)
    assert code == 1
    assert [record["status"] for record in records()] == ["done", "done", "failed", "failed"]
    failed = records()[2]
    assert failed["kind"] == "ValueError"
    assert "raises ValueError: no loss today (train.py:" in failed["message"]
    assert "and none tomorrow" in failed["traceback"]
    assert "batch 2,048, plain failed: the step of train.py:broken raises" in " ".join(out.split())
    in_this_process.clear()
    assert run(capsys, *arguments)[0] == 1
    assert ways(in_this_process) == [(2048, "plain"), (2048, "planned")]


def test_what_is_there_is_not_run_again(
    capsys: pytest.CaptureFixture[str],
    in_this_process: list[Case],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = Case("train.py:make", 512, "plain", steps=1)
    made_up = {key: value for key, value in run_case(quick).items() if key != "case"}
    monkeypatch.setattr(HERE, "run_case", lambda case: {"case": asdict(case), **made_up})
    monkeypatch.setattr(sweep_report, "write_sweep_pngs", lambda folder, data: [])
    arguments = ["train.py:make", "--batches", "512", "--budget", "90%"]

    def ran(*more: str) -> list[tuple[int, str]]:
        in_this_process.clear()
        code, _, err = run(capsys, *arguments, *more)
        assert code == 0, err
        return ways(in_this_process)

    both = [(512, "plain"), (512, "planned")]
    assert ran() == both
    before = records()
    assert ran() == []
    assert records() == before
    assert ran("--engine", "python") == [(512, "planned")]
    assert ran("--planner", "mutwo") == [(512, "planned")]
    assert ran("--cap", "1GiB") == both
    assert ran("--again") == both
    arguments[2] = "512,640"
    assert ran() == [(640, "plain"), (640, "planned")]
    Path("train.py").write_text(TRAIN + "\n# changed\n")
    assert len(ran()) == 4
    for broken in Path("found/cases").glob("b640-plain*"):
        broken.write_text("{")
    assert ran() == [(640, "plain")]


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on(
    capsys: pytest.CaptureFixture[str], in_this_process: list[Case]
) -> None:
    """Ctrl-C while the second batch size runs: the first one's records stay and are kept."""
    Path("slow").touch()
    arguments = ["train.py:slow", "--batches", "512,2048", "--budget", "90%"]
    whole = [*arguments, "--out", "found", "--steps", "2"]
    listen = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # jobs behind do not
    start = f"import signal; {listen}; from rekindle.cli import main; main(['sweep', *{whole!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while len(list(Path("found/cases").glob("b*"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "left" in err
    assert [record["case"]["batch"] for record in records()] == [512, 512]
    assert "512" in out
    assert Path("found/memory.png").exists()
    Path("slow").unlink()
    assert run(capsys, *arguments)[0] == 0
    assert ways(in_this_process) == [(2048, "plain"), (2048, "planned")]
    assert len(records()) == 4


@pytest.mark.parametrize("content", ['{"cases": 3}', '{"cases": []}', "[]", "{"])
def test_a_sweep_that_cannot_be_read(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep.json").write_text(content)
    commands.check_refused(
        capsys, "there is no sweep in", "sweep", "--figures-only", "--out", str(tmp_path)
    )


@pytest.mark.slow
def test_figures_only(capsys: pytest.CaptureFixture[str], in_this_process: list[Case]) -> None:
    run(capsys, "train.py:make", "--batches", "512", "--budget", "90%")
    before = records()
    for picture in Path("found").glob("*.png"):
        picture.unlink()
    for case in Path("found/cases").iterdir():
        case.unlink()
    in_this_process.clear()
    code, out, _ = commands.run(capsys, "sweep", "--figures-only", "--out", "found", "--json", "-")
    data = json.loads(out)
    assert (code, data["cases"], in_this_process) == (0, before, [])
    assert len(list(Path("found").glob("*.png"))) == 4


@pytest.mark.slow
def test_json_alone_on_standard_output(
    capsys: pytest.CaptureFixture[str], in_this_process: list[Case]
) -> None:
    code, out, err = run(
        capsys, "train.py:make", "--batches", "64", "--budget", "100%", "--json", "-"
    )
    data = json.loads(out)
    assert (code, data["schema"], len(data["cases"])) == (0, 1, 2)
    assert "left" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "8", "--budget", "60%"], "Give a MODEL"),
        (["mlp", "--budget", "60%"], "Give --batches 32,64,128"),
        (["mlp", "--batches", "8"], "how much memory may planned steps take?"),
        (["mlp", "--batches", "8,x", "--budget", "60%"], "'8,x' are no batch sizes"),
        (["mlp", "--batches", "0", "--budget", "60%"], "'0' are no batch sizes"),
        (["mlp", "--batches", "8", "--budget", "60%,lots"], "'lots' is not a budget"),
        (["mlp", "--batches", "8", "--budget", "60%", "--cap", "60%"], "not an amount of memory"),
        (["mlp", "--batches", "8", "--budget", "60%", "--cap", "0"], "nothing fits into 0"),
        (["mlpp", "--batches", "8", "--budget", "60%"], "no model named 'mlpp', did you mean"),
        (["no.py:f", "--batches", "8", "--budget", "60%"], "no file 'no.py'"),
        (["train.py", "--batches", "8", "--budget", "60%"], "names a file but no function"),
        (["a.json.gz", "--batches", "8", "--budget", "60%"], "is a saved profile"),
        (["mlp", "--batches", "8", "--budget", "60%", "--engine", "steam"], "no engine 'steam'"),
        (["mlp", "--batches", "8", "--budget", "60%", "--planner", "me"], "me"),
        (["mlp", "--batches", "8", "--budget", "60%", "--device", "H200"], "no device of this"),
        (["mlp", "--batches", "8", "--budget", "60%", "--precision", "fp8"], "unknown precision"),
        (["mlp", "--batches", "8", "--budget", "60%", "--steps", "0"], "steps"),
        (["--figures-only"], "there is no sweep in found"),
    ],
)
def test_bad_input_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    commands.check_refused(capsys, message, "sweep", *arguments, "--out", "found")
    assert not Path("found").exists()


class Block(nn.Module):
    """A layer made of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def test_blocks_are_found() -> None:
    """Layers made of others before plain sequences, and those before single layers."""
    stages = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(), Block()), nn.Sequential(Block()))
    assert {type(block) for block in repeated_blocks(stages)} == {Block}
    assert len(repeated_blocks(stages)) == 3
    chain = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
    assert len(repeated_blocks(chain)) == 3
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    assert [type(block) for block in repeated_blocks(layers)] == [nn.Linear] * 2
    with pytest.raises(ModelError, match="repeats no block"):
        repeated_blocks(nn.Linear(4, 4))


def test_checkpoints_change_no_number() -> None:
    model = nn.Sequential(Block(), Block())
    x = torch.randn(8, 4)
    model(x).sum().backward()
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    assert checkpoint_every_block(model) == 2
    model(x).sum().backward()
    after = [param.grad for param in model.parameters() if param.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
