"""The best plan of a chain of segments: a rotor-style dynamic program over blocks and bytes kept.

After rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019), whose blocks
are modules that are kept or recomputed as a whole. Here blocks are found in the graph (`blocks`),
and each segment of blocks has several plans inside, found by priced min-cuts and local search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rekindle.planners.blocks import BlockPartition, Segment
from rekindle.planners.local_search import SearchOptions, fit
from rekindle.planners.lowering import Choices, choices, drop_all, lower
from rekindle.planners.min_cut import Cut, CutNetwork
from rekindle.planners.problem import Floats, Ints, Problem


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
    key = {
        id(p): (p.kept_bytes, int(p.live.max(initial=0)), float(times[p.recomputed].sum()))
        for p in found
    }
    for plan in sorted(found, key=lambda p: key[id(p)]):
        mine = key[id(plan)]
        if not any(all(a <= b for a, b in zip(key[id(o)], mine, strict=True)) for o in kept):
            kept.append(plan)
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
