"""What a graph, a profile and a plan from a file must satisfy; all other code relies on it.

Each function raises ValueError with one line that says what is wrong, and where. Types are checked
exactly: in JSON, a list may stand where a number should.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rekindle.core.checks import MAX_BYTES, MAX_COUNT, number, numbers, real, require, text
from rekindle.core.cost.allocator import ALLOCATORS
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Op, StepGraph
from rekindle.core.graph.schedule import Compute, Plan

MAX_DIMS = 64
MAX_FINGERPRINT = 64


def check_graph(graph: StepGraph) -> None:
    """Raise unless indices exist, every value is made once, and none is read before it is made."""
    n_ops, n_values, n_storages = len(graph.ops), len(graph.values), len(graph.storages)
    for storage in graph.storages:
        what = f"storage {storage.index}"
        number(storage.nbytes, 0, MAX_BYTES, f"the bytes of {what}")
        text(storage.device, f"the device of {what}")
        number(storage.held_until, -1, n_ops - 1, f"the last holder of {what}")
    require(sum(s.nbytes for s in graph.storages) <= MAX_COUNT, "its storages are too large")
    for value in graph.values:
        what = f"value {value.index}"
        text(value.name, f"the name of {what}")
        text(value.dtype, f"the dtype of {what}")
        number(value.storage, 0, n_storages - 1, f"the storage of {what}")
        numbers(value.shape, 0, MAX_BYTES, f"the shape of {what}")
        require(len(value.shape) <= MAX_DIMS, f"{what} has too many dimensions")
        require(math.prod(value.shape) <= MAX_COUNT, f"{what} is too large")
        if value.producer is not None:
            number(value.producer, 0, n_ops - 1, f"the producer of {what}")
    for op in graph.ops:
        _check_op(op, n_values)
    numbers(graph.outputs, 0, n_values - 1, "its outputs")
    _check_order(graph)


def _check_op(op: Op, n_values: int) -> None:
    what = f"op {op.index}"
    for name in (op.name, op.target, op.copy_target, op.source.module, op.source.filename):
        text(name, f"a name of {what}")
    for values in (op.inputs, op.outputs, op.mutates, op.may_overwrite):
        numbers(values, 0, n_values - 1, f"the values of {what}")
    for member in op.members:
        text(member, f"a member of {what}")
    number(op.flops, 0, MAX_COUNT, f"the FLOPs of {what}")
    number(op.source.lineno, 0, MAX_COUNT, f"the line of {what}")
    require(set(op.may_overwrite) <= set(op.inputs), f"{what} overwrites what it does not read")
    require(not op.copy_target or bool(op.outputs), f"{what} has no result to compute again")


def _check_order(graph: StepGraph) -> None:
    """Raise unless ops read what entered the step or earlier ops made."""
    names = {op.name for op in graph.ops}
    require(len(names) == len(graph.ops), "two of its ops have the same name")
    made_by: dict[int, int] = {}
    for op in graph.ops:
        for value in op.outputs:
            require(value not in made_by, f"value {value} is made twice")
            made_by[value] = op.index
    for each in graph.values:
        is_right = made_by.get(each.index) == each.producer
        require(is_right, f"value {each.index} is not made by the op that it names")
    for op in graph.ops:
        for value in (*op.inputs, *op.mutates):
            is_made = made_by.get(value, -1) < op.index or value in op.outputs
            require(is_made, f"op {op.index} uses value {value} before it is made")


def check_profile(profile: Profile) -> None:
    """Raise unless all costs are possible ones."""
    for each in (profile.device, profile.method):
        text(each, "a text of the profile")
    _fingerprint(profile.fingerprint)
    require(profile.allocator in ALLOCATORS, "its allocator is unknown")
    number(profile.overhead_bytes, 0, MAX_BYTES, "its overhead")
    real(profile.transfer_latency_us, "its transfer latency")
    real(profile.to_host_bytes_per_us, "its transfer rate")
    real(profile.to_device_bytes_per_us, "its transfer rate")
    _texts_by_name(profile.versions, "its versions")
    for index, cost in enumerate(profile.costs):
        real(cost.time_us, f"the time of op {index}")
        number(cost.workspace_bytes, 0, MAX_BYTES, f"the workspace of op {index}")
        if cost.copy_us is not None:
            real(cost.copy_us, f"the time to compute op {index} again")


def check_plan(plan: Plan) -> None:
    """Raise unless a plan's numbers are possible ones; `Plan.check` holds it to its graph."""
    text(plan.planner, "the name of its planner")
    _fingerprint(plan.fingerprint)
    number(plan.budget_bytes, 1, MAX_COUNT, "its budget")
    number(plan.peak_bytes, 0, MAX_BYTES, "its peak")
    real(plan.recompute_us, "its time of recomputation")
    if plan.bound_us is not None:
        real(plan.bound_us, "its bound")
    for step in plan.schedule:
        index = step.op if isinstance(step, Compute) else step.storage
        number(index, 0, MAX_BYTES, "an instruction of its schedule")
        number(step.copy, 0, MAX_BYTES, "a copy in its schedule")
    for decision in plan.decisions:
        number(decision.storage, 0, MAX_BYTES, "the storage of a decision")
        number(decision.freed_bytes, 0, MAX_BYTES, "the bytes of a decision")
        real(decision.added_us, "the time of a decision")
        text(decision.reason, "the reason of a decision")


def check_about(about: Any) -> None:
    """Raise unless the description of a profile is text and numbers by name."""
    require(isinstance(about, dict), "its description is no object")
    for name, value in about.items():
        text(name, "a name in its description")
        if isinstance(value, str):
            text(value, "a text in its description")
        elif isinstance(value, int) and not isinstance(value, bool):
            number(value, -MAX_COUNT, MAX_COUNT, "a number in its description")
        else:
            is_plain = value is None or isinstance(value, (bool, float))
            require(is_plain, "its description holds more than text and numbers")


def _fingerprint(value: Any) -> None:
    text(value, "its fingerprint")
    require(value.isalnum() and len(value) <= MAX_FINGERPRINT, "its fingerprint is none")


def _texts_by_name(values: Any, what: str) -> None:
    require(isinstance(values, Mapping), f"{what} are no object")
    for name, value in values.items():
        text(name, f"a name in {what}")
        text(value, f"a text in {what}")
