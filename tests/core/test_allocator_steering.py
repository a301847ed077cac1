"""The allocator's model, and what steers it."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.core.memory.allocator_steering import (
    APART_BYTES,
    PAGE_BYTES,
    REST_BYTES,
    ROUND_BYTES,
    Arena,
    Blocks,
    Mismatch,
    PlannedAddresses,
    Steering,
    plan_arena,
    rehearse,
    rounded,
)

MIB = 1 << 20

sizes = st.one_of(
    st.integers(2, 40).map(lambda n: n * MIB),
    st.integers(REST_BYTES + 1, 12 * MIB),
    st.just(REST_BYTES + ROUND_BYTES),
)


@st.composite
def steps(draw: st.DrawFn) -> Blocks:
    """A step of some ops, each of which asks for up to three pieces."""
    rows = []
    for position in range(draw(st.integers(1, 15))):
        for _ in range(draw(st.integers(0, 3))):
            life = draw(st.one_of(st.just(0), st.integers(0, 12)))
            rows.append((position, position + life, rounded(draw(sizes)), True))
    if draw(st.booleans()) and rows:
        rows.append((rows[-1][0] + 1, rows[-1][0] + 2, rounded(draw(sizes)), False))
    start, end, nbytes, is_steered = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Blocks(
        np.array(start, dtype=np.int64),
        np.array(end, dtype=np.int64),
        np.array(nbytes, dtype=np.int64),
        np.array(is_steered, dtype=bool),
    )


def check(arena: Arena) -> None:
    """Blocks and holes lie side by side and fill their segments; no two holes touch."""
    blocks = [(address, nbytes, False) for address, nbytes in arena.taken.items()]
    blocks += [(address, nbytes, True) for address, nbytes in arena.holes.items()]
    blocks.sort()
    for start, nbytes in arena.segments.items():
        inside = [block for block in blocks if start <= block[0] < start + nbytes]
        assert inside[0][0] == start
        assert sum(inside[-1][:2]) == start + nbytes
        for (address, size, is_hole), (following, _, is_next_hole) in pairwise(inside):
            assert address + size == following
            assert not (is_hole and is_next_hole)
    assert arena.taken_bytes == sum(arena.taken.values())


class Growing(Arena):
    """An allocator that gets a new segment where there is no room; it also counts its plugs."""

    def __init__(self, nbytes: int) -> None:
        super().__init__({0: nbytes})
        self.plugs: set[int] = set()

    def serve(self, nbytes: int) -> int:
        address = super().allocate(nbytes)
        if address is None:
            start = max(low + size for low, size in self.segments.items())  # it touches the last
            size = -(-max(nbytes, 20 * MIB) // PAGE_BYTES) * PAGE_BYTES
            self.segments[start] = size
            self._add_hole(start, size)
            address = super().allocate(nbytes)
            assert address is not None
        return address

    def allocate(self, nbytes: int) -> int:
        address = self.serve(nbytes)
        self.plugs.add(address)
        return address

    def free(self, address: int) -> None:
        super().free(address)
        self.plugs.discard(address)


@given(st.lists(st.one_of(sizes, st.integers(0, 50).map(lambda n: -n)), max_size=80))
def test_the_smallest_hole_that_fits_is_taken(events: list[int]) -> None:
    """Positive: a request; else the block to free, by its number."""
    arena = Arena({0: 100 * MIB, 100 * MIB: 60 * MIB})
    living: list[int] = []
    for event in events:
        if event <= 0:
            if living:
                arena.free(living.pop(-event % len(living)))
            check(arena)
            continue
        size = rounded(event)
        fitting = sorted((nbytes, low) for low, nbytes in arena.holes.items() if nbytes >= size)
        address = arena.allocate(event)
        if not fitting:
            assert address is None
            continue
        assert address == fitting[0][1]
        rest = fitting[0][0] - size
        assert arena.taken[address] == (size if rest > REST_BYTES else size + rest)
        living.append(address)
        check(arena)


def test_a_book_from_what_is_taken() -> None:
    arena = Arena({0: 10 * MIB, 10 * MIB: 10 * MIB}, {2 * MIB: 3 * MIB, 10 * MIB: 4 * MIB})
    assert arena.holes == {0: 2 * MIB, 5 * MIB: 5 * MIB, 14 * MIB: 6 * MIB}
    assert arena.has(19 * MIB)
    assert not arena.has(20 * MIB)
    assert not arena.place(4 * MIB, 2 * MIB)
    assert arena.place(16 * MIB, 2 * MIB)
    check(arena)


@settings(deadline=None, max_examples=60)
@given(steps())
def test_a_step_stays_in_its_arena(pieces: Blocks) -> None:
    plan = plan_arena(pieces)
    assert plan.arena_bytes >= pieces.least_bytes
    assert plan.arena_bytes % PAGE_BYTES == 0
    peak_bytes = rehearse(pieces, plan.offsets, plan.arena_bytes)
    assert peak_bytes is not None
    assert pieces.least_bytes <= peak_bytes <= plan.arena_bytes
    assert rehearse(pieces, plan.offsets, 0) is None or not len(pieces.start)


def test_pieces_go_where_they_are_wanted() -> None:
    """In any order, and although smaller holes would do."""
    start, end = np.array([0, 1, 1, 1]), np.array([3, 3, 2, 1])
    nbytes = np.array([8, 4, 16, 6]) * MIB
    pieces = Blocks(start, end, nbytes, np.ones(4, dtype=bool))
    offsets = np.array([40, 20, 60, 0]) * MIB
    for order in ([1, 2, 3], [3, 2, 1], [2, 3, 1]):
        arena = Arena({0: 100 * MIB})
        steering = Steering(Arena({0: 100 * MIB}), arena, PlannedAddresses(pieces, offsets))
        for asked in ([0], order):
            steering.arrange(asked)
            for piece in asked:
                address = arena.allocate(int(nbytes[piece]))
                assert address == offsets[piece]
                steering.record_allocation(address, int(nbytes[piece]))
        steering.open_all()
        assert steering.plugged_bytes == 0
        assert arena.taken == {int(o): int(n) for o, n in zip(offsets, nbytes, strict=True)}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_pieces_of_one_size_go_where_they_are_wanted(order: tuple[int, ...]) -> None:
    """The allocator would fill the lowest hole first."""
    once, nbytes = np.zeros(3, dtype=np.int64), np.full(3, 8 * MIB)
    offsets = np.array([0, 20, 40]) * MIB
    arena = Arena({0: 60 * MIB})
    wishes = PlannedAddresses(Blocks(once, once, nbytes, np.ones(3, dtype=bool)), offsets)
    steering = Steering(Arena({0: 60 * MIB}), arena, wishes)
    steering.arrange(order)
    assert [arena.allocate(8 * MIB) for _ in order] == [offsets[piece] for piece in order]


def test_larger_holes_are_not_taken_for_others() -> None:
    """There is no room for a hole that does not touch the next: then all are as they were."""
    once, nbytes = np.zeros(3, dtype=np.int64), np.array([8, 8, 4]) * MIB
    offsets = np.array([20 * MIB, 0, 8 * MIB + APART_BYTES])
    arena = Arena({0: 60 * MIB})
    wishes = PlannedAddresses(Blocks(once, once, nbytes, np.ones(3, dtype=bool)), offsets)
    steering = Steering(Arena({0: 60 * MIB}), arena, wishes)
    steering.arrange([0, 1, 2])
    assert [arena.allocate(int(each)) for each in nbytes] == [0, 20 * MIB, offsets[2]]


@pytest.mark.parametrize("twins", [[9, 1], [1, 9]])
def test_there_is_room_for_larger_holes(twins: list[int]) -> None:
    """A later piece needs the memory of the one that is freed first, and more."""
    start, end = np.array([0, 1, 1, 3]), np.array([9, *twins, 4])
    pieces = Blocks(start, end, np.array([16, 8, 8, 24]) * MIB, np.ones(4, dtype=bool))
    assert plan_arena(pieces).arena_bytes <= pieces.least_bytes + PAGE_BYTES


def test_a_piece_that_cannot_have_its_place_leaves_others_theirs() -> None:
    nbytes = np.array([8, 8, 8]) * MIB
    pieces = Blocks(np.array([0, 1, 2]), np.array([5, 5, 5]), nbytes, np.ones(3, dtype=bool))
    offsets = np.array([0, 8, 16]) * MIB
    arena = Arena({0: 32 * MIB})
    book = Arena({0: 32 * MIB})
    for each in (arena, book):
        assert each.place(10 * MIB, 2 * MIB)  # an unforeseen request
    steering = Steering(book, arena, PlannedAddresses(pieces, offsets))
    found = []
    for piece in range(3):
        steering.arrange([piece])
        address = arena.allocate(8 * MIB)
        assert address is not None
        steering.record_allocation(address, 8 * MIB)
        found.append(address // MIB)
    assert found == [0, 24, 16]


def test_an_allocator_that_does_something_else_is_noticed() -> None:
    pieces = Blocks(*(np.array([n]) for n in (0, 0, 4 * MIB)), np.array([True]))
    wishes = PlannedAddresses(pieces, np.array([8 * MIB]))
    steering = Steering(Arena({0: 64 * MIB}), Arena({0: 64 * MIB}, {0: 32 * MIB}), wishes)
    with pytest.raises(Mismatch):
        steering.arrange([0])
    steering = Steering(Arena({0: 64 * MIB}), Arena({0: 64 * MIB}), wishes)
    with pytest.raises(Mismatch):
        steering.record_allocation(70 * MIB, 4 * MIB)


@settings(deadline=None, max_examples=60)
@given(steps(), st.randoms(use_true_random=False), st.sampled_from([1.0, 0.8, 1.3]))
def test_ops_that_do_not_behave(pieces: Blocks, chance: object, scale: float) -> None:
    """Temporaries first, blocks that stay, any order, an arena of another size: all is booked."""
    random = chance.random  # type: ignore[attr-defined]
    plan = plan_arena(pieces)
    arena_bytes = -(-int(plan.arena_bytes * scale) // PAGE_BYTES) * PAGE_BYTES
    real = Growing(max(arena_bytes, PAGE_BYTES))
    wishes = PlannedAddresses(pieces, plan.offsets)

    def read() -> Steering:
        for plug in list(real.plugs):
            real.free(plug)
        return Steering(Arena(real.segments, real.taken), real, wishes)

    steering = read()
    where: dict[int, int] = {}
    for position in range(int(pieces.end.max(initial=-1)) + 1):
        asked = np.flatnonzero(pieces.start == position).tolist()
        if steering.model.taken_bytes != real.taken_bytes:
            steering = read()
        try:
            steering.arrange([piece for piece in asked if random() < 0.9])
        except Mismatch:
            steering = read()
        temporary = real.serve(3 * MIB) if random() < 0.2 else None
        if random() < 0.05:
            real.serve(5 * MIB)  # and keeps it
        asked.sort(key=lambda _: random())
        for piece in asked:
            where[piece] = real.serve(int(pieces.nbytes[piece]))
        if temporary is not None:
            real.free(temporary)
        for piece in asked:
            try:
                steering.record_allocation(where[piece], int(pieces.nbytes[piece]))
            except Mismatch:
                steering = read()
                break
        for piece in np.flatnonzero(pieces.end == position).tolist():
            real.free(where[piece])
            steering.record_free(where.pop(piece))
        check(real)
        check(steering.model)
        if steering.model.taken_bytes == real.taken_bytes:
            assert steering.model.taken == real.taken
        assert steering.plugged_bytes == sum(real.taken[plug] for plug in real.plugs)
    for plug in list(real.plugs):
        real.free(plug)
    assert set(where.values()) <= real.taken.keys()
