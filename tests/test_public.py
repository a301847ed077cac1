"""The public surface, written down: a change here is a change for users."""

from __future__ import annotations

import inspect

import pytest

import rekindle

NAMES = [
    "CaptureError",
    "CapturedStep",
    "Comparison",
    "CompiledModel",
    "Device",
    "EngineInfo",
    "InfeasibleBudget",
    "InvalidLayout",
    "InvalidSchedule",
    "LargestBatch",
    "Layout",
    "Measurement",
    "ModelError",
    "Plan",
    "PlanError",
    "Profile",
    "ProfileError",
    "RekindleError",
    "RewriteError",
    "StepGraph",
    "Trace",
    "TrainStep",
    "add_device",
    "capture",
    "compile",
    "layout",
    "load_plan",
    "max_batch",
    "optimize",
    "plan",
    "profile",
    "save_plan",
    "simulate",
    "verify",
]

_STEP = (
    "train_step: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any"
)
SIGNATURES = {
    "compile": (
        "(model: nn.Module, *, budget: int | str, optimizer: torch.optim.Optimizer | None = None, "
        "planner: str = auto, lower: str = inductor, dynamic: bool | None = None, "
        "fullgraph: bool = False, options: dict[str, Any] | None = None) -> CompiledModel"
    ),
    "max_batch": (
        "(train_step: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, "
        "make_batch: Callable[[int], Any], *, budget: int | str, device: str | None = None, "
        "planner: str = auto, at_least: float | None = None, "
        "progress: Callable[[str], None] | None = None) -> LargestBatch"
    ),
    "capture": f"({_STEP}, *, as_on_gpu: bool = False) -> CapturedStep",
    "optimize": (
        f"({_STEP}, *, budget: int | str | None = None, planner: str = auto, "
        "profile: Profile | None = None, plan: Plan | None = None, engine: str = auto, "
        "progress: Callable[[str], None] | None = None) -> TrainStep"
    ),
    "verify": (
        f"({_STEP}, *, budget: int | str, planner: str = auto, steps: int = 3, "
        "engine: str = auto) -> Comparison"
    ),
    "profile": (
        "(captured: CapturedStep | TrainStep, *, device: str | None = None, cache: bool = True, "
        "runs: int = 3, progress: Callable[[str], None] | None = None) -> Profile"
    ),
    "plan": (
        "(graph: StepGraph, profile: Profile, *, budget: str | int, planner: str = auto) -> Plan"
    ),
    "simulate": "(graph: StepGraph, profile: Profile, plan: Plan | None = None) -> Trace",
    "layout": "(graph: StepGraph, plan: Plan | None = None) -> Layout",
    "add_device": "(device: Device) -> None",
    "load_plan": "(path: str | Path) -> Plan",
    "save_plan": "(path: str | Path, plan: Plan) -> None",
}


def test_exported_names() -> None:
    assert sorted(rekindle.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_explained(name: str) -> None:
    """With a docstring of its own, not one that a base class or `dataclass` provides."""
    text = getattr(rekindle, name).__doc__
    assert text
    assert not text.startswith(f"{name}(")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    found = str(inspect.signature(getattr(rekindle, name)))
    assert found.replace("'", "") == SIGNATURES[name]


def test_every_error_is_a_rekindle_error() -> None:
    for name in NAMES:
        if name.endswith("Error"):
            assert issubclass(getattr(rekindle, name), rekindle.RekindleError)
    for name in ("InfeasibleBudget", "InvalidLayout", "InvalidSchedule"):
        assert issubclass(getattr(rekindle, name), rekindle.PlanError)


def test_plan_is_the_verb() -> None:
    assert rekindle.plan is rekindle.api.plan
    assert rekindle.max_batch is rekindle.largest_batch.max_batch
