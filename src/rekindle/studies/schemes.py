"""The schemes of memory optimisation beside one another: bytes of feature maps under each.

**Feature maps** are what a step makes on its way through the model and back. What belongs to the
weights does not count: their gradients, the parts that those are summed up from, and what the
optimizer makes. The bytes are those of an arena in which every feature map has a static address.

Where something is computed again, the plan is the one with the fewest bytes of feature maps that
its planner finds, whatever time that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Phase, Role, StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import simulate
from rekindle.core.memory.layout import layout
from rekindle.errors import InfeasibleBudget
from rekindle.planners.registry import find_planner

FEATURE_ROLES = (Role.ACTIVATION, Role.GRAD_MAP, Role.TEMP, Role.OUTPUT)

# How parts of a weight's gradient become one: added up, or written in another precision.
_SUMMING = frozenset({"aten.add.Tensor", "aten.add_.Tensor", "aten._to_copy.default"})


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to save memory. Without a planner nothing is dropped.

    `runs` says whether steps can be run so, and not only estimated.
    """

    name: str
    label: str
    in_place: bool = True
    sharing: bool = True
    planner: str | None = None
    runs: bool = True


SCHEMES = (
    Scheme("none", "no optimisation", in_place=False, sharing=False, runs=False),
    Scheme("in-place", "in-place", sharing=False, runs=False),
    Scheme("sharing", "sharing", in_place=False),
    Scheme("in-place-sharing", "in-place and sharing", runs=False),
    Scheme("sqrt", "√n checkpointing", planner="chen-sqrt"),
    Scheme("selective", "selective checkpointing", planner="chen-selective"),
    Scheme("auto", "auto, least peak", planner="auto"),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a scheme comes to; `added_us` is the time of what is computed again."""

    feature_bytes: int
    added_us: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step that was run took beyond what was there before it, weights' gradients included.

    `forecast_bytes` is what the simulator had said.
    """

    peak_bytes: int
    forecast_bytes: int


@dataclass(frozen=True)
class SizeResult:
    """All schemes on a model of one size, by their names. `size` is None where it has only one."""

    size: int | None
    n_ops: int
    step_us: float
    estimates: Mapping[str, Estimate]
    measured: Mapping[str, Measured]


@dataclass(frozen=True)
class Study:
    """All schemes on a model in several sizes, from the smallest up.

    `size_name` says what a size is, a depth for one; it is "" where there is only one.
    """

    model: str
    title: str
    size_name: str
    batch: int | None
    precision: str
    device: str
    is_measured: bool  # the times of ops, and not estimated
    results: tuple[SizeResult, ...]

    @property
    def growths(self) -> dict[str, float]:
        """The exponent with which each scheme's feature maps grow over the two largest sizes."""
        last = self.results[-2:]
        sizes = [result.size for result in last if result.size is not None]
        if len(sizes) < 2:
            return {}
        return {
            scheme.name: growth(sizes, [each.estimates[scheme.name].feature_bytes for each in last])
            for scheme in SCHEMES
        }


def estimate(
    graph: StepGraph,
    profile: Profile,
    tell: Callable[[str], None] = lambda label: None,
    schemes: Sequence[Scheme] = SCHEMES,
) -> dict[str, Estimate]:
    """The bytes of a step's feature maps under each scheme. `tell` hears which one is next."""
    whole = _with_roles(graph)
    features, costs = _features_alone(whole, profile)
    found = {}
    for scheme in schemes:
        tell(scheme.label)
        plan = least_plan(features, costs, scheme.planner) if scheme.planner else None
        options = {"in_place": scheme.in_place, "sharing": scheme.sharing}
        arena = layout(whole, plan, roles=FEATURE_ROLES, **options)
        found[scheme.name] = Estimate(arena.arena_bytes, plan.recompute_us if plan else 0.0)
    return found


def least_plan(graph: StepGraph, profile: Profile, planner: str) -> Plan:
    """The plan of least peak that a planner finds."""
    make = find_planner(planner)
    try:
        plan = make(graph, profile, 1)  # no step does with one byte
    except InfeasibleBudget as error:
        plan = make(graph, profile, error.least_peak_bytes)
    plan.check(graph)
    return plan


def forecast_bytes(graph: StepGraph, profile: Profile, plan: Plan | None = None) -> int:
    """The most that a step takes beyond what was there before it, weights' gradients included."""
    trace = simulate(graph, profile, plan)
    there = trace.sizes_bytes[trace.liveness.is_resident].sum()
    return trace.peak_bytes - trace.overhead_bytes - int(there)


def growth(sizes: Sequence[int], nbytes: Sequence[int]) -> float:
    """The exponent with which bytes grow with size: 1 if twice the size takes twice the bytes.

    >>> round(growth([1, 4, 16], [10, 20, 40]), 3)
    0.5
    """
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(nbytes, 1)), 1)[0])


def _with_roles(graph: StepGraph) -> StepGraph:
    """The same step, where all that belongs to the weights has the role of their gradients."""
    storage_of = [value.storage for value in graph.values]
    made_in: dict[int, Phase] = {}
    for op in graph.ops:
        for value in op.outputs:
            made_in.setdefault(storage_of[value], op.phase)
    of_weights = {s.index for s in graph.storages if s.role is Role.GRAD}
    of_weights |= {storage for storage, phase in made_in.items() if phase is Phase.OPTIMIZER}
    for op in reversed(graph.ops):
        results = {storage_of[value] for value in (*op.outputs, *op.mutates)}
        if op.phase is Phase.BACKWARD and op.target in _SUMMING and results & of_weights:
            parts = {storage_of[value] for value in op.inputs}
            of_weights |= {p for p in parts if graph.storages[p].role is Role.GRAD_MAP}
    storages = (
        replace(storage, role=Role.GRAD)
        if storage.index in of_weights and not storage.role.is_resident
        else storage
        for storage in graph.storages
    )
    return replace(graph, storages=tuple(storages))


def _features_alone(graph: StepGraph, profile: Profile) -> tuple[StepGraph, Profile]:
    """The step as it would be if gradients of weights and ops' scratch space took no memory.

    A planner looks at all of a step's memory, and where gradients fill it up at the end of the
    backward pass, would see no use in saving feature maps before.
    """
    storages = (
        replace(storage, nbytes=0) if storage.role is Role.GRAD else storage
        for storage in graph.storages
    )
    features = replace(graph, storages=tuple(storages))
    costs = tuple(replace(cost, workspace_bytes=0) for cost in profile.costs)
    return features, replace(profile, costs=costs, fingerprint=features.fingerprint)
