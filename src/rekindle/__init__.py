"""Rekindle fits a PyTorch training step into the memory you have."""

from rekindle.api import capture, optimize, profile, simulate
from rekindle.core.devices import Device, add_device
from rekindle.errors import CaptureError, ModelError, ProfileError, RekindleError
from rekindle.fx.step import CapturedStep, TrainStep

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CapturedStep",
    "Device",
    "ModelError",
    "ProfileError",
    "RekindleError",
    "TrainStep",
    "add_device",
    "capture",
    "optimize",
    "profile",
    "simulate",
]
