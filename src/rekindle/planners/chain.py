"""The best way through the chain of segments: dynamic programming over blocks and bytes kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rekindle.planners.blocks import Blocks, Segment
from rekindle.planners.lowering import Choices, choices
from rekindle.planners.problem import Floats, Ints, Problem
from rekindle.planners.segment_plans import SegmentPlan, lighter, shapes

LENGTHS = (1, 2, 3, 4, 6, 12)  # of segments, in blocks
MOST_CELLS = 500  # of a segment of more than three blocks, on average: the blocks are long then
MOST_STATES = 1000
_NEARLY = 0.8  # of a budget


@dataclass(frozen=True, slots=True)
class Option:
    """One way to plan the blocks first…last-1: bytes kept, bytes needed meanwhile, time added."""

    first: int
    last: int
    kept_bytes: int
    peak_bytes: int
    added_us: float
    segment: Segment
    shape: SegmentPlan


class _Kind:
    """All segments of one structure: their options, found on the first of them."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    @cached_property
    def shapes(self) -> list[SegmentPlan]:
        """The usual ones."""
        return shapes(self._segment)

    @cached_property
    def lighter(self) -> list[SegmentPlan]:
        """Those of lower peaks, for budgets that are hard to meet."""
        return lighter(self._segment, self.shapes)


def _option(first: int, last: int, segment: Segment, shape: SegmentPlan) -> Option:
    problem = segment.problem
    return Option(
        first,
        last,
        shape.kept_bytes,
        int((shape.live + problem.base).max(initial=0)),
        float(np.array(problem.times)[shape.again].sum()),
        segment,
        shape,
    )


class Chain:
    """A problem's segments with their options; made once, solved for many budgets."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.blocks = Blocks(problem)
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self.options: list[list[Option]] = [[] for _ in range(self.blocks.n_blocks + 1)]
        self._segments: list[tuple[int, int, Segment, int]] = []  # with the least peak of each
        usual = problem.n_cells / self.blocks.n_blocks
        for length in (n for n in LENGTHS if n <= 3 or n * usual <= MOST_CELLS):
            for first in range(self.blocks.n_blocks - length + 1):
                last = first + length
                segment = self.blocks.segment(first, last)
                kind = self._kinds.setdefault(segment.signature, _Kind(segment))
                own = [_option(first, last, segment, shape) for shape in kind.shapes]
                self.options[last] += own
                least = min(option.peak_bytes for option in own)
                self._segments.append((first, last, segment, least))

    def lighter(self, budget_bytes: int) -> list[list[Option]]:
        """All options, and lighter ones of segments that nearly fill a budget by themselves."""
        options = [list(own) for own in self.options]
        for first, last, segment, least in self._segments:
            if least > _NEARLY * budget_bytes:
                shapes = self._kinds[segment.signature].lighter
                options[last] += [_option(first, last, segment, shape) for shape in shapes]
        return options

    def solve(self, budget_bytes: int, *, lighter: bool = False) -> Choices | None:
        """The choices of least added time whose peak, segment by segment, is within the budget.

        Where it is hard to meet, `lighter` options may help: they take time to find.
        """

        def step(before: _States, option: Option) -> tuple[int, Floats]:
            fits = np.searchsorted(before.kept, budget_bytes - option.peak_bytes, side="right")
            return int(fits), before.cost[:fits] + option.added_us

        return self._best(step, self.lighter(budget_bytes) if lighter else self.options)

    def least_peak(self) -> Choices:
        """The choices of least peak, whatever time they add."""

        def step(before: _States, option: Option) -> tuple[int, Floats]:
            return len(before.kept), np.maximum(before.cost, before.kept + option.peak_bytes)

        found = self._best(step, self.options)
        assert found is not None  # without a budget, something always fits
        return found

    def _best(self, step: Step, options: list[list[Option]]) -> Choices | None:
        states = [_START]
        for last in range(1, self.blocks.n_blocks + 1):
            states.append(_reached(states, options[last], step))
        return self._choices(_path(states, options)) if len(states[-1].kept) else None

    def _choices(self, path: list[Option]) -> Choices:
        problem = self.problem
        whole = choices(problem, ())
        for option in path:
            chosen = option.shape.chosen
            ops = [*option.segment.from_ops, problem.n_ops]
            for local, cell in enumerate(option.segment.cells):
                whole.keep[cell] = chosen.keep[local]
                whole.hold_from[cell] = ops[chosen.hold_from[local]]
        return whole


@dataclass(frozen=True)
class _States:
    """Ways to have planned the blocks so far: bytes kept and cost, none beaten in both."""

    kept: Ints
    cost: Floats
    option: Ints
    parent: Ints


_ZERO = np.zeros(1, dtype=np.int64)
_START = _States(kept=_ZERO, cost=np.zeros(1), option=_ZERO, parent=_ZERO)


def _path(states: list[_States], options: list[list[Option]]) -> list[Option]:
    """The options that led to the cheapest way through all blocks, the last first."""
    path = []
    block, index = len(states) - 1, int(np.argmin(states[-1].cost))
    while block:
        at = states[block]
        option = options[block][at.option[index]]
        path.append(option)
        block, index = option.first, int(at.parent[index])
    return path


# From the states before an option: how many of them, by bytes kept, allow it, and their new costs.
Step = Callable[[_States, Option], tuple[int, Floats]]


def _reached(states: list[_States], options: list[Option], step: Step) -> _States:
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
    if len(order) > MOST_STATES:
        order = order[np.linspace(0, len(order) - 1, MOST_STATES).astype(np.int64)]
    return _States(
        all_kept[order],
        all_cost[order],
        np.concatenate(number)[order],
        np.concatenate(parent)[order],
    )
