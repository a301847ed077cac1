"""Steps planned for a budget: the plain step's bits, in no more memory than was promised."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis import strategies as st
from support.random_modules import CHANNELS, OPTIMIZERS, SIDE, WIDTH, bodies
from support.square_step import square_step
from support.zoo_steps import ZOO, zoo_parts
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rekindle
from rekindle.core.cost.devices import find_device
from rekindle.core.cost.profile import Profile
from rekindle.core.cost.roofline import analytic_profile
from rekindle.core.graph.graph import Phase, StepGraph
from rekindle.core.graph.schedule import Compute, Plan
from rekindle.measuring.bitwise_compare import Parts, State, compare, differences, state_of
from rekindle.measuring.meters import peak_bytes
from rekindle.measuring.timing import resident_tensors
from rekindle.planners.registry import PLANNERS

CPU = torch.device("cpu")
STEPS = 2
SHARES = (50, 70, 90)  # per cent of the plain peak; the tightest first

CASES = [
    *((name, "fp32", planner) for name in ZOO for planner in PLANNERS),
    ("bert-tiny", "bf16", "chen-recursive"),
    ("resnet-tiny", "bf16", "mutwo"),
    ("gpt2-tiny", "bf16", "chen-sqrt"),
]


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """Tell the garbage collector not to look again at all that the imports have made."""
    for name in ("resnet-tiny", "bert-tiny"):  # which import torchvision and transformers
        zoo_parts(name, "fp32")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@dataclass(frozen=True)
class Subject:
    """A step to plan, its profile, and the results of plain training."""

    make: Callable[[], Parts]
    graph: StepGraph
    profile: Profile
    plain: State

    @property
    def peak_bytes(self) -> int:
        return rekindle.simulate(self.graph, self.profile).peak_bytes


@dataclass(frozen=True)
class Outcome:
    """A planned training: what differs from the plain one, and the bytes it really took."""

    plan: Plan
    budget_bytes: int
    differences: list[str]
    peak_bytes: int


def trained(step: Callable[[Any], Any], objects: list[Any]) -> tuple[State, int]:
    """All that a few steps return and leave, and the allocator's peak in the last."""
    model, optimizer, batch = objects
    results: State = {}

    def train() -> None:
        results[f"result {len(results)}"] = step(batch).detach().clone()

    torch.manual_seed(11)
    for _ in range(STEPS - 1):
        train()
    peak = peak_bytes(train, CPU, lambda: resident_tensors(model, optimizer, batch))
    return results | state_of(model, optimizer), peak


def subject_of(make: Callable[[], Parts]) -> Subject:
    train_step, *objects = make()
    captured = rekindle.capture(train_step, *objects)
    state, _ = trained(lambda batch: train_step(*objects[:2], batch), objects)
    return Subject(make, captured.graph, steady_profile(captured), state)


def steady_profile(captured: rekindle.CapturedStep) -> Profile:
    """Bytes as measured and times as calculated: planners then choose the same in every run."""
    measured = rekindle.profile(captured, cache=False, runs=1)
    analytic = analytic_profile(captured.graph, find_device("H200"))
    pairs = zip(measured.costs, analytic.costs, strict=True)
    return replace(measured, costs=tuple(replace(m, time_us=a.time_us) for m, a in pairs))


@cache
def zoo_subject(name: str, precision: str) -> Subject:
    return subject_of(lambda: zoo_parts(name, precision))


def run_planned(subject: Subject, **asked: Any) -> Outcome:
    """Train with `optimize`, given a budget and a planner, or a plan."""
    train_step, *objects = subject.make()
    step = rekindle.optimize(train_step, *objects, profile=subject.profile, **asked)
    state, peak = trained(step, objects)
    assert step.plan is not None
    assert step.budget_bytes is not None
    return Outcome(step.plan, step.budget_bytes, differences(subject.plain, state), peak)


def is_refused(subject: Subject, planner: str, budget: int) -> rekindle.PlanError:
    """The error that `optimize` raises for a budget a planner cannot meet; nothing changes."""
    train_step, *objects = subject.make()
    before = state_of(*objects[:2])
    with pytest.raises(rekindle.PlanError) as caught:
        rekindle.optimize(
            train_step, *objects, budget=budget, planner=planner, profile=subject.profile
        )
    assert differences(before, state_of(*objects[:2])) == []
    return caught.value


def planned(subject: Subject, planner: str, budget: int) -> Plan | rekindle.PlanError:
    """A plan, or why there is none."""
    try:
        return rekindle.plan(subject.graph, subject.profile, budget=budget, planner=planner)
    except rekindle.PlanError as error:
        return error


@pytest.mark.parametrize(("name", "precision", "planner"), CASES)
def test_every_planner_within_every_budget(name: str, precision: str, planner: str) -> None:
    """Where a planner does not reach a budget, it says how far it gets, and gets that far."""
    subject = zoo_subject(name, precision)
    last: Outcome | None = None
    for share in SHARES:
        budget = subject.peak_bytes * share // 100
        plan = planned(subject, planner, budget)
        if isinstance(plan, rekindle.InfeasibleBudget):
            assert planner != "auto"
            least = plan.least_peak_bytes
            assert least > budget
            if share == SHARES[0] and planner == "none":
                refusal = is_refused(subject, planner, budget)
                assert isinstance(refusal, rekindle.InfeasibleBudget)
                assert budget < refusal.least_peak_bytes <= least  # in place it takes less
            if least > subject.peak_bytes:
                continue
            budget = least
            plan = planned(subject, planner, least)
        elif isinstance(plan, rekindle.PlanError):
            assert planner == "ilp"
            assert name != "mlp"  # which is small enough
            assert "for small steps" in str(is_refused(subject, planner, budget))
            return
        assert isinstance(plan, Plan)
        assert plan.peak_bytes <= budget
        if last is not None and plan.schedule == last.plan.schedule:
            continue  # it has been run already, within less
        takes_long = planner == "auto"  # to plan: not twice
        asked = {"plan": plan} if takes_long else {"planner": planner, "budget": budget}
        last = run_planned(subject, **asked)
        assert last.differences == []
        assert last.peak_bytes <= budget == last.budget_bytes
        assert last.peak_bytes == pytest.approx(last.plan.peak_bytes, rel=0.005)


def test_verify_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With measured times, and the default planner."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = rekindle.verify(*zoo_parts("gpt2-tiny", "fp32"), budget="60%", steps=2)
    assert found.equal
    assert found.budget_bytes is not None
    assert found.captured_peak_bytes <= found.budget_bytes < 0.61 * found.plain_peak_bytes


# Random modules


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[HypothesisPhase.explicit, HypothesisPhase.generate],  # to shrink would take minutes
)
@given(
    body=bodies,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    precision=st.sampled_from([torch.float32, torch.bfloat16]),
    planner=st.sampled_from([*PLANNERS][::-1]),
    share=st.integers(0, 70).map(lambda less: 100 - less),
)
def test_random_modules_within_random_budgets(
    body: tuple[nn.Module, tuple[int, ...]],
    optimizer: str,
    precision: torch.dtype,
    planner: str,
    share: int,
) -> None:
    """Equal to the plain step, or refused before anything changes.

    After a refusal, the least peak that it names is what is asked for.
    """
    module, (_, *shape) = body
    features = WIDTH if len(shape) == 1 else CHANNELS * SIDE * SIDE
    model = nn.Sequential(module, nn.Linear(features, 3))
    g = torch.Generator().manual_seed(1)
    batch = torch.randn(128, *shape, generator=g), torch.randint(0, 3, (128,), generator=g)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        is_on = precision is not torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def make() -> Parts:
        own = copy.deepcopy(model)
        return train_step, own, OPTIMIZERS[optimizer](own.parameters()), batch

    try:
        train_step(*make()[1:])
    except RuntimeError:  # an in-place operator has overwritten what a gradient needs
        assume(False)
    subject = subject_of(make)
    budget = subject.peak_bytes * share // 100
    try:
        found = run_planned(subject, planner=planner, budget=budget)
    except rekindle.PlanError:
        refusal = is_refused(subject, planner, budget)
        if not isinstance(refusal, rekindle.InfeasibleBudget):
            assert planner == "ilp"
            return
        assert refusal.least_peak_bytes > budget
        found = run_planned(subject, planner=planner, budget=refusal.least_peak_bytes)
    assert found.differences == []


# No op runs that is not planned, and random numbers are the same


def n_flops(run: Callable[[], Any]) -> int:
    """The floating-point operations that torch counts while something runs."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["mlp", "resnet-tiny", "bert-tiny"])
def test_the_recomputation_is_what_the_plan_says_to_the_flop(name: str) -> None:
    subject = zoo_subject(name, "fp32")
    plan = planned(subject, "chen-sqrt", 10 * subject.peak_bytes)
    assert isinstance(plan, Plan)
    computed = [each for each in plan.schedule if isinstance(each, Compute)]
    flops = [op.flops for op in subject.graph.ops]
    again = sum(flops[each.op] for each in computed if each.copy)
    assert again > 0
    assert not any(op.flops for op in subject.graph.ops if op.phase is Phase.OPTIMIZER)

    train_step, *objects = subject.make()
    step = rekindle.optimize(train_step, *objects, plan=plan)
    assert n_flops(lambda: train_step(*objects)) == sum(flops)
    assert n_flops(lambda: step(objects[2])) == sum(flops[each.op] for each in computed)
    assert sum(flops[each.op] for each in computed) == sum(flops) + again


class Drawn(TorchDispatchMode):
    """Keeps the result of everything that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            mask = result[1] if isinstance(result, tuple) else result
            self.results.append(mask.clone())
        return result


class Masked(nn.Module):
    """Dropout in its three forms, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(torch.tanh(self.layers[0](x)), 0.5)
        x = F.dropout(F.silu(self.layers[1](x)), 0.2, inplace=True)
        x, _ = torch.native_dropout(F.gelu(self.layers[2](x)), 0.4, train=True)
        return torch.tanh(x) * torch.rand_like(x)


def dropping_all(*given: Any, planner: str = "all") -> rekindle.TrainStep:
    """Like `optimize`, with a planner that does not look at the budget."""
    profile = rekindle.profile(rekindle.capture(*given), cache=False, runs=1)
    return rekindle.optimize(*given, budget="300%", planner=planner, profile=profile)


# `all` draws again in captured order and so ends with the last numbers, `chen-recursive` does not.
@pytest.mark.parametrize("planner", ["all", "chen-recursive"])
def test_a_dropout_has_the_same_mask_again(planner: str) -> None:
    model, batch = Masked(), torch.randn(64, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain = copy.deepcopy((model, optimizer))
    step = dropping_all(square_step, model, optimizer, batch, planner=planner)
    assert step.plan is not None
    computed = [each for each in step.plan.schedule if isinstance(each, Compute)]
    order = [(each.op, each.copy) for each in computed if step.graph.ops[each.op].is_random]
    captured_ones = sorted({op for op, _ in order})
    assert len(captured_ones) == 4

    torch.manual_seed(5)
    with Drawn() as plainly:
        square_step(*plain, batch)
    end = torch.get_rng_state()
    torch.manual_seed(5)
    with Drawn() as drawn:
        step(batch)
    assert torch.equal(torch.get_rng_state(), end)

    masks = dict(zip(order, drawn.results, strict=True))
    assert all(map(torch.equal, plainly.results, (masks[op, 0] for op in captured_ones)))
    copies = [(op, number) for op, number in order if number]
    assert {op for op, _ in copies} >= set(captured_ones[:3])  # all three dropouts
    assert all(torch.equal(masks[op, 0], masks[op, number]) for op, number in copies)
    first, second, third, _ = (masks[op, 0].bool() for op in captured_ones)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_the_next_step_draws_on_where_the_plain_one_would() -> None:
    def make() -> Parts:
        model = Masked()
        return square_step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(64, 8)

    found = compare(make, partial(dropping_all, planner="chen-recursive"), steps=4)
    assert found.differences == ()
    assert found.compared["generator"] == 1


def test_to_set_a_generator_back_takes_no_more_than_the_plan_says() -> None:
    """At the least peak there is no room to spare, not for the generator's state either.

    It is read, 5 KB, before the op's result is there, which here is 8 KB.
    """

    def make() -> Parts:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))
        return square_step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(256, 8)

    subject = subject_of(make)
    refusal = planned(subject, "chen-recursive", 1)
    assert isinstance(refusal, rekindle.InfeasibleBudget)
    budget = refusal.least_peak_bytes
    found = run_planned(subject, planner="chen-recursive", budget=budget)
    assert found.differences == []
    copies = [each.op for each in found.plan.schedule if isinstance(each, Compute) and each.copy]
    assert any(subject.graph.ops[op].is_random for op in copies)
    assert found.peak_bytes <= budget


def test_batch_norm_keeps_the_same_statistics_over_ten_steps() -> None:
    """Each step counts once, however often the layer is computed."""
    subject = zoo_subject("resnet-tiny", "fp32")
    plan = rekindle.plan(subject.graph, subject.profile, budget="70%", planner="chen-sqrt")
    copies = [each.op for each in plan.schedule if isinstance(each, Compute) and each.copy]
    assert any("batch_norm" in subject.graph.ops[op].target for op in copies)

    train_step, *plain = subject.make()
    _, *objects = subject.make()
    step = rekindle.optimize(train_step, *objects, plan=plan)
    for _ in range(10):
        train_step(*plain)
        step(objects[2])
    assert differences(state_of(*plain[:2]), state_of(*objects[:2])) == []
    counters = {
        name: buffer.item()
        for name, buffer in objects[0].named_buffers()
        if name.endswith("num_batches_tracked")
    }
    assert counters
    assert set(counters.values()) == {10}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
def test_batch_norm_of_every_kind_again(precision: torch.dtype, affine: bool, tracks: bool) -> None:
    """A copy leaves the statistics alone, and must find the same numbers without them."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        with torch.autocast("cpu", dtype=precision, enabled=precision is torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def make() -> Parts:
        norm = nn.BatchNorm1d(8, affine=affine, track_running_stats=tracks)
        model = nn.Sequential(nn.Linear(8, 8), norm, nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return train_step, model, optimizer, torch.randn(128, 8)

    found = compare(make, dropping_all, steps=3)
    assert found.differences == ()
    assert found.plan is not None
    copies = [e.op for e in found.plan.schedule if isinstance(e, Compute) and e.copy]
    assert any("batch_norm" in found.graph.ops[op].target for op in copies)
