"""The forms of a step: small ops together, results in place, updates early; the same bits in all.

Early updates are forced: by a plan of the early form, or by a budget that no other form meets.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.faults import (
    AFTER,
    BEFORE,
    AtOp,
    Trial,
    interrupt,
    interrupted_at_lines,
    momentum,
)
from support.faults import run_out_of_memory as run_out
from support.square_step import square_step
from support.zoo_steps import ZOO, zoo_parts
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.core.cost.devices import find_device
from rekindle.core.cost.profile import Profile
from rekindle.core.cost.roofline import analytic_profile
from rekindle.core.graph.graph import Phase, Role, StepGraph
from rekindle.core.graph.liveness import analyze
from rekindle.core.graph.schedule import Plan, Schedule, schedule_of
from rekindle.core.graph.serial import load_plan, save_plan
from rekindle.core.graph.simulate import simulate
from rekindle.core.rewrite.improve import (
    OpKind,
    batch_small_ops,
    carry_over,
)
from rekindle.errors import InfeasibleBudget, PlanError, RewriteError
from rekindle.measuring.bitwise_compare import Parts, compare, differences, state_of
from rekindle.rewriting.apply_schedule import RewrittenStep, rewrite
from rekindle.rewriting.step_forms import improved, with_early_updates
from rekindle.rewriting.verify import check_rewritten
from rekindle.tracing.tape import Recording

WIDTH = 32
Optimizer = torch.optim.Optimizer


def train_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> torch.Tensor:
    """Gradients are there while the step runs, and neither before nor after it."""
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def layers(n: int = 4, width: int = WIDTH) -> nn.Sequential:
    """Weights that are large compared to the activations of a small batch."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(n)))


def making(
    make_optimizer: Callable[[nn.Module], Optimizer],
    *,
    step: Callable[..., Any] = train_step,
    model: Callable[[], nn.Module] = layers,
    batch: Callable[[], Any] = lambda: torch.randn(8, WIDTH),
) -> Callable[[], Parts]:
    """Builds a step with model, optimizer and batch, the same each time."""

    def make() -> Parts:
        torch.manual_seed(5)
        made = model()
        return step, made, make_optimizer(made), batch()

    return make


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Forms(NamedTuple):
    """A captured step, and the forms it can take."""

    recording: Recording
    graph: StepGraph
    profile: Profile
    improved: StepGraph
    early: StepGraph | None

    def costs(self, form: StepGraph) -> Profile:
        return carry_over(self.profile, self.graph, form)

    def peak_bytes(self, form: StepGraph) -> int:
        return simulate(form, self.costs(form)).peak_bytes


def forms_of(parts: Parts, *, measured: bool = False) -> Forms:
    captured = rekindle.capture(*parts)
    graph, recording = captured.graph, captured.recording
    profile = analytic_profile(graph, find_device("H200"))
    if measured:
        found = rekindle.profile(captured, cache=False, runs=1)
        pairs = zip(found.costs, profile.costs, strict=True)
        profile = replace(found, costs=tuple(replace(m, time_us=a.time_us) for m, a in pairs))
    form = improved(recording, graph)
    return Forms(recording, graph, profile, form, with_early_updates(recording, form))


def early_plan(*parts: Any) -> Plan:
    """A plan of the early form of a step that drops nothing."""
    forms = forms_of(parts)
    assert forms.early is not None
    return rekindle.plan(forms.early, forms.costs(forms.early), budget="300%", planner="none")


def early(*parts: Any) -> rekindle.TrainStep:
    """Like `optimize`, with early updates."""
    step = rekindle.optimize(*parts, plan=early_plan(*parts))
    assert count(step.graph, OpKind.UPDATE) > 1
    return step


def count(graph: StepGraph, kind: OpKind) -> int:
    return sum(op.kind is kind for op in graph.ops)


def assert_early(make: Callable[[], Parts], steps: int = 3) -> None:
    """It has an early form, and trains the same in all forms."""
    assert compare(make, early, steps=steps).differences == ()
    assert compare(make, rekindle.optimize, steps=steps).differences == ()


def assert_not_early(make: Callable[[], Parts], steps: int = 3) -> None:
    """It has no early form, under any budget, and trains the same."""
    forms = forms_of(make())
    assert forms.early is None
    assert compare(make, rekindle.optimize, steps=steps).differences == ()
    least, parts = forms.peak_bytes(forms.improved), make()
    with pytest.raises(InfeasibleBudget):
        rekindle.optimize(*parts, budget=least - 1, planner="none", profile=forms.profile)
    asked: dict[str, Any] = {"budget": forms.peak_bytes(forms.graph), "profile": forms.profile}

    def optimize(*parts: Any) -> rekindle.TrainStep:
        step = rekindle.optimize(*parts, **asked)
        assert count(step.graph, OpKind.UPDATE) == 0
        return step

    assert compare(make, optimize, steps=steps).differences == ()


# Optimizers that may be called early

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.05, lambd=0.01),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_that_goes_one_by_one(name: str, foreach: bool) -> None:
    make = making(lambda model: OPTIMIZERS[name](model.parameters(), foreach=foreach))
    assert compare(make, early, steps=4).differences == ()


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD with momentum"])
def test_fused_optimizers(name: str) -> None:
    make = making(lambda model: OPTIMIZERS[name](model.parameters(), fused=True))
    assert compare(make, early, steps=4).differences == ()


def test_two_groups_of_parameters() -> None:
    def make_optimizer(model: nn.Module) -> Optimizer:
        params = [*model.parameters()]
        groups = [
            {"params": params[::2], "lr": 0.02, "weight_decay": 0.1},
            {"params": params[1::2], "lr": 0.001, "betas": (0.8, 0.9)},
        ]
        return torch.optim.AdamW(groups)

    assert_early(making(make_optimizer))


def test_a_schedule_of_learning_rates() -> None:
    """It wraps the optimizer's step, only to count."""
    parts, plain = [making(adam)() for _ in range(2)]
    _, model, optimizer, batch = parts
    schedulers = [torch.optim.lr_scheduler.StepLR(each[2], 1, 0.5) for each in (parts, plain)]
    step = early(*parts)
    for _ in range(4):
        step(batch)
        plain[0](*plain[1:])
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.01 / 16
    assert differences(state_of(plain[1], plain[2]), state_of(model, optimizer)) == []


# Models


class WithSpare(nn.Module):
    """Has parameters that get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.spare, self.frozen = nn.Linear(4, 4), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.frozen(x))
        return out


class Tied(nn.Module):
    """Embedding and head share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(WIDTH, WIDTH), layers()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return out


class Shaky(nn.Module):
    """Dropout, a norm that runs twice, and a branch around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = layers(), nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        out: torch.Tensor = self.norm(torch.relu(self.norm(x)))
        return out


def test_parameters_without_a_gradient() -> None:
    assert_early(making(adam, model=WithSpare))


def test_tied_weights_are_updated_when_the_last_of_them_is_through() -> None:
    make = making(adam, model=Tied, batch=lambda: torch.arange(8) % 5)
    forms = forms_of(make())
    assert forms.early is not None
    first, *_, last = (op for op in forms.early.ops if op.kind is OpKind.UPDATE)
    tied = "param_embedding_weight"
    assert tied in {forms.early.values[v].name for v in last.mutates}
    assert tied not in {forms.early.values[v].name for v in first.mutates}
    assert_early(make)


def test_dropout_and_a_norm_that_runs_twice() -> None:
    assert_early(making(adam, model=Shaky))


def micro_batches(model: nn.Module, optimizer: Optimizer, batch: Any) -> list[torch.Tensor]:
    """Gradients of two parts add up before the update."""
    optimizer.zero_grad()
    losses = []
    for part in batch.chunk(2):
        losses.append(model(part).square().mean())
        losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses


def test_gradients_that_add_up_inside_the_step() -> None:
    assert_early(making(adam, step=micro_batches))


@pytest.mark.slow
def test_a_budget_with_recomputation_and_early_updates() -> None:
    """Nothing is computed again from a weight that has been updated."""
    make = making(adam, model=Shaky, batch=partial(torch.randn, 64, WIDTH))
    forms = forms_of(make())
    assert forms.early is not None
    costs = forms.costs(forms.early)
    with pytest.raises(InfeasibleBudget) as caught:
        rekindle.plan(forms.early, costs, budget=1)
    plan = rekindle.plan(forms.early, costs, budget=caught.value.least_peak_bytes)
    assert plan.recompute_us > 0

    def optimize(*parts: Any) -> rekindle.TrainStep:
        return rekindle.optimize(*parts, plan=plan)

    found = compare(make, optimize, steps=3)
    assert found.differences == ()
    assert count(found.graph, OpKind.UPDATE) > 1


def test_a_step_that_clears_gradients_at_its_end_alone() -> None:
    """The most usual step: there are no old gradients, and a capture holds as long as that."""
    assert_early(making(adam, step=square_step))


# Steps that must not be early


def clipping(model: nn.Module, optimizer: Optimizer, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_gradients_that_are_clipped_are_all_there_at_once() -> None:
    """Each update waits for the norm of all gradients, so that none can be early."""
    make = making(adam, step=clipping)
    forms = forms_of(make())
    if forms.early is not None:
        updates = [op.index for op in forms.early.ops if op.kind is OpKind.UPDATE]
        backward = [op.index for op in forms.early.ops if op.phase is Phase.BACKWARD]
        assert min(updates) > max(backward)
    asked: dict[str, Any] = {"budget": forms.peak_bytes(forms.graph), "profile": forms.profile}
    optimize = partial(rekindle.optimize, **asked)
    assert compare(make, optimize, steps=3).differences == ()
    assert compare(make, rekindle.optimize, steps=3).differences == ()


class Averaged(nn.Module):
    """Layers, and a running average of the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.register_buffer("average", torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out

    def follow(self) -> None:
        with torch.no_grad():
            self.get_buffer("average").lerp_(self.get_parameter("layers.0.0.weight"), 0.1)


def averaging_after(model: Averaged, optimizer: Optimizer, batch: Any) -> torch.Tensor:
    loss = train_step(model, optimizer, batch)
    model.follow()
    return loss


def averaging_before(model: Averaged, optimizer: Optimizer, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    model.follow()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_an_average_of_updated_parameters() -> None:
    assert_not_early(making(adam, model=Averaged, step=averaging_after))


def test_an_average_of_parameters_before_the_update() -> None:
    """The one that is read waits."""
    make = making(adam, model=Averaged, step=averaging_before)
    forms = forms_of(make())
    assert forms.early is not None
    reader = next(op.index for op in forms.early.ops if "lerp_" in op.target)
    last = [op for op in forms.early.ops if op.kind is OpKind.UPDATE][-1]
    assert last.index > reader
    assert "param_layers_0_0_weight" in {forms.early.values[v].name for v in last.mutates}
    assert_early(make)


def test_returned_gradients_and_norms() -> None:
    def returning(model: nn.Module, optimizer: Optimizer, batch: Any) -> list[Any]:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        grads = [param.grad for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return [loss, grads[0], torch.stack([g.norm() for g in grads if g is not None])]

    assert_not_early(making(adam, step=returning))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_looks_at_the_optimizers_state(when: str) -> None:
    """It reads parameters from before or after the update, as in the plain step."""

    def size(optimizer: Optimizer, model: nn.Module) -> torch.Tensor:
        averages = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
        return torch.stack([each.norm() for each in averages])

    def looking(model: nn.Module, optimizer: Optimizer, batch: Any) -> list[Any]:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        seen = size(optimizer, model) if when == "before" else None
        optimizer.step()
        optimizer.zero_grad()
        return [loss, size(optimizer, model) if seen is None else seen]

    def make() -> Parts:
        parts = making(adam, step=looking)()
        train_step(*parts[1:])  # creates the optimizer's state
        return parts

    forms = forms_of(make())
    optimize = early if forms.early is not None else rekindle.optimize
    assert compare(make, optimize, steps=3).differences == ()


@pytest.mark.slow
@pytest.mark.parametrize("register", ["pre", "post"])
def test_hooks_on_the_optimizer(register: str) -> None:
    seen: list[str] = []

    def make_optimizer(model: nn.Module) -> Optimizer:
        optimizer = adam(model)
        getattr(optimizer, f"register_step_{register}_hook")(lambda *_: seen.append(register))
        return optimizer

    make = making(make_optimizer)
    assert_not_early(make)
    parts = make()
    step = rekindle.optimize(*parts)
    seen.clear()
    step(parts[3])
    assert seen == [register]


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
def test_hooks_on_all_optimizers(register: Callable[..., Any]) -> None:
    handle = register(lambda *_: None)
    try:
        assert forms_of(making(adam)()).early is None
    finally:
        handle.remove()
    assert forms_of(making(adam)()).early is not None


def test_a_hook_that_comes_later_is_called_once_a_step() -> None:
    parts = making(adam)()
    step = early(*parts)
    seen: list[int] = []
    handle = parts[2].register_step_post_hook(lambda *_: seen.append(1))
    step(parts[3])
    handle.remove()
    step(parts[3])
    assert seen == [1]


class OwnAdam(torch.optim.AdamW):
    """Could do anything."""


class Wrapped:
    """A step of the user's own in place of the optimizer's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, closure: Any = None) -> Any:
        return type(self.optimizer).step(self.optimizer, closure)


def with_own_step(model: nn.Module) -> Optimizer:
    optimizer = adam(model)
    optimizer.step = Wrapped(optimizer)  # type: ignore[method-assign]
    return optimizer


@pytest.mark.slow
def test_optimizers_that_are_not_known() -> None:
    assert_not_early(making(lambda model: OwnAdam(model.parameters(), lr=0.01)))
    assert_not_early(making(lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01)))
    assert forms_of(making(with_own_step)()).early is None


def clearing_first(model: nn.Module, optimizer: Optimizer, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def zeroing(model: nn.Module, optimizer: Optimizer, batch: Any) -> torch.Tensor:
    loss = clearing_first(model, optimizer, batch)
    optimizer.zero_grad(set_to_none=False)
    return loss


def never_clearing(model: nn.Module, optimizer: Optimizer, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def stepping_twice(model: nn.Module, optimizer: Optimizer, batch: Any) -> torch.Tensor:
    train_step(model, optimizer, batch)
    return train_step(model, optimizer, batch)


@pytest.mark.slow
@pytest.mark.parametrize("step", [clearing_first, zeroing, never_clearing, stepping_twice])
def test_gradients_that_are_left_or_found(step: Callable[..., Any]) -> None:
    assert_not_early(making(adam, step=step))


def accumulating(model: nn.Module, optimizer: Optimizer, batch: Any) -> torch.Tensor:
    """Adds to the gradients that are there."""
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_old_gradients_are_added_to() -> None:
    def make() -> Parts:
        parts = making(adam, step=accumulating)()
        parts[1](parts[3]).mean().backward()
        return parts

    assert_not_early(make)


def test_gradients_that_come_after_the_capture() -> None:
    """As where the user runs a backward pass of their own between two steps."""
    parts, plain = [making(adam, step=accumulating)() for _ in range(2)]
    step = rekindle.optimize(*parts, budget="300%", profile=forms_of(parts).profile)
    for number in range(4):
        if number % 2:
            for each in (parts, plain):
                each[1](each[3]).mean().backward()
        step(parts[3])
        plain[0](*plain[1:])
        assert differences(state_of(*plain[1:3]), state_of(*parts[1:3])) == []


# Small ops together


class Normed(nn.Module):
    """Convolutions and batch norms; the second norm runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 1, 2, 1):
            x = torch.relu(self.norms[number](self.convs[number](x)))
        return x


def in_bf16(model: nn.Module, optimizer: Optimizer, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = model(batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


NORMED = making(adam, model=Normed, step=in_bf16, batch=lambda: torch.randn(2, 16, 4, 4))


@pytest.mark.slow
def test_batch_norms_and_casts_in_bf16() -> None:
    plan = early_plan(*NORMED())
    optimize = partial(rekindle.optimize, plan=plan)
    assert compare(NORMED, optimize, steps=3).differences == ()
    assert compare(NORMED, rekindle.optimize, steps=3).differences == ()
    parts = NORMED()
    step = rekindle.optimize(*parts)
    for _ in range(3):
        step(parts[3])
    counters = [parts[1].get_buffer(f"norms.{i}.num_batches_tracked").item() for i in range(3)]
    assert counters == [3, 6, 3]


def members(graph: StepGraph, phase: Phase) -> list[int]:
    """How many values each op that does several things at once makes or changes."""
    return [
        len(op.outputs or op.mutates)
        for op in graph.ops
        if op.kind is OpKind.FOREACH and op.phase is phase
    ]


def test_casts_of_gradients_are_done_together() -> None:
    forms = forms_of(NORMED())
    assert members(forms.improved, Phase.BACKWARD) == [6]
    assert "_foreach" not in rekindle.capture(*NORMED()).code
    assert "cast" in rekindle.optimize(*NORMED()).captured.code


def test_counters_of_batch_norms_are_done_together() -> None:
    """A norm that runs twice counts twice."""
    forms = forms_of(NORMED())
    assert members(forms.improved, Phase.FORWARD) == [3]
    assert "count" in rekindle.optimize(*NORMED()).captured.code


def casts_of(forms: Forms) -> list[int]:
    """The ops that cast weights' gradients."""
    return [
        op.index
        for op in forms.graph.ops
        if op.phase is Phase.BACKWARD
        and "_to_copy" in op.target
        and forms.graph.storage_of(op.outputs[0]).role is Role.GRAD
    ]


# Peaks


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["mlp", "resnet-tiny", "bert-tiny"])
def test_an_improved_step_takes_no_more_than_the_plain_one(name: str, precision: str) -> None:
    assert name in ZOO
    found = compare(partial(zoo_parts, name, precision), rekindle.optimize, steps=2)
    assert found.differences == ()
    assert found.captured_peak_bytes <= found.plain_peak_bytes


# So large that the constant overhead of an update does not matter.
WIDE: dict[str, Any] = {
    "model": lambda: layers(width=256),
    "batch": lambda: torch.randn(8, 256),
}


def test_a_budget_that_only_early_updates_meet() -> None:
    make = making(sgd, **WIDE)
    forms = forms_of(make(), measured=True)
    assert forms.early is not None
    least = []
    for form in (forms.early, forms.improved):
        with pytest.raises(InfeasibleBudget) as caught:
            rekindle.plan(form, forms.costs(form), budget=1)
        least.append(caught.value.least_peak_bytes)
    assert least[0] < 0.9 * least[1]
    budget = sum(least) // 2

    def optimize(*parts: Any) -> rekindle.TrainStep:
        step = rekindle.optimize(*parts, budget=budget, profile=forms.profile)
        assert count(step.graph, OpKind.UPDATE) > 1
        return step

    found = compare(make, optimize, steps=3)
    assert found.differences == ()
    assert found.plan is not None
    assert found.captured_peak_bytes <= budget == found.budget_bytes
    assert found.captured_peak_bytes == pytest.approx(found.plan.peak_bytes, rel=0.005)
    with pytest.raises(InfeasibleBudget) as caught:
        rekindle.optimize(*make(), budget=least[0] - 1, profile=forms.profile)
    assert caught.value.least_peak_bytes == least[0]


def peak_of_early(make_optimizer: Callable[[nn.Module], Optimizer]) -> tuple[int, int]:
    """The peak of an early form as forecast, and as measured."""
    parts = making(make_optimizer, **WIDE)()
    forms = forms_of(parts, measured=True)
    assert forms.early is not None
    budget = forms.peak_bytes(forms.early)
    assert budget < forms.peak_bytes(forms.improved) <= forms.peak_bytes(forms.graph)
    step = rekindle.optimize(*parts, budget=budget, planner="none", profile=forms.profile)
    assert step.plan is not None
    assert count(step.graph, OpKind.UPDATE) > 1
    return step.plan.peak_bytes, step.measure(parts[3], steps=1).peak_bytes


@pytest.mark.parametrize("name", ["SGD", "SGD with momentum", "AdamW", "RMSprop"])
def test_the_forecast_of_early_updates_all_at_once(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    forecast, measured = peak_of_early(lambda m: optimizer(m.parameters(), foreach=True))
    assert measured == pytest.approx(forecast, rel=0.005)


def test_the_forecast_of_early_updates_one_by_one() -> None:
    optimizer = OPTIMIZERS["AdamW"]
    forecast, measured = peak_of_early(lambda m: optimizer(m.parameters(), foreach=False))
    assert measured == pytest.approx(forecast, rel=0.005)


# Plans that are kept


def test_a_saved_plan_of_early_updates_goes_on_where_training_stopped(tmp_path: Path) -> None:
    make = making(adam, model=Shaky)
    plain, parts, later = make(), make(), make()
    torch.manual_seed(9)
    for _ in range(4):
        plain[0](*plain[1:])
    torch.manual_seed(9)
    step = early(*parts)
    for _ in range(2):
        step(parts[3])
    assert step.plan is not None
    save_plan(tmp_path / "plan.json", step.plan)
    later[1].load_state_dict(parts[1].state_dict())
    later[2].load_state_dict(parts[2].state_dict())
    resumed = rekindle.optimize(*later, plan=load_plan(tmp_path / "plan.json"))
    assert count(resumed.graph, OpKind.UPDATE) > 1
    for _ in range(2):
        resumed(later[3])
    assert differences(state_of(*plain[1:3]), state_of(*later[1:3])) == []


def test_a_plan_of_early_updates_is_refused_where_they_must_not_be() -> None:
    plan = early(*making(adam)()).plan
    with pytest.raises(PlanError, match="another step"):
        rekindle.optimize(*making(lambda m: OwnAdam(m.parameters(), lr=0.01))(), plan=plan)


# Faults


@pytest.fixture
def _usual_interrupts() -> Iterator[None]:
    """An interrupt raises KeyboardInterrupt, as in any script; each test leaves it so."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, old) is signal.default_int_handler


def early_trial() -> Trial:
    """A step with early updates, that has run once."""
    model, batch = layers(3), torch.randn(8, WIDTH)
    twin = copy.deepcopy(model)
    plan = early_plan(train_step, twin, momentum(twin.parameters(), lr=0.05), batch)
    trial = Trial(model, batch, function=train_step, make=momentum, plan=plan)
    assert count(trial.step.graph, OpKind.UPDATE) > 1
    trial.train()
    return trial


class Watch(TorchDispatchMode):
    """Counts the ops of a step, and those that run before one changes parameters or state."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        state = [t for each in trial.optimizer.state.values() for t in each.values()]
        self.watched = [*trial.model.parameters(), *filter(torch.is_tensor, state)]
        self.before = [tensor._version for tensor in self.watched]
        self.count, self.changed = 0, -1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "profiler":
            if self.changed < 0 and [t._version for t in self.watched] != self.before:
                self.changed = self.count
            self.count += 1
        return result


def watched(trial: Trial) -> tuple[int, int]:
    """The number of the first op that changes a parameter or its state, and of all ops."""
    with Watch(trial) as watch:
        trial.step(trial.batch)
    assert trial.outcome() == AFTER
    assert 5 < watch.changed < watch.count // 2 + watch.count // 4
    return watch.changed, watch.count


@pytest.mark.usefixtures("_usual_interrupts")
def test_an_interrupt_at_any_op_of_an_early_step() -> None:
    """After the first update it waits for the last: all parameters are those of after the step."""
    trial = early_trial()
    changed, n_ops = watched(trial)
    outcomes = []
    for number in range(n_ops):
        with pytest.raises(KeyboardInterrupt), AtOp(number, interrupt):
            trial.step(trial.batch)
        outcomes.append(trial.outcome())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert all(param.grad is None for param in trial.model.parameters())
    n_before = outcomes.count(BEFORE)
    assert outcomes == [BEFORE] * n_before + [AFTER] * (n_ops - n_before)
    assert changed - 3 <= n_before <= changed  # an update may begin with ops that change nothing
    trial.train()
    assert trial.step.n_captures == 1


@pytest.mark.usefixtures("_usual_interrupts")
def test_an_interrupt_at_any_line_of_an_early_step() -> None:
    trial = early_trial()
    interrupted_at_lines(trial, every=3)
    trial.train()


def test_an_error_before_the_first_update_leaves_all_as_it_was() -> None:
    trial = early_trial()
    changed, _ = watched(trial)
    for number in range(changed):
        before = trial.state()
        with pytest.raises(torch.OutOfMemoryError), AtOp(number, run_out):
            trial.step(trial.batch)
        assert differences(before, trial.state()) == [], number
    trial.train()
    assert trial.step.n_captures == 1


# The check of rewritten steps

Rewritten = tuple[Recording, StepGraph, RewrittenStep, Schedule]


def rewrite_all(recording: Recording, graph: StepGraph) -> Rewritten:
    schedule = tuple(schedule_of(graph, None))
    return recording, graph, rewrite(recording, graph, schedule), schedule


def is_right(
    recording: Recording, graph: StepGraph, rewritten: RewrittenStep, schedule: Schedule
) -> None:
    check_rewritten(recording, graph, rewritten, schedule)


@pytest.fixture
def updated_early() -> Rewritten:
    forms = forms_of(making(adam)())
    assert forms.early is not None
    found = rewrite_all(forms.recording, forms.early)
    is_right(*found)
    return found


class Scaled(nn.Module):
    """A parameter that is read once more after its gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers(2), layers(2)
        self.scale = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.first(x) * self.scale))
        return out


def test_the_check_sees_an_update_before_the_last_read() -> None:
    assert_early(making(adam, model=Scaled))
    forms = forms_of(making(adam, model=Scaled)())
    one_each = with_early_updates(forms.recording, forms.improved, max_updates=1000)
    assert one_each is not None
    found = rewrite_all(forms.recording, one_each)
    is_right(*found)
    rewritten, slots = found[2], forms.recording.state.slots
    (update,) = (
        node
        for node, call in rewritten.optimizer_calls.items()
        if "scale" in {slots[index].name for index in call.params}
    )
    place = rewritten.nodes.index(update)
    (scale,) = (node for node in rewritten.graph.nodes if node.name == "param_scale")
    reader = max(rewritten.nodes.index(user) for user in scale.users)
    assert max(rewritten.nodes.index(grad) for grad in update.all_input_nodes) < reader < place
    rewritten.nodes.insert(reader, rewritten.nodes.pop(place))
    with pytest.raises(RewriteError, match="does not read what"):
        is_right(*found)


def test_the_check_sees_an_update_before_its_gradient_is_complete() -> None:
    """Gradients of tied weights add up."""
    forms = forms_of(making(adam, model=Tied, batch=lambda: torch.arange(8) % 5)())
    assert forms.early is not None
    found = rewrite_all(forms.recording, forms.early)
    is_right(*found)
    rewritten = found[2]
    last = [*rewritten.optimizer_calls][-1]
    whole = next(arg for arg in last.all_input_nodes if "add" in arg.name)
    last.replace_input_with(whole, whole.all_input_nodes[0])
    with pytest.raises(RewriteError):
        is_right(*found)


def test_the_check_sees_a_missing_update(updated_early: Rewritten) -> None:
    rewritten = updated_early[2]
    node = next(iter(rewritten.optimizer_calls))
    place = rewritten.nodes.index(node)
    rewritten.nodes.remove(node)
    freed = rewritten.frees.pop(node)
    rewritten.frees.setdefault(rewritten.nodes[place - 1], []).extend(freed)
    with pytest.raises(RewriteError, match="never updated"):
        is_right(*updated_early)


def test_the_check_sees_an_update_with_another_gradient(updated_early: Rewritten) -> None:
    rewritten = updated_early[2]
    node = next(n for n, c in rewritten.optimizer_calls.items() if len(c.params) == 2)
    first, second = node.args
    node.args = (second, first)
    with pytest.raises(RewriteError, match="as was recorded"):
        is_right(*updated_early)


def test_the_check_sees_an_update_that_is_done_twice(updated_early: Rewritten) -> None:
    rewritten = updated_early[2]
    node, call = next(iter(rewritten.optimizer_calls.items()))
    again = rewritten.graph.create_node("call_function", node.target, node.args, {}, name="again")
    rewritten.nodes.insert(rewritten.nodes.index(node), again)
    rewritten.optimizer_calls[again] = call
    with pytest.raises(RewriteError, match="as was recorded"):
        is_right(*updated_early)


class Branched(nn.Module):
    """A gradient that goes two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def overwriting(graph: StepGraph, op: int, value: int) -> StepGraph:
    """The graph with an op that overwrites one of its inputs, valid or not."""
    (result,) = graph.ops[op].outputs
    ops, values = list(graph.ops), list(graph.values)
    ops[op] = replace(ops[op], mutates=(value,))
    old, new = values[result].storage, values[value].storage
    moved = [replace(v, storage=new if v.storage == old else v.storage) for v in values]
    return replace(graph, ops=tuple(ops), values=tuple(moved))


def test_the_check_sees_what_is_overwritten_and_read_later() -> None:
    forms = forms_of(making(adam, model=Branched)())
    graph, liveness = forms.graph, analyze(forms.graph)
    late: list[tuple[int, int]] = []
    right: list[tuple[int, int]] = []
    for op in graph.ops:
        if op.phase is not Phase.BACKWARD:
            continue
        for value in op.may_overwrite:
            storage = graph.values[value].storage
            is_own = graph.ops[liveness.birth[storage]].phase is Phase.BACKWARD
            if is_own and graph.storages[storage].role is not Role.GRAD:
                is_late = liveness.death[storage] > op.index
                (late if is_late else right).append((op.index, value))
    assert late
    assert right
    is_right(*rewrite_all(forms.recording, overwriting(graph, *right[0])))
    for each in late:
        with pytest.raises(RewriteError, match="does not read what"):
            is_right(*rewrite_all(forms.recording, overwriting(graph, *each)))


def test_the_check_sees_what_is_written_over_a_parameter() -> None:
    """Or over anything that was there before the step."""

    def product(model: nn.Module, optimizer: Optimizer, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (torch.tanh(model.get_parameter("weight")) * batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    make = making(
        adam,
        model=partial(nn.Linear, 8, 8, bias=False),
        step=product,
        batch=partial(torch.randn, 8, 8),
    )
    forms = forms_of(make())
    entered = {v.index for v in forms.graph.values if v.producer is None}
    wrong = [
        (op.index, value)
        for op in forms.graph.ops
        for value in op.may_overwrite
        if value in entered and op.phase is Phase.BACKWARD
    ]
    assert wrong
    for each in wrong:
        with pytest.raises(RewriteError):
            is_right(*rewrite_all(forms.recording, overwriting(forms.graph, *each)))


@pytest.fixture
def cast_together() -> Rewritten:
    forms = forms_of(NORMED())
    casts = casts_of(forms)
    assert len(casts) == 6
    found = rewrite_all(forms.recording, batch_small_ops(forms.graph, [casts]))
    is_right(*found)
    assert [len(calls) for calls in found[2].batched.values()] == [6]
    return found


def test_the_check_sees_a_cast_that_is_not_done(cast_together: Rewritten) -> None:
    rewritten = cast_together[2]
    ((node, calls),) = rewritten.batched.items()
    tensors, dtype = node.args
    assert isinstance(tensors, (list, tuple))
    node.args = ([*tensors][:-1], dtype)
    rewritten.batched[node] = calls[:-1]
    with pytest.raises((RewriteError, KeyError)):
        is_right(*cast_together)


def test_the_check_sees_a_cast_of_another_tensor(cast_together: Rewritten) -> None:
    ((node, _),) = cast_together[2].batched.items()
    tensors, dtype = node.args
    assert isinstance(tensors, (list, tuple))
    node.args = ([*tensors][::-1], dtype)
    with pytest.raises(RewriteError, match="does not read what"):
        is_right(*cast_together)


def test_the_check_sees_a_cast_to_another_type(cast_together: Rewritten) -> None:
    ((node, _),) = cast_together[2].batched.items()
    node.args = (node.args[0], torch.float64)
    with pytest.raises(RewriteError, match="does not do what"):
        is_right(*cast_together)


def test_the_check_sees_a_counter_that_does_not_count() -> None:
    forms = forms_of(NORMED())
    counts = [
        op.index for op in forms.graph.ops if "add_" in op.target and op.phase is Phase.FORWARD
    ]
    found = rewrite_all(forms.recording, batch_small_ops(forms.graph, [counts[:3]]))
    is_right(*found)
    rewritten = found[2]
    ((node, calls),) = rewritten.batched.items()
    tensors, number = node.args
    assert isinstance(tensors, (list, tuple))
    node.args = ([*tensors][:-1], number)
    rewritten.batched[node] = calls[:-1]
    with pytest.raises(RewriteError):
        is_right(*found)


class Holding(nn.Module):
    """Trains tensors that are no parameters: an attribute, one in a list, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(2)
        self.scale = torch.ones(WIDTH, requires_grad=True)
        self.shifts = [torch.zeros(WIDTH, requires_grad=True)]
        self.register_buffer("factor", torch.ones(WIDTH, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) * self.scale * self.factor + self.shifts[0]
        return out


@pytest.mark.parametrize("planned", [False, True])
def test_tensors_that_are_trained_and_are_no_parameters(planned: bool) -> None:
    def make() -> Parts:
        model = Holding()
        own = [*model.parameters(), model.scale, *model.shifts, model.factor]
        optimizer = torch.optim.AdamW(own, lr=0.1)  # type: ignore[arg-type]
        return square_step, model, optimizer, torch.randn(8, WIDTH)

    trained: list[torch.Tensor] = []

    def optimize(*parts: Any) -> Any:
        held = parts[1]
        trained.extend((held.scale, held.shifts[0], held.factor))
        return rekindle.optimize(*parts, budget="100%" if planned else None)

    before = [torch.ones(WIDTH), torch.zeros(WIDTH), torch.ones(WIDTH)]
    found = compare(make, optimize, steps=3)
    assert found.equal
    assert all(not torch.equal(a, b) for a, b in zip(trained, before, strict=True))


def test_gradients_that_a_step_clears_first_are_not_counted_twice() -> None:
    """They are left from the step before, and go before anything is made."""

    def clearing_first(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def make() -> Parts:
        model = layers(6)
        return clearing_first, model, adam(model), torch.randn(256, WIDTH)

    found = compare(make, lambda *parts: rekindle.optimize(*parts, budget="90%"), steps=3)
    assert found.equal
    assert found.is_within_budget
    assert found.plain_trace is not None
    assert found.plain_peak_bytes == pytest.approx(found.plain_trace.peak_bytes, rel=0.02)
