"""Ways to plan one segment, from keeping all to dropping all, each the best of its kind.

For a price per byte kept, a segment's best plan is a minimum cut. Going through all prices gives
the corners of the lower convex hull of (bytes kept, time added). Long segments that keep nothing
inside also have a nested plan: the first recomputation leaves only the borders of the blocks, and
each block is computed once more when the backward pass comes to it.

Where a segment nearly fills a budget by itself, that is not enough: of a loss over many classes,
all is best kept but one large tensor, which no price singles out. Local search finds such ways.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rekindle.planners.blocks import Segment
from rekindle.planners.local_search import fit
from rekindle.planners.lowering import Choices, choices, lower
from rekindle.planners.min_cut import Cut, CutNetwork
from rekindle.planners.problem import Ints, Problem

MOST_OPTIONS = 10
_STARTS = 3  # options of the lowest peaks, which are made lighter
_LOWER = 0.9  # of an option's peak: what is asked for next
_LOWERINGS = 4
_WORK = 3000  # ops to place in one such search
_STEEPEST = 1e4  # µs per byte: a price at which nothing is kept that need not be


@dataclass(frozen=True)
class SegmentPlan:
    """An option for all segments of one structure, in the segment's own numbers.

    `kept_bytes` is what stays for the rest of the step; `again` are the ops that run again, as
    often as they do; `live` is what the segment's own cells take at each of its ops.
    """

    chosen: Choices
    kept_bytes: int
    again: Ints
    live: Ints


def shapes(segment: Segment) -> list[SegmentPlan]:
    """The options of a segment that no other option beats in bytes, peak and time alike."""
    found = [_shape(segment, kept) for kept in _hull(segment)]
    if segment.borders:
        found.append(_shape(segment, [], _nested(segment)))
    return _undominated(segment.problem, found)


def lighter(segment: Segment, known: list[SegmentPlan]) -> list[SegmentPlan]:
    """Options of lower peaks: what local search makes of the lowest, asked for less and less."""
    exports = set(segment.exports)
    must = [each or cell in exports for cell, each in enumerate(segment.problem.must_keep)]
    problem = replace(segment.problem, must_keep=must)
    found: list[SegmentPlan] = []
    by_peak = sorted(known, key=lambda shape: _peak_bytes(problem, shape))
    quickest = sorted(by_peak[_STARTS:], key=lambda shape: len(shape.again))[:1]
    for start in (*by_peak[:_STARTS], *quickest):
        lowest = start
        for _ in range(_LOWERINGS):
            asked = int(_LOWER * _peak_bytes(problem, lowest))
            chosen = fit(problem, lowest.chosen, asked, _WORK)
            kept = [cell for cell, keep in enumerate(chosen.keep) if keep]
            lower_one = _shape(segment, kept, chosen.hold_from)
            if _peak_bytes(problem, lower_one) >= _peak_bytes(problem, lowest):
                break
            lowest = lower_one
            found.append(lowest)
    return _undominated(problem, found)


def _peak_bytes(problem: Problem, shape: SegmentPlan) -> int:
    return int((shape.live + problem.base).max(initial=0))


def _hull(segment: Segment) -> list[list[int]]:
    """The sets of kept cells at the corners of the hull, found by cutting between neighbours."""
    problem = segment.problem
    network = CutNetwork(problem)
    nbytes = np.array(problem.bytes, dtype=np.float64)
    nbytes[segment.exports] = 0.0  # kept in any case

    def cut(price: float) -> tuple[float, float, list[int]]:
        found: Cut = network.solve(price * nbytes)
        return (
            float(nbytes[found.kept].sum()),
            sum(problem.times[op] for op in found.ops),
            found.kept,
        )

    corners = [cut(_STEEPEST), cut(0.0)]
    todo = [(corners[0], corners[1])]
    while todo and len(corners) < MOST_OPTIONS:
        low, high = todo.pop(0)  # widest first would be better; in turn is good enough
        if high[0] - low[0] < 1 or low[1] - high[1] < 1e-9:
            continue
        price = (low[1] - high[1]) / (high[0] - low[0])
        middle = cut(price)
        if low[0] < middle[0] < high[0]:
            corners.append(middle)
            todo += [(low, middle), (middle, high)]
    return [corner[2] for corner in corners]


def _shape(segment: Segment, kept: list[int], hold_from: list[int] | None = None) -> SegmentPlan:
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
    return SegmentPlan(
        chosen,
        sum(problem.bytes[c] for c in stays),
        lowered.ops[lowered.copies > 0],
        live,
    )


def _nested(segment: Segment) -> list[int]:
    """From when each cell is held: borders at once, the rest when the backward pass is there."""
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
        id(s): (s.kept_bytes, int(s.live.max(initial=0)), float(times[s.again].sum()))
        for s in found
    }
    for shape in sorted(found, key=lambda s: key[id(s)]):
        mine = key[id(shape)]
        if not any(all(a <= b for a, b in zip(key[id(o)], mine, strict=True)) for o in kept):
            kept.append(shape)
    return kept
