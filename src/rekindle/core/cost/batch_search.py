"""The search for the largest batch that fits into a budget, in few evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rekindle.core.notebook import html_table, one_line
from rekindle.units import format_bytes

MOST = 1 << 24  # samples: the largest batch considered

_BISECT_EVERY = 6  # evaluations: one in so many bisects instead of following the secant
_DESCENT_START_RATIO = 1.15  # by which `descend` raises its upper end
_DESCENT_STEP_RATIO = 1.01  # by which it comes down from there
_CLIMB_RATIO = 1.1  # by which `climb` goes up
_MAX_EXTRAPOLATION = 8.0  # times the distance of the two batches that a line goes through
_LINEAR_ADDED_TIME_RATIO = 2.0  # of the time that may be added: beyond, no line is fitted


class Fit(NamedTuple):
    """A batch that fits: its peak and the time of a step, as forecast."""

    batch: int
    peak_bytes: int
    step_us: float

    @property
    def samples_per_s(self) -> float:
        """The throughput."""
        return self.batch / self.step_us * 1e6 if self.step_us > 0 else math.nan


@dataclass(frozen=True)
class LargestBatch:
    """The largest batches that fit into a budget; None if not even one sample fits.

    `plain` is the largest without a plan, `planned` the largest with one, `quick` the largest that
    keeps the share `at_least` of the throughput of `plain`, if that was asked for. If nothing fits,
    `least_bytes` is a budget that one sample fits into.
    """

    budget_bytes: int
    device: str
    method: str
    plain: Fit | None
    planned: Fit | None
    at_least: float | None = None
    quick: Fit | None = None
    least_bytes: int | None = None

    def _facts(self) -> dict[str, object]:
        def shown(fit: Fit | None) -> str:
            return f"{fit.batch:,} at {fit.samples_per_s:,.1f} samples/s" if fit else "none fits"

        facts: dict[str, object] = {"plain": shown(self.plain), "planned": shown(self.planned)}
        if self.at_least is not None:
            facts[f"planned, at least {self.at_least:.0%} of plain's speed"] = shown(self.quick)
        return facts | {"budget": format_bytes(self.budget_bytes), "device": self.device}

    __repr__ = one_line
    _repr_html_ = html_table


class Between(NamedTuple):
    """An interval that contains the largest batch: the first end fits, the second does not."""

    fits: float
    fails: float


def largest_within(
    peak_bytes: Callable[[int], int], budget_bytes: float, *, start: int, close: float
) -> int:
    """The largest batch whose peak is within a budget, to the relative precision `close`; or 0.

    Peaks grow almost linearly, so this is the secant method, with a bisection now and then.
    """
    last = (1, peak_bytes(1))
    if last[1] > budget_bytes:
        return 0
    low, high, tried, n_tries = 1, MOST, max(start, 2), 1
    while high - low > _step(low, close):
        now = (tried, peak_bytes(tried))
        low, high = (tried, high) if now[1] <= budget_bytes else (low, tried)
        n_tries += 1
        is_slow = n_tries % _BISECT_EVERY == 0  # the secant converges slowly if growth is uneven
        meets = math.sqrt(low * high) if is_slow else _meets(last, now, budget_bytes)
        last, tried = now, _inside(meets, low, high, close)
    return low


def descend(can_plan: Callable[[float], bool], known: float) -> Between:
    """An interval that contains the largest batch, from one that is known to fit.

    If larger batches fit, too, the search comes from above: a planner that knows the step rejects
    an infeasible batch sooner than it finds a plan.
    """
    fits, fails = known, known * _DESCENT_STEP_RATIO
    if not can_plan(fails):
        return Between(fits, fails)
    while fails < MOST and can_plan(fails * _DESCENT_START_RATIO):
        fails *= _DESCENT_START_RATIO
    fits, fails = fails, fails * _DESCENT_START_RATIO
    while (tried := fails / _DESCENT_STEP_RATIO) > fits:
        if can_plan(tried):
            return Between(tried, fails)
        fails = tried
    return Between(fits, fails)


def close_in(plan: Callable[[int], Fit | None], between: Between, close: float) -> Fit | None:
    """The largest batch with a plan, to the relative precision `close`, from an estimate."""
    best, tried, stride = None, max(1, int(between.fits)), close
    high = max(round(between.fails), tried + 1)
    while best is None or high - best.batch > _step(best.batch, close):
        found = plan(tried)
        if found is not None:
            best = found
        elif tried == 1:
            return None
        else:
            high = tried
        if best is None:
            tried = max(1, min(high - 1, int(high * (1 - stride))))
            stride *= 2
        else:
            tried = (best.batch + high) // 2
    return best


def climb(can: Callable[[int], Fit | None], start: Fit, most: int, close: float) -> Fit:
    """The largest feasible batch up to `most`, to the relative precision `close`."""
    best, high = start, most + 1
    while high - best.batch > _step(best.batch, close):
        up = min(int(best.batch * _CLIMB_RATIO) + 1, most)
        tried = up if high > most else (best.batch + high) // 2
        found = can(tried)
        if found is None:
            high = tried
        else:
            best = found
    return best


def quickest(
    plan: Callable[[int], Fit | None], plain: Fit, at_least: float, between: Between, close: float
) -> tuple[Fit, int]:
    """The largest batch that keeps a share of the plain step's throughput, and one that does not.

    The time added per sample grows smoothly at first, so that the secant tells where to look; it
    jumps where the planner runs out of good plans.
    """
    most = 1 / at_least - 1
    best, high = plain, round(between.fails)
    added = {plain.batch: 0.0}
    tried = max(plain.batch + 1, int(between.fits))
    while high - best.batch > _step(best.batch, close):
        tried = min(tried, high - 1)
        found = plan(tried)
        slower = math.inf if found is None else plain.samples_per_s / found.samples_per_s - 1
        if found is not None and slower <= most:
            best = found
        else:
            high = tried
        if slower <= _LINEAR_ADDED_TIME_RATIO * most:
            added[tried] = slower
        tried = _inside(_crosses(added, most, best.batch, high), best.batch, high, close)
    return best, high


def _crosses(added: dict[int, float], most: float, low: int, high: int) -> float:
    """The estimated batch at which the added time reaches its limit, between two others."""
    middle = math.sqrt(low * high)
    near = sorted(added.items(), key=lambda entry: abs(entry[1] - most))[:2]
    (a, less), (b, more) = sorted(near)[0], sorted(near)[-1]
    if less >= more:
        return middle
    share = (most - less) / (more - less)
    meets = a * math.pow(b / a, max(-_MAX_EXTRAPOLATION, min(share, _MAX_EXTRAPOLATION)))
    return meets if less <= most <= more else min(meets, middle)


def _step(batch: int, close: float) -> int:
    """The largest difference of two batches that are close."""
    return max(1, int(batch * close))


def _inside(batch: float, low: int, high: int, close: float) -> int:
    """The batch, clamped between two others, and close to neither if there is room."""
    least, most = low + _step(low, close), math.ceil(high / (1 + close))
    return max(low + 1, min(max(int(batch), least), most, high - 1))


def _meets(a: tuple[int, int], b: tuple[int, int], budget_bytes: float) -> float:
    """The batch at which the line through two peaks meets the budget."""
    if (a[1] < b[1]) != (a[0] < b[0]) or a[1] == b[1]:
        return 2 * max(a[0], b[0])
    return a[0] + (budget_bytes - a[1]) * (b[0] - a[0]) / (b[1] - a[1])
