"""Rekindle fits a PyTorch training step into the memory you have."""

from typing import TYPE_CHECKING, Any

from rekindle.api import capture, layout, optimize, plan, profile, simulate, verify
from rekindle.captured_step import CapturedStep, TrainStep
from rekindle.core.cost.batch_search import LargestBatch
from rekindle.core.cost.devices import Device, add_device
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.comparison import Comparison
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.serial import load_plan, save_plan
from rekindle.core.graph.simulate import Trace
from rekindle.core.memory.layout import Layout
from rekindle.engines.engine import EngineInfo
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
from rekindle.measuring.timing import Measurement

if TYPE_CHECKING:
    from rekindle.dynamo import CompiledModel, compile

__version__ = "0.1.0"

__all__ = [
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


def __getattr__(name: str) -> Any:
    """Import torch's compiler when it is first asked for: it takes seconds to load."""
    if name in ("CompiledModel", "compile"):
        from rekindle import dynamo

        return getattr(dynamo, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
