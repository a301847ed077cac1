"""The public functions. The stages behind them are in `pipeline.py`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rekindle.captured_step import CapturedStep, TrainStep
from rekindle.core.cost.devices import Device, find_device
from rekindle.core.cost.profile import Profile
from rekindle.core.cost.roofline import analytic_profile
from rekindle.core.graph.comparison import Comparison
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import Trace
from rekindle.core.graph.simulate import simulate as simulate_step
from rekindle.core.memory.layout import Layout
from rekindle.core.memory.layout import layout as lay_out
from rekindle.core.memory.layout_check import check_layout
from rekindle.errors import PlanError, ProfileError
from rekindle.measuring.bitwise_compare import compare
from rekindle.measuring.measure import measured_profile
from rekindle.pipeline import PlanRequest
from rekindle.planners.registry import find_planner
from rekindle.tracing.trace import python_snapshot
from rekindle.units import parse_budget


def capture(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    as_on_gpu: bool = False,
) -> CapturedStep:
    """Capture one whole training step as a graph; nothing is computed, changed or allocated.

    `as_on_gpu=True` is for forecasts on a machine without a GPU: a model on the CPU is captured
    with the operators that a GPU would run. The result can be profiled, but not run.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(model, optimizer, batch):
    ...     loss = model(batch).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    >>> step = capture(train_step, model, optimizer, torch.ones(8, 4))
    >>> [op.target for op in step.graph.ops][:2]
    ['aten.t.default', 'aten.addmm.default']
    """
    return CapturedStep(train_step, model, optimizer, batch, as_on_gpu=as_on_gpu)


def optimize(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    budget: int | str | None = None,
    planner: str = "auto",
    profile: Profile | None = None,
    plan: Plan | None = None,
    engine: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> TrainStep:
    """Capture a training step and return it ready to train with: ``loss = step(batch)``.

    The numbers are bit for bit those of the plain function. The step trains `model` and `optimizer`
    themselves: state dicts, schedulers and evaluation between steps work as always.

    With a `budget` ("8GiB", "60%" of the plain step's peak, or bytes), the step is profiled and
    planned: some activations are dropped and recomputed so that the peak stays within the budget.
    Raises InfeasibleBudget, before anything runs, if no plan does. A `profile` from an earlier run
    saves measuring; a `plan`, from `load_plan` for example, also saves planning. A batch of another
    shape is profiled and planned when it is first met.

    `engine` is how the step runs. "python" is generated code, on any device. "cudagraph" launches
    its kernels by CUDA graphs from the second step on, where possible. "auto" chooses between them.
    "inductor" compiles the ops between matrix products, convolutions and attention, which takes a
    while the first time; it rounds differently from the plain function, and its dropout draws
    other masks, but a budget changes no bit of what it computes. `progress` is called with what is
    being compiled; by default that is logged.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(model, optimizer, batch):
    ...     loss = model(batch).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    >>> step = optimize(train_step, model, optimizer, torch.ones(8, 4))
    >>> bool(step(torch.ones(8, 4)) > step(torch.ones(8, 4)))
    True
    """
    find_planner(planner)
    _check_kind("plan", plan, Plan, advice="read a file with rekindle.load_plan(path)")
    _check_kind("profile", profile, Profile, advice="make one with rekindle.profile(captured)")
    if budget is not None and plan is not None:
        raise PlanError("a plan includes its budget: give a budget or a plan, not both.")
    if profile is not None and budget is None and plan is None:
        raise PlanError("a profile is for planning, which needs a budget: give a budget, too.")
    if plan is not None:
        budget = plan.budget_bytes
    request = None if budget is None else PlanRequest(budget, planner, profile, plan)
    captured = CapturedStep(
        train_step,
        model,
        optimizer,
        batch,
        request=request,
        engine=engine,
        improves=True,
        progress=progress,
    )
    return TrainStep(captured)


def verify(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    budget: int | str,
    planner: str = "auto",
    steps: int = 3,
    engine: str = "auto",
) -> Comparison:
    """Train with the plain step and under a budget, from the same state, and compare every bit.

    Both trainings run on copies: `model`, `optimizer`, the random generators and the Python state
    that the step changes stay as they are. Where bits differ, the plain training is repeated:
    `.is_deterministic` is False, and `.plain_differences` not empty, if it differs from itself.
    The result's `.equal` is True if all bits are the same, `.differences` lists those that are not;
    it also has peak and step time of both, measured and forecast. A compiled step is compared with
    a compiled one that drops nothing; `.rounding` is how far that is from the plain step.

    >>> model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(model, optimizer, batch):
    ...     loss = model(batch).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    >>> verify(train_step, model, optimizer, torch.ones(512, 4), budget="100%").equal
    True
    """

    restore = python_snapshot(train_step, *deepcopy((model, optimizer)), batch)

    def make() -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
        restore()
        return train_step, *deepcopy((model, optimizer)), batch

    within = partial(optimize, budget=budget, planner=planner, engine=engine)
    try:
        return compare(make, within, steps=steps, unplanned=partial(optimize, engine=engine))
    finally:
        restore()


def profile(
    captured: CapturedStep | TrainStep,
    *,
    device: str | None = None,
    cache: bool = True,
    runs: int = 3,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """The cost of every op of a captured step: measured, or analytic for a GPU by name.

    Without `device`, the step is run op by op on the model's device, `runs` times; its tensors
    keep their values, and the result is cached on disk. With `device="H200"` or another known name,
    times follow from FLOPs and bytes, and no GPU is needed.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(model, optimizer, batch):
    ...     model(batch).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> captured = capture(train_step, model, optimizer, torch.ones(8, 4), as_on_gpu=True)
    >>> profile(captured, device="H200").device
    'H200'
    """
    if isinstance(captured, TrainStep):
        captured = captured.captured
    if not isinstance(captured, CapturedStep):
        raise TypeError(
            f"profile takes what capture or optimize returns, and not a value of type "
            f"{type(captured).__name__}"
        )
    if runs < 1:
        raise ProfileError(f"runs must be at least 1, and is {runs}")
    graph = captured.graph
    if device is not None:
        return _forecast(captured, find_device(device))
    if captured.is_forecast:
        raise ProfileError(
            "this step was captured for a forecast and cannot be measured: name a GPU, as in "
            'device="H200", or capture it without as_on_gpu=True.'
        )
    return measured_profile(
        captured.recording,
        graph,
        captured.first_batch(),
        captured.device,
        cache=cache,
        runs=runs,
        progress=progress or (lambda text: None),
    )


def _forecast(captured: CapturedStep, device: Device) -> Profile:
    """An analytic profile whose `method` says how accurate it is."""
    found = analytic_profile(captured.graph, device)
    if captured.is_forecast:
        trust = "captured without a GPU; on an H200 the peak was within 5%, the time within 15%"
    elif captured.device.type == "cuda":
        trust = "on an H200 the time was within 15%"
    else:
        trust = "this is the CPU's graph, which differs: capture it with as_on_gpu=True"
    return replace(found, method=f"{found.method}; {trust}")


def plan(graph: StepGraph, profile: Profile, *, budget: str | int, planner: str = "auto") -> Plan:
    """Decide which activations to keep and which to recompute so that a step fits into a budget.

    The budget bounds everything that is allocated during the step. It is a number of bytes, text
    with a unit (`"8GiB"`), or a share of the plain step's peak (`"60%"`). Raises InfeasibleBudget
    if the planner finds no such plan; the error carries the least peak it found.

    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(model, optimizer, batch):
    ...     model(batch).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> batch = torch.ones(4096, 64)
    >>> captured = capture(train_step, model, optimizer, batch, as_on_gpu=True)
    >>> costs = profile(captured, device="H200")
    >>> made = plan(captured.graph, costs, budget="100%", planner="none")
    >>> made.recompute_us, made.peak_bytes <= made.budget_bytes
    (0.0, True)
    """
    _check_graph_and_profile("plan(graph, profile, budget=…)", graph, profile)
    make = find_planner(planner)
    made = make(graph, profile, parse_budget(budget, simulate_step(graph, profile).peak_bytes))
    made.check(graph)
    return made


def simulate(graph: StepGraph, profile: Profile, plan: Plan | None = None) -> Trace:
    """Memory and time at every position of the step, plain or planned; nothing is run.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(model, optimizer, batch):
    ...     model(batch).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> captured = capture(train_step, model, optimizer, torch.ones(8, 4), as_on_gpu=True)
    >>> trace = simulate(captured.graph, profile(captured, device="H200"))
    >>> trace.peak_bytes > sum(storage.nbytes for storage in captured.graph.storages[:3])
    True
    """
    _check_graph_and_profile("simulate(graph, profile, plan)", graph, profile)
    _check_kind("plan", plan, Plan, advice="the order is simulate(graph, profile, plan)")
    return simulate_step(graph, profile, plan)


def layout(graph: StepGraph, plan: Plan | None = None) -> Layout:
    """A static address in one arena for every storage of a step, plain or planned.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(model, optimizer, batch):
    ...     model(batch).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> captured = capture(train_step, model, optimizer, torch.ones(512, 64))
    >>> found = layout(captured.graph)
    >>> found.arena_bytes <= 1.02 * found.lower_bound_bytes
    True
    """
    advice = "the order is layout(graph, plan)"
    _check_kind("graph", graph, StepGraph, advice=advice, is_optional=False)
    _check_kind("plan", plan, Plan, advice=advice)
    found = lay_out(graph, plan)
    check_layout(graph, found, plan)
    return found


def _check_graph_and_profile(order: str, graph: Any, profile: Any) -> None:
    advice = f"the order is {order}, with graph = captured.graph"
    _check_kind("graph", graph, StepGraph, advice=advice, is_optional=False)
    _check_kind("profile", profile, Profile, advice=advice, is_optional=False)


def _check_kind(
    name: str, value: Any, kind: type, *, advice: str, is_optional: bool = True
) -> None:
    """Refuse an argument of a wrong type, or in a wrong place."""
    if not isinstance(value, kind) and not (is_optional and value is None):
        found = type(value).__name__
        raise TypeError(f"{name} must be a {kind.__name__}, and is of type {found}: {advice}")
