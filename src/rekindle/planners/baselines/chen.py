"""The baselines `chen-*`: √n segments, recursive segments, and selection by kind of op.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. The paper's networks are chains;
captured steps are not. A **cut** lies between two forward ops; it is **crossed** by the cells that
are written before it and read by forward ops after it. If these are kept, everything after the cut
can be recomputed without going back past it; so segments end where few bytes cross. A cell that an
in-place op overwrites later cannot be kept, so cuts that it crosses are avoided.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np

from rekindle.core.graph.graph import Op, op_name
from rekindle.planners.lowering import Choices, choices, lower
from rekindle.planners.problem import Floats, Ints, Problem

# Numbers of segments to try, in units of √n: the best depends on the bytes that cross the cuts.
_SEGMENT_COUNT_RATIOS = (0.5, 0.7, 1.0, 1.4, 2.0)

# The larger part of a split segment has at most this share of its bytes, so that the depth of the
# recursion is logarithmic.
_LARGEST_PART_RATIO = 0.75

# Ops that take long for the bytes they make, whether or not their FLOPs are known.
_EXPENSIVE = (
    "_cudnn_rnn",
    "_flash_attention",
    "_scaled_dot_product",
    "_scaled_mm",
    "_thnn_fused",
    "_trilinear",
    "addbmm",
    "addmm",
    "addmv",
    "baddbmm",
    "bmm",
    "conv",
    "cudnn_conv",
    "einsum",
    "linear",
    "lstm",
    "matmul",
    "miopen_rnn",
    "mkldnn_",
    "mm",
    "mv",
    "slow_conv",
)


def selective_choices(problem: Problem) -> Choices:
    """Keep the results of convolutions, matmuls, attention and RNN kernels; drop the rest.

    If a cheap op mutates an expensive result in place, the mutated result is kept.
    """
    ops = problem.graph.ops
    expensive = {
        problem.storage[cell] for cell, op in enumerate(problem.writer) if is_expensive(ops[op])
    }
    kept = [cell for cell, storage in enumerate(problem.storage) if storage in expensive]
    return choices(problem, kept)


def is_expensive(op: Op) -> bool:
    """True if an op takes long for the bytes it makes."""
    return op.flops > 0 or op_name(op).startswith(_EXPENSIVE)


class _Spans(NamedTuple):
    """The cells that may be dropped, and the cuts they cross.

    Cut p lies right before the p-th forward op. A cell is written by the forward op `first` and
    last read by `last`, both counted among forward ops, and crosses the cuts first + 1 … last.
    `crossing` is its weight there: its bytes, or, if it cannot be kept, more than everything.
    `held` is what it adds to a recomputed segment: 0 if only forward ops read it.
    """

    cells: Ints
    first: Ints
    last: Ints
    crossing: Floats
    held: Floats

    def of(self, which: Ints) -> _Spans:
        """A selection of the cells, by position."""
        return _Spans._make(column[which] for column in self)


def _spans(problem: Problem) -> _Spans:
    is_forward = np.array([op.phase.is_forward for op in problem.graph.ops], dtype=bool)
    place = np.cumsum(is_forward, dtype=np.int64) - 1
    cells = np.array(
        [c for c in range(problem.n_cells) if problem.bytes[c] and not problem.must_keep[c]],
        dtype=np.int64,
    )
    last_read = list(problem.writer)
    for op in problem.graph.ops:
        if op.phase.is_forward:
            for cell in problem.reads[op.index]:
                last_read[cell] = op.index
    nbytes = np.array(problem.bytes, dtype=np.float64)
    can_keep = np.array(problem.can_keep, dtype=bool)
    is_read = np.array([bool(needs) for needs in problem.needs], dtype=bool)
    crossing = np.where(can_keep, nbytes, nbytes.sum() + nbytes)
    return _Spans(
        cells=cells,
        first=place[np.array(problem.writer, dtype=np.int64)[cells]],
        last=place[np.array(last_read, dtype=np.int64)[cells]],
        crossing=crossing[cells],
        held=np.where(is_read, nbytes, 0.0)[cells],
    )


def sqrt_choices(problem: Problem) -> Choices:
    """About √n segments, of which only the cells that cross a cut are kept.

    Of several numbers of segments around √n, the one with the least peak is taken.
    """

    def cost(chosen: Choices) -> tuple[int, float]:
        lowered = lower(problem, chosen)
        return lowered.peak_bytes, lowered.recompute_us

    return min(all_sqrt_choices(problem), key=cost)


def all_sqrt_choices(problem: Problem) -> list[Choices]:
    """The choices for several numbers of segments around √n.

    The backward pass starts with the last segment. For each number there are two choices: drop that
    segment like the others, or keep it, which costs less time and sometimes more memory.
    """
    spans = _spans(problem)
    n_forward = sum(op.phase.is_forward for op in problem.graph.ops)
    # The total over √n, where n is an effective number of cells: n equal ones count n, small ones
    # hardly count if there are large ones.
    usual_bytes = np.sqrt(np.square(spans.held).sum())
    found: dict[tuple[int, ...], None] = {}
    for factor in _SEGMENT_COUNT_RATIOS:
        cuts = _cuts(spans, n_forward, float(usual_bytes) / factor)
        crosses = np.searchsorted(cuts, spans.first, "right") < np.searchsorted(
            cuts, spans.last, "right"
        )
        in_last = spans.first >= (cuts[-1] if len(cuts) else 0)
        for kept in (spans.cells[crosses], spans.cells[crosses | in_last]):
            found[tuple(int(cell) for cell in kept)] = None
    return [choices(problem, kept) for kept in found]


def _cuts(spans: _Spans, n: int, limit_bytes: float) -> Ints:
    """The cuts with the fewest bytes crossing in total that leave no segment above the limit.

    `n` is the number of forward ops. A single op that makes more than the limit is a segment of its
    own. Dynamic program: best[p] is the least sum over the cuts up to p, if p is one; a sliding
    window has its predecessors.
    """
    weights = np.bincount(spans.first + 1, weights=spans.crossing, minlength=n + 1)
    weights -= np.bincount(spans.last + 1, weights=spans.crossing, minlength=n + 1)
    crossing = np.cumsum(weights)
    made = np.bincount(spans.first + 1, weights=spans.held, minlength=n + 1).cumsum()
    earliest = np.searchsorted(made, made - limit_bytes * (1 + 1e-9), "left")
    best, before = [0.0] * (n + 1), [0] * (n + 1)
    window: deque[int] = deque()
    for cut in range(1, n + 1):
        while window and best[window[-1]] > best[cut - 1]:
            window.pop()
        window.append(cut - 1)
        while window[0] < min(earliest[cut], cut - 1):
            window.popleft()
        before[cut] = window[0]
        best[cut] = best[window[0]] + (float(crossing[cut]) if cut < n else 0.0)
    cuts = []
    while n and (n := before[n]):
        cuts.append(n)
    return np.array(cuts[::-1], dtype=np.int64)


def recursive_choices(problem: Problem) -> Choices:
    """Cut the forward pass in two, hold the cells that cross, and do the same to both halves.

    At any time the cells of one cut per level are held, O(log n) in all.
    The cells that cross a segment's midpoint are held from when the backward pass enters the
    segment; a recomputation that only passes through frees them. The backward pass starts with the
    last part at every level: the cells that cross there are kept. Each level costs up to another
    forward pass.
    """
    spans = _spans(problem)
    first_need = np.array(problem.first_need, dtype=np.int64)
    kept: list[int] = []
    hold_from = np.zeros(problem.n_cells, dtype=np.int64)
    todo = []
    start = 0
    for end in _ends_of_runs(problem):
        run = np.flatnonzero((start <= spans.first) & (spans.first < end))
        stays = spans.last[run] >= end
        kept.extend(spans.cells[run[stays]])
        todo.append((spans.of(run[~stays]), True))
        start = end
    while todo:
        segment, is_entered_at_once = todo.pop()
        if not len(segment.cells):
            continue
        cut = _midpoint(segment)
        held = (segment.first < cut) & (cut <= segment.last)
        if cut < 0:
            held[:] = True
        if is_entered_at_once:
            kept.extend(segment.cells[held])
        else:
            hold_from[segment.cells[held]] = first_need[segment.cells].min()
        todo.append((segment.of(np.flatnonzero(~held & (segment.last < cut))), False))
        after = np.flatnonzero(~held & (segment.first >= cut))
        todo.append((segment.of(after), is_entered_at_once))
    return Choices(choices(problem, kept).keep, hold_from.tolist())


def _ends_of_runs(problem: Problem) -> list[int]:
    """The number of forward ops up to the end of each run of them.

    A step that computes several losses, one after the other, has several runs.
    """
    runs = groupby(problem.graph.ops, key=lambda op: op.phase.is_forward)
    return list(accumulate(len(list(run)) for is_forward, run in runs if is_forward))


def _midpoint(segment: _Spans) -> int:
    """The cut that splits a segment best; -1 if holding all of it takes no more memory.

    Splitting a part of b bytes recursively, with c bytes at each cut, holds about c·log(b / c) in
    the end. The larger part counts, and is limited.
    """
    start = int(segment.first.min())
    n = int(segment.last.max()) - start + 1
    first, last = segment.first - start, segment.last - start
    total = segment.held.sum()
    crossing = np.bincount(first + 1, weights=segment.crossing, minlength=n + 1)
    crossing -= np.bincount(last + 1, weights=segment.crossing, minlength=n + 1)
    crossing = np.maximum(crossing.cumsum(), 0.0)
    before = np.bincount(last + 1, weights=segment.held, minlength=n + 1).cumsum()
    after = total - np.bincount(first + 1, weights=segment.held, minlength=n + 1).cumsum()
    larger = np.maximum(before, after)
    saves = crossing + larger < total * (1 - 1e-9)
    if not saves.any():
        return -1
    in_middle = saves & (larger <= max(_LARGEST_PART_RATIO * total, larger[saves].min()))
    cuts = np.flatnonzero(in_middle)
    weight = np.maximum(crossing[cuts], 1e-9 * total)
    score = weight * (1 + np.log2(1 + larger[cuts] / weight))
    return start + int(cuts[np.lexsort((larger[cuts], score))[0]])
