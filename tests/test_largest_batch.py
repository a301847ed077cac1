"""The largest batch that a budget holds, against trying all of them."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import check_refused, run
from torch import nn

import rekindle
from rekindle.cli.options import parse_share
from rekindle.core.cost.batch_search import MOST
from rekindle.core.graph.simulate import simulate
from rekindle.errors import UnitError

WIDTH = 32
HEAVY = 128
_LAYER = (partial(nn.Linear, WIDTH, WIDTH), nn.GELU, partial(nn.LayerNorm, WIDTH))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def parts() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(make() for _ in range(6) for make in _LAYER))
    return train_step, model, torch.optim.Adam(model.parameters())


def make_batch(n: int) -> torch.Tensor:
    return torch.ones(n, WIDTH)


def heavy_parts() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """Weights that are larger than what a small batch makes of them."""
    torch.manual_seed(0)
    layers = [make() for _ in range(6) for make in (partial(nn.Linear, HEAVY, HEAVY), nn.GELU)]
    model = nn.Sequential(*layers)
    return train_step, model, torch.optim.Adam(model.parameters())


def make_wide_batch(n: int) -> torch.Tensor:
    return torch.ones(n, HEAVY)


def fits_plainly(batch: int, budget_bytes: int) -> bool:
    captured = rekindle.capture(*parts(), make_batch(batch))
    return simulate(captured.graph, rekindle.profile(captured)).peak_bytes <= budget_bytes


def fits_planned(batch: int, budget_bytes: int) -> bool:
    try:
        step = rekindle.optimize(*parts(), make_batch(batch), budget=budget_bytes)
    except rekindle.InfeasibleBudget:
        return False
    return step.measure(make_batch(batch), steps=1).peak_bytes <= budget_bytes


@pytest.mark.slow
def test_it_is_the_largest_that_can_be_had() -> None:
    budget_bytes = 1_500_000
    found = rekindle.max_batch(*parts(), make_batch, budget=budget_bytes)
    assert found.plain is not None
    assert found.planned is not None
    assert fits_plainly(found.plain.batch, budget_bytes)
    assert not fits_plainly(int(found.plain.batch * 1.02) + 1, budget_bytes)
    assert found.planned.batch > 1.5 * found.plain.batch
    assert fits_planned(found.planned.batch, budget_bytes)
    assert not fits_planned(int(found.planned.batch * 1.04) + 1, budget_bytes)
    assert found.planned.peak_bytes <= budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("share", [3.8, 4.2])
def test_it_is_the_largest_where_gradients_fill_the_budget(share: float) -> None:
    """Updates as gradients come are what makes room, and the peak is hardly of the batch's size."""
    params_bytes = sum(p.numel() * p.element_size() for p in heavy_parts()[1].parameters())
    budget_bytes = int(share * params_bytes)
    found = rekindle.max_batch(*heavy_parts(), make_wide_batch, budget=budget_bytes)
    assert found.plain is None
    assert found.planned is not None
    assert found.planned.peak_bytes <= budget_bytes
    largest = found.planned.batch
    rekindle.optimize(*heavy_parts(), make_wide_batch(largest), budget=budget_bytes)
    beyond = make_wide_batch(int(largest * 1.02) + 1)
    with pytest.raises(rekindle.InfeasibleBudget):
        rekindle.optimize(*heavy_parts(), beyond, budget=budget_bytes)


@pytest.mark.slow
def test_where_nothing_fits_it_says_what_would() -> None:
    found = rekindle.max_batch(*parts(), make_batch, budget=1000)
    assert (found.plain, found.planned) == (None, None)
    assert found.least_bytes is not None
    enough = rekindle.max_batch(*parts(), make_batch, budget=found.least_bytes)
    assert enough.planned is not None
    assert enough.least_bytes is None
    little = rekindle.max_batch(*parts(), make_batch, budget=int(0.97 * found.least_bytes))
    assert little.planned is None


def test_the_model_is_left_alone() -> None:
    step, model, optimizer = parts()
    before = [param.detach().clone() for param in model.parameters()]
    rekindle.max_batch(step, model, optimizer, make_batch, budget="1MB")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state


@pytest.mark.slow
def test_a_gpu_that_is_not_here_and_a_speed_to_keep() -> None:
    found = rekindle.max_batch(
        *parts(), make_batch, budget="200MB", device="RTX 4090", at_least=0.9
    )
    assert found.device == "RTX 4090"
    plain, quick, planned = found.plain, found.quick, found.planned
    assert plain is not None
    assert quick is not None
    assert planned is not None
    assert plain.batch <= quick.batch <= planned.batch
    assert quick.samples_per_s >= 0.9 * plain.samples_per_s


def test_nothing_fits() -> None:
    found = rekindle.max_batch(*parts(), make_batch, budget=1000, device="H200")
    assert (found.plain, found.planned) == (None, None)


@pytest.mark.parametrize("bad", [{"budget": "60%"}, {"budget": "1GB", "at_least": 1.5}])
def test_what_has_no_meaning_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(rekindle.PlanError):
        rekindle.max_batch(*parts(), make_batch, **bad)


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        ({"at_least": "95%"}, rekindle.PlanError, "at_least is a share"),
        ({"budget": "lots"}, UnitError, "not an amount of memory"),
        ({"planner": None}, rekindle.PlanError, "no planner named None"),
        ({"device": "cpu"}, rekindle.ProfileError, "the name of a GPU"),
        ({"device": torch.device("cpu")}, rekindle.ProfileError, "the name of a GPU"),
        ({"make_batch": make_batch(8)}, TypeError, "make_batch must be a function"),
        ({"make_batch": lambda n: make_batch(8)}, rekindle.ProfileError, "as many bytes"),
    ],
)
def test_what_is_wrong_is_said(bad: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"budget": "1MB", "device": "H200", "make_batch": make_batch, **bad}
    with pytest.raises(error, match=words):
        rekindle.max_batch(*parts(), **given)


def test_another_order_is_refused() -> None:
    step, model, optimizer = parts()
    with pytest.raises(TypeError, match="the order is"):
        rekindle.max_batch(model, step, optimizer, make_batch, budget="1MB")  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", ["8kB", "14kB", "30kB"])
def test_small_budgets_of_a_model_that_takes_no_single_sample(budget: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = rekindle.max_batch(
        train_step, model, optimizer, lambda n: torch.ones(n, 8), budget=budget
    )
    assert (found.plain is None) or found.plain.batch >= 1


def test_no_batch_is_beyond_what_is_looked_for() -> None:
    found = rekindle.max_batch(*parts(), make_batch, budget="400TB", device="H200")
    assert found.plain is not None
    assert found.planned is not None
    assert 0.99 * MOST < found.plain.batch <= found.planned.batch <= MOST


def test_a_step_that_changes_with_its_batch_is_refused() -> None:
    def uneven(n: int) -> torch.Tensor:
        return torch.ones(n * n, WIDTH)

    with pytest.raises(rekindle.ProfileError, match="linearly"):
        rekindle.max_batch(*parts(), uneven, budget="1GB", device="H200")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    arguments = ("max-batch", "mlp", "--budget", "40MB", "--check", "--json", str(path))
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    found = json.loads(path.read_text())
    assert found["plain"]["batch"] <= found["planned"]["batch"]
    assert [check["fits"] for check in found["checks"]] == [True]
    assert "checked" in out


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("no"), "it ran out of memory"),
        (
            rekindle.InfeasibleBudget(budget_bytes=1, least_peak_bytes=2_000_000),
            "the least peak found is 1.91",
        ),
    ],
)
def test_a_check_that_fails(
    error: Exception,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **how: Any) -> None:
        raise error

    monkeypatch.setattr(rekindle, "optimize", fail)
    code, out, err = run(capsys, "max-batch", "mlp", "--budget", "40MB", "--check")
    assert code == 1, err
    assert f"does not fit: {words}" in out


def test_the_command_says_where_the_search_ends(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "max-batch", "mlp", "--budget", "400TB", "--device", "H200")
    assert code == 0, err
    assert f"batches of more than {MOST:,} are not tried" in out


def test_the_command_says_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "max-batch", "mlp", "--budget", "1MB", "--device", "T4")
    assert code == 0, err
    assert re.search(r"a budget of [0-9.]+[MG]iB would hold one sample", out)


MAKE = """
import torch
from torch import nn

def train_step(model, optimizer, batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def make(batch):
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    return train_step, model, torch.optim.Adam(model.parameters()), torch.ones(batch, 8)

def fixed():
    return make(8)
"""


def test_a_function_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its batch needs no default; and a budget that the GPU does not have is told."""
    path = tmp_path / "own.py"
    path.write_text(MAKE)
    asked = ("--budget", "80GiB", "--device", "RTX 4090")
    code, out, err = run(capsys, "max-batch", f"{path}:make", *asked)
    assert code == 0, err
    assert "RTX 4090 has 24.0 GiB" in out
    check_refused(capsys, "takes no argument 'batch'", "max-batch", f"{path}:fixed", *asked)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("a share has no meaning", ("mlp", "--budget", "60%")),
        ("not here", ("mlp", "--budget", "1GB", "--device", "H200", "--check")),
        ("at-least", ("mlp", "--budget", "1GB", "--at-least", "lots")),
        ("must be positive", ("mlp", "--budget", "0")),
        ("no model named", ("nope", "--budget", "1GB")),
    ],
)
def test_bad_input_is_refused(
    capsys: pytest.CaptureFixture[str], message: str, arguments: tuple[str, ...]
) -> None:
    check_refused(capsys, message, "max-batch", *arguments)


@pytest.mark.parametrize("text", ["95%", "95", "0.95", " 95 % "])
def test_a_share_in_words(text: str) -> None:
    assert parse_share(text) == pytest.approx(0.95)
