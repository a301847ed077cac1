"""Graphs, profiles and plans to and from JSON.

A saved profile is one gzip-compressed JSON file with graph and profile together, so that a step
measured on a GPU can be planned anywhere. A saved plan holds its graph's fingerprint, not the
graph.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.files import compressed, in_one_line, read_json, write_at_once
from rekindle.core.graph.graph import Op, Phase, Role, Source, StepGraph, Storage, Value
from rekindle.core.graph.schedule import Compute, Decision, Free, Instruction, Plan, Schedule
from rekindle.core.graph.validate import check_about, check_graph, check_plan, check_profile
from rekindle.errors import PlanError, ProfileError, RekindleError

SCHEMA = 1
SAVED_SUFFIX = ".json.gz"


class SavedProfile(NamedTuple):
    """The content of a saved profile."""

    graph: StepGraph
    profile: Profile
    about: dict[str, Any]  # model, batch, precision, …


def graph_to_json(graph: StepGraph) -> dict[str, Any]:
    """A graph as plain lists; targets and sources are written once and referred to by number."""
    sources: dict[tuple[str, str, int], int] = {}
    targets: dict[str, int] = {}

    def source_number(source: Source) -> int:
        row = (source.module, _portable(source.filename), source.lineno)
        return sources.setdefault(row, len(sources))

    def target_number(target: str) -> int:
        return targets.setdefault(target, len(targets))

    return {
        "storages": [[s.nbytes, s.role.name, s.device, s.held_until] for s in graph.storages],
        "values": [[v.name, v.storage, list(v.shape), v.dtype, v.producer] for v in graph.values],
        "ops": [
            [
                op.name,
                target_number(op.target),
                op.phase.name,
                list(op.inputs),
                list(op.outputs),
                list(op.mutates),
                int(op.is_random),
                int(op.is_view),
                op.flops,
                source_number(op.source),
                *_rest(target_number(op.copy_target) if op.copy_target else None, op),
            ]
            for op in graph.ops
        ],
        "outputs": list(graph.outputs),
        "targets": list(targets),
        "sources": [list(source) for source in sources],
    }


def graph_from_json(data: dict[str, Any]) -> StepGraph:
    """The graph that `graph_to_json` wrote; ValueError, KeyError or TypeError if it is none."""
    sources = [Source(*source) for source in data["sources"]]
    targets = data["targets"]
    graph = StepGraph(
        ops=tuple(_op(index, row, targets, sources) for index, row in enumerate(data["ops"])),
        values=tuple(
            Value(index, name, storage, tuple(shape), dtype, producer)
            for index, (name, storage, shape, dtype, producer) in enumerate(data["values"])
        ),
        storages=tuple(
            Storage(index, nbytes, Role[role], device, held_until)
            for index, (nbytes, role, device, held_until) in enumerate(data["storages"])
        ),
        outputs=tuple(data["outputs"]),
    )
    check_graph(graph)
    return graph


def _op(index: int, row: list[Any], targets: list[str], sources: list[Source]) -> Op:
    name, target, phase, inputs, outputs, mutates, is_random, is_view, flops, source, *rest = row
    return Op(
        index=index,
        name=name,
        target=_item(targets, target),
        phase=Phase[phase],
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        mutates=tuple(mutates),
        is_random=bool(is_random),
        is_view=bool(is_view),
        flops=flops,
        source=_item(sources, source),
        copy_target=_item(targets, rest[0]) if rest and rest[0] is not None else "",
        may_overwrite=tuple(rest[1]) if len(rest) > 1 else (),
        members=tuple(rest[2]) if len(rest) > 2 else (),
    )


def _item(items: list[Any], number: int) -> Any:
    if number < 0:
        raise ValueError("a number of a target or source is negative")
    return items[number]


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """A profile as plain lists."""
    return {
        "device": profile.device,
        "fingerprint": profile.fingerprint,
        "method": profile.method,
        "allocator": profile.allocator,
        "overhead_bytes": profile.overhead_bytes,
        "transfer_latency_us": profile.transfer_latency_us,
        "to_host_bytes_per_us": profile.to_host_bytes_per_us,
        "to_device_bytes_per_us": profile.to_device_bytes_per_us,
        "versions": dict(profile.versions),
        "costs": [
            [
                round(cost.time_us, 3),
                cost.workspace_bytes,
                int(cost.is_measured),
                *([] if cost.copy_us is None else [round(cost.copy_us, 3)]),
            ]
            for cost in profile.costs
        ],
    }


def profile_from_json(data: dict[str, Any]) -> Profile:
    """The profile that `profile_to_json` wrote."""
    fields = dict(data)
    costs = tuple(
        OpCost(us, workspace, bool(measured), *copy_us)
        for us, workspace, measured, *copy_us in fields.pop("costs")
    )
    profile = Profile(costs=costs, **fields)
    check_profile(profile)
    return profile


def save_profile(path: Path, graph: StepGraph, profile: Profile, about: dict[str, Any]) -> None:
    """Write graph and profile into one file."""
    profile.check(graph)
    data = {
        "schema": SCHEMA,
        "about": about,
        "graph": graph_to_json(graph),
        "profile": profile_to_json(profile),
    }
    _write(path, data, is_compressed=True)


def load_profile(path: Path) -> SavedProfile:
    """Read what `save_profile` wrote; a damaged or unrelated file raises ProfileError."""
    how = "rekindle profile MODEL --save FILE"
    with _read(path, "profile", ProfileError, how) as data:
        check_about(data["about"])
        graph = graph_from_json(data["graph"])
        profile = profile_from_json(data["profile"])
        if profile.fingerprint != graph.fingerprint or len(profile.costs) != len(graph.ops):
            raise ValueError("its profile is for another graph")
        return SavedProfile(graph, profile, data["about"])


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain lists; two numbers per instruction, as `_numbers` writes them."""
    return {
        "planner": plan.planner,
        "fingerprint": plan.fingerprint,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "recompute_us": plan.recompute_us,
        "bound_us": plan.bound_us,
        "schedule": _numbers(plan.schedule),
        "decisions": [
            [d.storage, int(d.is_kept), d.freed_bytes, d.added_us, d.reason] for d in plan.decisions
        ],
    }


def plan_from_json(data: dict[str, Any]) -> Plan:
    """The plan that `plan_to_json` wrote."""
    plan = Plan(
        planner=data["planner"],
        fingerprint=data["fingerprint"],
        budget_bytes=data["budget_bytes"],
        schedule=_instructions(data["schedule"]),
        decisions=tuple(
            Decision(storage, bool(is_kept), freed, added_us, reason)
            for storage, is_kept, freed, added_us, reason in data["decisions"]
        ),
        peak_bytes=data["peak_bytes"],
        recompute_us=data["recompute_us"],
        bound_us=data["bound_us"],
    )
    check_plan(plan)
    return plan


def save_plan(path: str | Path, plan: Plan) -> None:
    """Write a plan into a file, compressed if its name ends in .gz."""
    path = Path(path)
    data = {"schema": SCHEMA, "plan": plan_to_json(plan)}
    _write(path, data, is_compressed=path.suffix == ".gz")


def load_plan(path: str | Path) -> Plan:
    """Read what `save_plan` wrote; `Plan.check(graph)` raises if it is for another graph."""
    path, how = Path(path), "rekindle plan MODEL --budget B --save FILE"
    with _read(path, "plan", PlanError, how) as data:
        return plan_from_json(data["plan"])


@contextmanager
def _read(path: Path, what: str, error: type[RekindleError], how: str) -> Iterator[dict[str, Any]]:
    """The content of a file; if it is missing or damaged, the error says how to save it."""
    try:
        data = read_json(path)
        if not isinstance(data, dict) or "schema" not in data:
            raise ValueError("it has no schema")
        if data["schema"] != SCHEMA:
            raise error(
                f"{path} has schema {in_one_line(data['schema'])}, and this version reads "
                f"{SCHEMA}: save the {what} again with {how}."
            )
        yield data
    except FileNotFoundError:
        raise error(f"there is no file {path}") from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as cause:
        raise error(
            f"{path} is not a saved {what}, or is damaged ({in_one_line(cause)}): save it again "
            f"with {how}."
        ) from cause


def _rest(copy_target: int | None, op: Op) -> list[Any]:
    """The fields that most ops lack, at the end of their rows."""
    rest = [copy_target, list(op.may_overwrite), list(op.members)]
    while rest and not (rest[-1] or rest[-1] == 0):
        rest.pop()
    return rest


def _numbers(schedule: Schedule) -> list[int]:
    """Two numbers per instruction: the op, or -1 - storage for a free; and the copy."""
    numbers: list[int] = []
    for each in schedule:
        numbers += (each.op if isinstance(each, Compute) else -1 - each.storage, each.copy)
    return numbers


def _instructions(numbers: list[int]) -> Schedule:
    if any(type(number) is not int for number in numbers):
        raise ValueError("its schedule holds something that is not an integer")
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    made: list[Instruction] = [
        Compute(what, copy) if what >= 0 else Free(-1 - what, copy) for what, copy in pairs
    ]
    return tuple(made)


def _write(path: Path, data: dict[str, Any], *, is_compressed: bool) -> None:
    text = json.dumps(data, separators=(",", ":")).encode()
    write_at_once(path, compressed(text) if is_compressed else text)


def _portable(filename: str) -> str:
    """A source file's name without the part that is particular to this machine."""
    library = filename.rpartition("site-packages/")[2]
    parts = Path(filename).parts
    own = "/".join(part for part in parts[-2:] if part != Path(filename).anchor)
    return library if library != filename else own
