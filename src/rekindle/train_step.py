"""The training step as users hold it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rekindle.captured_step import CapturedStep
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import Trace, simulate
from rekindle.core.memory.layout import layout
from rekindle.core.notebook import html_table, one_line
from rekindle.errors import ReportError
from rekindle.measuring.timing import Measurement, measure
from rekindle.report.html import write_html
from rekindle.report.summary import summarize
from rekindle.units import format_bytes, format_us


class TrainStep:
    """A training step to train with: ``loss = step(batch)``."""

    def __init__(self, captured: CapturedStep) -> None:
        self._captured = captured

    def __call__(self, batch: Any) -> Any:
        """Train on one batch; returns what the user's function returns."""
        return self._captured(batch)

    @property
    def captured(self) -> CapturedStep:
        """The captured step that runs."""
        return self._captured

    @property
    def graph(self) -> StepGraph:
        """The step that runs, as a torch-free graph; `profile` and `plan` are of this one.

        Under a budget, that is the captured step with ops that write in place, and with parameters
        updated as their gradients come where that helps; `captured.graph` is as it was captured,
        which is what is shown without a budget.
        """
        arranged = self._captured.arranged
        return arranged.graph if arranged else self._captured.graph

    @property
    def profile(self) -> Profile | None:
        """What every op costs; None for a step without a budget, which is not profiled."""
        arranged = self._captured.arranged
        return arranged.profile if arranged else None

    @property
    def plan(self) -> Plan | None:
        """What is kept and what is computed again; None for a step without a budget."""
        arranged = self._captured.arranged
        return arranged.plan if arranged else None

    @property
    def budget_bytes(self) -> int | None:
        """What the step may take; its plan stays a little below. None where nothing was asked."""
        arranged = self._captured.arranged
        return arranged.budget_bytes if arranged else None

    @property
    def trace(self) -> Trace | None:
        """Bytes and microseconds at every position, as forecast; None without a profile.

        Where the step is going to run from CUDA graphs, what it makes lies in one arena, and its
        peak is a little below the plan's, which also holds for the first step.
        """
        arranged = self._captured.arranged
        if arranged is None or arranged.profile is None:
            return None
        profile = arranged.profile
        if profile.allocator == "cuda" and self._captured.is_steered:
            profile = replace(profile, allocator="arena")
        return simulate(self.graph, profile, arranged.plan)

    @property
    def plain_profile(self) -> Profile | None:
        """What every op of the plain step costs, as it was captured; None without a budget."""
        arranged = self._captured.arranged
        return arranged.captured_profile if arranged else None

    @property
    def plain_trace(self) -> Trace | None:
        """Bytes and microseconds of the plain step, as forecast; None without a profile."""
        profile = self.plain_profile
        return None if profile is None else simulate(self._captured.graph, profile)

    @property
    def is_compiled(self) -> bool:
        """Whether what runs has been compiled, and may round differently from the plain step."""
        return self._captured.is_compiled

    @property
    def graphs_peak_bytes(self) -> int:
        """What the step needed when it was captured in CUDA graphs; 0 where it was not."""
        return self._captured.graphs_peak_bytes

    @property
    def n_captures(self) -> int:
        """How many captures are kept: one for each batch signature and mode met so far."""
        return self._captured.n_captures

    def measure(self, batch: Any, steps: int = 5) -> Measurement:
        """Run a few steps (they train!) and measure them, after two to warm up."""
        captured = self._captured
        found = measure(
            lambda: self(batch),
            device=captured.device,
            steps=steps,
            warmup=2,  # CUDA graphs are captured in the second step
            around=lambda: captured.around(batch),
        )
        return replace(found, peak_bytes=max(found.peak_bytes, captured.graphs_peak_bytes))

    def report(self, path: str | Path) -> None:
        """Write the page about this step: what it holds when, and what was decided and why.

        The page needs a profile, so the step a budget; it opens in any browser, without a network.
        """
        plan, profile, trace = self.plan, self.profile, self.trace
        if plan is None or profile is None or trace is None:
            raise ReportError(
                "there is nothing to report of a step without a profile: give optimize a budget, "
                "or use rekindle.profile and rekindle.simulate."
            )
        summary = summarize(
            self.graph,
            profile,
            trace,
            plan=plan,
            plain=self.plain_trace,
            plain_profile=self.plain_profile,
        )
        write_html(Path(path), summary, layout=layout(self.graph, plan))

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: it is bound to the very objects it trains."""
        raise TypeError(
            "a TrainStep cannot be pickled or copied: save model.state_dict() and "
            "optimizer.state_dict(), the plan with rekindle.save_plan, and call optimize again."
        )

    def _facts(self) -> dict[str, object]:
        plan, facts = self.plan, dict[str, object](ops=f"{len(self.graph.ops):,}")
        facts |= {"device": self._captured.device, "captures": self.n_captures}
        if plan is None or self.budget_bytes is None:
            return facts | {"budget": "none"}
        dropped = sum(not decision.is_kept for decision in plan.decisions)
        return facts | {
            "budget": format_bytes(self.budget_bytes),
            "planner": plan.planner,
            "forecast peak": format_bytes(plan.peak_bytes),
            "dropped": f"{dropped:,} of {len(plan.decisions):,} activations",
            "added time": format_us(plan.recompute_us),
        }

    __repr__ = one_line
    _repr_html_ = html_table
