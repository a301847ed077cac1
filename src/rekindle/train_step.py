"""The training step that `optimize` returns."""

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
from rekindle.engines.engine import EngineInfo
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
        """The captured step behind this one."""
        return self._captured

    @property
    def graph(self) -> StepGraph:
        """The step that runs, as a torch-free graph; `profile` and `plan` are of this graph.

        Under a budget it is an improved form of the captured step: ops write in place, and
        parameters may be updated early. `captured.graph` is the step as it was captured.
        """
        planned = self._captured.planned
        return planned.graph if planned else self._captured.graph

    @property
    def profile(self) -> Profile | None:
        """The cost of every op; None without a budget, as the step is not profiled then."""
        planned = self._captured.planned
        return planned.profile if planned else None

    @property
    def plan(self) -> Plan | None:
        """Which activations are kept and which recomputed; None without a budget."""
        planned = self._captured.planned
        return planned.plan if planned else None

    @property
    def budget_bytes(self) -> int | None:
        """The budget; the plan stays a margin below it. None without a budget."""
        planned = self._captured.planned
        return planned.budget_bytes if planned else None

    @property
    def trace(self) -> Trace | None:
        """The forecast of bytes and microseconds at every position; None without a profile.

        CUDA graphs allocate from one arena, so that their peak is slightly below the plan's, which
        also covers the first step.
        """
        planned = self._captured.planned
        if planned is None or planned.profile is None:
            return None
        profile = planned.profile
        if profile.allocator == "cuda" and self._captured.is_steered:
            profile = replace(profile, allocator="arena")
        return simulate(self.graph, profile, planned.plan)

    @property
    def plain_profile(self) -> Profile | None:
        """The cost of every op of the step as it was captured; None without a budget."""
        planned = self._captured.planned
        return planned.captured_profile if planned else None

    @property
    def plain_trace(self) -> Trace | None:
        """The forecast of the plain step; None without a profile."""
        profile = self.plain_profile
        return None if profile is None else simulate(self._captured.graph, profile)

    @property
    def engine_info(self) -> EngineInfo:
        """What runs the step, and why: generated code or CUDA graphs, compiled or not."""
        return self._captured.engine_info

    @property
    def is_compiled(self) -> bool:
        """True if ops are compiled, so that they may round differently from the plain step."""
        return self._captured.is_compiled

    @property
    def graphs_peak_bytes(self) -> int:
        """The peak of the step when it was captured in CUDA graphs; 0 without graphs."""
        return self._captured.graphs_peak_bytes

    @property
    def n_captures(self) -> int:
        """How many captures are kept: one for each batch signature and mode met so far."""
        return self._captured.n_captures

    def measure(self, batch: Any, steps: int = 5) -> Measurement:
        """Run a few steps and measure peak and time, after two warm-up steps. All of them train."""
        captured = self._captured
        found = measure(
            lambda: self(batch),
            device=captured.device,
            steps=steps,
            warmup=2,  # CUDA graphs are captured in the second step
            resident=lambda: captured.around(batch),
        )
        return replace(found, peak_bytes=max(found.peak_bytes, captured.graphs_peak_bytes))

    def report(self, path: str | Path) -> None:
        """Write an HTML page about the step: memory over time, and every decision with its reason.

        It needs a profile, and so a budget. The page opens in any browser, without a network.
        """
        plan, profile, trace = self.plan, self.profile, self.trace
        if plan is None or profile is None or trace is None:
            raise ReportError(
                "a step without a profile has no report: give optimize a budget, "
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
        """Refuse to be pickled or copied: the step is bound to the model that it trains."""
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
