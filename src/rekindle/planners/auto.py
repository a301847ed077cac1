"""The planner people use: the best of all, with a proof of how good it is.

Most steps are chains of blocks: the dynamic program over segments (`chain`) finds plans within a
few parts in a thousand of the bound there; where it does not, it looks closer at the segments that
nearly fill the budget. What the other planners would choose is tried as well,
so that `auto` is never worse than any of them (of a step of many thousand ops, only what μ-TWO
would choose, as long as anything fits); small steps are solved to the optimum (`ilp`). Local search
against the exact simulation puts room that is left to use (`polish`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.errors import InfeasibleBudget, PlanError
from rekindle.planners.baselines import chen, mutwo
from rekindle.planners.baselines.mincut import cheapest_cut
from rekindle.planners.bound import Bound
from rekindle.planners.chain import Chain
from rekindle.planners.exact import ilp
from rekindle.planners.finish import write_up
from rekindle.planners.local_search import exchange, fit, polish
from rekindle.planners.lowering import Choices, Lowered, choices, keep_all, lower
from rekindle.planners.min_cut import CutNetwork
from rekindle.planners.problem import Problem, problem_of

_CLOSE = 1.02  # within this factor of the bound, nothing more is tried
_FAR = 1.1  # beyond this factor of the bound, segments are looked at more closely
_TIGHTENINGS = 4  # how often the chain is asked again for less where it went over
_LOWERINGS = (0.03, 0.01, 0.003)  # by how much a still lower peak is asked for
_PROBES = (0.02, 0.05)  # the same where plans are sought from scratch
_MOST_OPS_FOR_ALL = 4000  # of a larger step, the others are asked only where nothing fits
_MOST_FOR_ILP = 130  # decisions of the integer program: up to here it is solved at once
_MOST_FOR_A_TRY = (
    ilp.MOST_DECISIONS
)  # and up to here it is tried where the others stay far from the bound
_MOST_DROPPABLE_FOR_A_TRY = 120  # with more activations, there are more decisions than that
_TRY_NODES = 300  # of the search tree
_MOST_DROPPABLE_FOR_EXCHANGES = 200  # with more, some hundred exchanges have not helped yet


def plan_auto(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
    """The cheapest plan found within the budget, and a lower bound on what any plan must add."""
    return session(graph, profile).plan(budget_bytes)


def session(graph: StepGraph, profile: Profile) -> AutoPlanner:
    """The session of a step; made once, so that a second budget costs much less than the first."""
    known: AutoPlanner | None = graph.__dict__.get("_auto")  # as cached_property does
    if known is None or known.problem.profile is not profile:
        known = graph.__dict__["_auto"] = AutoPlanner(problem_of(graph, profile))
    return known


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to run the step. `chosen` is None where it cannot be said by choices."""

    keep: list[bool]
    lowered: Lowered
    chosen: Choices | None

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated at any position."""
        return self.lowered.peak_bytes

    @property
    def added_us(self) -> float:
        """The time spent on recomputation."""
        return self.lowered.recompute_us


class AutoPlanner:
    """What `auto` knows of one step whatever the budget: made once, asked for many budgets."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.network = CutNetwork(problem)
        self.bound = Bound(problem, self.network)
        self._last: tuple[int, Candidate | None] | None = None  # what was asked, and found
        self._too_small_bytes = 0  # a budget that nothing stays within, as has been proven

    def plan(self, budget_bytes: int) -> Plan:
        """The cheapest plan found within the budget."""
        best = self.best(budget_bytes) or self.least
        if best.peak_bytes > budget_bytes:
            raise InfeasibleBudget(budget_bytes=budget_bytes, least_peak_bytes=best.peak_bytes)
        bound_us = min(self.bound.added_us(budget_bytes), best.added_us)
        return write_up(
            self.problem,
            best.keep,
            best.lowered,
            planner="auto",
            budget_bytes=budget_bytes,
            bound_us=bound_us,
        )

    def best(self, budget_bytes: int) -> Candidate | None:
        """The cheapest candidate that fits; None where none does."""
        if self._last is None or self._last[0] != budget_bytes:
            self._last = budget_bytes, self._best(budget_bytes)
        return self._last[1]  # whoever was told the least peak asks for it next

    def _best(self, budget_bytes: int) -> Candidate | None:
        plain = self._candidate(keep_all(self.problem))
        if plain.peak_bytes <= budget_bytes:
            return plain
        if self.n_decisions <= _MOST_FOR_ILP:
            with suppress(PlanError):
                if found := self._exact(budget_bytes):
                    return found
        is_large = self.problem.n_ops > _MOST_OPS_FOR_ALL
        tried = [*self._by_chain(budget_bytes), *self._by_greedy(budget_bytes)]
        if not is_large or not _cheapest(tried, budget_bytes):
            tried += [*self.at_any_budget, *self._by_cut(budget_bytes)]
        if not _cheapest(tried, budget_bytes):
            tried.append(self._lowest)
        tried += list(self._improved(_undominated(tried), budget_bytes))
        found = _cheapest(tried, budget_bytes)
        bound_us = self.bound.added_us(budget_bytes)
        if not found or found.added_us > _FAR * bound_us:
            lighter = list(self._by_chain(budget_bytes, lighter=True))
            tried += [*lighter, *self._improved(_undominated(lighter), budget_bytes)]
            found = _cheapest(tried, budget_bytes)
        if not found or found.added_us > _CLOSE * bound_us:
            tried += self._by_wider_search(None if is_large else found, budget_bytes)
        return _cheapest(tried, budget_bytes)

    @cached_property
    def chain(self) -> Chain:
        """The step as a chain of blocks."""
        return Chain(self.problem)

    @cached_property
    def greedy(self) -> mutwo.DropOrder:
        """What μ-TWO drops one after the other."""
        return mutwo.DropOrder(self.problem)

    @cached_property
    def at_any_budget(self) -> list[Candidate]:
        """What the planners choose that do not look at the budget."""
        problem = self.problem
        chosen = [choices(problem, ()), *chen.sqrt_choices(problem)]
        chosen += [chen.recursive_choices(problem), chen.selective_choices(problem)]
        return [self._candidate(each) for each in chosen]

    @cached_property
    def least(self) -> Candidate:
        """The candidate of least peak: asked for that peak or less, `best` finds no lower one."""
        least = self._lowest
        while found := self._lower_than(least):
            least = found
        return least

    def _lower_than(self, least: Candidate) -> Candidate | None:
        """A candidate of a lower peak, if `best` finds one: plans can lie far from each other."""
        asked = (int(least.peak_bytes * (1 - share)) for share in (0.0, *_PROBES))
        found = map(self.best, asked)
        return next((each for each in found if each and each.peak_bytes < least.peak_bytes), None)

    @cached_property
    def _lowest(self) -> Candidate:
        """The candidate of least peak that asking for less and less leads to."""
        if self.n_decisions <= _MOST_FOR_ILP:
            with suppress(PlanError):
                return self._exactly_least()
        known = [*self.at_any_budget, self._candidate(self.chain.least_peak())]
        best, *others = sorted(known, key=_peak_first)
        for share in _LOWERINGS:
            best = self._below(best, best, share)
        if self.problem.n_ops <= _MOST_OPS_FOR_ALL:
            for start in others[:3]:
                best = self._below(best, start, _LOWERINGS[-1])
        if self.n_decisions <= _MOST_FOR_A_TRY:
            with suppress(PlanError):
                best = min(best, self._exactly_least(_TRY_NODES), key=_peak_first)
        return best

    def _below(self, best: Candidate, start: Candidate, share: float) -> Candidate:
        """What local search makes of a start when asked for a peak below the best's, if better."""
        assert start.chosen is not None
        asked = int(best.peak_bytes * (1 - share))
        found = self._candidate(fit(self.problem, start.chosen, asked))
        return min(best, found, key=_peak_first)

    @cached_property
    def n_decisions(self) -> float:
        """The size of the integer program; infinite where it need not be counted."""
        if len(self.problem.droppable) > _MOST_DROPPABLE_FOR_A_TRY:
            return float("inf")
        return ilp.n_decisions(self.problem)

    def _by_chain(self, budget_bytes: int, *, lighter: bool = False) -> Iterator[Candidate]:
        """What the dynamic program finds; asked for less where its estimate was too low."""
        asked = budget_bytes
        for _ in range(_TIGHTENINGS):
            chosen = self.chain.solve(asked, lighter=lighter)
            if chosen is None:
                break
            candidate = self._candidate(chosen)
            yield candidate
            if candidate.peak_bytes <= budget_bytes:
                break
            asked -= candidate.peak_bytes - budget_bytes

    def _by_greedy(self, budget_bytes: int) -> Iterator[Candidate]:
        """What μ-TWO drops."""
        chosen = self.greedy.first_within(budget_bytes)
        if chosen is not None:
            yield self._candidate(chosen)

    def _by_cut(self, budget_bytes: int) -> Iterator[Candidate]:
        """What one price per byte keeps."""
        chosen, _ = cheapest_cut(self.problem, budget_bytes, self.network)
        if chosen is not None:
            yield self._candidate(chosen)

    def _improved(self, front: list[Candidate], budget_bytes: int) -> Iterator[Candidate]:
        """What local search makes of the cheapest that fits, and of the next that does not."""
        found = [_cheapest(front, budget_bytes)]
        beyond = [each for each in front if each.peak_bytes > budget_bytes]
        if beyond and (chosen := beyond[0].chosen):
            found.append(self._candidate(fit(self.problem, chosen, budget_bytes)))
        for each in found:
            if each and each.chosen and each.peak_bytes <= budget_bytes:
                yield each
                yield self._candidate(polish(self.problem, each.chosen, budget_bytes))

    def _by_wider_search(self, found: Candidate | None, budget_bytes: int) -> Iterator[Candidate]:
        """What is tried where the cheapest is far from the bound, or there is none."""
        is_small = len(self.problem.droppable) <= _MOST_DROPPABLE_FOR_EXCHANGES
        if found and found.chosen and is_small:
            yield self._candidate(exchange(self.problem, found.chosen, budget_bytes))
        if self.n_decisions <= _MOST_FOR_A_TRY:
            with suppress(PlanError):
                if exact := self._exact(budget_bytes, _TRY_NODES):
                    yield exact

    def _candidate(self, chosen: Choices) -> Candidate:
        return Candidate(chosen.keep, lower(self.problem, chosen), chosen)

    def _exact(self, budget_bytes: int, nodes: int | None = None) -> Candidate | None:
        """The cheapest of all that stays within a budget; None where there is none."""
        if budget_bytes <= self._too_small_bytes:
            return None
        lowered = ilp.cheapest_within(self.problem, budget_bytes, nodes)
        if lowered is None:
            self._too_small_bytes = budget_bytes
            return None
        return Candidate(ilp.survivors(self.problem, lowered), lowered, None)

    def _exactly_least(self, nodes: int | None = None) -> Candidate:
        lowered = ilp.optimum(self.problem, None, nodes)
        return Candidate(ilp.survivors(self.problem, lowered), lowered, None)


def _cheapest(tried: list[Candidate], budget_bytes: int) -> Candidate | None:
    fitting = [each for each in tried if each.peak_bytes <= budget_bytes]
    return min(fitting, key=lambda each: (each.added_us, each.peak_bytes), default=None)


def _undominated(tried: list[Candidate]) -> list[Candidate]:
    """Those of the tried that are cheaper than all with a lower peak; the lowest first."""
    front: list[Candidate] = []
    for each in sorted(tried, key=_peak_first):
        if not front or each.added_us < front[-1].added_us:
            front.append(each)
    return front


def _peak_first(candidate: Candidate) -> tuple[int, float]:
    return candidate.peak_bytes, candidate.added_us
