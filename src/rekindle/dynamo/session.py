"""One call of `compile`: the graphs that Dynamo finds in a model, planned as they come."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.optim import Optimizer

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Phase, StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import Trace, simulate
from rekindle.dynamo import aot, pages
from rekindle.dynamo.attention_masks import simplify_masks
from rekindle.dynamo.budget_shares import (
    Static,
    resident_bytes,
    share_of,
    static_of_graph,
    static_of_model,
    weight_of,
)
from rekindle.dynamo.fused_costs import joint_profile
from rekindle.dynamo.fusion import drop_unread_statistics
from rekindle.dynamo.joint_graph import Joint, lift
from rekindle.dynamo.pad_matmuls import align
from rekindle.dynamo.partition import split
from rekindle.dynamo.post_grad_passes import Tidy
from rekindle.dynamo.unused_tangents import compile_backward, ungiven
from rekindle.errors import InfeasibleBudget, PlanError, RekindleError
from rekindle.measuring.peak_monitor import PeakMonitor, report_peak
from rekindle.planners.registry import find_planner
from rekindle.units import format_bytes, parse_budget

log = logging.getLogger("rekindle")

LOWERS = ("inductor", "eager")
_HUGE = 1 << 60
_NAME = "rekindle"
_MARGIN = 0.003  # of the budget, for small things that no forecast knows
_MOST_OVER = 0.4  # of the budget: what is more has other reasons
_MORE = (1.1, 1.5, 2.0)  # of what a step took too much: in another plan, others are at the peak
_DROPPED = 0.7  # of the outputs' bytes, taken less than forecast: the caller let go of them
_WORTH_BYTES, _WORTH_US = 0.03, 0.02  # of the budget, and of a step's time, for another plan
_MONITORED_STEP = 2  # the first one compiles, and tunes kernels
Key = tuple[object, ...]


@dataclass(frozen=True)
class PlannedGraph:
    """A compiled graph: its step, what it costs, its plan, and what the two modules hold.

    `budget_bytes` is what a step may take, of which the plan may have been made for less. `kept`
    are the tensors that the forward pass makes and leaves to the backward pass, with their bytes.
    `share` is the part it was given of what static bytes and earlier graphs leave, `note` says why;
    `seconds` is what planning took.
    """

    graph: StepGraph
    profile: Profile
    plan: Plan
    budget_bytes: int
    kept: dict[str, int]
    share: float
    note: str
    seconds: float
    key: Key = ()

    @property
    def kept_bytes(self) -> int:
        """The bytes held from the forward pass to the backward pass."""
        return sum(self.kept.values())

    @property
    def output_bytes(self) -> int:
        """The bytes of what the forward pass returns."""
        graph = self.graph
        made_by = ((value, graph.values[value].producer) for value in graph.outputs)
        return sum(
            graph.storage_of(value).nbytes
            for value, op in made_by
            if op is not None and graph.ops[op].phase is Phase.FORWARD
        )

    @property
    def recompute_share(self) -> float:
        """The time that recomputation adds to the graph's own."""
        return self.plan.recompute_us / max(sum(cost.time_us for cost in self.profile.costs), 1e-9)

    @property
    def trace(self) -> Trace:
        """Bytes and microseconds at every position of the planned graph, as forecast."""
        return simulate(self.graph, self.profile, self.plan)

    @property
    def plain_trace(self) -> Trace:
        """The same of the graph with nothing dropped."""
        return simulate(self.graph, self.profile)


@dataclass(eq=False)
class Session:
    """Compiles what Dynamo captures, each graph within its part of one budget.

    A model, if it is known, tells what parameters there are beside those of the graph at hand.
    `spare_bytes` are left free of the budget, as far as that can be. `holds_outputs` says whether
    the caller is taken to hold the outputs of the forward pass during the backward pass; `tries` is
    how often the model was planned anew; `short_bytes` is what a later graph lacks.
    """

    budget: int | str
    planner: str = "auto"
    lower: str = "inductor"
    options: dict[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None
    optimizer: Optimizer | None = None
    plans: list[PlannedGraph] = field(default_factory=list)
    n_steps: int = 0
    monitor: PeakMonitor | None = None
    measured_peak_bytes: int | None = None
    spare_bytes: int = 0
    holds_outputs: bool = True
    tries: int = 0
    short_bytes: int = 0
    __name__: str = _NAME

    def __post_init__(self) -> None:
        find_planner(self.planner)
        parse_budget(self.budget, _HUGE)
        if self.lower not in LOWERS:
            raise PlanError(f"lower is {' or '.join(map(repr, LOWERS))}, and not {self.lower!r}.")

    @property
    def name(self) -> str:
        """What decisions depend on, beside the graphs."""
        static = self.model and static_of_model(self.model, self.optimizer)
        how = f"{self.planner} {self.budget!r} {self.spare_bytes} {self.holds_outputs}"
        return f"{_NAME} {how} {static}"

    @property
    def forecast_bytes(self) -> int:
        """The peak of a step, by the plans made so far."""
        return max((each.plan.peak_bytes for each in self.plans), default=0)

    @property
    def budget_bytes(self) -> int:
        """What a step may take; known once there are plans."""
        return max((each.budget_bytes for each in self.plans), default=0)

    def begin_step(self, device: torch.device | None) -> int | None:
        """Count a training step; the peak of the monitored one, once, when that is over."""
        monitor = PeakMonitor(device)
        if not monitor.is_active or self.measured_peak_bytes is not None:
            return None
        self.n_steps += 1
        if self.n_steps == _MONITORED_STEP:
            self.monitor = monitor
            monitor.start()
        elif self.monitor is not None:
            self.measured_peak_bytes = self.monitor.stop()
        return self.measured_peak_bytes

    def again(self, peak_bytes: int) -> Session | None:
        """What to compile the model with anew, now that a step is known to have taken so much.

        None where that would not help. Nor is it done in a distributed job, where all have to
        decide the same.
        """
        exceeds = report_peak(peak_bytes, self.forecast_bytes, self.budget_bytes)
        over_bytes = peak_bytes - self.forecast_bytes
        if self.tries >= len(_MORE) or _is_distributed():
            return None
        if exceeds:
            if over_bytes > _MOST_OVER * self.budget_bytes:
                return None  # something else than this model takes memory
            log.info("compiling once more, with %s to spare", format_bytes(over_bytes))
            return self._anew(spare_bytes=int(_MORE[self.tries] * over_bytes))
        if self._can_use_outputs_room(-over_bytes):
            log.info("compiling once more: outputs are not held during the backward pass")
            return self._anew(holds_outputs=False)
        return None

    def with_room(self) -> Session | None:
        """What to compile the model with anew, if earlier graphs left too little to a later one."""
        if not self.short_bytes or self.tries >= len(_MORE):
            return None
        log.info(
            "compiling once more, with %s left to later graphs", format_bytes(self.short_bytes)
        )
        more_bytes = int(_MORE[self.tries] * self.short_bytes)
        return self._anew(spare_bytes=self.spare_bytes + more_bytes)

    def _anew(self, **changes: Any) -> Session:
        return Session(
            self.budget,
            self.planner,
            self.lower,
            self.options,
            self.model,
            self.optimizer,
            tries=self.tries + 1,
            **{
                "spare_bytes": self.spare_bytes,
                "holds_outputs": self.holds_outputs,
                **changes,
            },
        )

    def _can_use_outputs_room(self, under_bytes: int) -> bool:
        """Whether outputs that the caller let go of leave room that makes steps much faster.

        With several graphs, the outputs of one are held as the inputs of the next.
        """
        if not self.holds_outputs or len({each.key for each in self.plans}) != 1:
            return False
        last = self.plans[-1]
        is_much = last.output_bytes > _WORTH_BYTES * self.budget_bytes
        is_slow = last.recompute_share > _WORTH_US
        return is_much and is_slow and under_bytes > _DROPPED * last.output_bytes

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph; what Rekindle refuses is raised when the graph is called.

        Whatever a backend raises while Dynamo compiles, Dynamo wraps; so it is raised later.
        """
        partitioner = Partitioner(self, aot.identity(module))
        simplify_masks(module)
        try:
            if self.lower == "eager":
                found = aot.compile_eagerly(module, inputs, partitioner, compile_backward)
            else:
                found = aot.compile_with_inductor(
                    module, inputs, partitioner, Tidy(), compile_backward, self.options
                )
        except RekindleError as error:
            return _refusing(error)
        return _without_zeros(found) if partitioner.has_ungiven else found

    def partition(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        key: Key,
        n_outputs: int,
        static: Sequence[int],
    ) -> aot.Modules:
        """Plan a joint graph and cut it in two."""
        start = time.perf_counter()
        if any(map(aot.is_unsupported, module.graph.nodes)):
            log.warning("a graph that hands random state around is left to torch: no budget holds")
            return aot.torch_partition(
                module, inputs, num_fwd_outputs=n_outputs, static_lifetime_input_indices=static
            )
        drop_unread_statistics(module.graph)
        aot.without_repeats(module)
        if self.lower == "inductor":
            align(module.graph)
        joint, planned = self._planned(module, n_outputs, static, key)
        planned.plan.check(joint.step)
        found = split(joint, planned.plan)
        seconds = time.perf_counter() - start
        planned = replace(planned, kept=found.kept, seconds=seconds)
        self.plans.append(planned)
        log.info(
            "planned a graph of %d ops for %s: a peak of %s, %s kept, %.1f ms of recomputation, "
            "in %.1f s",
            len(joint.step.ops),
            format_bytes(planned.plan.budget_bytes),
            format_bytes(planned.plan.peak_bytes),
            format_bytes(planned.kept_bytes),
            planned.plan.recompute_us / 1e3,
            seconds,
        )
        return found.forward, found.backward

    def _planned(
        self, module: fx.GraphModule, n_outputs: int, static: Sequence[int], key: Key
    ) -> tuple[Joint, PlannedGraph]:
        """A joint graph as a step, and its plan.

        Where nothing fits as long as outputs beside a loss are held, they are taken not to be.
        """

        def lifted(holds_outputs: bool) -> Joint:
            fuses = self.lower == "inductor"
            return lift(module, n_outputs, static, fuses=fuses, holds_outputs=holds_outputs)

        joint = lifted(self.holds_outputs)
        try:
            return joint, self._plan(joint, key)
        except InfeasibleBudget:
            if not self.holds_outputs or not ungiven(module.graph):
                raise
        joint = lifted(holds_outputs=False)
        planned = self._plan(joint, key)
        note = "outputs have to be let go of before the backward pass: with them, nothing fits"
        log.warning(note)
        return joint, replace(planned, note=f"{planned.note}; {note}")

    def _plan(self, joint: Joint, key: Key) -> PlannedGraph:
        step, weight = joint.step, weight_of(joint.step)
        static = self._static(step)
        others = self._others(key)
        held = sum(each.kept_bytes for each in others)
        profile = joint_profile(joint)
        alone = replace(profile, overhead_bytes=profile.overhead_bytes + static.outside(step))
        profile = replace(alone, overhead_bytes=alone.overhead_bytes + held)
        plain_bytes = sum(weight_of(each.graph).activation_bytes for each in others)
        budget_bytes = parse_budget(self.budget, simulate(step, alone).peak_bytes + plain_bytes)
        is_share = isinstance(self.budget, str) and self.budget.strip().endswith("%")
        seen = weight.param_bytes + sum(weight_of(each.graph).param_bytes for each in others)
        share = 1.0 if is_share else share_of(weight, static.param_bytes - seen)
        floor = min(profile.overhead_bytes + resident_bytes(step), budget_bytes)
        spare_bytes = max(self.spare_bytes, 0 if is_share else int(_MARGIN * budget_bytes))
        own_bytes = floor + int((budget_bytes - floor) * share) - spare_bytes
        make = find_planner(self.planner)
        try:
            plan = make(step, profile, own_bytes)
        except InfeasibleBudget as error:
            least = error.least_peak_bytes
            if least > budget_bytes:
                self._fall_short(budget_bytes, least, is_soft=is_share, is_later=bool(others))
            plan = make(step, profile, least)  # more than its share, and within the budget
        may_take = max(plan.budget_bytes, own_bytes + spare_bytes)
        note = _note(static, share, held, is_share, self)
        return PlannedGraph(step, profile, plan, may_take, {}, share, note, 0.0, key)

    def _fall_short(
        self, budget_bytes: int, least_bytes: int, *, is_soft: bool, is_later: bool
    ) -> None:
        """A graph does not fit: refuse it, or if the ones before it could hold less, note that."""
        can_try = self.model is not None and self.tries < len(_MORE)
        if not is_later or not (is_soft or can_try):
            raise InfeasibleBudget(
                budget_bytes=budget_bytes, least_peak_bytes=least_bytes
            ) from None
        self.short_bytes = max(self.short_bytes, least_bytes - budget_bytes)
        log.warning(
            "a later graph needs %s, with what the earlier ones hold; the budget is %s",
            format_bytes(least_bytes),
            format_bytes(budget_bytes),
        )

    def _static(self, graph: StepGraph) -> Static:
        if self.model is None:
            return static_of_graph(graph)
        return static_of_model(self.model, self.optimizer)

    def _others(self, key: Key) -> list[PlannedGraph]:
        """The graphs planned so far; of one that was compiled several times, what held the most."""
        most: dict[Key, PlannedGraph] = {}
        for each in self.plans:
            known = most.get(each.key)
            if each.key != key and (known is None or known.kept_bytes < each.kept_bytes):
                most[each.key] = each
        return list(most.values())

    def report(self, path: str | Path) -> None:
        """Write the page of the plan; of several graphs, one for each, and a list of them."""
        pages.write(Path(path), self.plans)


class Partitioner(aot.CustomPartitionerFn):
    """Cuts the joint graphs of one graph that Dynamo captured."""

    def __init__(self, session: Session, key: Key) -> None:
        self.has_ungiven = False  # gradients that are left away
        self._session = session
        self._key = key
        self._name = session.name

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> aot.Modules:
        """The forward and the backward module of a joint graph."""
        self.has_ungiven = bool(ungiven(gm.graph))
        static = kwargs.get("static_lifetime_input_indices") or ()
        n_outputs = kwargs["num_fwd_outputs"]
        return self._session.partition(gm, joint_inputs, self._key, n_outputs, static)

    def uuid(self) -> str:
        """A name for what is kept on disk: other decisions have another one."""
        return self._name

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle as a name: Inductor pickles all its settings to find what it has on disk."""
        return str, (self._name,)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _refusing(error: RekindleError) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise error.with_traceback(None)

    return refuse


def _without_zeros(compiled: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        aot.leave_away_zeros(outputs)
        return outputs

    return run


def _note(static: Static, share: float, held: int, is_share: bool, session: Session) -> str:
    words = [f"optimizer state: {format_bytes(static.state_bytes)} ({static.note})"]
    if is_share:
        words.append("the budget is a share of what is needed here with nothing dropped")
    elif share < 1:
        words.append(
            f"{share:.0%} of what is left, in proportion to its parameters and activations"
        )
    else:
        words.append("all that is left")
    if session.spare_bytes:
        words.append(f"planned with {format_bytes(session.spare_bytes)} to spare")
    if not session.holds_outputs:
        words.append("outputs are let go of before the backward pass, as a step has shown")
    if held:
        words.append(f"earlier graphs hold {format_bytes(held)}")
    return "; ".join(words)
