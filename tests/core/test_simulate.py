"""The simulator: timelines worked out by hand, and a second simulator that counts naively."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hand_made import BACKWARD, FORWARD, LOSS, UPDATE, Call, profile_of, step, storages
from support.tiny_step import MIB, OVERHEAD_BYTES, PEAK_BYTES, tiny_step
from torch import nn

import rekindle
from rekindle.core.cost.allocator import allocated_bytes
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Phase, Role, StepGraph
from rekindle.core.graph.simulate import ROLES, Trace, main_device, simulate
from rekindle.errors import ProfileError

# Values are numbered as their storages.
GRAPH = step(
    storages(
        (100, Role.INPUT),
        (1000, Role.PARAM),
        (10, Role.TEMP),
        (20, Role.ACTIVATION),
        (3, Role.OUTPUT),
        (40, Role.GRAD_MAP),
        (1000, Role.GRAD),
    ),
    entering=[0, 1],
    calls=[
        Call(FORWARD, [0, 1], [2]),
        Call(FORWARD, [2], [3]),
        Call(LOSS, [3], [4]),
        Call(BACKWARD, [3], [5]),
        Call(BACKWARD, [0, 5], [6]),
        Call(UPDATE, [1, 6], [], [1]),
    ],
    outputs=[4],
)


def row(trace: Trace, role: Role) -> list[int]:
    return [int(n) for n in trace.by_role[ROLES.index(role)]]


def test_every_position_by_hand() -> None:
    """An op's outputs and inputs are live together; then dead inputs are freed."""
    trace = simulate(GRAPH, profile_of(GRAPH, times_us=[1, 2, 3, 4, 5, 6]))
    assert trace.live_bytes.tolist() == [1110, 1130, 1123, 1163, 2143, 2103]
    assert row(trace, Role.INPUT) == 6 * [100]
    assert row(trace, Role.PARAM) == 6 * [1000]
    assert row(trace, Role.TEMP) == [10, 10, 0, 0, 0, 0]
    assert row(trace, Role.ACTIVATION) == [0, 20, 20, 20, 0, 0]
    assert row(trace, Role.OUTPUT) == [0, 0, 3, 3, 3, 3]
    assert row(trace, Role.GRAD_MAP) == [0, 0, 0, 40, 40, 0]
    assert row(trace, Role.GRAD) == [0, 0, 0, 0, 1000, 1000]
    assert (trace.peak_bytes, trace.peak_op) == (2143, 4)
    assert trace.starts_us.tolist() == [0, 1, 3, 6, 10, 15, 21]
    assert trace.step_us == 21


def test_what_is_alive() -> None:
    """Largest first; of two alike, the one that comes first in the graph."""
    trace = simulate(GRAPH, profile_of(GRAPH))
    alive = [trace.alive_at(position) for position in range(6)]
    assert alive == [
        [1, 0, 2],
        [1, 0, 3, 2],
        [1, 0, 3, 4],
        [1, 0, 5, 3, 4],
        [1, 6, 0, 5, 4],
        [1, 6, 0, 4],
    ]
    for position, indices in enumerate(alive):
        assert sum(GRAPH.storages[i].nbytes for i in indices) == trace.live_bytes[position]


def test_workspace_and_overhead() -> None:
    """A workspace is live while its op runs and counts as temporary; the overhead always is."""
    trace = simulate(GRAPH, profile_of(GRAPH, workspaces={1: 7000, 3: 1}, overhead_bytes=50_000))
    assert trace.live_bytes.tolist() == [51110, 58130, 51123, 51164, 52143, 52103]
    assert row(trace, Role.TEMP) == [10, 7010, 0, 1, 0, 0]
    assert (trace.peak_bytes, trace.peak_op) == (58130, 1)
    assert trace.overhead_bytes == 50_000
    assert sum(trace.peak_by_role().values()) == 58130 - 50_000
    assert trace.peak_by_role()[Role.TEMP] == 7010


def test_the_tiny_step() -> None:
    _, _, trace = tiny_step()
    resident = 2 * MIB + OVERHEAD_BYTES
    assert (trace.live_bytes - resident).tolist() == [
        MIB + MIB // 2,
        MIB + 4 * MIB,
        4 * MIB + 4,
        4 * MIB + 8,
        4 * MIB + MIB + 4,
        MIB + MIB + 4,
        MIB + 4,
    ]
    # tie between op 1 and op 4 is broken by the loss's four bytes
    assert (trace.peak_bytes, trace.peak_op) == (PEAK_BYTES, 4)


def test_the_first_of_two_peaks() -> None:
    graph = step(
        storages((8, Role.PARAM), (8, Role.TEMP), (8, Role.TEMP)),
        entering=[0],
        calls=[Call(FORWARD, [0], [1]), Call(FORWARD, [0], [2])],
    )
    trace = simulate(graph, profile_of(graph))
    assert trace.live_bytes.tolist() == [16, 16]
    assert trace.peak_op == 0


def test_views_and_in_place_ops_add_nothing() -> None:
    graph = step(
        storages((8, Role.PARAM), (16, Role.TEMP)),
        entering=[0, 0],  # a tied weight: two values, one storage
        calls=[
            Call(FORWARD, [0, 1], [1]),
            Call(FORWARD, [2], [1]),
            Call(FORWARD, [3], [], [3]),
            Call(FORWARD, [0], []),
        ],
    )
    assert simulate(graph, profile_of(graph)).live_bytes.tolist() == [24, 24, 24, 8]


def test_what_is_held_counts() -> None:
    held = storages((8, Role.PARAM), (16, Role.TEMP), (32, Role.TEMP), held_until={1: 2, 2: 1})
    calls = [Call(FORWARD, [0], [1]), *[Call(FORWARD, [0], []) for _ in range(3)]]
    calls[1] = Call(FORWARD, [0], [2])
    graph = step(held, [0], calls)
    trace = simulate(graph, profile_of(graph))
    assert trace.live_bytes.tolist() == [24, 56, 24, 8]
    assert trace.alive_at(2) == [1, 0]


def test_a_storage_nobody_touches_is_not_there() -> None:
    """Calls with unused results are removed, and variables that held their results hold nothing."""
    graph = step(
        storages((8, Role.PARAM), (512, Role.TEMP), (512, Role.TEMP), held_until={2: 1}),
        entering=[0],
        calls=[Call(FORWARD, [0], []) for _ in range(4)],
    )
    trace = simulate(graph, profile_of(graph))
    assert trace.live_bytes.tolist() == [8, 8, 8, 8]
    assert [trace.alive_at(position) for position in range(4)] == 4 * [[0]]


def test_a_step_that_computes_what_nobody_uses() -> None:
    """A metric that is neither returned nor printed: the bytes never go below what is resident."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        out = model(batch)
        unused = (out.detach().repeat(50, 1) * 2).sum()
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        del unused

    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = rekindle.capture(train_step, model, optimizer, torch.ones(16, 16)).graph
    trace = rekindle.simulate(graph, profile_of(graph))
    assert trace.live_bytes.min() >= 4 * (16 * 16 + 16 + 16 * 16)
    assert trace.by_role.min() >= 0


def test_only_the_parameters_device_counts() -> None:
    """The batch lies on the host here, and so does a scalar that an op makes there."""
    graph = step(
        storages(
            (100, Role.INPUT),
            (1000, Role.PARAM),
            (30, Role.TEMP),
            (4, Role.TEMP),
            device={1: "cuda:0", 2: "cuda:0"},
        ),
        entering=[0, 1],
        calls=[Call(FORWARD, [0, 1], [2]), Call(FORWARD, [2], [3])],
    )
    assert main_device(graph) == "cuda:0"
    trace = simulate(graph, profile_of(graph, allocator="cuda"))
    assert trace.live_bytes.tolist() == [1024 + 512, 1024 + 512]
    assert trace.alive_at(1) == [1, 2]
    assert row(trace, Role.INPUT) == [0, 0]


def test_a_graph_without_parameters() -> None:
    graph = step(storages((8, Role.INPUT), device={0: "cuda:1"}), [0], [Call(FORWARD, [0], [])])
    assert main_device(graph) == "cuda:1"
    assert simulate(graph, profile_of(graph)).peak_bytes == 8


@pytest.mark.parametrize(
    ("requested", "allocated"),
    [
        (0, 0),
        (1, 512),
        (512, 512),
        (513, 1024),
        (3 * MIB + 1, 3 * MIB + 512),
        (10 * MIB - 1, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512),  # 2 MiB - 512 of the segment would be left: split off
        (11 * MIB - 512, 11 * MIB - 512),  # 1 MiB + 512 would be left: still split off
        (11 * MIB, 12 * MIB),  # 1 MiB would be left: not worth it
        (12 * MIB - 1, 12 * MIB),
        (12 * MIB, 12 * MIB),
        (9 * MIB, 9 * MIB),  # too small for a segment of its own
    ],
)
def test_what_the_cuda_allocator_makes_of_a_request(requested: int, allocated: int) -> None:
    assert int(allocated_bytes(np.array([requested]), "cuda")[0]) == allocated
    assert int(allocated_bytes(np.array([requested]), "exact")[0]) == requested
    graph = step(storages((requested, Role.PARAM)), [0], [Call(FORWARD, [0], [])])
    trace = simulate(graph, profile_of(graph, allocator="cuda"))
    assert trace.peak_bytes == allocated


def test_what_a_step_makes_in_an_arena_is_not_rounded_to_segments() -> None:
    """Resident storages are counted as CUDA's allocator rounds them."""
    sizes = ((11 * MIB, Role.PARAM), (11 * MIB, Role.ACTIVATION), (1, Role.TEMP))
    graph = step(
        storages(*sizes),
        entering=[0],
        calls=[Call(FORWARD, [0], [1]), Call(FORWARD, [1], [2])],
    )
    trace = simulate(graph, profile_of(graph, allocator="arena"))
    assert trace.live_bytes.tolist() == [(12 + 11) * MIB, (12 + 11) * MIB + 512]
    assert simulate(graph, profile_of(graph, allocator="cuda")).peak_bytes == 24 * MIB + 512


def test_an_unknown_allocator() -> None:
    with pytest.raises(ValueError, match=r"unknown allocator 'heap': one of arena, cuda, exact"):
        allocated_bytes(np.array([1]), "heap")


def test_a_profile_of_another_step() -> None:
    other = step(storages((8, Role.PARAM)), [0], [Call(FORWARD, [0], [])])
    with pytest.raises(ProfileError, match="another step"):
        simulate(GRAPH, profile_of(other))


# A second simulator


def naive_live_bytes(graph: StepGraph, profile: Profile) -> list[dict[Role, int]]:
    """The live bytes at each position, by role, storage by storage."""
    before = {value.storage for value in graph.values if value.producer is None}

    def size(index: int) -> int:
        nbytes = graph.storages[index].nbytes
        if graph.storages[index].device != "cuda:0":
            return 0
        if profile.allocator == "exact":
            return nbytes
        while nbytes % 512:
            nbytes += 1
        if profile.allocator == "arena" and index not in before:
            return nbytes
        if nbytes >= 10 * 2**20:
            whole = nbytes
            while whole % 2**21:
                whole += 512
            if whole - nbytes <= 2**20:
                return whole
        return nbytes

    def touched(position: int) -> set[int]:
        op = graph.ops[position]
        return {graph.values[v].storage for v in (*op.inputs, *op.outputs, *op.mutates)}

    alive = {index: size(index) for index in before}
    stay = before | {graph.values[value].storage for value in graph.outputs}
    found = []
    for position in range(len(graph.ops)):
        alive.update((index, size(index)) for index in touched(position))
        now = dict.fromkeys(Role, 0)
        for index, nbytes in alive.items():
            now[graph.storages[index].role] += nbytes
        now[Role.TEMP] += profile.costs[position].workspace_bytes
        found.append(now)
        later = range(position + 1, len(graph.ops))
        for index in list(alive):
            storage = graph.storages[index]
            is_grad_in_use = storage.role is Role.GRAD and any(
                graph.ops[p].phase is Phase.OPTIMIZER for p in later
            )
            is_used = any(index in touched(p) for p in later)
            if not (index in stay or is_used or is_grad_in_use or storage.held_until > position):
                del alive[index]
    return found


@st.composite
def graphs(draw: st.DrawFn) -> StepGraph:
    """Small steps with views, in-place ops, held storages and a second device.

    The first storage is a parameter on the main device.
    """
    n_entering = draw(st.integers(1, 3))
    n_ops = draw(st.integers(1, 10))
    phases = sorted(
        draw(st.lists(st.sampled_from(Phase), min_size=n_ops, max_size=n_ops)),
        key=list(Phase).index,
    )
    storage_of = list(range(n_entering))
    n_storages = n_entering
    calls = []
    for phase in phases:
        some = st.lists(st.integers(0, len(storage_of) - 1), max_size=3, unique=True)
        reads = draw(some)
        makes = []
        for _ in range(draw(st.integers(0, 2))):
            if reads and draw(st.booleans()):
                makes.append(storage_of[reads[0]])
            else:
                makes.append(n_storages)
                n_storages += 1
        calls.append(Call(phase, reads, makes, draw(some) if draw(st.booleans()) else ()))
        storage_of += makes
    sizes = st.one_of(st.integers(0, 4000), st.integers(9 * MIB, 15 * MIB))
    pairs = [(draw(sizes), draw(st.sampled_from(Role))) for _ in range(n_storages)]
    pairs[0] = (pairs[0][0], Role.PARAM)
    places = st.sampled_from(["cuda:0", "cuda:0", "cuda:0", "cpu"])
    return step(
        storages(
            *pairs,
            device={0: "cuda:0", **{i: draw(places) for i in range(1, n_storages)}},
            held_until={i: draw(st.integers(-1, n_ops - 1)) for i in range(n_storages)},
        ),
        entering=range(n_entering),
        calls=calls,
        outputs=draw(st.lists(st.integers(0, len(storage_of) - 1), max_size=2, unique=True)),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(graphs(), st.sampled_from(["arena", "cuda", "exact"]), st.integers(0, 5000), st.data())
def test_random_steps_against_the_naive_simulator(
    graph: StepGraph, allocator: str, overhead_bytes: int, data: st.DataObject
) -> None:
    workspaces = {i: data.draw(st.integers(0, 5000)) for i in range(len(graph.ops))}
    profile = profile_of(
        graph, workspaces=workspaces, allocator=allocator, overhead_bytes=overhead_bytes
    )
    trace = simulate(graph, profile)
    expected = naive_live_bytes(graph, profile)
    for position, by_role in enumerate(expected):
        found = dict(zip(ROLES, trace.by_role[:, position].tolist(), strict=True))
        assert found == by_role
        assert trace.live_bytes[position] == sum(by_role.values()) + overhead_bytes
        alive = trace.alive_at(position)
        total = sum(int(trace.sizes_bytes[i]) for i in alive) + workspaces[position]
        assert total == sum(by_role.values())
    totals = [sum(by_role.values()) + overhead_bytes for by_role in expected]
    assert trace.peak_bytes == max(totals)
    assert trace.peak_op == totals.index(max(totals))
    assert trace.peak_by_role() == expected[trace.peak_op]
