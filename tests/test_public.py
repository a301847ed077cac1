"""The public surface, written down: a change here is a change for users."""

from __future__ import annotations

import inspect

import pytest

import rekindle

NAMES = [
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

_STEP = (
    "train_step: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any"
)
SIGNATURES = {
    "capture": f"({_STEP}, *, as_on_gpu: bool = False) -> CapturedStep",
    "optimize": f"({_STEP}) -> TrainStep",
    "profile": (
        "(captured: CapturedStep | TrainStep, *, device: str | None = None, cache: bool = True, "
        "runs: int = 3, progress: Callable[[str], None] | None = None) -> Profile"
    ),
    "simulate": "(graph: StepGraph, profile: Profile) -> Trace",
    "add_device": "(device: Device) -> None",
}


def test_exported_names() -> None:
    assert sorted(rekindle.__all__) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_explained(name: str) -> None:
    """With a docstring of its own, not one that a base class or `dataclass` provides."""
    text = vars(rekindle)[name].__doc__
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
