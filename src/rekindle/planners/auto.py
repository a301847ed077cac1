"""The default planner: the best of all others, with a proof of how good it is.

Small steps are solved to optimality (`ilp`). For large ones, the rotor-style dynamic program
(`chain`) and all other planners are tried, and local search uses up the rest of the budget. If the
result is far from the Lagrangian bound (`bound`), wider searches follow.
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
from rekindle.planners.local_search import DEFAULT_SEARCH, SearchOptions, exchange, fit, polish
from rekindle.planners.lowering import Choices, Lowered, drop_all, keep_all, lower
from rekindle.planners.min_cut import CutNetwork
from rekindle.planners.problem import Problem, problem_of


@dataclass(frozen=True)
class AutoOptions:
    """The tuning constants of `auto`. Sizes are of the step: limits on how much is tried."""

    close_to_bound_ratio: float = 1.02  # a plan within this factor of the bound is accepted
    far_from_bound_ratio: float = 1.1  # beyond this factor, segments get lighter options
    max_chain_attempts: int = 4  # dynamic programs solved, each for what the last one exceeded
    lowering_ratios: tuple[float, ...] = (0.03, 0.01, 0.003)  # by which a lower peak is asked for
    probe_ratios: tuple[float, ...] = (0.02, 0.05)  # the same, for plans made from scratch
    max_ops_for_all_planners: int = 4000  # with more ops, the others are asked if nothing fits
    max_decisions_for_ilp: int = 130  # of the integer program: solved first
    max_decisions_for_ilp_attempt: int = ilp.MAX_DECISIONS  # solved if plans stay far from bound
    max_droppable_for_ilp_attempt: int = 120  # with more activations, it has more decisions
    ilp_attempt_nodes: int = 300  # of the branch-and-bound tree
    max_droppable_for_exchange: int = 200  # with more, exchanges have not helped
    search: SearchOptions = DEFAULT_SEARCH


DEFAULT_AUTO = AutoOptions()


def plan_auto(
    graph: StepGraph, profile: Profile, budget_bytes: int, options: AutoOptions = DEFAULT_AUTO
) -> Plan:
    """The cheapest plan found within the budget, and a lower bound on the time any plan adds."""
    return auto_planner(graph, profile, options).plan(budget_bytes)


def auto_planner(
    graph: StepGraph, profile: Profile, options: AutoOptions = DEFAULT_AUTO
) -> AutoPlanner:
    """The planner of a step; kept with the graph, since a second budget costs much less."""
    known: AutoPlanner | None = graph.__dict__.get("_auto")  # as cached_property does
    if known is None or known.problem.profile is not profile or known.options != options:
        known = graph.__dict__["_auto"] = AutoPlanner(problem_of(graph, profile), options)
    return known


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to run the step. `chosen` is None if choices cannot express it."""

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
    """The planner of one step: made once, asked for many budgets."""

    def __init__(self, problem: Problem, options: AutoOptions = DEFAULT_AUTO) -> None:
        self.problem = problem
        self.options = options
        self.network = CutNetwork(problem)
        self.bound = Bound(problem, self.network)
        self._last: tuple[int, Candidate | None] | None = None  # budget and result
        self._too_small_bytes = 0  # a budget proven to be infeasible

    def plan(self, budget_bytes: int) -> Plan:
        """The cheapest plan found within the budget."""
        best = self.best(budget_bytes) or self.least
        if best.peak_bytes > budget_bytes:
            raise InfeasibleBudget(budget_bytes=budget_bytes, least_peak_bytes=best.peak_bytes)
        bound_us = min(self.bound.added_us(budget_bytes), best.added_us)
        return write_up(
            best.lowered, best.keep, planner="auto", budget_bytes=budget_bytes, bound_us=bound_us
        )

    def best(self, budget_bytes: int) -> Candidate | None:
        """The cheapest candidate that fits; None if none does."""
        if self._last is None or self._last[0] != budget_bytes:
            self._last = budget_bytes, self._best(budget_bytes)
        return self._last[1]  # kept, since the least peak that an error names is asked for next

    def _best(self, budget_bytes: int) -> Candidate | None:
        plain = self._candidate(keep_all(self.problem))
        if plain.peak_bytes <= budget_bytes:
            return plain
        options = self.options
        if self.n_decisions <= options.max_decisions_for_ilp:
            with suppress(PlanError):
                if found := self._exact(budget_bytes):
                    return found
        is_large = self.problem.n_ops > options.max_ops_for_all_planners
        tried = list(self._by_chain(budget_bytes))
        if (chosen := self.greedy.first_within(budget_bytes)) is not None:
            tried.append(self._candidate(chosen))
        if not is_large or not _cheapest(tried, budget_bytes):
            tried += self.budget_independent
            chosen, _ = cheapest_cut(self.problem, budget_bytes, self.network)
            if chosen is not None:
                tried.append(self._candidate(chosen))
        if not _cheapest(tried, budget_bytes):
            tried.append(self._lowest)
        tried += list(self._improved(_undominated(tried), budget_bytes))
        found = _cheapest(tried, budget_bytes)
        bound_us = self.bound.added_us(budget_bytes)
        if not found or found.added_us > options.far_from_bound_ratio * bound_us:
            lighter = list(self._by_chain(budget_bytes, lighter=True))
            tried += [*lighter, *self._improved(_undominated(lighter), budget_bytes)]
            found = _cheapest(tried, budget_bytes)
        if not found or found.added_us > options.close_to_bound_ratio * bound_us:
            tried += self._by_wider_search(None if is_large else found, budget_bytes)
        return _cheapest(tried, budget_bytes)

    @cached_property
    def chain(self) -> Chain:
        """The step as a chain of blocks."""
        return Chain(self.problem)

    @cached_property
    def greedy(self) -> mutwo.DropOrder:
        """The order in which μ-TWO drops activations."""
        return mutwo.DropOrder(self.problem)

    @cached_property
    def budget_independent(self) -> list[Candidate]:
        """The plans of the planners that ignore the budget."""
        problem = self.problem
        chosen = [drop_all(problem), *chen.all_sqrt_choices(problem)]
        chosen += [chen.recursive_choices(problem), chen.selective_choices(problem)]
        return [self._candidate(each) for each in chosen]

    @cached_property
    def least(self) -> Candidate:
        """The candidate of least peak: for a lower budget, `best` finds none."""
        least = self._lowest
        while found := self._lower_than(least):
            least = found
        return least

    def _lower_than(self, least: Candidate) -> Candidate | None:
        """A candidate of a lower peak, if `best` finds one: peaks of plans can be far apart."""
        asked = (int(least.peak_bytes * (1 - share)) for share in (0.0, *self.options.probe_ratios))
        found = map(self.best, asked)
        return next((each for each in found if each and each.peak_bytes < least.peak_bytes), None)

    @cached_property
    def _lowest(self) -> Candidate:
        """The candidate of least peak that local search reaches, asked for less and less."""
        options = self.options
        if self.n_decisions <= options.max_decisions_for_ilp:
            with suppress(PlanError):
                return self._exactly_least()
        known = [*self.budget_independent, self._candidate(self.chain.least_peak())]
        best, *others = sorted(known, key=_peak_first)
        for share in options.lowering_ratios:
            best = self._below(best, best, share)
        if self.problem.n_ops <= options.max_ops_for_all_planners:
            for start in others[:3]:
                best = self._below(best, start, options.lowering_ratios[-1])
        if self.n_decisions <= options.max_decisions_for_ilp_attempt:
            with suppress(PlanError):
                exact = self._exactly_least(options.ilp_attempt_nodes)
                best = min(best, exact, key=_peak_first)
        return best

    def _below(self, best: Candidate, start: Candidate, share: float) -> Candidate:
        """The better of the best and what local search finds from a start, for a lower peak."""
        assert start.chosen is not None
        asked = int(best.peak_bytes * (1 - share))
        found = self._candidate(fit(self.problem, start.chosen, asked, self.options.search))
        return min(best, found, key=_peak_first)

    @cached_property
    def n_decisions(self) -> float:
        """The size of the integer program; infinite if it is known to be too large."""
        if len(self.problem.droppable) > self.options.max_droppable_for_ilp_attempt:
            return float("inf")
        return ilp.n_decisions(self.problem)

    def _by_chain(self, budget_bytes: int, *, lighter: bool = False) -> Iterator[Candidate]:
        """The plans of the dynamic program; asked again for less if its estimate was too low."""
        asked = budget_bytes
        for _ in range(self.options.max_chain_attempts):
            chosen = self.chain.solve(asked, lighter=lighter)
            if chosen is None:
                break
            candidate = self._candidate(chosen)
            yield candidate
            if candidate.peak_bytes <= budget_bytes:
                break
            asked -= candidate.peak_bytes - budget_bytes

    def _improved(self, front: list[Candidate], budget_bytes: int) -> Iterator[Candidate]:
        """Local search from the cheapest that fits, and from the next that does not."""
        search = self.options.search
        found = [_cheapest(front, budget_bytes)]
        beyond = [each for each in front if each.peak_bytes > budget_bytes]
        if beyond and (chosen := beyond[0].chosen):
            found.append(self._candidate(fit(self.problem, chosen, budget_bytes, search)))
        for each in found:
            if each and each.chosen and each.peak_bytes <= budget_bytes:
                yield each
                polished = polish(self.problem, each.chosen, budget_bytes, search)
                yield self._candidate(polished)

    def _by_wider_search(self, found: Candidate | None, budget_bytes: int) -> Iterator[Candidate]:
        """Slow searches, for when the cheapest is far from the bound or there is none."""
        options = self.options
        is_small = len(self.problem.droppable) <= options.max_droppable_for_exchange
        if found and found.chosen and is_small:
            chosen = exchange(self.problem, found.chosen, budget_bytes, options.search)
            yield self._candidate(chosen)
        if self.n_decisions <= options.max_decisions_for_ilp_attempt:
            with suppress(PlanError):
                if exact := self._exact(budget_bytes, options.ilp_attempt_nodes):
                    yield exact

    def _candidate(self, chosen: Choices) -> Candidate:
        return Candidate(chosen.keep, lower(self.problem, chosen), chosen)

    def _exact(self, budget_bytes: int, nodes: int | None = None) -> Candidate | None:
        """The optimum within a budget; None if there is none."""
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
    """The candidates that are cheaper than all with a lower peak; the lowest first."""
    front: list[Candidate] = []
    for each in sorted(tried, key=_peak_first):
        if not front or each.added_us < front[-1].added_us:
            front.append(each)
    return front


def _peak_first(candidate: Candidate) -> tuple[int, float]:
    return candidate.peak_bytes, candidate.added_us
