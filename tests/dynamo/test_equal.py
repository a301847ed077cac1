"""A planned graph computes the bits of the unplanned one, under every plan."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from support.small import attention, batch_for, convolutions, differences, perceptron, step

from rekindle import dynamo
from rekindle.core.graph.graph import Phase
from rekindle.core.graph.schedule import Compute
from rekindle.errors import InfeasibleBudget

MAKERS = (perceptron, convolutions, attention)


def _plain(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    found = step(torch.compile(deepcopy(model), backend="aot_eager"), batch)
    torch.compiler.reset()
    return found


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("budget", ["100%", "85%", "70%"])
def test_at_any_budget(make, budget: str) -> None:
    model, batch = make(), batch_for(make)
    plain = _plain(model, batch)
    planned = dynamo.compile(model, budget=budget, lower="eager")
    try:
        found = step(planned, batch)
    except InfeasibleBudget as error:
        torch.compiler.reset()
        planned = dynamo.compile(model, budget=error.least_peak_bytes, lower="eager")
        found = step(planned, batch)
    assert differences(plain, found) == []
    (only,) = planned.plans
    assert only.plan.peak_bytes <= only.plan.budget_bytes


@pytest.mark.parametrize(
    "planner", ["none", "all", "chen-sqrt", "chen-recursive", "mutwo", "mincut"]
)
@pytest.mark.parametrize("make", [perceptron, convolutions])
def test_with_any_planner(make, planner: str) -> None:
    model, batch = make(), batch_for(make)
    plain = _plain(model, batch)
    planned = dynamo.compile(model, budget="10GiB", planner=planner, lower="eager")
    assert differences(plain, step(planned, batch)) == []
    (only,) = planned.plans
    again = [each for each in only.plan.schedule if isinstance(each, Compute) and each.copy]
    assert bool(again) == (planner not in ("none", "mutwo", "mincut"))  # who look at the budget


def test_several_steps_of_training() -> None:
    models = [convolutions() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain = torch.compile(models[0], backend="aot_eager")
    planned = dynamo.compile(models[1], budget="80%", lower="eager")
    for model in (plain, planned):
        optimizer = torch.optim.Adam(model.parameters())
        for number in range(3):
            torch.manual_seed(number)
            model(torch.randn(32, 3, 8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert planned.plans[0].plan.recompute_us > 0
    states = [model.state_dict() for model in models]
    assert differences(*states) == []
    assert int(states[1]["0.1.num_batches_tracked"]) == 3


def test_what_draws_random_numbers_runs_once() -> None:
    planned = dynamo.compile(perceptron(), budget="10GiB", planner="all", lower="eager")
    step(planned, batch_for(perceptron))
    (only,) = planned.plans
    random = {op.index for op in only.graph.ops if op.is_random}
    assert len(random) == 4
    assert not any(
        isinstance(each, Compute) and each.copy and each.op in random for each in only.plan.schedule
    )
    kept = [d.reason for d in only.plan.decisions if d.is_kept]
    assert sum("changes state (random_generator)" in reason for reason in kept) >= 4


def test_the_passes_are_told_apart() -> None:
    planned = dynamo.compile(convolutions(), budget="100%", lower="eager")
    step(planned, batch_for(convolutions))
    graph = planned.plans[0].graph
    assert {op.phase for op in graph.ops} == {Phase.FORWARD, Phase.BACKWARD}
    phases = [op.phase for op in graph.ops]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD].index)
    convolved = [op.phase for op in graph.ops if op.target == "aten.convolution.default"]
    assert convolved == [Phase.FORWARD] * 4
    assert sum("batch_norm" in op.target for op in graph.ops) == 8


def test_an_input_that_is_changed_in_place() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = perceptron()
            self.register_buffer("seen", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.mean(0).detach()
            return self.inner(x) * (1 + self.seen.sum())

    model, batch = Counts(), batch_for(perceptron)
    plain = _plain(model, batch)
    planned = dynamo.compile(model, budget="10GiB", planner="all", lower="eager")
    assert differences(plain, step(planned, batch)) == []
