"""A planned step shaped into rows: what became of every activation, and what that brought.

As in `summary`, nothing is planned or simulated here: the rows are read off plan and traces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.op_names import op_name
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import Trace
from rekindle.report.names import pattern_of, source_line
from rekindle.report.summary import Peak, Summary, first_values, peak_of, summarize


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One activation: what it is, what was decided about it, and why."""

    name: str
    kind: str
    module: str
    source: str
    nbytes: int
    is_kept: bool
    freed_bytes: int
    added_us: float
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group of activations of which some were dropped."""

    label: str
    dropped: int
    count: int
    freed_bytes: int
    added_us: float


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """All rows of a planned step; `plain` has those of the step as it was."""

    plain: Summary
    planner: str
    budget_bytes: int
    peak: Peak
    is_peak_recomputing: bool  # whether the op that runs at the peak is a recomputation
    step_us: float
    recompute_us: float
    recomputed_ops: int
    bound_us: float | None
    plan_seconds: float | None
    decisions: tuple[DecisionRow, ...]  # most bytes first
    kinds: tuple[Dropped, ...]  # by the operator that made them, most bytes freed first
    modules: tuple[Dropped, ...]  # by module, repeated blocks together

    @property
    def dropped(self) -> Dropped:
        """All activations as one group."""
        return _group("all", self.decisions)

    @property
    def added_share(self) -> float:
        """The time that recomputation adds, as a share of the plain step's."""
        return self.recompute_us / (self.plain.step_us or 1.0)

    @property
    def bound_share(self) -> float | None:
        """The lower bound on that share; None where the planner gives none."""
        return None if self.bound_us is None else self.bound_us / (self.plain.step_us or 1.0)

    @property
    def peak_share(self) -> float:
        """The peak as a share of the plain step's."""
        return self.peak.nbytes / max(self.plain.peak.nbytes, 1)

    @property
    def budget_share(self) -> float:
        """The budget as a share of the plain step's peak."""
        return self.budget_bytes / max(self.plain.peak.nbytes, 1)


def summarize_plan(
    graph: StepGraph,
    profile: Profile,
    plain: Trace,
    plan: Plan,
    planned: Trace,
    about: Mapping[str, Any] | None = None,
    plan_seconds: float | None = None,
    plain_profile: Profile | None = None,
) -> PlanSummary:
    """The rows of a planned step, beside those of the plain one.

    The plain one may be another graph, with costs of its own: the step before it was improved.
    """
    decisions = _decisions(graph, planned, plan)
    return PlanSummary(
        plain=summarize(plain.graph, plain_profile or profile, plain, about),
        planner=plan.planner,
        budget_bytes=plan.budget_bytes,
        peak=peak_of(graph, planned),
        is_peak_recomputing=bool(graph.ops) and bool(planned.copies[planned.peak_position]),
        step_us=planned.step_us,
        recompute_us=planned.recompute_us,
        recomputed_ops=sum(not graph.ops[op].is_view for op in planned.ops[planned.copies > 0]),
        bound_us=plan.bound_us,
        plan_seconds=plan_seconds,
        decisions=decisions,
        kinds=_groups(decisions, lambda row: row.kind),
        modules=_groups(decisions, lambda row: pattern_of(row.module) or "(no module)"),
    )


def _decisions(graph: StepGraph, trace: Trace, plan: Plan) -> tuple[DecisionRow, ...]:
    names = first_values(graph)
    rows = []
    for decision in plan.decisions:
        maker = graph.ops[int(trace.liveness.birth[decision.storage])]
        rows.append(
            DecisionRow(
                name=names[decision.storage].name,
                kind=op_name(maker),
                module=maker.source.module,
                source=source_line(maker.source),
                nbytes=int(trace.sizes_bytes[decision.storage]),
                is_kept=decision.is_kept,
                freed_bytes=decision.freed_bytes,
                added_us=decision.added_us,
                reason=decision.reason,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _groups(
    decisions: Iterable[DecisionRow], label_of: Callable[[DecisionRow], str]
) -> tuple[Dropped, ...]:
    """The groups of which something was dropped."""
    members: dict[str, list[DecisionRow]] = defaultdict(list)
    for row in decisions:
        members[label_of(row)].append(row)
    groups = [_group(label, rows) for label, rows in members.items()]
    found = [group for group in groups if group.dropped]
    return tuple(sorted(found, key=lambda group: (-group.freed_bytes, group.label)))


def _group(label: str, rows: Iterable[DecisionRow]) -> Dropped:
    rows = list(rows)
    return Dropped(
        label=label,
        dropped=sum(not row.is_kept for row in rows),
        count=len(rows),
        freed_bytes=sum(row.freed_bytes for row in rows),
        added_us=sum(row.added_us for row in rows),
    )
