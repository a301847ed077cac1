"""Rekindle fits a PyTorch training step into the memory you have."""

from rekindle.api import capture, optimize
from rekindle.errors import CaptureError, ModelError, RekindleError
from rekindle.fx.step import CapturedStep, TrainStep

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CapturedStep",
    "ModelError",
    "RekindleError",
    "TrainStep",
    "capture",
    "optimize",
]
