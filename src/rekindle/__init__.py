"""Rekindle fits a PyTorch training step into the memory you have."""

from typing import TYPE_CHECKING, Any

from rekindle.api import capture, layout, optimize, plan, profile, simulate, verify
from rekindle.captured_step import CapturedStep
from rekindle.core.cost.batch_search import LargestBatch
from rekindle.core.cost.devices import Device, add_device
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.serial import load_plan, save_plan
from rekindle.core.memory.layout import Layout
from rekindle.errors import (
    CaptureError,
    InfeasibleBudget,
    InvalidLayout,
    InvalidSchedule,
    ModelError,
    PlanError,
    ProfileError,
    RekindleError,
    RewriteError,
)
from rekindle.largest_batch import max_batch
from rekindle.train_step import TrainStep

if TYPE_CHECKING:
    from rekindle.dynamo import compile

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CapturedStep",
    "Device",
    "InfeasibleBudget",
    "InvalidLayout",
    "InvalidSchedule",
    "LargestBatch",
    "Layout",
    "ModelError",
    "Plan",
    "PlanError",
    "ProfileError",
    "RekindleError",
    "RewriteError",
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


def __getattr__(name: str) -> Any:
    """Import `compile` when it is first asked for: torch's compiler takes seconds to load."""
    if name == "compile":
        from rekindle.dynamo import compile

        return compile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
