"""The best plan of a chain of segments: a rotor-style dynamic program over blocks and bytes kept.

After rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019), whose blocks
are modules that are kept or recomputed as a whole. Here the forward pass is cut into blocks where
few bytes cross, and each segment of blocks has several plans inside, found by priced min-cuts and
local search.

A **segment** is a run of blocks, planned independently: its inputs are kept by earlier segments,
and it keeps the cells that later segments read (its exports). So the plans of segments can be
combined freely, and only the bytes they keep add up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rekindle.planners.local_search import SearchOptions, fit
from rekindle.planners.lowering import Choices, choices, drop_all, lower
from rekindle.planners.min_cut import Cut, CutNetwork
from rekindle.planners.problem import Floats, Ints, Problem

MAX_BLOCKS = 96
_EXPORT_BLOCKS = 2  # a cell is exported to so many blocks; ops farther away are not recomputed


@dataclass(frozen=True)
class ChainOptions:
    """The tuning constants of the dynamic program and of the plans of segments."""

    segment_lengths_blocks: tuple[int, ...] = (1, 2, 3, 4, 6, 12)
    max_cells_per_segment: int = 500  # on average, of segments of more than three blocks
    max_states: int = 1000  # per block
    nearly_full_ratio: float = 0.8  # of the budget: segments above it get lighter plans
    max_plans_per_segment: int = 10  # from min-cuts
    highest_price_us_per_byte: float = 1e4  # at which only what must be kept is kept
    lighter_starts: int = 3  # plans of the lowest peaks
    lighter_peak_ratio: float = 0.9  # of a plan's peak: what is asked for next
    lighter_attempts: int = 4  # from each start
    lighter_max_ops_placed: int = 3000  # in one local search


_OPTIONS = ChainOptions()


@dataclass(frozen=True)
class Segment:
    """A run of blocks as a problem of its own.

    `cells` and `ops` map its own numbers to the whole problem's; `exports` are the cells it must
    keep for later segments, `borders` those that one of its blocks exports to another, both in its
    own numbers. `block_of_cell` counts its blocks from 0. The first `n_forward` ops are of the
    forward pass; the others are readers. Before the first reader and after each, one more op
    stands for all ops that run there.
    """

    problem: Problem
    cells: list[int]
    ops: list[int]
    exports: list[int]
    borders: list[int]
    block_of_cell: list[int]
    signature: tuple[object, ...]
    n_forward: int

    @property
    def from_ops(self) -> list[int]:
        """The first op, in the whole problem, that each of its own ops stands for."""
        n = self.n_forward
        is_behind = [i > n and (i - n) % 2 == 0 for i in range(len(self.ops))]
        found = [op + behind for op, behind in zip(self.ops, is_behind, strict=True)]
        return [0, *found[1:]]


class BlockPartition:
    """A problem's forward pass, cut into blocks."""

    def __init__(self, problem: Problem, most: int = MAX_BLOCKS) -> None:
        self.problem = problem
        self.ops = sorted(set(problem.writer))
        self.number = {op: i for i, op in enumerate(self.ops)}
        self.readers: list[list[int]] = [[] for _ in range(problem.n_cells)]  # forward ops
        for i, op in enumerate(self.ops):
            for cell in problem.reads[op]:
                self.readers[cell].append(i)
        self._all_readers = [op for op, _ in problem.readers]
        self.ends = _cuts(self._crossing(), most, sum(problem.bytes) + 1)
        self.block_of_op = np.searchsorted(self.ends, np.arange(len(self.ops)), side="right")
        self.block_of_cell = [int(self.block_of_op[self.number[op]]) for op in problem.writer]
        self.pinned, self.global_cells = self._far()

    @property
    def n_blocks(self) -> int:
        """The number of blocks."""
        return len(self.ends)

    def _crossing(self) -> Ints:
        """The bytes crossing from each op to the next; cells other than activations weigh more."""
        problem = self.problem
        changes = np.zeros(len(self.ops) + 1)
        total = sum(problem.bytes) + 1
        for cell, readers in enumerate(self.readers):
            if readers:
                weight = problem.bytes[cell] * (1.0 if problem.needs[cell] else 1.5)
                if not problem.can_keep[cell]:
                    weight = total  # never between the ops that write one storage
                changes[self.number[problem.writer[cell]]] += weight
                changes[readers[-1]] -= weight
        return np.cumsum(changes)[:-1].astype(np.int64)

    def _far(self) -> tuple[set[int], set[int]]:
        """Ops that are not recomputed because they read a cell of a far block, and cells kept for
        such ops.

        A large cell is not kept for the sake of small ones: rather, their ops are not recomputed.
        """
        problem = self.problem
        share: dict[int, float] = {}  # by op: its part of the cells that would be kept for it
        far_cells: dict[int, list[int]] = {}
        for cell, readers in enumerate(self.readers):
            block = self.block_of_cell[cell]
            far = [self.ops[i] for i in readers if self.block_of_op[i] > block + _EXPORT_BLOCKS]
            if problem.needs[cell]:
                continue  # exported anyway
            for op in far:
                share[op] = share.get(op, 0.0) + problem.bytes[cell] / len(far)
                far_cells.setdefault(op, []).append(cell)
        pinned = {
            op
            for op, nbytes in share.items()
            if 2 * nbytes > sum(problem.bytes[cell] for cell in problem.writes[op])
        }
        for op in self.ops:  # what a pinned op overwrites later is gone, and with it what reads it
            gone = (c for c in problem.reads[op] if not problem.can_keep[c])
            if any(problem.writer[cell] in pinned for cell in gone):
                pinned.add(op)
        kept = {cell for op, cells in far_cells.items() if op not in pinned for cell in cells}
        return pinned, kept

    def exports(self, cell: int, last: int) -> bool:
        """True if a segment that ends before block `last` exports a cell to later ones."""
        blocks = [int(self.block_of_op[i]) for i in self.readers[cell]]
        later = [b for b in blocks if b >= last]
        if not later:
            return False
        near = min(later) < last + _EXPORT_BLOCKS
        return near or bool(self.problem.needs[cell]) or cell in self.global_cells

    @cached_property
    def _cells_by_block(self) -> list[list[int]]:
        cells: list[list[int]] = [[] for _ in self.ends]
        for cell, block in enumerate(self.block_of_cell):
            cells[block].append(cell)
        return cells

    def segment(self, first: int, last: int) -> Segment:
        """The blocks first…last-1 as a problem of their own."""
        problem = self.problem
        cells = [c for block in range(first, last) for c in self._cells_by_block[block]]
        local = {cell: i for i, cell in enumerate(cells)}
        start = int(self.ends[first - 1]) if first else 0
        forward = self.ops[start : int(self.ends[last - 1])]
        readers = sorted({op for c in cells for op in problem.needs[c]}.difference(forward))
        ops = [*forward, *(op for reader in readers for op in (reader, reader))]
        if readers:
            ops.insert(len(forward), readers[0])
        place = {op: i for i, op in enumerate(forward)}
        place.update({op: len(forward) + 1 + 2 * i for i, op in enumerate(readers)})
        inside = set(forward)
        needs = [[place[op] for op in problem.needs[c] if op not in inside] for c in cells]
        exports = [local[c] for c in cells if self.exports(c, last)]
        blocks = [self.block_of_cell[c] - first for c in cells]
        borders = [
            local[c]
            for c, block in zip(cells, blocks, strict=True)
            if block < last - first - 1 and self.exports(c, first + block + 1)
        ]
        final = len(forward) - 1
        sub = replace(
            problem,
            storage=[problem.storage[c] for c in cells],
            bytes=[problem.bytes[c] for c in cells],
            writer=[place[problem.writer[c]] for c in cells],
            last_use=[place.get(problem.last_use[c], final) for c in cells],
            needs=needs,
            can_keep=[problem.can_keep[c] for c in cells],
            must_keep=[problem.must_keep[c] or problem.writer[c] in self.pinned for c in cells],
            reads=[[local[c] for c in problem.reads[op] if c in local] for op in ops],
            writes=[[local[c] for c in problem.writes[op]] for op in forward]
            + [[] for _ in ops[len(forward) :]],
            also_makes=[[] for _ in ops],
            times=[problem.times[op] for op in ops],
            workspaces=problem.workspaces[ops],
            base=self._base(forward, readers),
            between=problem.between[ops],
        )
        signature = (
            tuple(sub.bytes),
            tuple(sub.writer),
            tuple(sub.can_keep),
            tuple(sub.must_keep),
            tuple(map(tuple, sub.needs)),
            tuple(map(tuple, sub.reads)),
            tuple(exports),
            tuple(borders),
            tuple(sub.last_use),
            tuple(int(nbytes) for nbytes in sub.workspaces[: len(forward)]),
        )
        return Segment(sub, cells, ops, exports, borders, blocks, signature, len(forward))

    def _base(self, forward: list[int], readers: list[int]) -> Ints:
        """The base at each op of a segment; between two readers, the maximum in between.

        Before the first reader, the maximum since the last reader of any segment.
        """
        base, rest = self.problem.base, []
        if readers:
            place = bisect_left(self._all_readers, readers[0])
            before = self._all_readers[place - 1] if place else self.ops[-1]
            rest.append(int(base[before + 1 : readers[0]].max(initial=0)))
        for reader in readers:
            rest += [int(base[reader]), self._after[reader]]
        return np.array([*base[forward], *rest], dtype=np.int64)

    @cached_property
    def _after(self) -> dict[int, int]:
        """The maximum of the base between each reader and the next one of any segment."""
        base, ends = self.problem.base, [*self._all_readers[1:], self.problem.n_ops]
        return {
            reader: int(base[reader + 1 : end].max(initial=0))
            for reader, end in zip(self._all_readers, ends, strict=False)
        }


def _cuts(crossing: Ints, most: int, never: int) -> Ints:
    """The ends of the blocks: after ops with the fewest bytes crossing nearby, spaced out.

    There is no cut where `never` bytes or more cross.
    """
    n = len(crossing)
    radius = max(1, n // most)
    ends: list[int] = []
    for i in range(n - 1):
        near = crossing[max(0, i - radius) : min(n - 1, i + radius + 1)]
        is_least = crossing[i] < never and crossing[i] <= near.min()
        if is_least and (not ends or i + 1 >= ends[-1] + radius):
            ends.append(i + 1)
    return np.array([*ends, n], dtype=np.int64)


@dataclass(frozen=True)
class SegmentPlan:
    """A plan for all segments of one structure, in the segment's own numbers.

    `kept_bytes` are kept for the rest of the step; `recomputed` are the recomputed ops, with
    repetitions; `live` are the bytes of the segment's own cells at each of its ops.
    """

    chosen: Choices
    kept_bytes: int
    recomputed: Ints
    live: Ints


def segment_plans(segment: Segment) -> list[SegmentPlan]:
    """The plans of a segment that are not dominated in kept bytes, peak and time.

    For a price per byte kept, a segment's best plan is a min-cut; all prices together give the
    corners of the lower convex hull of (bytes kept, time added). A segment of several blocks also
    has a nested plan that keeps nothing: the first recomputation leaves only the borders of the
    blocks, and each block is recomputed a second time when the backward pass reaches it.
    """
    found = [_segment_plan(segment, kept) for kept in _hull(segment)]
    if segment.borders:
        found.append(_segment_plan(segment, [], _nested(segment)))
    return _undominated(segment.problem, found)


def lighter_plans(segment: Segment, known: list[SegmentPlan]) -> list[SegmentPlan]:
    """Plans of lower peaks, by local search from those of the lowest peaks.

    For segments that nearly fill the budget. A loss over a large vocabulary, for example, is best
    kept except for one large tensor, which no price singles out.
    """
    exports = set(segment.exports)
    must = [each or cell in exports for cell, each in enumerate(segment.problem.must_keep)]
    problem = replace(segment.problem, must_keep=must)
    found: list[SegmentPlan] = []
    n_starts = _OPTIONS.lighter_starts
    search = SearchOptions(max_ops_placed=_OPTIONS.lighter_max_ops_placed)
    by_peak = sorted(known, key=lambda plan: _peak_bytes(problem, plan))
    quickest = sorted(by_peak[n_starts:], key=lambda plan: len(plan.recomputed))[:1]
    for start in (*by_peak[:n_starts], *quickest):
        lowest = start
        for _ in range(_OPTIONS.lighter_attempts):
            asked = int(_OPTIONS.lighter_peak_ratio * _peak_bytes(problem, lowest))
            chosen = fit(problem, lowest.chosen, asked, search)
            kept = [cell for cell, keep in enumerate(chosen.keep) if keep]
            lower_one = _segment_plan(segment, kept, chosen.hold_from)
            if _peak_bytes(problem, lower_one) >= _peak_bytes(problem, lowest):
                break
            lowest = lower_one
            found.append(lowest)
    return _undominated(problem, found)


def _peak_bytes(problem: Problem, plan: SegmentPlan) -> int:
    return int((plan.live + problem.base).max(initial=0))


def _hull(segment: Segment) -> list[list[int]]:
    """The kept cells at the corners of the convex hull, found between neighbouring corners."""
    problem = segment.problem
    network = CutNetwork(problem)
    nbytes = np.array(problem.bytes, dtype=np.float64)
    nbytes[segment.exports] = 0.0  # kept in any case

    def cut(price: float) -> tuple[float, float, list[int]]:
        found: Cut = network.solve(price * nbytes)
        added_us = sum(problem.times[op] for op in found.ops)
        return float(nbytes[found.kept].sum()), added_us, found.kept

    corners = [cut(_OPTIONS.highest_price_us_per_byte), cut(0.0)]
    todo = [(corners[0], corners[1])]
    while todo and len(corners) < _OPTIONS.max_plans_per_segment:
        low, high = todo.pop(0)
        if high[0] - low[0] < 1 or low[1] - high[1] < 1e-9:
            continue
        price = (low[1] - high[1]) / (high[0] - low[0])
        middle = cut(price)
        if low[0] < middle[0] < high[0]:
            corners.append(middle)
            todo += [(low, middle), (middle, high)]
    return [corner[2] for corner in corners]


def _segment_plan(
    segment: Segment, kept: list[int], hold_from: list[int] | None = None
) -> SegmentPlan:
    problem = segment.problem
    chosen = choices(problem, [*kept, *segment.exports])
    if hold_from is not None:
        chosen = Choices(chosen.keep, hold_from)
    lowered = lower(problem, chosen)
    cells = lowered.live - np.where(
        lowered.copies > 0, problem.between[lowered.anchor], problem.base[lowered.ops]
    )
    live = np.zeros(problem.n_ops, dtype=np.int64)
    np.maximum.at(live, lowered.anchor, cells)
    stays = {*kept, *segment.exports}
    stays.update(c for c in range(problem.n_cells) if chosen.keep[c] and problem.needs[c])
    kept_bytes = sum(problem.bytes[c] for c in stays)
    return SegmentPlan(chosen, kept_bytes, lowered.ops[lowered.copies > 0], live)


def _nested(segment: Segment) -> list[int]:
    """`hold_from` of each cell: borders at once, others when backward reaches their block."""
    problem = segment.problem
    n_blocks = max(segment.block_of_cell) + 1
    entered = [problem.n_ops] * n_blocks
    borders = set(segment.borders)
    for cell, block in enumerate(segment.block_of_cell):
        if problem.needs[cell] and cell not in borders:
            entered[block] = min(entered[block], problem.needs[cell][0])
    entered[-1] = 0
    return [
        0 if cell in borders else min(entered[block], problem.first_need[cell])
        for cell, block in enumerate(segment.block_of_cell)
    ]


def _undominated(problem: Problem, found: list[SegmentPlan]) -> list[SegmentPlan]:
    kept: list[SegmentPlan] = []
    times = np.array(problem.times)
    costs = [
        (p.kept_bytes, int(p.live.max(initial=0)), float(times[p.recomputed].sum())) for p in found
    ]
    kept_costs: list[tuple[int, int, float]] = []
    for index in sorted(range(len(found)), key=costs.__getitem__):
        mine = costs[index]
        if not any(all(a <= b for a, b in zip(o, mine, strict=True)) for o in kept_costs):
            kept.append(found[index])
            kept_costs.append(mine)
    return kept


@dataclass(frozen=True, slots=True)
class Option:
    """One plan of the blocks first…last-1: bytes kept, peak inside, time added."""

    first: int
    last: int
    kept_bytes: int
    peak_bytes: int
    added_us: float
    segment: Segment
    plan: SegmentPlan


class _Structure:
    """All segments of one structure: their plans, found on the first of them."""

    def __init__(self, first: Segment) -> None:
        self._first = first

    @cached_property
    def plans(self) -> list[SegmentPlan]:
        return segment_plans(self._first)

    @cached_property
    def lighter(self) -> list[SegmentPlan]:
        return lighter_plans(self._first, self.plans)


def _option(first: int, last: int, segment: Segment, plan: SegmentPlan) -> Option:
    problem = segment.problem
    peak_bytes = _peak_bytes(problem, plan)
    added_us = float(np.array(problem.times)[plan.recomputed].sum())
    return Option(first, last, plan.kept_bytes, peak_bytes, added_us, segment, plan)


class Chain:
    """A problem's segments with their options; made once, solved for many budgets."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.blocks = BlockPartition(problem)
        self._structures: dict[tuple[object, ...], _Structure] = {}
        self.options: list[list[Option]] = [[] for _ in range(self.blocks.n_blocks + 1)]
        self._segments: list[tuple[int, int, Segment, int]] = []  # with the least peak of each
        usual, most = problem.n_cells / self.blocks.n_blocks, _OPTIONS.max_cells_per_segment
        lengths = _OPTIONS.segment_lengths_blocks
        for length in (n for n in lengths if n <= 3 or n * usual <= most):
            for first in range(self.blocks.n_blocks - length + 1):
                last = first + length
                segment = self.blocks.segment(first, last)
                structure = self._structures.setdefault(segment.signature, _Structure(segment))
                own = [_option(first, last, segment, plan) for plan in structure.plans]
                self.options[last] += own
                least = min(option.peak_bytes for option in own)
                self._segments.append((first, last, segment, least))

    def lighter(self, budget_bytes: int) -> list[list[Option]]:
        """All options, and lighter ones for segments that nearly fill a budget by themselves."""
        options = [list(own) for own in self.options]
        for first, last, segment, least in self._segments:
            if least > _OPTIONS.nearly_full_ratio * budget_bytes:
                plans = self._structures[segment.signature].lighter
                options[last] += [_option(first, last, segment, plan) for plan in plans]
        return options

    def solve(self, budget_bytes: int, *, lighter: bool = False) -> Choices | None:
        """The choices of least added time whose peak, segment by segment, is within the budget.

        `lighter` options help with tight budgets, but take time to find.
        """

        def step(before: _States, option: Option) -> tuple[int, Floats]:
            fits = np.searchsorted(before.kept, budget_bytes - option.peak_bytes, side="right")
            return int(fits), before.cost[:fits] + option.added_us

        return self._best(step, self.lighter(budget_bytes) if lighter else self.options)

    def least_peak(self) -> Choices:
        """The choices of least peak, at any cost in time."""

        def step(before: _States, option: Option) -> tuple[int, Floats]:
            return len(before.kept), np.maximum(before.cost, before.kept + option.peak_bytes)

        found = self._best(step, self.options)
        assert found is not None  # without a budget, something always fits
        return found

    def _best(self, step: Step, options: list[list[Option]]) -> Choices | None:
        states = [_START]
        for last in range(1, self.blocks.n_blocks + 1):
            states.append(_reached(states, options[last], step, _OPTIONS.max_states))
        return self._choices(_path(states, options)) if len(states[-1].kept) else None

    def _choices(self, path: list[Option]) -> Choices:
        problem = self.problem
        whole = drop_all(problem)
        for option in path:
            chosen = option.plan.chosen
            ops = [*option.segment.from_ops, problem.n_ops]
            for local, cell in enumerate(option.segment.cells):
                whole.keep[cell] = chosen.keep[local]
                whole.hold_from[cell] = ops[chosen.hold_from[local]]
        return whole


@dataclass(frozen=True)
class _States:
    """The partial plans up to a block: bytes kept and cost, none dominated in both."""

    kept: Ints
    cost: Floats
    option: Ints
    parent: Ints


_ZERO = np.zeros(1, dtype=np.int64)
_START = _States(kept=_ZERO, cost=np.zeros(1), option=_ZERO, parent=_ZERO)


def _path(states: list[_States], options: list[list[Option]]) -> list[Option]:
    """The options of the cheapest complete plan, the last first."""
    path = []
    block, index = len(states) - 1, int(np.argmin(states[-1].cost))
    while block:
        at = states[block]
        option = options[block][at.option[index]]
        path.append(option)
        block, index = option.first, int(at.parent[index])
    return path


# From the states before an option: how many of them (by bytes kept) allow it, and their new costs.
Step = Callable[[_States, Option], tuple[int, Floats]]


def _reached(states: list[_States], options: list[Option], step: Step, max_states: int) -> _States:
    """The states after a block, over all options that end with it."""
    kept, cost, number, parent = [], [], [], []
    for index, option in enumerate(options):
        before = states[option.first]
        fits, costs = step(before, option)
        kept.append(before.kept[:fits] + option.kept_bytes)
        cost.append(costs)
        number.append(np.full(fits, index))
        parent.append(np.arange(fits))
    all_kept, all_cost = np.concatenate(kept), np.concatenate(cost)
    order = np.lexsort((all_cost, all_kept))
    least = np.minimum.accumulate(all_cost[order])
    order = order[np.flatnonzero(np.diff(least, prepend=np.inf) < 0)]  # cheaper than all smaller
    if len(order) > max_states:
        order = order[np.linspace(0, len(order) - 1, max_states).astype(np.int64)]
    return _States(
        all_kept[order],
        all_cost[order],
        np.concatenate(number)[order],
        np.concatenate(parent)[order],
    )
