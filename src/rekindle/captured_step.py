"""The captured training step as the user meets it: call it with a batch."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.liveness import analyze
from rekindle.core.graph.schedule import Plan, schedule_of
from rekindle.core.graph.simulate import simulate
from rekindle.engines.cudagraph.graph_engine import CudaGraphEngine
from rekindle.engines.expandable_segments import growing_for
from rekindle.engines.program import Program
from rekindle.engines.select_engine import Engine, EngineMaker
from rekindle.errors import RekindleError
from rekindle.measuring.timing import tensors_around
from rekindle.rewriting.apply_schedule import rewrite
from rekindle.rewriting.early_updates import is_one_by_one
from rekindle.rewriting.step_forms import improved
from rekindle.rewriting.verify import check_rewritten
from rekindle.tracing import batch_tree, user_line
from rekindle.tracing.guard import Guard, signature
from rekindle.tracing.lift import lift
from rekindle.tracing.preconditions import Checks
from rekindle.tracing.recording import Recording
from rekindle.tracing.trace import record
from rekindle.units import format_bytes

log = logging.getLogger("rekindle")

MAX_VARIANTS = 16
"""How many captures a step keeps, for different batch shapes and modes; the oldest go first."""


class PlannedStep(NamedTuple):
    """What was decided about a captured step; a plan from elsewhere may come without costs.

    `graph` is the step that is planned and runs, `profile` what its ops cost: it may do in place
    and early what the captured one, whose costs are `captured_profile`, does not.
    """

    plan: Plan
    graph: StepGraph
    profile: Profile | None
    captured_profile: Profile | None
    budget_bytes: int


class Arranger(Protocol):
    """Decides how captured steps run."""

    def arrange(
        self,
        recording: Recording,
        graph: StepGraph,
        batch: list[torch.Tensor],
        device: torch.device,
        engines: EngineMaker,
    ) -> PlannedStep:
        """Decide about a captured step, given its batch's tensors and how it will run."""

    def again(self, before: PlannedStep, peak_bytes: int) -> PlannedStep | None:
        """Decide anew after a step has needed more than its budget."""


class Variant:
    """One capture: valid for one batch signature and one form of the user's objects."""

    def __init__(
        self,
        recording: Recording,
        batch: list[torch.Tensor],
        device: torch.device,
        arranger: Arranger | None,
        engines: EngineMaker,
        *,
        improves: bool,
    ) -> None:
        self.graph: StepGraph = lift(recording)
        self._improves = improves
        self.recording = recording
        self._arranger = arranger
        self._engines = engines
        self._device = device
        self.arranged: PlannedStep | None = None
        if arranger is not None:
            self.arranged = arranger.arrange(recording, self.graph, batch, device, engines)
        self.engine = self._planned()
        self.guard = Guard(recording)
        self._is_first = True
        self._is_second_plan = False

    @property
    def program(self) -> Program:
        """The generated code."""
        return self.engine.program if isinstance(self.engine, CudaGraphEngine) else self.engine

    def fetch(self) -> list[torch.Tensor] | None:
        """The tensors around the step; None if the user's objects are not as they were."""
        if self.program.is_early and not is_one_by_one(self.recording.around.optimizer):
            self.guard.reason = "somebody watches the optimizer's steps now"
            return None
        return self.guard.fetch()

    def run(self, batch: list[torch.Tensor], state: list[torch.Tensor]) -> Any:
        """Run one step. The first one under a budget is watched, where that costs nothing."""
        if self._is_first and self.arranged and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            result = self.engine(batch, state)
            seen = self.engine.peak_bytes if isinstance(self.engine, CudaGraphEngine) else 0
            self._hold_to_budget(max(seen, torch.cuda.max_memory_allocated(self._device)))
        else:
            result = self.engine(batch, state)
            self._hold_graphs_to_budget()
        self._is_first = False
        return result

    def _hold_graphs_to_budget(self) -> None:
        """Plan once more if graphs need more than the budget; then do without them."""
        if isinstance(self.engine, CudaGraphEngine) and self.arranged:
            over = self.engine.peak_bytes - self.arranged.budget_bytes
            if over > 0 and not self._hold_to_budget(self.engine.peak_bytes):
                self.engine.give_up(f"they need {format_bytes(over)} more than the budget")

    def _hold_to_budget(self, peak_bytes: int) -> bool:
        """Plan anew, once, if a step has needed more than the budget; returns whether it did."""
        assert self.arranged is not None
        assert self._arranger is not None
        budget_bytes = self.arranged.budget_bytes
        if peak_bytes <= budget_bytes or self._is_second_plan:
            return False
        log.warning(
            "the step took %s, and the budget is %s (%s was forecast)",
            format_bytes(peak_bytes),
            format_bytes(budget_bytes),
            format_bytes(self.arranged.plan.peak_bytes),
        )
        arranged = self._arranger.again(self.arranged, peak_bytes)
        if arranged is None:
            return False
        log.warning("planned again, for %s less", format_bytes(peak_bytes - budget_bytes))
        self.arranged, self._is_second_plan = arranged, True
        self.engine = self._planned()
        return True

    def _planned(self) -> Engine:
        """The step as it was arranged, on its engine."""
        if self.arranged is not None:
            graph, schedule = self.arranged.graph, self.arranged.plan.schedule
        elif self._improves:
            graph = improved(self.recording, self.graph)
            schedule = tuple(schedule_of(graph, None))
        else:
            optimizer_bytes = analyze(self.graph).optimizer_bytes()
            return self._engines.make(Program(self.recording, None, optimizer_bytes), self.graph)
        listing = rewrite(self.recording, graph, schedule)
        check_rewritten(self.recording, graph, listing, schedule)
        growing = None
        if self.arranged is not None:
            growing = growing_for(self.arranged.plan.peak_bytes, self._device)
        program = Program(self.recording, listing, self._optimizer_bytes(), growing)
        known = (self.arranged.plan, self.arranged.profile) if self.arranged else (None, None)
        return self._engines.make(program, graph, *known)

    def _optimizer_bytes(self) -> list[int]:
        """What is allocated from the first update on, beyond what is there then."""
        if self.arranged is None:
            return analyze(self.graph).optimizer_bytes()
        plan, graph, profile, *_ = self.arranged
        updates = graph.early_updates
        if not updates or profile is None:
            return analyze(graph).optimizer_bytes()
        trace = simulate(graph, profile, plan)
        first = int(np.argmax(trace.ops == updates[0]))
        more = trace.live_bytes[first:].max() - trace.live_bytes[first]
        return [int(more) + int(profile.workspaces_bytes[updates[0]])]


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
        arranger: Arranger | None = None,
        engine: str = "python",
        improves: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Without an `arranger` the step runs as it was captured, unless it `improves` it."""
        check_types(train_step, model, optimizer)
        self._arranger = arranger
        self._improves = improves
        self._train_step = train_step
        self._model = model
        self._engines = EngineMaker(engine, self.device, progress or log.info)
        self._optimizer = optimizer
        self.is_forecast = as_on_gpu
        self._variants: OrderedDict[Hashable, list[Variant]] = OrderedDict()
        self._lock = threading.Lock()
        self._caller: object | None = None  # whose call is running
        self._has_forgotten = False
        flat = batch_tree.flatten(batch)
        Checks(user_line.definition(train_step)).batch(flat.structure)
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
    def arranged(self) -> PlannedStep | None:
        """The profile and plan of what was captured first; None where nothing is dropped."""
        return self._first.arranged

    @property
    def is_compiled(self) -> bool:
        """Whether what runs has been compiled, and may round differently from the plain step."""
        return self._engines.is_compiled

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next((p.device for p in self._model.parameters()), torch.device("cpu"))

    @property
    def graphs_peak_bytes(self) -> int:
        """What the step needed when it was captured in CUDA graphs; 0 where it was not.

        A replay uses the same memory, but the allocator does not count it. Before the capture, it
        is what the first step needed, if that was watched: the allocator's count does not show it.
        """
        engines = [v.engine for variants in self._variants.values() for v in variants]
        return max((e.peak_bytes for e in engines if isinstance(e, CudaGraphEngine)), default=0)

    @property
    def is_steered(self) -> bool:
        """Whether what the first capture makes lies in an arena of CUDA graphs, once they are."""
        engine = self._first.engine
        return isinstance(engine, CudaGraphEngine) and engine.is_steered

    @property
    def recording(self) -> Recording:
        """What the first capture recorded."""
        return self._first.recording

    def around(self, batch: Any) -> list[Any]:
        """The tensors that are there before a step on this batch."""
        return tensors_around(self._model, self._optimizer, batch)

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
        caller = object()
        try:
            with self._lock:  # an interrupt may come between any two calls, but not inside this
                if self._caller is None:
                    self._caller = caller
            if self._caller is not caller:
                raise RuntimeError(
                    "this step is already running: call it from one thread at a time"
                )
            return self._run(batch)
        finally:
            with self._lock:
                if self._caller is caller:
                    self._caller = None

    def _run(self, batch: Any) -> Any:
        flat = batch_tree.flatten(batch)
        key = self._key(flat)
        for variant in self._known(key, flat.structure):
            state = variant.fetch()
            if state is not None:
                self._variants.move_to_end(key)
                return variant.run(flat.tensors, state)
        variant = self._capture(batch, key)
        state = variant.fetch()
        if state is None:
            raise RekindleError(
                f"the step cannot be told from a changed one: {variant.guard.reason}"
            )
        return variant.run(flat.tensors, state)

    def _key(self, flat: batch_tree.Flat) -> Hashable:
        """All that a capture depends on, but for the tensors around the step."""
        return (
            tuple(signature(tensor) for tensor in flat.tensors),
            flat.structure.key(),
            tuple(
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
                for kind in ("cpu", "cuda")
            ),
        )

    def _known(self, key: Hashable, structure: batch_tree.Structure) -> list[Variant]:
        try:
            return self._variants.get(key, [])
        except TypeError:  # something in the batch cannot be a key
            Checks(user_line.definition(self._train_step)).batch(structure)
            raise

    def _capture(self, batch: Any, key: Hashable) -> Variant:
        others = self._variants.get(key)
        recording = record(
            self._train_step, self._model, self._optimizer, batch, as_on_gpu=self.is_forecast
        )
        tensors = batch_tree.flatten(batch).tensors
        variant = Variant(
            self._engines.prepare(recording),
            tensors,
            self.device,
            self._arranger,
            self._engines,
            improves=self._improves,
        )
        if others:
            log.info("captured the step anew: %s", others[-1].guard.reason)
        elif self._variants:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
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


def check_types(train_step: Any, model: Any, optimizer: Any) -> None:
    """Refuse what is no training step, model or optimizer, or in another order."""
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
