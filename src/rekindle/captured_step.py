"""Training steps as the user calls them: captured, and as `optimize` returns them."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import Trace, simulate
from rekindle.core.memory.layout import layout
from rekindle.core.notebook import html_table, one_line
from rekindle.core.uncopyable import Uncopyable
from rekindle.engines.engine import EngineInfo
from rekindle.engines.select_engine import EngineFactory
from rekindle.errors import CaptureError, RekindleError, ReportError
from rekindle.measuring.meters import Resident
from rekindle.measuring.timing import Measurement, PeakMonitor, measure, resident_tensors
from rekindle.pipeline import PlannedStep, PlanRequest, Variant, device_of, prepare_step, replan
from rekindle.report.html import write_html
from rekindle.report.summary import summarize
from rekindle.rewriting.step_forms import updates_independently
from rekindle.tracing import batch_tree, user_line
from rekindle.tracing.contents import signature
from rekindle.tracing.global_state import global_state
from rekindle.tracing.guard import Guard
from rekindle.tracing.preconditions import Checks
from rekindle.tracing.tape import Recording
from rekindle.tracing.undo import uninterrupted
from rekindle.units import format_bytes, format_us

log = logging.getLogger("rekindle")

_CHANGES_BEFORE_WARNING = 3


class CapturedStep(Uncopyable):
    """A training step captured as one graph. Call it with a batch, as often as you like.

    A batch of another shape, or a model switched between training and evaluation mode, is captured
    when it is first met. Up to `max_captures` captures are kept; the oldest is dropped first.
    """

    max_captures: int = 16

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        *,
        as_on_gpu: bool = False,
        request: PlanRequest | None = None,
        engine: str = "python",
        improves: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Without a `request` nothing is dropped; see `prepare_step`."""
        check_types(train_step, model, optimizer)
        self._request = request
        self._improves = improves
        self._train_step = train_step
        self._model = model
        self._engines = EngineFactory(engine, self.device, progress or log.info)
        self._optimizer = optimizer
        self.is_forecast = as_on_gpu
        self._variants: OrderedDict[Hashable, list[Variant]] = OrderedDict()
        self._lock = threading.Lock()
        self._caller: object | None = None  # whose call is running
        self._thread = 0  # in which it is running
        self._forked_reason = ""  # why a forked process must not run it
        _steps.add(self)
        self._has_dropped = False
        self._n_changes: Counter[str] = Counter()  # captures by the Python value that had changed
        flat = batch_tree.flatten(batch)
        Checks(user_line.definition(train_step)).batch(flat)
        self.first = self._capture(batch, self._key(flat))
        self._first_batch = [weakref.ref(tensor) for tensor in flat.tensors]

    @property
    def graph(self) -> StepGraph:
        """The step that was captured first, as a torch-free graph."""
        return self.first.graph

    @property
    def n_captures(self) -> int:
        """How many captures are kept: one for each batch signature and mode met so far."""
        return len(self.variants)

    @property
    def variants(self) -> list[Variant]:
        """The captures that are kept, grouped by batch signature, the last used at the end."""
        return [variant for variants in self._variants.values() for variant in variants]

    @property
    def planned(self) -> PlannedStep | None:
        """The profile and plan of the first capture; None if there is no budget."""
        return self.first.planned

    @property
    def engine_info(self) -> EngineInfo:
        """What runs the first capture, and why."""
        return self._engines.info(self.first.engine)

    @property
    def is_compiled(self) -> bool:
        """True if ops are compiled, so that they may round differently from the plain step."""
        return self._engines.is_compiled

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return device_of(self._model)

    @property
    def graphs_peak_bytes(self) -> int:
        """The peak of the step when it was captured in CUDA graphs; 0 without graphs.

        The allocator does not count the memory of a replay. Before the capture, it is the peak of
        the first step, if that was watched.
        """
        return max((variant.engine.peak_bytes for variant in self.variants), default=0)

    @property
    def is_steered(self) -> bool:
        """True if the first capture's CUDA graphs have planned addresses in one arena."""
        return self.first.engine.is_steered

    @property
    def recording(self) -> Recording:
        """The recording of the first capture."""
        return self.first.recording

    def around(self, batch: Any) -> list[Resident]:
        """The tensors that are live before a step on this batch."""
        return resident_tensors(self._model, self._optimizer, batch)

    def first_batch(self) -> list[torch.Tensor] | None:
        """The tensors of the first captured batch; None if the user has freed any of them."""
        tensors = [tensor() for tensor in self._first_batch]
        found = [tensor for tensor in tensors if tensor is not None and not tensor.is_meta]
        return found if len(found) == len(tensors) else None

    @property
    def code(self) -> str:
        """The generated Python code that runs for the first captured batch."""
        return self.first.engine.program.source

    def __call__(self, batch: Any) -> Any:
        """Train on one batch; returns what the user's function returns."""
        if self.is_forecast:
            raise RekindleError(
                "this step was captured as a GPU would run it, for a forecast, and cannot be run: "
                "capture it without as_on_gpu=True to train."
            )
        if self._forked_reason:
            raise RekindleError(self._forked_reason)
        with uninterrupted() as interruptible:
            caller = object()
            with self._lock:
                if self._caller is None:
                    self._thread, self._caller = threading.get_ident(), caller
            if self._caller is not caller:
                raise RuntimeError(
                    "this step is already running: call it from one thread at a time"
                )
            try:
                with interruptible():
                    return self._run(batch)
            finally:
                self._caller = None

    def _run(self, batch: Any) -> Any:
        flat = batch_tree.flatten(batch)
        key = self._key(flat)
        for variant in self._known(key, flat):
            state = _state_of(variant, flat.tensors)
            if state is not None:
                self._variants.move_to_end(key)
                return self._run_variant(variant, flat.tensors, state)
        variant = self._capture(batch, key)
        state = _state_of(variant, flat.tensors)
        if state is None:
            raise RekindleError(
                f"the step cannot be told from a changed one: {variant.guard.reason}"
            )
        return self._run_variant(variant, flat.tensors, state)

    def _run_variant(
        self, variant: Variant, batch: list[torch.Tensor], state: list[torch.Tensor]
    ) -> Any:
        """Run one step; under a budget, the first one is measured and held to it.

        After replanning, and after the optimizer has created its state, the next one is, too.
        """
        monitor = PeakMonitor(variant.device, partial(self.around, batch))
        is_watched = variant.planned and not variant.is_held and monitor.is_active
        has_state = any(self._optimizer.state.values())
        peak_bytes = None
        if is_watched:
            monitor.start()
        try:
            result = variant.engine(batch, state)
        finally:
            if is_watched:
                peak_bytes = monitor.stop()
        if is_watched:
            peak_bytes = max(variant.engine.peak_bytes, peak_bytes or 0)
            is_replanned = self.hold_to_budget(variant, peak_bytes)
            will_grow = not has_state and any(self._optimizer.state.values())
            variant.is_held = not is_replanned and not will_grow
        elif variant.planned and variant.engine.peak_bytes > variant.planned.budget_bytes:
            self._hold_graphs_to_budget(variant)
        return result

    def hold_to_budget(self, variant: Variant, peak_bytes: int) -> bool:
        """Replan a variant, once, if a step's peak exceeds the budget; True if it was replanned."""
        assert self._request is not None
        return replan(variant, peak_bytes, self._engines, self._request)

    def _hold_graphs_to_budget(self, variant: Variant) -> None:
        """Replan once if CUDA graphs exceed the budget; if they still do, run without them."""
        engine, planned = variant.engine, variant.planned
        assert planned is not None
        if not self.hold_to_budget(variant, engine.peak_bytes):
            over = format_bytes(engine.peak_bytes - planned.budget_bytes)
            engine.give_up(f"they need {over} more than the budget")

    def _key(self, flat: batch_tree.Flat) -> Hashable:
        """What a capture depends on, except for the tensors of model and optimizer."""
        return (
            tuple(signature(tensor) for tensor in flat.tensors),
            flat.structure.key(),
            global_state(),
        )

    def _known(self, key: Hashable, flat: batch_tree.Flat) -> list[Variant]:
        try:
            return self._variants.get(key, [])
        except TypeError:  # something in the batch cannot be a key
            Checks(user_line.definition(self._train_step)).batch(flat)
            raise

    def _capture(self, batch: Any, key: Hashable) -> Variant:
        others = self._variants.get(key)
        variant = prepare_step(
            self._train_step,
            self._model,
            self._optimizer,
            batch,
            self._engines,
            self._request,
            improves=self._improves,
            as_on_gpu=self.is_forecast,
            is_first=not self._variants,
        )
        if self._request is not None:
            self._request = self._request.without_results()
        if others:
            log.info("captured the step again: %s", others[-1].guard.reason)
            self._warn_of_changes(others[-1].guard)
        elif self._variants:
            tensors = batch_tree.flatten(batch).tensors
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            log.info("captured the step again, for a batch of shape %s", shapes)
        reason = others[-1].guard.reason if others else ""
        self._variants.setdefault(key, []).append(variant)
        self._drop_oldest(reason)
        return variant

    def _warn_of_changes(self, guard: Guard) -> None:
        """Name a Python value that keeps changing, once."""
        self._n_changes[guard.changed] += 1
        if guard.changed and self._n_changes[guard.changed] == _CHANGES_BEFORE_WARNING:
            log.warning(
                "%s changes between steps, and each new value costs a capture (%s). If it is a "
                "number that changes often, pass it in the batch as a tensor.",
                guard.changed,
                guard.reason,
            )

    def _drop_oldest(self, reason: str) -> None:
        while self.n_captures > self.max_captures:
            if not self._has_dropped:
                self._has_dropped = True
                log.warning(
                    "more than %d captures: something changes at every step (a shape, a number or "
                    "text in the batch, a value that is read, an attribute of a module), and each "
                    "change costs a capture%s",
                    self.max_captures,
                    f"; this time: {reason}" if reason else "",
                )
            key, variants = next(iter(self._variants.items()))
            variants.pop(0)
            if not variants:
                del self._variants[key]

    def _facts(self) -> dict[str, object]:
        graph = self.graph
        return {
            "ops": f"{len(graph.ops):,}",
            "device": "forecast only" if self.is_forecast else self.device,
            "captures": self.n_captures,
            "graph": graph.fingerprint,
        }

    __repr__ = one_line
    _repr_html_ = html_table


class TrainStep(Uncopyable):
    """A training step to train with: ``loss = step(batch)``."""

    def __init__(self, captured: CapturedStep) -> None:
        self._captured = captured

    def __call__(self, batch: Any) -> Any:
        """Train on one batch; returns what the user's function returns."""
        return self._captured(batch)

    @property
    def captured(self) -> CapturedStep:
        """The captured step behind this one."""
        return self._captured

    @property
    def graph(self) -> StepGraph:
        """The step that runs, as a torch-free graph; `profile` and `plan` are of this graph.

        Under a budget it is an improved form of the captured step: ops write in place, and
        parameters may be updated early. `captured.graph` is the step as it was captured.
        """
        planned = self._captured.planned
        return planned.graph if planned else self._captured.graph

    @property
    def profile(self) -> Profile | None:
        """The cost of every op; None without a budget, as the step is not profiled then."""
        planned = self._captured.planned
        return planned.profile if planned else None

    @property
    def plan(self) -> Plan | None:
        """Which activations are kept and which recomputed; None without a budget."""
        planned = self._captured.planned
        return planned.plan if planned else None

    @property
    def budget_bytes(self) -> int | None:
        """The budget; the plan stays a margin below it. None without a budget."""
        planned = self._captured.planned
        return planned.budget_bytes if planned else None

    @property
    def trace(self) -> Trace | None:
        """The forecast of bytes and microseconds at every position; None without a profile.

        CUDA graphs allocate from one arena, so that their peak is slightly below the plan's, which
        also covers the first step.
        """
        planned = self._captured.planned
        if planned is None or planned.profile is None:
            return None
        profile = planned.profile
        if profile.allocator == "cuda" and self._captured.is_steered:
            profile = replace(profile, allocator="arena")
        return simulate(self.graph, profile, planned.plan)

    @property
    def plain_profile(self) -> Profile | None:
        """The cost of every op of the step as it was captured; None without a budget."""
        planned = self._captured.planned
        return planned.captured_profile if planned else None

    @property
    def plain_trace(self) -> Trace | None:
        """The forecast of the plain step; None without a profile."""
        profile = self.plain_profile
        return None if profile is None else simulate(self._captured.graph, profile)

    @property
    def engine_info(self) -> EngineInfo:
        """What runs the step, and why: generated code or CUDA graphs, compiled or not."""
        return self._captured.engine_info

    @property
    def is_compiled(self) -> bool:
        """True if ops are compiled, so that they may round differently from the plain step."""
        return self._captured.is_compiled

    @property
    def graphs_peak_bytes(self) -> int:
        """The peak of the step when it was captured in CUDA graphs; 0 without graphs."""
        return self._captured.graphs_peak_bytes

    @property
    def n_captures(self) -> int:
        """How many captures are kept: one for each batch signature and mode met so far."""
        return self._captured.n_captures

    def measure(self, batch: Any, steps: int = 5) -> Measurement:
        """Run a few steps and measure peak and time, after two warm-up steps. All of them train."""
        captured = self._captured
        found = measure(
            lambda: self(batch),
            device=captured.device,
            steps=steps,
            warmup=2,  # CUDA graphs are captured in the second step
            resident=lambda: captured.around(batch),
        )
        return replace(found, peak_bytes=max(found.peak_bytes, captured.graphs_peak_bytes))

    def report(self, path: str | Path) -> None:
        """Write an HTML page about the step: memory over time, and every decision with its reason.

        It needs a profile, and so a budget. The page opens in any browser, without a network.
        """
        plan, profile, trace = self.plan, self.profile, self.trace
        if plan is None or profile is None or trace is None:
            raise ReportError(
                "a step without a profile has no report: give optimize a budget, "
                "or use rekindle.profile and rekindle.simulate."
            )
        summary = summarize(
            self.graph,
            profile,
            trace,
            plan=plan,
            plain=self.plain_trace,
            plain_profile=self.plain_profile,
        )
        write_html(Path(path), summary, layout=layout(self.graph, plan))

    def _facts(self) -> dict[str, object]:
        plan, facts = self.plan, dict[str, object](ops=f"{len(self.graph.ops):,}")
        facts |= {"device": self._captured.device, "captures": self.n_captures}
        if plan is None or self.budget_bytes is None:
            return facts | {"budget": "none"}
        dropped = sum(not decision.is_kept for decision in plan.decisions)
        return facts | {
            "budget": format_bytes(self.budget_bytes),
            "planner": plan.planner,
            "forecast peak": format_bytes(plan.peak_bytes),
            "dropped": f"{dropped:,} of {len(plan.decisions):,} activations",
            "added time": format_us(plan.recompute_us),
        }

    __repr__ = one_line
    _repr_html_ = html_table


_steps: weakref.WeakSet[CapturedStep] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A forked process trains its own copy of a model, if that is whole and on the CPU."""
    for step in list(_steps):
        step._lock = threading.Lock()
        if step.device.type == "cuda":
            step._forked_reason = (
                "this process was forked from one that uses the GPU, which it cannot: start it "
                'with the method "spawn", and call optimize there.'
            )
        elif step._caller is not None and step._thread != threading.get_ident():
            step._forked_reason = (
                "this process was forked while the step was running in another thread, and its "
                "copy of the model may be half updated: load a state dict into a new one, and "
                "call optimize again."
            )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _state_of(variant: Variant, batch: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """The tensors of the model and optimizer; None if they, or the batch, are not as captured."""
    optimizer = variant.recording.state.optimizer
    if variant.engine.program.is_early and not updates_independently(optimizer):
        variant.guard.reason = "there are hooks on the optimizer's steps now"
        return None
    state = variant.guard.fetch()
    if state is not None and (change := variant.recording.decisions.change(batch)):
        variant.guard.reason = change
        return None
    return state


def check_types(train_step: Any, model: Any, optimizer: Any) -> None:
    """Refuse arguments of wrong types, or in the wrong order."""
    _refuse_distributed(model)
    for name, value, kind in (
        ("model", model, nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        if not isinstance(value, kind):
            raise TypeError(
                f"{name} must be a torch {kind.__name__}, and is of type {type(value).__name__}: "
                "the order is (train_step, model, optimizer, batch)"
            )
    if not callable(train_step) or isinstance(train_step, nn.Module):
        raise TypeError("train_step must be a function of (model, optimizer, batch)")


_DISTRIBUTED = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DTensor")


def _refuse_distributed(model: Any) -> None:
    """Refuse a model that is spread over processes: its collectives cannot be captured."""
    parts = [*model.modules(), *model.parameters()] if isinstance(model, nn.Module) else []
    for part in parts:
        names = {kind.__name__ for kind in type(part).__mro__}
        found = next((name for name in _DISTRIBUTED if name in names), None)
        if found is not None:
            raise CaptureError(
                f"the model uses {found}, and rekindle.optimize captures one process only",
                filename="rekindle.optimize",
                lineno=0,
                advice="Keep your loop, and use rekindle.compile(model, budget=...), which works "
                "with it.",
            )
