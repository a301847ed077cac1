"""Steers CUDA's caching allocator, so that what a step makes lies where it was planned to lie.

The allocator cannot be told an address. But it is predictable: of the holes that a request fits
into it takes the smallest, and of several the lowest, from the low end on; the rest is split off if
it is larger than a mebibyte, and handed out too if not; what is freed becomes one hole with the
holes beside it. (Requests of up to a mebibyte are served elsewhere, and are of no concern here.)

So all free memory is held by **plugs**, blocks that nobody uses. Before an op runs, holes are
opened that have the very sizes of what it is going to ask for, each at its planned address, and one
more, the largest plug there is, for what nobody has foreseen. Addresses are wishes: where memory is
not free as planned, the hole that fits best is opened, and what has gone elsewhere is booked there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle.core.memory.packing import Ints, least_bytes

Span = tuple[int, int]

ROUND_BYTES = 512  # sizes are multiples of this
REST_BYTES = 1 << 20  # no larger request, and no larger rest, is one of the arena's

APART_BYTES = REST_BYTES + ROUND_BYTES  # the smallest plug


class Allocator(Protocol):
    """What plugs are taken from."""

    def allocate(self, nbytes: int) -> int | None:
        """The address of so many bytes; None if there is no room."""

    def free(self, address: int) -> None:
        """Give them back."""


class Mismatch(Exception):
    """The allocator has not done what it was expected to do."""


class Arena:
    """A pool of memory as the allocator deals it out: the model, and the book.

    `taken` has the bytes of each block that is handed out, by its address; `holes` those of each
    hole; `segments` those of each
    segment. A pool has one segment or several, which never form a common hole.
    """

    def __init__(
        self, segments: Mapping[int, int], taken: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        """`segments` has the bytes of each by its address."""
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
        """Serve a request; returns the address, or None if there is no room."""
        size = rounded(nbytes)
        index = bisect_left(self._sizes, (size, -1))
        if index == len(self._sizes):
            return None
        address = self._sizes[index][1]
        self._take(address, size, address)
        return address

    def place(self, address: int, nbytes: int) -> bool:
        """Book a block that was handed out at this address; False if there was no hole."""
        size = rounded(nbytes)
        for hole, hole_bytes in self.holes.items():
            if hole <= address and address + size <= hole + hole_bytes:
                self._take(address, size, hole)
                return True
        return False

    def has(self, address: int) -> bool:
        """Whether an address lies in here."""
        return any(0 <= address - start < nbytes for start, nbytes in self.segments.items())

    def free(self, address: int) -> None:
        """Take a block back: it becomes one hole with those beside it."""
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
        """Hand out bytes at an address inside of a hole."""
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
    """What a step asks for, in the order in which it does: arrays over requests.

    A piece is there from position `start` to `end`, inclusive. Of one position, workspaces come
    last. What `is_steered` not is asked for inside of something that cannot be looked into.
    """

    start: Ints
    end: Ints
    nbytes: Ints
    is_steered: NDArray[np.bool_]

    @property
    def least_bytes(self) -> int:
        """The most bytes that are there at once."""
        return least_bytes(self.start, self.end, self.nbytes)


class PlannedAddresses:
    """Where each piece of a step should lie, in an arena that starts at some address."""

    def __init__(self, pieces: Blocks, offsets: Ints, base: int = 0) -> None:
        self._start, self._end = pieces.start, pieces.end
        self._low = offsets + base
        self._high = self._low + pieces.nbytes
        self.addresses: list[int] = self._low.tolist()
        self.sizes: list[int] = pieces.nbytes.tolist()

    def later(self, piece: int) -> list[Span]:
        """What others want that come while a piece is there: from and to, in order."""
        meets = (self._start > self._start[piece]) & (self._start <= self._end[piece])
        spans = sorted(zip(self._low[meets].tolist(), self._high[meets].tolist(), strict=True))
        return _joined(spans)


class Steering:
    """Decides before each op which memory is free for it.

    `book` is what is known of the arena; plugs are taken from `allocator`, which may be another
    arena, on paper, or the real one. If it does not do as the book has it, `Mismatch` is raised.
    """

    def __init__(self, book: Arena, allocator: Allocator, wishes: PlannedAddresses) -> None:
        self.book = book
        self._allocator = allocator
        self._wishes = wishes
        self._plugs: dict[int, int] = {}
        self.plugged_bytes = 0

    def arrange(self, pieces: Sequence[int]) -> None:
        """Open a hole for each of the pieces that an op is going to ask for, and one to spare."""
        self._plug_holes()
        opened: dict[int, int] = {}  # by address: the bytes that are asked for
        for target, size, hole_bytes in self._targets(pieces):
            opened[self._carve(target, hole_bytes, opened)] = size
        spare = self._spare(opened)
        if spare is not None:
            opened[self._carve(*spare, opened)] = spare[1]
        for address in opened:
            self._unplug(address)

    def took(self, address: int, nbytes: int) -> None:
        """Book what an op has made."""
        if not self.book.place(address, nbytes):
            raise Mismatch(f"{nbytes} bytes lie at {address}, where there was no hole")

    def gave_back(self, address: int) -> None:
        """Book that a block is gone which an op had made."""
        self.book.free(address)

    def open_all(self) -> None:
        """Let go of all plugs."""
        for address in list(self._plugs):
            self._unplug(address)

    def _plug_holes(self) -> None:
        """Plug all there is. Each hole is asked for by its very size, so that it is the one."""
        for nbytes in [size for size in self.book.holes.values() if size > REST_BYTES]:
            self._plug(nbytes)

    def _targets(self, pieces: Sequence[int]) -> list[tuple[int, int, int]]:
        """Where each piece is to lie, its bytes, and those of the hole that is opened for it."""
        gaps = self._gaps()
        sizes = {piece: self._wishes.sizes[piece] for piece in pieces}
        found: dict[int, int] = {}
        for piece, size in sizes.items():  # those whose wish is free come first
            wanted = self._wishes.addresses[piece]
            if _gap_around(gaps, wanted, size) is not None:
                found[piece] = _take_from(gaps, wanted, size)
        others = [(size, piece) for piece, size in sizes.items() if piece not in found]
        for size, piece in sorted(others, reverse=True):
            unwanted = _without(gaps, self._wishes.later(piece))
            for spans in (unwanted, gaps):
                fitting = [(high - low, low) for low, high in spans if high - low >= size]
                if fitting:
                    found[piece] = _take_from(gaps, min(fitting)[1], size)
                    break
        targets = [(found[piece], sizes[piece]) for piece in pieces if piece in found]
        return [(*each, _hole_bytes(each, targets, gaps)) for each in targets]

    def _gaps(self) -> list[Span]:
        """Where nothing lies but plugs, in order."""
        idle = sorted([*self._plugs.items(), *self.book.holes.items()])
        return _joined(((a, a + n) for a, n in idle), self.book.segments)

    def _carve(self, address: int, size: int, kept: Iterable[int]) -> int:
        """Have one plug at this address, of this size, in place of those that lie there.

        Nothing else is open meanwhile, so that requests are served here. What is left over is
        plugged again; where that is too little for a plug, the plug beside it goes, too, unless it
        is to be `kept`.
        """
        if self._plugs.get(address) == size:
            return address
        for plug in [p for p, n in self._plugs.items() if p < address + size and address < p + n]:
            self._unplug(plug)
        low, end = self._hole_around(address, size)
        while beside := self._plugs_beside(low, end, address, size).difference(kept):
            for plug in beside:
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
        for hole, nbytes in self.book.holes.items():
            if hole <= address and address + size <= hole + nbytes:
                return hole, hole + nbytes
        raise Mismatch(f"there is no hole of {size} bytes at {address}")

    def _plugs_beside(self, low: int, end: int, address: int, size: int) -> set[int]:
        """The plugs next to a hole on whose side too little is left for a plug of its own."""
        beside: set[int] = set()
        edges = self.book.segments
        if 0 < address - low <= REST_BYTES and low not in edges:
            beside.update(plug for plug, nbytes in self._plugs.items() if plug + nbytes == low)
        if 0 < end - address - size <= REST_BYTES and end not in edges and end in self._plugs:
            beside.add(end)
        return beside

    def _spare(self, opened: Mapping[int, int]) -> Span | None:
        """The largest plug that will not be taken for one of the holes that are to be opened.

        It must not touch them: what would touch stays plugged. Returns its address and bytes.
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
        address, expected = self._allocator.allocate(nbytes), self.book.allocate(nbytes)
        if address is None or expected is None or address != expected:
            raise Mismatch(f"a plug of {nbytes} bytes lies at {address}, not at {expected}")
        self._plugs[address] = self.book.taken[address]
        self.plugged_bytes += self._plugs[address]

    def _unplug(self, address: int) -> None:
        self.plugged_bytes -= self._plugs.pop(address)
        self._allocator.free(address)
        self.book.free(address)


def rounded(nbytes: int) -> int:
    """A request's bytes as the allocator counts them."""
    return -(-nbytes // ROUND_BYTES) * ROUND_BYTES


def _joined(spans: Iterable[Span], edges: Container[int] = ()) -> list[Span]:
    """Spans in order, those that touch or overlap made one; but not across an edge."""
    joined: list[Span] = []
    for low, high in spans:
        if joined and low <= joined[-1][1] and low not in edges:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined


def _without(gaps: list[Span], spans: list[Span]) -> list[Span]:
    """What is left of gaps without some spans; all in order, and none overlap."""
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
    """The index of the gap in which so many bytes lie at an address."""
    index = bisect_right(gaps, address, key=itemgetter(0)) - 1
    return index if index >= 0 and address + size <= gaps[index][1] else None


def _hole_bytes(target: Span, targets: Sequence[Span], gaps: list[Span]) -> int:
    """How large a hole has to be, so that it is taken by the request it is meant for.

    Of equal holes the lowest is taken first. Where requests of equal size come in another order,
    what comes later gets a larger hole, if there is room.
    """
    address, size = target
    alike = [low for low, nbytes in targets if nbytes == size]
    alike = alike[: alike.index(address) + 1]
    n_larger = sum(above > below for above, below in pairwise(alike))
    end, more = address + size, n_larger * APART_BYTES
    has_room = _gap_around(gaps, end, more) is not None
    return size + more if has_room and all(low != end + more for low, _ in targets) else size


def _take_from(gaps: list[Span], address: int, size: int) -> int:
    """Take bytes out of a gap, as close to an address as the allocator does; returns where."""
    index = _gap_around(gaps, address, size)
    assert index is not None
    low, high = gaps[index]
    if address - low <= REST_BYTES:
        address = low
    rests = [(low, address), (address + size, high)]
    gaps[index : index + 1] = [rest for rest in rests if rest[1] - rest[0] > REST_BYTES]
    return address
