"""The optimal schedule of a small step: an integer program, solved to proven optimality.

After Checkmate (Jain et al., MLSys 2020). Time is divided into **stages**, one for each op that
reads a cell across its gap (a reader). Before its reader, a stage may recompute any forward ops,
each once, in captured order: the program decides which. Its solutions include everything that
`lower` makes of any choices, and more: a cell may be freed and recomputed at any stage, or computed
early because that is cheap.

Variables, for a stage t, an op k and a cell c:

    run[t, k]       1 if op k is recomputed in stage t, else 0
    there[t, c]     c is live when stage t begins
    until[t, c, k]  c is live until op k of stage t, which may read it
    after[t, c]     c is live while the stage's reader runs

    minimise  Σ time_k · run[t, k]

subject to: an op's inputs are live until it runs, the reader's inputs while it runs; a cell that is
live until an op is live until all earlier ones; a cell that is live until the first op was live
when the stage began, or is made in it; a cell that is live when a stage begins was live at the end
of the previous one; at every moment, the live bytes are within the budget. For fixed integers the
least values of all other variables are 0 or 1, so they need not be declared integer; `after` is,
since branching on it makes the search about ten times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.errors import InfeasibleBudget, PlanError
from rekindle.planners.exact.milp import IntegerProgram
from rekindle.planners.finish import write_up
from rekindle.planners.lowering import Bursts, Lowered, lower_bursts
from rekindle.planners.problem import Problem, problem_of

MAX_DECISIONS = 500


def plan_ilp(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
    """The plan that adds the least time within the budget, among all just-in-time schedules.

    Raises PlanError for a step with too many decisions.
    """
    problem = problem_of(graph, profile)
    lowered = optimum(problem, budget_bytes)
    kept, bound_us = survivors(problem, lowered), lowered.recompute_us
    return write_up(lowered, kept, planner="ilp", budget_bytes=budget_bytes, bound_us=bound_us)


def optimum(problem: Problem, budget_bytes: int | None, nodes: int | None = None) -> Lowered:
    """The plan that adds the least time within a budget; without one, that of the least peak.

    Raises PlanError if the search is not complete after so many nodes of its tree.
    """
    if budget_bytes is not None:
        found = cheapest_within(problem, budget_bytes, nodes)
        if found is not None:
            return found
    model = _Model(problem)
    lowered = lower_bursts(problem, model.bursts(model.program.least_peak(nodes)))
    if budget_bytes is not None:
        raise InfeasibleBudget(budget_bytes=budget_bytes, least_peak_bytes=lowered.peak_bytes)
    return lowered


def cheapest_within(
    problem: Problem, budget_bytes: int, nodes: int | None = None
) -> Lowered | None:
    """The plan that adds the least time within a budget; None if there is none."""
    lowered = lower_bursts(problem, ())
    if lowered.peak_bytes <= budget_bytes:
        return lowered
    model = _Model(problem)
    while (found := model.program.cheapest_within(budget_bytes, nodes)) is not None:
        lowered = lower_bursts(problem, model.bursts(found))
        if lowered.peak_bytes <= budget_bytes:
            return lowered
        model.program.forbid(found)  # over the budget by the solver's rounding
    return None


def n_decisions(problem: Problem) -> int:
    """The size of the integer program: the number of places where an op may be recomputed."""
    return sum(len(ops) for ops in _runnable(problem))


def survivors(problem: Problem, lowered: Lowered) -> list[bool]:
    """For each cell: True if its original is live whenever it is read across its gap."""
    place = np.flatnonzero(lowered.copies == 0)
    end = {i.storage: i.end for i in lowered.instances if i.copy == 0}
    return [
        bool(needs) and end[storage] >= place[needs[-1]]
        for storage, needs in zip(problem.storage, problem.needs, strict=True)
    ]


@dataclass
class _Stage:
    """The variables of one stage, by op and by cell, and the terms of the bytes at each op."""

    reader: int
    run: dict[int, int] = field(default_factory=dict)
    there: dict[int, int] = field(default_factory=dict)
    after: dict[int, int] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)  # until the first reader, or `after`
    bytes_at: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by op


class _Model:
    """The integer program of a step, stage by stage."""

    def __init__(self, problem: Problem) -> None:
        if (n := n_decisions(problem)) > MAX_DECISIONS:
            raise PlanError(
                f"the planner ilp is for small steps: this one has {n} decisions, and "
                f"{MAX_DECISIONS} are the most it takes. Use the planner auto."
            )
        self.problem = problem
        self.program = IntegerProgram()
        self.first_write: dict[int, int] = {}  # by storage
        for cell, storage in enumerate(problem.storage):
            self.first_write.setdefault(storage, problem.writer[cell])
        self.last_use = dict(zip(problem.storage, problem.last_use, strict=True))
        useful, runnable = _useful_cells(problem), _runnable(problem)
        self.stages: list[_Stage] = []
        for (reader, _), ops in zip(problem.readers, runnable, strict=True):
            self.add_stage(reader, ops, useful[reader])
        self.add_captured_ops()

    def bursts(self, solution: Sequence[bool]) -> Bursts:
        """The recomputed ops, by reader, from the values of the variables."""
        found = (
            (s.reader, [op for op, var in s.run.items() if solution[var]]) for s in self.stages
        )
        return [(reader, ops) for reader, ops in found if ops]

    def add_stage(self, reader: int, ops: list[int], useful: set[int]) -> None:
        problem, program = self.problem, self.program
        stage = _Stage(reader)
        in_use = self.in_use_before(reader)
        for op in ops:
            stage.run[op] = program.decision(cost=problem.times[op])
            extra = problem.workspaces[op] + sum(problem.sizes[s] for s in problem.also_makes[op])
            stage.bytes_at[op] = [(stage.run[op], int(extra))]
        for cell in sorted(useful - in_use):
            if problem.writer[cell] < reader:
                self.add_cell(stage, cell)
        for op in ops:
            products = [c for c in problem.writes[op] if c in stage.first]
            for cell in problem.writes[op]:
                if cell not in stage.first:  # a by-product, freed at once
                    stage.bytes_at[op].append((stage.run[op], problem.bytes[cell]))
            # An op is recomputed only if one of its results is used.
            program.at_most(0, [(stage.run[op], 1), *((stage.first[c], -1) for c in products)])
        waiting = self.bytes_in_use(reader, started_before=reader)
        for op in ops:
            program.peak_at(int(problem.between[reader]) + waiting, stage.bytes_at[op])
        program.peak_at(
            int(problem.base[reader]) + self.bytes_in_use(reader),
            [(var, problem.bytes[cell]) for cell, var in stage.after.items()],
        )
        self.stages.append(stage)

    def add_cell(self, stage: _Stage, cell: int) -> None:
        """The constraints on one cell in one stage, and its bytes at each op of the stage."""
        problem, program = self.problem, self.program
        writer, nbytes, can_keep = problem.writer[cell], problem.bytes[cell], problem.can_keep[cell]
        made = None if problem.must_keep[cell] else stage.run.get(writer)
        readers = [op for op in stage.run if cell in problem.reads[op]]
        chain = [program.share() for _ in readers]
        for op, until in zip(readers, chain, strict=True):
            program.at_most(0, [(stage.run[op], 1), (until, -1)])
        there = None
        if can_keep:
            there = stage.there[cell] = program.share()
            is_read = stage.reader in problem.needs[cell]
            stage.after[cell] = program.share(at_least=float(is_read), is_whole=True)
            chain.append(stage.after[cell])
            if self.stages and problem.last_use[cell] < self.stages[-1].reader:
                program.at_most(0, [(there, 1), (self.stages[-1].after[cell], -1)])
        if not chain:
            return
        first = stage.first[cell] = chain[0]
        sources = [var for var in (there, made) if var is not None]
        program.at_most(0, [(first, 1), *((var, -1) for var in sources)])
        for earlier, later in pairwise(chain):
            program.at_most(0, [(later, 1), (earlier, -1)])
        at_writer = made
        if made is not None and there is not None:
            at_writer = program.share()  # the copy made here, or the one live before
            program.at_most(0, [(made, 1), (at_writer, -1)])
            program.at_most(0, [(first, 1), (at_writer, -1)])
        passed = 0
        for op in stage.run:
            if made is not None and op <= writer:
                var = at_writer if op == writer else there
            else:
                var = chain[passed] if passed < len(chain) else None
                if passed < len(readers) and readers[passed] == op:
                    passed += 1
                    if not can_keep and _changes(problem, op, cell):
                        var = None  # counted as the version that the op writes
            if var is not None:
                stage.bytes_at[op].append((var, nbytes))

    def add_captured_ops(self) -> None:
        """The memory at ops that are not readers: with the cells that live on to the next stage."""
        problem, stages = self.problem, iter([*self.stages, _Stage(self.problem.n_ops)])
        stage = next(stages)
        for op in range(problem.n_ops):
            if op == stage.reader:
                stage = next(stages)
                continue
            waiting = [
                (var, problem.bytes[cell])
                for cell, var in stage.there.items()
                if problem.last_use[cell] < op
            ]
            self.program.peak_at(int(problem.base[op]) + self.bytes_in_use(op), waiting)

    def in_use_before(self, reader: int) -> set[int]:
        """The cells that are live when a stage begins because forward ops will use them later."""
        held: dict[int, int] = {}
        for cell, storage in enumerate(self.problem.storage):
            if self.problem.writer[cell] < reader <= self.last_use[storage]:
                held[storage] = cell
        return set(held.values())

    def bytes_in_use(self, op: int, started_before: int | None = None) -> int:
        """The bytes of the storages that are live at an op for forward ops."""
        limit = op + 1 if started_before is None else started_before
        return sum(
            int(self.problem.sizes[storage])
            for storage, first in self.first_write.items()
            if first < limit and op <= self.last_use[storage]
        )


def _useful_cells(problem: Problem) -> dict[int, set[int]]:
    """For each reader: the cells that it or a later one needs, directly or as a source."""
    found: dict[int, set[int]] = {}
    useful: set[int] = set()
    for reader, cells in reversed(problem.readers):
        todo = [cell for cell in cells if cell not in useful]
        useful = useful | set(todo)
        while todo:
            cell = todo.pop()
            if not problem.must_keep[cell]:
                new = set(problem.reads[problem.writer[cell]]) - useful
                useful |= new
                todo += new
        found[reader] = useful
    return found


def _runnable(problem: Problem) -> list[list[int]]:
    """For each reader: the ops that may be recomputed before it, to some use."""
    found = []
    for reader, useful in sorted(_useful_cells(problem).items()):
        writers = {problem.writer[cell] for cell in useful if not problem.must_keep[cell]}
        found.append(sorted(op for op in writers if op < reader))
    return found


def _changes(problem: Problem, op: int, cell: int) -> bool:
    """True if an op writes the next version of a cell's storage."""
    return any(problem.storage[c] == problem.storage[cell] for c in problem.writes[op])
