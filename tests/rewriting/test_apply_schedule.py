"""Rewritten steps compute the plain step's numbers, bit for bit, under every plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.square_step import square_step as train_step
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rekindle
from rekindle import models
from rekindle.core.cost.devices import find_device
from rekindle.core.cost.roofline import analytic_profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.errors import RewriteError
from rekindle.measuring.bitwise_compare import compare, differences, state_of
from rekindle.planners.finish import finish
from rekindle.planners.lowering import Choices, choices
from rekindle.planners.problem import Problem, problem_of
from rekindle.rewriting.apply_schedule import RewrittenStep, rewrite
from rekindle.rewriting.verify import check_rewritten
from rekindle.tracing import rng
from rekindle.tracing.tape import Recording

Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Any]


def parts(model: nn.Module, batch: torch.Tensor) -> Parts:
    return train_step, model, torch.optim.AdamW(model.parameters(), lr=0.01), batch


class Residual(nn.Module):
    """Batch norm, in-place ops, dropout, views and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = F.relu_(self.norm(self.first(x)))
        y = self.dropout(self.second(x))
        y += x
        y.relu_()
        scaled = y.flatten(2).transpose(1, 2) * torch.sigmoid(y.flatten(2).transpose(1, 2))
        return scaled * torch.rand_like(scaled) / self.calls


class WithGenerator(nn.Module):
    """Draws from its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return torch.tanh(self.linear(torch.tanh(x * noise)) * noise)


class Checkpointed(nn.Module):
    """Saves and restores random state itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return self.body(checkpoint(self.body, y, use_reentrant=False))


class EarlyViews(nn.Module):
    """Views that are taken before a write and read after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            kept = layer(x) + 1
            x = kept.clone()
            first = x[:, :1]
            x[:, 1:3], last = x[:, 2:4].tanh(), x[:, 2:]
            x = x * first.sum() * kept + last.sigmoid().sum()
        return x


MODELS: dict[str, Callable[[], Parts]] = {
    "residual": lambda: parts(Residual(), torch.randn(4, 3, 8, 8)),
    "generator": lambda: parts(WithGenerator(), torch.randn(8, 16)),
    "checkpointed": lambda: parts(Checkpointed(), torch.randn(8, 16)),
    "lstm": lambda: parts(Recurrent(), torch.randn(5, 4, 8)),
    "nested": lambda: parts(Nested(), torch.randn(64, 8)),
    "views": lambda: parts(EarlyViews(), torch.randn(16, 8)),
}


class Recurrent(nn.Module):
    """An operator with several results, the last of them lists in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(x)
        first, second = torch.tanh(out).chunk(2, dim=2)
        values, _ = torch.cat([second, first], dim=2).sigmoid().max(dim=0)
        return values


@torch.library.custom_op("rekindle_test::powers", mutates_args=())
def powers(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A tensor's sine, and in a list its square and its cube."""
    return x.sin(), [x * x, x * x * x]


@powers.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.empty_like(x), [torch.empty_like(x), torch.empty_like(x)]


def _save_input(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _powers_backward(ctx: Any, grad: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    _, (square, _) = powers(x)
    return grad * x.cos() + grads[0] * 2 * x + grads[1] * 3 * square


powers.register_autograd(_powers_backward, setup_context=_save_input)


class Nested(nn.Module):
    """An operator that returns a tensor and a list of tensors, and one that is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            sine, (square, cube) = powers(layer(x).sigmoid())
            powers(sine.detach())
            x = sine * cube + torch.tanh(square)
        return x


def dropping(choose: Callable[[Problem], Choices]) -> Callable[..., rekindle.TrainStep]:
    """Like `optimize`, but with given choices rather than a budget."""

    def optimize(*given: Any) -> rekindle.TrainStep:
        graph = rekindle.capture(*given).graph
        profile = analytic_profile(graph, find_device("H200"))
        problem = problem_of(graph, profile)
        plan = finish(problem, choose(problem), planner="test", budget_bytes=10**12)
        return rekindle.optimize(*given, profile=profile, plan=plan)

    return optimize


def drop_all(problem: Problem) -> Choices:
    return choices(problem, ())


def drop_all_and_hold_nothing(problem: Problem) -> Choices:
    return replace(choices(problem, ()), hold_from=[problem.n_ops] * problem.n_cells)


def drop_at_random(seed: int) -> Callable[[Problem], Choices]:
    def choose(problem: Problem) -> Choices:
        rng = random.Random(seed)
        kept = [cell for cell in range(problem.n_cells) if rng.random() < 0.5]
        held = [rng.choice((0, problem.n_ops)) for _ in range(problem.n_cells)]
        return replace(choices(problem, kept), hold_from=held)

    return choose


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("choose", [drop_all, drop_all_and_hold_nothing])
def test_with_all_dropped_that_may_be(name: str, choose: Callable[[Problem], Choices]) -> None:
    assert compare(MODELS[name], dropping(choose), steps=3).differences == ()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_with_a_random_part_dropped(name: str, seed: int) -> None:
    assert compare(MODELS[name], dropping(drop_at_random(seed)), steps=3).differences == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet-tiny", "bert-tiny", "gpt2-tiny", "vit-tiny"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_zoo_with_all_dropped(name: str, precision: str) -> None:
    def make() -> Parts:
        work = models.build(name, batch=2, precision=precision)
        return work.train_step, work.model, work.optimizer, work.batch

    assert compare(make, dropping(drop_all), steps=2).differences == ()


def test_statistics_and_counters_change_once() -> None:
    train, model, optimizer, batch = MODELS["residual"]()
    step = dropping(drop_all)(train, model, optimizer, batch)
    for _ in range(10):
        step(batch)
    assert model.calls.item() == 10
    assert model.norm.num_batches_tracked.item() == 10


def test_a_budget_is_met_by_the_forecast_and_its_plan_runs() -> None:
    train, model, optimizer, batch = MODELS["residual"]()
    step = rekindle.optimize(train, model, optimizer, batch, budget="84%")
    assert step.plan is not None
    assert step.trace is not None
    assert step.plan.peak_bytes == step.trace.peak_bytes <= step.plan.budget_bytes
    assert step.trace.recompute_us > 0
    step(batch)
    step(torch.randn(6, 3, 8, 8))  # another shape is planned on first use
    assert step.n_captures == 2


@pytest.mark.parametrize("budget", [None, "85%"])
def test_results_in_lists(budget: str | None) -> None:
    steps: list[rekindle.TrainStep] = []

    def optimize(*given: Any) -> rekindle.TrainStep:
        steps.append(rekindle.optimize(*given, budget=budget))
        return steps[-1]

    assert compare(MODELS["nested"], optimize, steps=3).differences == ()
    assert "_out1_out1" in steps[0].captured.code
    plan = steps[0].plan
    assert plan is None or plan.recompute_us > 0


def test_a_budget_that_cannot_be_met_is_refused_before_anything_runs() -> None:
    train, model, optimizer, batch = MODELS["residual"]()
    before = state_of(model, optimizer)
    with pytest.raises(rekindle.InfeasibleBudget):
        rekindle.optimize(train, model, optimizer, batch, budget="1%")
    assert differences(before, state_of(model, optimizer)) == []


def test_verify_leaves_the_objects_as_they_are() -> None:
    train, model, optimizer, batch = MODELS["residual"]()
    before = state_of(model, optimizer)
    assert rekindle.verify(train, model, optimizer, batch, budget="90%").equal
    assert differences(before, state_of(model, optimizer)) == []


@pytest.fixture
def planned() -> tuple[Recording, StepGraph, RewrittenStep, Plan]:
    step = dropping(drop_all)(*MODELS["residual"]())
    captured = step.captured
    assert step.plan is not None
    rewritten = rewrite(captured.recording, captured.graph, step.plan.schedule)
    return captured.recording, captured.graph, rewritten, step.plan


def test_the_check_sees_a_call_out_of_place(planned: Any) -> None:
    recording, graph, rewritten, plan = planned
    called = [i for i, node in enumerate(rewritten.nodes) if node in rewritten.origin]
    a, b = called[3], called[4]
    rewritten.nodes[a], rewritten.nodes[b] = rewritten.nodes[b], rewritten.nodes[a]
    with pytest.raises(RewriteError, match="not the one scheduled"):
        check_rewritten(recording, graph, rewritten, plan.schedule)


def test_the_check_sees_a_wrong_reader(planned: Any) -> None:
    recording, graph, rewritten, plan = planned
    copies = [n for n, (_, copy) in rewritten.origin.items() if copy and n.all_input_nodes]
    node = next(n for n in copies if any(a.op == "call_function" for a in n.all_input_nodes))
    old = next(a for a in node.all_input_nodes if a.op == "call_function")
    other = next(n for n in rewritten.nodes if n in rewritten.origin and n not in (old, node))
    node.replace_input_with(old, other)
    with pytest.raises(RewriteError):
        check_rewritten(recording, graph, rewritten, plan.schedule)


def test_the_check_sees_what_is_deleted_too_early_or_never(planned: Any) -> None:
    recording, graph, rewritten, plan = planned
    node, freed = next((n, f) for n, f in rewritten.frees.items() if f and f[0] is not n)
    del rewritten.frees[node]
    with pytest.raises(RewriteError, match="never freed"):
        check_rewritten(recording, graph, rewritten, plan.schedule)
    rewritten.frees[freed[0]] = [freed[0]]
    with pytest.raises(RewriteError, match="after it is freed"):
        check_rewritten(recording, graph, rewritten, plan.schedule)


def test_a_random_op_draws_the_same_numbers_again() -> None:
    torch.manual_seed(3)
    state = rng.read("cpu")
    first = torch.rand(4)
    later = torch.rand(2)
    assert torch.equal(rng.replay("cpu", state, torch.rand, 4), first)
    torch.manual_seed(3)
    torch.rand(4)
    assert torch.equal(torch.rand(2), later)
