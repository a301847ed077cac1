"""One call of `compile`: the graphs that Dynamo finds in a model, planned as they come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import fx, nn
from torch.optim import Optimizer

from rekindle.core.cost import Profile
from rekindle.core.ir import StepGraph
from rekindle.core.schedule import Plan
from rekindle.core.simulate import Trace, simulate
from rekindle.dynamo import pages, private
from rekindle.dynamo.budget import (
    Static,
    resident_bytes,
    share_of,
    static_of_graph,
    static_of_model,
    weight_of,
)
from rekindle.dynamo.costs import joint_profile
from rekindle.dynamo.fusion import drop_unread_statistics
from rekindle.dynamo.joint import Joint, lift
from rekindle.dynamo.split import split
from rekindle.dynamo.unmerge import Unmerge
from rekindle.dynamo.watch import Watch
from rekindle.errors import InfeasibleBudget, PlanError, RekindleError
from rekindle.plan.named import find_planner
from rekindle.units import format_bytes, parse_budget

log = logging.getLogger("rekindle")

LOWERS = ("inductor", "eager")
_HUGE = 1 << 60
_NAME = "rekindle"
_MOST_OVER = 0.1  # of the budget: what is more has other reasons
_MORE = 1.1  # of what a step took too much: in another plan, other ops are at the peak
Key = tuple[object, ...]


@dataclass(frozen=True)
class PlannedGraph:
    """A compiled graph: its step, what it costs, its plan, and what the two modules hold.

    `kept` are the tensors that the forward pass makes and leaves to the backward pass, with their
    bytes. `share` is the part it was given of what static bytes and earlier graphs leave, `note`
    says why; `seconds` is what planning took.
    """

    graph: StepGraph
    profile: Profile
    plan: Plan
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
    `spare_bytes` are left free of the budget, as far as that can be.
    """

    budget: int | str
    planner: str = "auto"
    lower: str = "inductor"
    options: dict[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None
    optimizer: Optimizer | None = None
    plans: list[PlannedGraph] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)
    spare_bytes: int = 0
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
        return f"{_NAME} {self.planner} {self.budget!r} {self.spare_bytes} {static}"

    def again(self, over_bytes: int) -> Session | None:
        """What to compile the model with anew, if a step took so much more than the forecast.

        None where that would not help: it was done before, or something else than this model takes
        memory. Nor is it done in a distributed job, where all have to decide the same.
        """
        most = max((each.plan.budget_bytes for each in self.plans), default=0)
        if self.spare_bytes or not 0 < over_bytes <= _MOST_OVER * most or _is_distributed():
            return None
        log.info("compiling once more, with %s to spare", format_bytes(over_bytes))
        return replace(self, plans=[], watch=Watch(), spare_bytes=int(_MORE * over_bytes))

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph; what Rekindle refuses is raised when the graph is called.

        Whatever a backend raises while Dynamo compiles, Dynamo wraps; so it is raised later.
        """
        partitioner = Partitioner(self, private.identity(module))
        try:
            if self.lower == "eager":
                return private.compile_eagerly(module, inputs, partitioner)
            return private.compile_with_inductor(
                module, inputs, partitioner, Unmerge(), self.options
            )
        except RekindleError as error:
            return _refusing(error)

    def partition(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        key: Key,
        n_outputs: int,
        static: Sequence[int],
    ) -> private.Modules:
        """Plan a joint graph and cut it in two."""
        start = time.perf_counter()
        if any(map(private.is_unsupported, module.graph.nodes)):
            log.warning("a graph that hands random state around is left to torch: no budget holds")
            return private.torch_partition(
                module, inputs, num_fwd_outputs=n_outputs, static_lifetime_input_indices=static
            )
        drop_unread_statistics(module.graph)
        private.without_repeats(module)
        joint = lift(module, n_outputs, static, fuses=self.lower == "inductor")
        planned = self._plan(joint, key)
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

    def _plan(self, joint: Joint, key: Key) -> PlannedGraph:
        step, weight = joint.step, weight_of(joint.step)
        static = self._static(step)
        others = self._others(key)
        held = sum(each.kept_bytes for each in others)
        profile = joint_profile(joint)
        alone = replace(profile, overhead_bytes=profile.overhead_bytes + static.outside(step))
        profile = replace(alone, overhead_bytes=alone.overhead_bytes + held)
        budget_bytes = parse_budget(self.budget, simulate(step, alone).peak_bytes)
        is_share = isinstance(self.budget, str) and self.budget.strip().endswith("%")
        if is_share:
            budget_bytes += held
        seen = weight.param_bytes + sum(weight_of(each.graph).param_bytes for each in others)
        share = 1.0 if is_share else share_of(weight, static.param_bytes - seen)
        floor = min(profile.overhead_bytes + resident_bytes(step), budget_bytes)
        own_bytes = floor + int((budget_bytes - floor) * share) - self.spare_bytes
        make = find_planner(self.planner)
        try:
            plan = make(step, profile, own_bytes)
        except InfeasibleBudget as error:
            least = error.least_peak_bytes
            if least > budget_bytes:
                raise InfeasibleBudget(budget_bytes=budget_bytes, least_peak_bytes=least) from None
            plan = make(step, profile, least)  # more than its share, and within the budget
        plan = replace(plan, budget_bytes=max(plan.budget_bytes, own_bytes + self.spare_bytes))
        note = _note(static, share, held, is_share)
        return PlannedGraph(step, profile, plan, {}, share, note, 0.0, key)

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


class Partitioner(private.CustomPartitionerFn):
    """Cuts the joint graphs of one graph that Dynamo captured."""

    def __init__(self, session: Session, key: Key) -> None:
        self._session = session
        self._key = key
        self._name = session.name

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> private.Modules:
        """The forward and the backward module of a joint graph."""
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


def _note(static: Static, share: float, held: int, is_share: bool) -> str:
    words = [f"optimizer state: {format_bytes(static.state_bytes)} ({static.note})"]
    if is_share:
        words.append("the budget is a share of what this graph needs with nothing dropped")
    elif share < 1:
        words.append(
            f"{share:.0%} of what is left, in proportion to its parameters and activations"
        )
    else:
        words.append("all that is left")
    if held:
        words.append(f"earlier graphs hold {format_bytes(held)}")
    return "; ".join(words)
