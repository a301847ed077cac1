"""A planned training can be copied, saved and resumed, bit for bit."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rekindle
from rekindle.errors import ReportError
from rekindle.measuring.bitwise_compare import differences, state_of

BUDGET = "75%"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Net(nn.Module):
    """Weights, running statistics and dropout: all the state that training has."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.2)
        return self.last(x)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make_batch(n_rows: int = 256) -> Any:
    g = torch.Generator().manual_seed(4)
    return torch.randn(n_rows, 8, generator=g), torch.randint(3, (n_rows,), generator=g)


def made(width: int = 16) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net(width)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def plainly(n_steps: int) -> dict[str, Any]:
    """The state after some plain steps."""
    with torch.random.fork_rng(devices=[]):
        model, optimizer = made()
        batch = make_batch()
        torch.manual_seed(2)
        for _ in range(n_steps):
            train_step(model, optimizer, batch)
        return state_of(model, optimizer)


def planned(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, **asked: Any
) -> rekindle.TrainStep:
    asked = asked or {"budget": BUDGET, "planner": "chen-sqrt"}  # which does not look at times
    step = rekindle.optimize(train_step, model, optimizer, batch, **asked)
    assert step.plan is not None
    assert step.plan.recompute_us > 0
    return step


# Copies


def by_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])
def test_a_copy_between_steps_equals_the_model_and_training_goes_on(copied: Any) -> None:
    model, optimizer = made()
    batch = make_batch()
    step = planned(model, optimizer, batch)
    torch.manual_seed(2)
    for n_steps in range(1, 4):
        step(batch)
        twin = copied(model)
        assert type(twin) is Net
        assert differences(model.state_dict(), twin.state_dict()) == []
        assert not {p.data_ptr() for p in twin.parameters()} & {
            p.data_ptr() for p in model.parameters()
        }
        assert differences(plainly(n_steps), state_of(model, optimizer)) == []
    assert step.n_captures == 1


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])
def test_a_copy_can_be_optimized_and_goes_on_like_the_model(copied: Any) -> None:
    model, optimizer = made()
    batch = make_batch()
    step = planned(model, optimizer, batch)
    torch.manual_seed(2)
    for _ in range(2):
        step(batch)
    twin = copied(model)
    twins = torch.optim.AdamW(twin.parameters(), lr=0.5)
    twins.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    middle = torch.get_rng_state()
    other = planned(twin, twins, batch)

    for _ in range(2):
        other(batch)
    ahead = state_of(twin, twins)
    assert differences(plainly(4), ahead) == []
    assert differences(plainly(2), state_of(model, optimizer)) == ["generator cpu"]
    torch.set_rng_state(middle)
    for _ in range(2):
        step(batch)
    assert differences(ahead, state_of(model, optimizer)) == []


def test_model_and_optimizer_copied_together() -> None:
    model, optimizer = made()
    batch = make_batch()
    step = planned(model, optimizer, batch)
    torch.manual_seed(2)
    step(batch)
    twins = copy.deepcopy((model, optimizer))
    other = planned(*twins, batch)
    other(batch)
    assert differences(plainly(2), state_of(*twins)) == []


def test_state_dicts_loaded_back_take_a_step_back() -> None:
    """The step works on the user's objects: it continues from their present values."""
    model, optimizer = made()
    batch = make_batch()
    step = planned(model, optimizer, batch)
    torch.manual_seed(2)
    step(batch)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    generator = torch.get_rng_state()
    step(batch)
    step(batch)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    torch.set_rng_state(generator)
    step(batch)
    assert differences(plainly(2), state_of(model, optimizer)) == []


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_step_itself_is_not_copied_and_says_what_to_do(how: Any) -> None:
    step = planned(*made(), make_batch())
    advice = r"model\.state_dict\(\).*optimizer\.state_dict\(\).*rekindle\.save_plan.*optimize"
    with pytest.raises(TypeError, match=advice):
        how(step)


def test_a_model_that_holds_its_step_says_so_too() -> None:
    """A module with a step as an attribute cannot be copied."""
    model, optimizer = made()
    vars(model)["trainer"] = planned(model, optimizer, make_batch())
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.deepcopy(model)


# A new process

RESUME = """
import sys
import torch
torch.set_num_threads(1)
from test_step_state import make_batch, made, train_step
from rekindle.measuring.bitwise_compare import state_of
import rekindle

folder = sys.argv[1]
saved = torch.load(f"{folder}/checkpoint.pt")
model, optimizer = made()
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
batch = make_batch()
plan = rekindle.load_plan(f"{folder}/plan.json")
step = rekindle.optimize(train_step, model, optimizer, batch, plan=plan)
assert step.plan == plan
torch.set_rng_state(saved["generator"])
losses = [step(batch).detach() for _ in range(3)]
torch.save({"state": state_of(model, optimizer), "losses": losses}, f"{folder}/end.pt")
"""


def test_a_training_is_resumed_in_a_new_process(tmp_path: Path) -> None:
    model, optimizer = made()
    batch = make_batch()
    step = planned(model, optimizer, batch)
    torch.manual_seed(2)
    for _ in range(3):
        step(batch)
    assert step.plan is not None
    rekindle.save_plan(tmp_path / "plan.json", step.plan)
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "generator": torch.get_rng_state(),
    }
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    losses = [step(batch).detach() for _ in range(3)]
    assert differences(plainly(6), state_of(model, optimizer)) == []

    done = subprocess.run(
        [sys.executable, "-c", RESUME, str(tmp_path)],
        capture_output=True,
        text=True,
        env={
            "PYTHONPATH": f"{ROOT / 'src'}:{Path(__file__).parent}",
            "XDG_CACHE_HOME": str(tmp_path / "no-cache"),
            "PATH": "",
            "OMP_NUM_THREADS": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    end = torch.load(tmp_path / "end.pt")
    assert differences(plainly(6), end["state"]) == []
    assert all(map(torch.equal, losses, end["losses"]))
    assert not (tmp_path / "no-cache").exists()  # with a plan, nothing is measured


# Plans and profiles of other steps


def test_a_plan_of_another_step_is_refused() -> None:
    plan = planned(*made(), make_batch()).plan
    model, optimizer = made(width=12)
    before = state_of(model, optimizer)
    with pytest.raises(rekindle.PlanError, match="another step"):
        planned(model, optimizer, make_batch(), plan=plan)
    assert differences(before, state_of(model, optimizer)) == []


def test_a_plan_of_another_batch_size_is_refused() -> None:
    plan = planned(*made(), make_batch()).plan
    with pytest.raises(rekindle.PlanError, match="another step"):
        planned(*made(), make_batch(128), plan=plan)


def test_a_plan_with_a_wrong_schedule_is_refused() -> None:
    plan = planned(*made(), make_batch()).plan
    assert plan is not None
    short = replace(plan, schedule=plan.schedule[:-1])
    with pytest.raises(rekindle.InvalidSchedule):
        planned(*made(), make_batch(), plan=short)


def test_a_plan_and_a_budget_exclude_each_other() -> None:
    plan = planned(*made(), make_batch()).plan
    with pytest.raises(rekindle.PlanError, match="a budget or a plan, not both"):
        planned(*made(), make_batch(), plan=plan, budget=BUDGET)


def test_a_profile_of_another_step_is_refused() -> None:
    profile = planned(*made(), make_batch()).profile
    model, optimizer = made(width=12)
    before = state_of(model, optimizer)
    with pytest.raises(rekindle.ProfileError, match="another step"):
        planned(model, optimizer, make_batch(), budget=BUDGET, profile=profile)
    assert differences(before, state_of(model, optimizer)) == []


def test_a_given_plan_is_run_as_it_is() -> None:
    """Without a profile there is no forecast; a batch of another size is planned for its budget."""
    plan = planned(*made(), make_batch()).plan
    assert plan is not None
    model, optimizer = made()
    batch, small = make_batch(), make_batch(192)
    step = planned(model, optimizer, batch, plan=plan)
    assert (step.plan, step.profile, step.trace) == (plan, None, None)
    assert step.budget_bytes == plan.budget_bytes
    twins = copy.deepcopy((model, optimizer))
    torch.manual_seed(2)
    step(batch)
    step(small)
    found = state_of(model, optimizer)
    torch.manual_seed(2)
    train_step(*twins, batch)
    train_step(*twins, small)
    assert differences(state_of(*twins), found) == []
    assert step.n_captures == 2


# Reports


def test_the_page_of_a_planned_step(tmp_path: Path) -> None:
    step = planned(*made(), make_batch())
    path = tmp_path / "page.html"
    step.report(path)
    text = path.read_text(encoding="utf-8")
    assert text.lstrip().lower().startswith("<!doctype html>")
    assert "layers.1" in text
    step.report(str(tmp_path / "again.html"))
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("has_plan", [False, True])
def test_there_is_no_page_without_a_profile(tmp_path: Path, has_plan: bool) -> None:
    plan = planned(*made(), make_batch()).plan if has_plan else None
    step = rekindle.optimize(train_step, *made(), make_batch(), plan=plan)
    with pytest.raises(ReportError, match="give optimize a budget"):
        step.report(tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
