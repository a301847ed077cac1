"""Steers CUDA's caching allocator, so that a step's storages get their planned addresses.

The allocator does not take addresses, but it is predictable. It is a best-fit allocator: a request
takes the smallest free block (**hole**) that it fits into, the lowest of several, from its low end;
the remainder is split off if it is larger than 1 MiB, and is handed out too if not; a freed block
merges with adjacent holes. (Requests of up to 1 MiB come from other segments.)

So all free memory is filled with **plugs**, unused blocks. Before an op runs, holes of exactly the
sizes of its requests are opened at their planned addresses, and one more, the largest plug, for
unforeseen requests. If a planned address is not free, the best-fitting hole is opened instead.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle.core.graph.liveness import Ints
from rekindle.core.memory.packing import least_bytes, pack

Span = tuple[int, int]

ROUND_BYTES = 512  # sizes are multiples of this
REST_BYTES = 1 << 20  # requests and remainders up to this size are not the arena's

APART_BYTES = REST_BYTES + ROUND_BYTES  # the smallest plug
PAGE_BYTES = 2 << 20  # an arena is a multiple of this

# An arena this close to the least bytes possible is accepted without trying others: by ratio, or,
# for a small arena, by the second ratio up to so many bytes.
_CLOSE_TO_BOUND_RATIO = 1.01
_CLOSE_TO_BOUND_RATIO_SMALL = 1.02
_CLOSE_TO_BOUND_BYTES_SMALL = 16 << 20
_SHORT_LIFETIME_DIVISOR = 50  # a piece is short-lived if it lives for 1/50 of the positions


class Allocator(Protocol):
    """The allocator that serves plugs."""

    def allocate(self, nbytes: int) -> int | None:
        """The address of so many bytes; None if there is no room."""

    def free(self, address: int) -> None:
        """Free the block at an address."""


class Mismatch(Exception):
    """The allocator did not do what the model predicts."""


class Arena:
    """A model of the allocator's pool.

    `taken`, `holes` and `segments` have the bytes of each allocated block, free block and segment,
    by address. A hole never spans two segments.
    """

    def __init__(
        self, segments: Mapping[int, int], taken: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        self.taken = dict(taken)
        self.taken_bytes = sum(taken.values())
        self.holes: dict[int, int] = {}
        self.segments = dict(segments)
        self._hole_ending_at: dict[int, int] = {}
        self._sizes: list[tuple[int, int]] = []  # of the holes, smallest first, with addresses
        blocks = sorted(taken.items())
        for start, nbytes in segments.items():
            end, top = start + nbytes, start
            for address, size in [*(b for b in blocks if start <= b[0] < end), (end, 0)]:
                if address > top:
                    self._add_hole(top, address - top)
                top = address + size

    def allocate(self, nbytes: int) -> int | None:
        """The address at which a request is served; None if there is no room."""
        size = rounded(nbytes)
        index = bisect_left(self._sizes, (size, -1))
        if index == len(self._sizes):
            return None
        address = self._sizes[index][1]
        self._take(address, size, address)
        return address

    def place(self, address: int, nbytes: int) -> bool:
        """Record a block allocated at this address; False if there was no hole."""
        size = rounded(nbytes)
        hole = self.hole_around(address, size)
        if hole is not None:
            self._take(address, size, hole)
        return hole is not None

    def hole_around(self, address: int, size: int) -> int | None:
        """The address of the hole that contains so many bytes at an address."""
        for hole, nbytes in self.holes.items():
            if hole <= address and address + size <= hole + nbytes:
                return hole
        return None

    def has(self, address: int) -> bool:
        """True if an address is in one of the segments."""
        return any(0 <= address - start < nbytes for start, nbytes in self.segments.items())

    def free(self, address: int) -> None:
        """Free a block: it merges with adjacent holes."""
        size = self.taken.pop(address)
        self.taken_bytes -= size
        end = address + size
        if end in self.holes and end not in self.segments:
            size += self._drop_hole(end)
        if address in self._hole_ending_at and address not in self.segments:
            address = self._hole_ending_at[address]
            size += self._drop_hole(address)
        self._add_hole(address, size)

    def _take(self, address: int, size: int, hole: int) -> None:
        """Allocate bytes at an address inside a hole."""
        end = hole + self._drop_hole(hole)
        if address > hole:
            self._add_hole(hole, address - hole)
        if end - address - size > REST_BYTES:
            self._add_hole(address + size, end - address - size)
        else:
            size = end - address
        self.taken[address] = size
        self.taken_bytes += size

    def _add_hole(self, address: int, size: int) -> None:
        self.holes[address] = size
        self._hole_ending_at[address + size] = address
        insort(self._sizes, (size, address))

    def _drop_hole(self, address: int) -> int:
        size = self.holes.pop(address)
        del self._hole_ending_at[address + size]
        del self._sizes[bisect_left(self._sizes, (size, address))]
        return size


@dataclass(frozen=True)
class Blocks:
    """The allocation requests of a step, in order: arrays over requests.

    A piece is live from position `start` to `end`, inclusive. Workspaces come last within a
    position. `is_steered` is False for requests made inside a call that cannot be interrupted.
    """

    start: Ints
    end: Ints
    nbytes: Ints
    is_steered: NDArray[np.bool_]

    @property
    def least_bytes(self) -> int:
        """The most bytes live at the same time."""
        return least_bytes(self.start, self.end, self.nbytes)


class PlannedAddresses:
    """The planned address of each piece, in an arena that starts at `base`."""

    def __init__(self, pieces: Blocks, offsets: Ints, base: int = 0) -> None:
        self._start, self._end = pieces.start, pieces.end
        self._low = offsets + base
        self._high = self._low + pieces.nbytes
        self.addresses: list[int] = self._low.tolist()
        self.sizes: list[int] = pieces.nbytes.tolist()

    def later(self, piece: int) -> list[Span]:
        """The planned spans of pieces that are allocated while a piece is live, in order."""
        meets = (self._start > self._start[piece]) & (self._start <= self._end[piece])
        spans = sorted(zip(self._low[meets].tolist(), self._high[meets].tolist(), strict=True))
        return _joined(spans)


class Steering:
    """Opens holes for each op's requests.

    `model` is the state of the arena; `allocator`, which serves the plugs, is the real allocator or
    another model. Raises `Mismatch` if it does not do what the model predicts.
    """

    def __init__(self, model: Arena, allocator: Allocator, planned: PlannedAddresses) -> None:
        self.model = model
        self._allocator = allocator
        self._planned = planned
        self._plugs: dict[int, int] = {}
        self.plugged_bytes = 0

    def arrange(self, pieces: Sequence[int]) -> None:
        """Open a hole for each piece that an op is about to request, and one to spare."""
        self._plug_holes()
        opened: dict[int, int] = {}  # by address: the requested bytes
        for target, size, hole_bytes in self._targets(pieces):
            opened[self._carve(target, hole_bytes, opened)] = size
        spare = self._spare(opened)
        if spare is not None:
            opened[self._carve(*spare, opened)] = spare[1]
        for address in opened:
            self._unplug(address)

    def record_allocation(self, address: int, nbytes: int) -> None:
        """Record a block that an op has allocated."""
        if not self.model.place(address, nbytes):
            raise Mismatch(f"{nbytes} bytes are at {address}, where there was no hole")

    def record_free(self, address: int) -> None:
        """Record that a block was freed."""
        self.model.free(address)

    def open_all(self) -> None:
        """Free all plugs."""
        for address in list(self._plugs):
            self._unplug(address)

    def _plug_holes(self) -> None:
        """Plug all holes. A request of exactly a hole's size is served from that hole."""
        for nbytes in [size for size in self.model.holes.values() if size > REST_BYTES]:
            self._plug(nbytes)

    def _targets(self, pieces: Sequence[int]) -> list[tuple[int, int, int]]:
        """The address of each piece, its bytes, and those of the hole to open for it."""
        gaps = self._gaps()
        sizes = {piece: self._planned.sizes[piece] for piece in pieces}
        found: dict[int, int] = {}
        for piece, size in sizes.items():  # those whose planned address is free come first
            wanted = self._planned.addresses[piece]
            if _gap_around(gaps, wanted, size) is not None:
                found[piece] = _take_from(gaps, wanted, size)
        others = [(size, piece) for piece, size in sizes.items() if piece not in found]
        for size, piece in sorted(others, reverse=True):
            unwanted = _without(gaps, self._planned.later(piece))
            for spans in (unwanted, gaps):
                fitting = [(high - low, low) for low, high in spans if high - low >= size]
                if fitting:
                    found[piece] = _take_from(gaps, min(fitting)[1], size)
                    break
        targets = [(found[piece], sizes[piece]) for piece in pieces if piece in found]
        return [(*each, _hole_bytes(each, targets, gaps)) for each in targets]

    def _gaps(self) -> list[Span]:
        """The spans without allocated blocks other than plugs, in order."""
        idle = sorted([*self._plugs.items(), *self.model.holes.items()])
        return _joined(((a, a + n) for a, n in idle), self.model.segments)

    def _carve(self, address: int, size: int, kept: Iterable[int]) -> int:
        """Replace the plugs at this address by one of exactly this size.

        No other hole is open, so that requests are served here. The remainders are plugged again;
        if one is too small for a plug, it is merged with the adjacent plug, unless that is `kept`.
        """
        if self._plugs.get(address) == size:
            return address
        for plug in [p for p, n in self._plugs.items() if p < address + size and address < p + n]:
            self._unplug(plug)
        low, end = self._hole_around(address, size)
        while adjacent := self._adjacent_plugs(low, end, address, size).difference(kept):
            for plug in adjacent:
                self._unplug(plug)
            low, end = self._hole_around(address, size)
        if address - low > REST_BYTES:
            self._plug(address - low)
        else:
            address = low
        self._plug(size)
        if end - address - size > REST_BYTES:
            self._plug(end - address - size)
        return address

    def _hole_around(self, address: int, size: int) -> tuple[int, int]:
        hole = self.model.hole_around(address, size)
        if hole is None:
            raise Mismatch(f"there is no hole of {size} bytes at {address}")
        return hole, hole + self.model.holes[hole]

    def _adjacent_plugs(self, low: int, end: int, address: int, size: int) -> set[int]:
        """The plugs adjacent to a hole where the remainder is too small for a plug of its own."""
        adjacent: set[int] = set()
        edges = self.model.segments
        if 0 < address - low <= REST_BYTES and low not in edges:
            adjacent.update(plug for plug, nbytes in self._plugs.items() if plug + nbytes == low)
        if 0 < end - address - size <= REST_BYTES and end not in edges and end in self._plugs:
            adjacent.add(end)
        return adjacent

    def _spare(self, opened: Mapping[int, int]) -> Span | None:
        """Address and bytes of the largest plug that no request for an opened hole would take.

        It must not touch them: the part that would touch stays plugged.
        """
        holes = {address: self._plugs[address] for address in opened}
        ends = {address + nbytes for address, nbytes in holes.items()}
        is_joined = not ends.isdisjoint(holes)
        all_bytes = sum(holes.values())
        best: Span | None = None
        for plug, nbytes in self._plugs.items():
            low = plug + APART_BYTES if plug in ends else plug
            high = plug + nbytes - APART_BYTES if plug + nbytes in holes else plug + nbytes
            size = high - low
            if plug in holes or size <= (best[1] if best else REST_BYTES):
                continue
            is_taken = any(asked <= size <= holes[address] for address, asked in opened.items())
            if size > all_bytes or not (is_joined or is_taken):
                best = (low, size)
        return best

    def _plug(self, nbytes: int) -> None:
        address, expected = self._allocator.allocate(nbytes), self.model.allocate(nbytes)
        if address is None or expected is None or address != expected:
            raise Mismatch(f"a plug of {nbytes} bytes is at {address}, not at {expected}")
        self._plugs[address] = self.model.taken[address]
        self.plugged_bytes += self._plugs[address]

    def _unplug(self, address: int) -> None:
        self.plugged_bytes -= self._plugs.pop(address)
        self._allocator.free(address)
        self.model.free(address)


class ArenaPlan(NamedTuple):
    """The offset of each piece, and the size of the arena that the steered step needs."""

    offsets: Ints
    arena_bytes: int


def plan_arena(pieces: Blocks) -> ArenaPlan:
    """The offset of every piece and the size of the arena, found by simulating the step.

    Adjacent holes merge, and could serve another request. So pieces that one op requests are kept
    apart if they are short-lived; or none is, or all are, if that needs less memory. Pieces of
    equal size that one op requests are followed by room for larger holes.
    """
    rank = _rank_among_equals(pieces)
    n_positions = int(pieces.end.max(initial=0)) + 1
    is_together = (np.bincount(pieces.start, minlength=1)[pieces.start] > 1) & pieces.is_steered
    is_short = pieces.end - pieces.start <= n_positions // _SHORT_LIFETIME_DIVISOR
    least_bytes = pieces.least_bytes
    small_bytes = min(
        _CLOSE_TO_BOUND_RATIO_SMALL * least_bytes, least_bytes + _CLOSE_TO_BOUND_BYTES_SMALL
    )
    close_bytes = max(_CLOSE_TO_BOUND_RATIO * least_bytes, small_bytes, least_bytes + PAGE_BYTES)
    best: ArenaPlan | None = None
    for is_apart in (is_together & is_short, is_together & False, is_together):
        room = np.where(is_apart, np.maximum(rank, 1), rank) * APART_BYTES
        offsets = pack(pieces.start, pieces.end, pieces.nbytes + room)
        arena_bytes = _arena_bytes(pieces, offsets)
        if best is None or arena_bytes < best.arena_bytes:
            best = ArenaPlan(offsets, arena_bytes)
        if best.arena_bytes <= close_bytes:
            break
    assert best is not None
    return best


def _rank_among_equals(pieces: Blocks) -> Ints:
    """For each piece: how many of the same size are requested before it at its position."""
    seen: Counter[tuple[int, int]] = Counter()
    ranks: list[int] = []
    for key in zip(pieces.start.tolist(), pieces.nbytes.tolist(), strict=True):
        ranks.append(seen[key])
        seen[key] += 1
    return np.array(ranks, dtype=np.int64)


def _arena_bytes(pieces: Blocks, offsets: Ints) -> int:
    """The smallest of a series of growing arenas that the step fits into."""
    planned_bytes = int((offsets + pieces.nbytes).max(initial=0))
    arenas = (_paged(planned_bytes + planned_bytes * n**2 // 1000) for n in count())
    return next(nbytes for nbytes in arenas if rehearse(pieces, offsets, nbytes) is not None)


def rehearse(pieces: Blocks, offsets: Ints, arena_bytes: int) -> int | None:
    """The peak of allocated bytes of a simulated steered step, without plugs.

    None if it does not fit into the arena.
    """
    arena = Arena({0: arena_bytes})
    steering = Steering(Arena({0: arena_bytes}), arena, PlannedAddresses(pieces, offsets))
    made, gone = _by_position(pieces.start), _by_position(pieces.end)
    sizes = pieces.nbytes.tolist()
    where: dict[int, int] = {}
    peak_bytes = 0
    for position in sorted(made.keys() | gone.keys()):
        asked = made.get(position, [])
        if asked and pieces.is_steered[asked].all():
            steering.arrange(asked)
        elif asked:
            steering.open_all()
        for each in asked:
            address = arena.allocate(sizes[each])
            if address is None:
                return None
            steering.record_allocation(address, sizes[each])
            where[each] = address
        peak_bytes = max(peak_bytes, arena.taken_bytes - steering.plugged_bytes)
        for each in gone.get(position, []):
            arena.free(where[each])
            steering.record_free(where[each])
    return peak_bytes


def _by_position(positions: Ints) -> dict[int, list[int]]:
    """The pieces by position."""
    found: dict[int, list[int]] = {}
    for piece, position in enumerate(positions.tolist()):
        found.setdefault(position, []).append(piece)
    return found


def _paged(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def rounded(nbytes: int) -> int:
    """A request's size as the allocator rounds it."""
    return -(-nbytes // ROUND_BYTES) * ROUND_BYTES


def _joined(spans: Iterable[Span], edges: Container[int] = ()) -> list[Span]:
    """Ordered spans, merged if they touch or overlap, but not across an edge."""
    joined: list[Span] = []
    for low, high in spans:
        if joined and low <= joined[-1][1] and low not in edges:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined


def _without(gaps: list[Span], spans: list[Span]) -> list[Span]:
    """The gaps minus some spans; both are in order and do not overlap."""
    left: list[Span] = []
    first = 0
    for low, high in gaps:
        while first < len(spans) and spans[first][1] <= low:
            first += 1
        for from_, to in spans[first:]:
            if from_ >= high:
                break
            if from_ > low:
                left.append((low, from_))
            low = to
        if low < high:
            left.append((low, high))
    return left


def _gap_around(gaps: list[Span], address: int, size: int) -> int | None:
    """The index of the gap that contains so many bytes at an address."""
    index = bisect_right(gaps, address, key=itemgetter(0)) - 1
    return index if index >= 0 and address + size <= gaps[index][1] else None


def _hole_bytes(target: Span, targets: Sequence[Span], gaps: list[Span]) -> int:
    """The size of a hole that makes the intended request take it.

    Of equal holes the lowest is taken first. If requests of equal size come in another order, the
    later ones get larger holes, if there is room.
    """
    address, size = target
    alike = [low for low, nbytes in targets if nbytes == size]
    alike = alike[: alike.index(address) + 1]
    n_larger = sum(above > below for above, below in pairwise(alike))
    end, more = address + size, n_larger * APART_BYTES
    has_room = _gap_around(gaps, end, more) is not None
    return size + more if has_room and all(low != end + more for low, _ in targets) else size


def _take_from(gaps: list[Span], address: int, size: int) -> int:
    """Remove bytes from a gap, at the address that the allocator would choose, and return it."""
    index = _gap_around(gaps, address, size)
    assert index is not None
    low, high = gaps[index]
    if address - low <= REST_BYTES:
        address = low
    rests = [(low, address), (address + size, high)]
    gaps[index : index + 1] = [rest for rest in rests if rest[1] - rest[0] > REST_BYTES]
    return address
