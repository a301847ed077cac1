"""A hand-made training step of seven ops, whose numbers can be checked by hand.

At op 4, the peak: input 1 MiB, weight 1 MiB, the activation 4 MiB, its gradient 1 MiB, the loss 4 B
and 100 KiB of library overhead. The activation is idle while op 3 runs, for 40 µs.
"""

from __future__ import annotations

from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.graph.graph import Op, Phase, Role, Source, StepGraph, Storage, Value
from rekindle.core.graph.schedule import Compute, Decision, Free, Plan
from rekindle.core.graph.simulate import Trace, simulate
from rekindle.report.summary import Summary, summarize

MIB = 1 << 20
OVERHEAD_BYTES = 100 << 10
PEAK_BYTES = 7 * MIB + 4 + OVERHEAD_BYTES
ABOUT = {"model": "tiny", "batch": 512, "precision": "fp32"}

_SQUARE, _WIDE = (512, 512), (1024, 1024)
FIRST = Source("layers.0.linear", "/home/me/project/models/net.py", 7)
SECOND = Source("layers.1.act", "/home/me/project/models/net.py", 8)
USER = Source("", "/home/me/project/train.py", 21)
NASTY = '</script><img src=x onerror="console.error(1)">'


def tiny_graph(first: Source = FIRST, mm: str = "mm") -> StepGraph:
    """The graph; `first` and `mm` are the source and the name of its first op."""
    return StepGraph(
        ops=(
            Op(
                0, mm, "aten.mm.default", Phase.FORWARD, (0, 1), (2,), flops=3_000_000, source=first
            ),
            Op(1, "relu", "aten.relu.default", Phase.FORWARD, (2,), (3,), source=SECOND),
            Op(2, "sum_1", "aten.sum.default", Phase.LOSS, (3,), (4,), source=USER),
            Op(3, "neg", "aten.neg.default", Phase.LOSS, (4,), (5,), source=USER),
            Op(
                4,
                "threshold_backward",
                "aten.threshold_backward.default",
                Phase.BACKWARD,
                (3,),
                (6,),
                source=SECOND,
            ),
            Op(
                5,
                "mm_1",
                "aten.mm.default",
                Phase.BACKWARD,
                (0, 6),
                (7,),
                flops=6_000_000,
                source=first,
            ),
            Op(6, "add_", "aten.add_.Tensor", Phase.OPTIMIZER, (1, 7), (), (1,), source=USER),
        ),
        values=(
            Value(0, "x", 0, _SQUARE, "float32"),
            Value(1, "w", 1, _SQUARE, "float32"),
            Value(2, mm, 2, _SQUARE, "float32", 0),
            Value(3, "relu", 3, _WIDE, "float32", 1),
            Value(4, "sum_1", 4, (), "float32", 2),
            Value(5, "neg", 5, (), "float32", 3),
            Value(6, "threshold_backward", 6, _SQUARE, "float32", 4),
            Value(7, "mm_1", 7, _SQUARE, "float32", 5),
        ),
        storages=(
            Storage(0, MIB, Role.INPUT),
            Storage(1, MIB, Role.PARAM),
            Storage(2, MIB, Role.TEMP),
            Storage(3, 4 * MIB, Role.ACTIVATION),
            Storage(4, 4, Role.TEMP),
            Storage(5, 4, Role.OUTPUT),
            Storage(6, MIB, Role.GRAD_MAP),
            Storage(7, MIB, Role.GRAD),
        ),
        outputs=(5,),
    )


def nasty_graph() -> StepGraph:
    """The graph, with markup in its first op's name, module and file."""
    return tiny_graph(Source(f"layers.0{NASTY}", f"{NASTY}.py", 3), mm=NASTY)


def tiny_profile(graph: StepGraph) -> Profile:
    """Costs of 500 µs in all; the first op has a workspace of 512 KiB."""
    times_us = (100.0, 20.0, 10.0, 40.0, 30.0, 200.0, 100.0)
    return Profile(
        device="Toy GPU",
        fingerprint=graph.fingerprint,
        costs=tuple(
            OpCost(time_us, 512 << 10 if index == 0 else 0, is_measured=True)
            for index, time_us in enumerate(times_us)
        ),
        overhead_bytes=OVERHEAD_BYTES,
        method="by hand",
        versions={"torch": "9.9"},
    )


def tiny_step(graph: StepGraph | None = None) -> tuple[StepGraph, Profile, Trace]:
    """Graph, profile and trace."""
    graph = graph or tiny_graph()
    profile = tiny_profile(graph)
    return graph, profile, simulate(graph, profile)


def tiny_plan(graph: StepGraph | None = None) -> Plan:
    """The tiny step with its one activation dropped: mm and relu are recomputed before op 4."""
    graph = graph or tiny_graph()
    schedule = (
        *(Compute(0), Compute(1), Free(2), Compute(2), Free(3), Compute(3), Free(4)),
        *(Compute(0, 1), Compute(1, 1), Free(2, 1), Compute(4), Free(3, 1)),
        *(Compute(5), Free(6), Compute(6), Free(7)),
    )
    decision = Decision(3, False, 4 * MIB, 120.0, "idle for 40.0 µs; computed again by hand")
    return Plan(
        planner="by hand",
        fingerprint=graph.fingerprint,
        budget_bytes=8 * MIB,
        schedule=schedule,
        decisions=(decision,),
        peak_bytes=PEAK_BYTES,
        recompute_us=120.0,
        bound_us=100.0,
    )


def tiny_plan_summary(
    plan: Plan | None = None, graph: StepGraph | None = None, seconds: float | None = None
) -> Summary:
    """The rows of a plan for the tiny step: of `tiny_plan`, unless another is given."""
    graph = graph or tiny_graph()
    plan, profile = plan or tiny_plan(graph), tiny_profile(graph)
    planned = simulate(graph, profile, plan)
    return summarize(graph, profile, planned, ABOUT, plan=plan, plan_seconds=seconds)
