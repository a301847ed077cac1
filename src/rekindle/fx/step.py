"""The captured training step as the user meets it: call it with a batch."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import nn

from rekindle.core.cost import Profile
from rekindle.core.ir import StepGraph
from rekindle.core.schedule import Plan
from rekindle.core.simulate import Trace, simulate
from rekindle.errors import RekindleError
from rekindle.fx import tree, where
from rekindle.fx.capture import record
from rekindle.fx.checks import Checks
from rekindle.fx.execute import Program
from rekindle.fx.guard import Guard, signature
from rekindle.fx.lift import lift
from rekindle.fx.recording import Recording
from rekindle.fx.rewrite import rewrite
from rekindle.fx.rewrite_check import check_listing
from rekindle.fx.timing import Measurement, measure

log = logging.getLogger("rekindle")

MAX_VARIANTS = 16
"""How many captures a step keeps, for different batch shapes and modes; the oldest go first."""


class Arrangement(NamedTuple):
    """What was decided about a captured step: its costs, and the plan it runs by."""

    profile: Profile
    plan: Plan


# From a recording, its graph and the batch's tensors: how the step is to run.
Arrange = Callable[[Recording, StepGraph, list[torch.Tensor]], Arrangement]


class Variant:
    """One capture: valid for one batch signature and one form of the user's objects."""

    def __init__(
        self, recording: Recording, arrange: Arrange | None, batch: list[torch.Tensor]
    ) -> None:
        self.graph: StepGraph = lift(recording)
        self.arranged = arrange(recording, self.graph, batch) if arrange else None
        listing = None
        if self.arranged is not None:
            schedule = self.arranged.plan.schedule
            listing = rewrite(recording, self.graph, schedule)
            check_listing(recording, self.graph, listing, schedule)
        self.program = Program(recording, listing)
        self.guard = Guard(recording)


class CapturedStep:
    """A training step captured as one graph. Call it with a batch, as often as you like.

    The first batch decides what is captured first; a batch of another shape, or a model switched
    between training and evaluation mode, is captured anew and kept beside the others.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        *,
        as_on_gpu: bool = False,
        arrange: Arrange | None = None,
    ) -> None:
        _check_types(train_step, model, optimizer)
        self._arrange = arrange
        self._train_step = train_step
        self._model = model
        self._optimizer = optimizer
        self.is_forecast = as_on_gpu
        self._variants: OrderedDict[Hashable, list[Variant]] = OrderedDict()
        self._lock = threading.Lock()
        self._has_forgotten = False
        flat = tree.flatten(batch)
        Checks(where.definition(train_step)).batch(flat.structure)
        self._first = self._capture(batch, self._key(flat))
        self._first_batch = [weakref.ref(tensor) for tensor in flat.tensors]

    @property
    def graph(self) -> StepGraph:
        """The step that was captured first, as a torch-free graph."""
        return self._first.graph

    @property
    def n_captures(self) -> int:
        """How many captures are kept: one for each batch signature and mode met so far."""
        return sum(len(variants) for variants in self._variants.values())

    @property
    def arranged(self) -> Arrangement | None:
        """The profile and plan of what was captured first; None where nothing is dropped."""
        return self._first.arranged

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next((p.device for p in self._model.parameters()), torch.device("cpu"))

    @property
    def recording(self) -> Recording:
        """What the first capture recorded."""
        return self._first.program.recording

    def first_batch(self) -> list[torch.Tensor] | None:
        """The tensors of the batch captured first, if the user still holds them all."""
        tensors = [tensor() for tensor in self._first_batch]
        found = [tensor for tensor in tensors if tensor is not None and not tensor.is_meta]
        return found if len(found) == len(tensors) else None

    @property
    def code(self) -> str:
        """The generated Python code that runs for the first captured batch."""
        return self._first.program.source

    def __call__(self, batch: Any) -> Any:
        """Train on one batch; returns what the user's function returns."""
        if self.is_forecast:
            raise RekindleError(
                "this step was captured as a GPU would run it, for a forecast, and cannot be run: "
                "capture it without as_on_gpu=True to train."
            )
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this step is already running: call it from one thread at a time")
        try:
            flat = tree.flatten(batch)
            key = self._key(flat)
            for variant in self._variants.get(key, ()):
                state = variant.guard.fetch()
                if state is not None:
                    self._variants.move_to_end(key)
                    return variant.program(flat.tensors, state)
            variant = self._capture(batch, key)
            state = variant.guard.fetch()
            if state is None:
                raise RekindleError(
                    f"the step cannot be told from a changed one: {variant.guard.reason}"
                )
            return variant.program(flat.tensors, state)
        finally:
            self._lock.release()

    def _key(self, flat: tree.Flat) -> Hashable:
        """All that a capture depends on, but for the tensors around the step."""
        return (
            tuple(signature(tensor) for tensor in flat.tensors),
            flat.structure.key(),
            tuple(
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
                for kind in ("cpu", "cuda")
            ),
        )

    def _capture(self, batch: Any, key: Hashable) -> Variant:
        others = self._variants.get(key)
        recording = record(
            self._train_step, self._model, self._optimizer, batch, as_on_gpu=self.is_forecast
        )
        variant = Variant(recording, self._arrange, tree.flatten(batch).tensors)
        if others:
            log.info("captured the step anew: %s", others[-1].guard.reason)
        elif self._variants:
            shapes = ", ".join(str(tuple(t.shape)) for t in tree.flatten(batch).tensors)
            log.info("captured the step anew, for a batch of shape %s", shapes)
        self._variants.setdefault(key, []).append(variant)
        self._forget_oldest()
        return variant

    def _forget_oldest(self) -> None:
        while self.n_captures > MAX_VARIANTS:
            if not self._has_forgotten:
                self._has_forgotten = True
                log.warning(
                    "more than %d captures: something changes at every step (a shape, a number or "
                    "text in the batch, an attribute of a module), and each change costs a capture",
                    MAX_VARIANTS,
                )
            key, variants = next(iter(self._variants.items()))
            variants.pop(0)
            if not variants:
                del self._variants[key]


def _check_types(train_step: Any, model: Any, optimizer: Any) -> None:
    for name, value, kind in (
        ("model", model, nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        if not isinstance(value, kind):
            raise TypeError(
                f"{name} must be a torch {kind.__name__}, and is a {type(value).__name__}: "
                "the order is (train_step, model, optimizer, batch)"
            )
    if not callable(train_step):
        raise TypeError("train_step must be a function of (model, optimizer, batch)")


class TrainStep:
    """A training step to train with: ``loss = step(batch)``."""

    def __init__(self, captured: CapturedStep) -> None:
        self._captured = captured

    def __call__(self, batch: Any) -> Any:
        """Train on one batch; returns what the user's function returns."""
        return self._captured(batch)

    @property
    def captured(self) -> CapturedStep:
        """The captured step that runs."""
        return self._captured

    @property
    def graph(self) -> StepGraph:
        """The captured step as a torch-free graph."""
        return self._captured.graph

    @property
    def profile(self) -> Profile | None:
        """What every op costs; None for a step without a budget, which is not profiled."""
        arranged = self._captured.arranged
        return arranged.profile if arranged else None

    @property
    def plan(self) -> Plan | None:
        """What is kept and what is computed again; None for a step without a budget."""
        arranged = self._captured.arranged
        return arranged.plan if arranged else None

    @property
    def trace(self) -> Trace | None:
        """Bytes and microseconds at every position, as forecast; None without a budget."""
        arranged = self._captured.arranged
        return simulate(self.graph, *arranged) if arranged else None

    @property
    def n_captures(self) -> int:
        """How many captures are kept: one for each batch signature and mode met so far."""
        return self._captured.n_captures

    def measure(self, batch: Any, steps: int = 5) -> Measurement:
        """Run a few steps (they train!) and measure them, after one to warm up."""
        device = self._captured.device
        return measure(lambda: self(batch), device=device, steps=steps)
