"""The parts of a model of the zoo, and the training step that all of them share."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rekindle.errors import ModelError

StepFunction = Callable[[nn.Module, Optimizer, Any], Any]
LossFn = Callable[[nn.Module, Any], Tensor]

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A training step with its model, optimizer and batch, and the settings it was made with.

    ``train_step(model, optimizer, batch)`` is one whole iteration. ``batch_size`` is None if a
    user's own batch does not show it. Compared by identity: tensors have no single truth value.
    """

    name: str
    train_step: StepFunction
    model: nn.Module
    optimizer: Optimizer
    batch: Any
    batch_size: int | None
    precision: str
    device: str


class ModelParts(NamedTuple):
    """The result of a builder: the parts that do not depend on device and precision."""

    model: nn.Module
    batch: Any
    loss_fn: LossFn


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of the zoo. ``needs`` is the package that must be installed, if any."""

    name: str
    summary: str
    default_batch: int
    build_fn: Callable[..., ModelParts]
    needs: str | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The size arguments that ``build`` takes for this model, with their defaults."""
        return {
            name: parameter.default
            for name, parameter in inspect.signature(self.build_fn).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }


def require(module: str) -> ModuleType:
    """Import an optional dependency, or raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ModelError(
            f'this model needs {package} ({error}): pip install "rekindle[models]"'
        ) from error


def make_train_step(loss_fn: LossFn, *, precision: str, device_type: str) -> StepFunction:
    """The plain training step around ``loss_fn``, as a user would write it by hand.

    Two functions rather than one with a switch, so that no autocast is captured at fp32.
    """

    def train_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def train_step_bf16(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return {"fp32": train_step, "bf16": train_step_bf16}[precision]


def check_settings(batch: Any = 1, precision: str = "fp32", device: Any = "cpu") -> torch.device:
    """The device as a `torch.device`; raises for settings that no model can be built with."""
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ModelError(f"a batch size is a whole number of at least 1, not {batch!r}")
    if precision not in PRECISIONS:
        raise ModelError(f"unknown precision {precision!r}: use {' or '.join(PRECISIONS)}")
    return check_device(device)


def check_device(device: str | torch.device) -> torch.device:
    """The device as a `torch.device`; raises unless tensors can be allocated there."""
    try:
        parsed = torch.device(device)
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise ModelError(f"unknown device {str(device)!r}: use cpu or cuda")
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device 'cuda' was asked for, but torch finds no GPU here: use cpu")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device {str(device)!r} was asked for, but torch finds only"
            f" {torch.cuda.device_count()} GPU(s), counted from cuda:0"
        )
    return parsed
