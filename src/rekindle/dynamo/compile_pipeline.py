"""The stages of `rekindle.compile`, from a graph that Dynamo captured to compiled code.

`compile_graph` hands the graph to AOTAutograd, which derives the joint graph of forward and
backward pass and calls `partition_joint_graph`; both parts are then compiled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.dynamo import aot
from rekindle.dynamo.attention_masks import simplify_masks
from rekindle.dynamo.budget_shares import BudgetShare, share_budget
from rekindle.dynamo.fused_costs import joint_profile
from rekindle.dynamo.fusion import drop_running_stats
from rekindle.dynamo.joint_graph import JointInputs, lift_joint_graph
from rekindle.dynamo.partition import partition_graph
from rekindle.dynamo.planned_graph import Key, PlannedGraph
from rekindle.dynamo.post_grad_passes import PostGradPasses
from rekindle.dynamo.session import Session
from rekindle.dynamo.unused_tangents import compile_backward, unused_tangents
from rekindle.errors import InfeasibleBudget, RekindleError
from rekindle.passes.matmul_padding import pad_matmuls
from rekindle.planners.registry import find_planner
from rekindle.torch_internals import min_cut_partition
from rekindle.units import format_bytes

log = logging.getLogger("rekindle")


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[Any], session: Session
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured, within its share of the session's budget.

    An error of Rekindle is raised when the graph is called, since Dynamo wraps what backends raise.
    """
    key, has_unused = aot.graph_identity(module), False

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> aot.Modules:
        nonlocal has_unused
        has_unused = bool(unused_tangents(joint.graph))
        static_inputs = kwargs.get("static_lifetime_input_indices") or ()
        given = JointInputs(joint, inputs, kwargs["num_fwd_outputs"], static_inputs, key)
        return partition_joint_graph(given, session)

    simplify_masks(module)
    try:
        if session.lower == "eager":
            compiled = aot.compile_eagerly(module, inputs, partition, compile_backward)
        else:
            partitioner = aot.Partitioner(partition, session.cache_key)
            passes = PostGradPasses(session.tuning.post_grad)
            compiled = aot.compile_with_inductor(
                module, inputs, partitioner, passes, compile_backward, session.options
            )
    except RekindleError as error:
        return _raising(error)
    return aot.skip_zero_tangents(compiled) if has_unused else compiled


def partition_joint_graph(given: JointInputs, session: Session) -> aot.Modules:
    """Plan a joint graph, and partition it into a forward and a backward module.

    If no plan fits while outputs besides a loss are held, they are assumed to be released.
    """
    start, module, tuning = time.perf_counter(), given.module, session.tuning
    if any(map(aot.is_unsupported, module.graph.nodes)):
        return _partition_without_budget(given)
    drop_running_stats(module.graph)
    aot.eliminate_common_subexpressions(module)
    fuses = session.lower == "inductor"
    if fuses:
        pad_matmuls(module.graph, tuning.padding)
    can_release = session.holds_outputs and bool(unused_tangents(module.graph))
    for holds_outputs in (True, False) if can_release else (session.holds_outputs,):
        joint = lift_joint_graph(given, fuses=fuses, holds_outputs=holds_outputs)
        share = share_budget(
            joint.step,
            joint_profile(joint),
            session.budget,
            session.static_memory(joint.step),
            session.earlier_graphs(given.key),
            spare_bytes=session.spare_bytes,
            margin_ratio=tuning.margin_ratio,
        )
        try:
            plan = plan_within_share(joint.step, share, given.key, session)
            break
        except InfeasibleBudget:
            if not (can_release and holds_outputs):
                raise
    plan.check(joint.step)
    modules, kept = partition_graph(joint, plan)
    planned = PlannedGraph(
        joint.step,
        share.profile,
        plan,
        budget_bytes=max(plan.budget_bytes, share.planned_bytes + share.spare_bytes),
        kept=kept,
        share=share.ratio,
        note=_note(share, session, must_release=session.holds_outputs and not holds_outputs),
        seconds=time.perf_counter() - start,
        key=given.key,
    )
    session.plans.append(planned)
    log.info(
        "planned a graph of %d ops for %s: peak %s, %s kept, %.1f ms of recomputation, in %.1f s",
        len(joint.step.ops),
        format_bytes(plan.budget_bytes),
        format_bytes(plan.peak_bytes),
        format_bytes(planned.kept_bytes),
        plan.recompute_us / 1e3,
        planned.seconds,
    )
    return modules


def plan_within_share(step: StepGraph, share: BudgetShare, key: Key, session: Session) -> Plan:
    """A plan within a graph's share of the budget.

    If none fits, the plan of the least peak is taken, if that is within the whole budget or a
    later recompilation can leave it more.
    """
    planner = find_planner(session.planner)
    try:
        return planner(step, share.profile, share.planned_bytes)
    except InfeasibleBudget as error:
        least_bytes = error.least_peak_bytes
        if least_bytes > share.budget_bytes:
            session.note_shortfall(key, share, least_bytes)
        return planner(step, share.profile, least_bytes)


def _partition_without_budget(given: JointInputs) -> aot.Modules:
    log.warning("a graph passes random state as values: torch partitions it, without a budget")
    modules: aot.Modules = min_cut_partition(
        given.module,
        given.inputs,
        num_fwd_outputs=given.n_outputs,
        static_lifetime_input_indices=given.static_inputs,
    )
    return modules


def _note(share: BudgetShare, session: Session, *, must_release: bool) -> str:
    """The reasons for a plan's budget, and what it assumes."""
    words = [share.note]
    if session.spare_bytes:
        words.append(f"planned with {format_bytes(session.spare_bytes)} left free")
    if not session.holds_outputs:
        words.append("outputs are released before the backward pass, as a step has shown")
    if must_release:
        words.append("outputs have to be released before the backward pass, or nothing fits")
        log.warning(words[-1])
    return "; ".join(words)


def _raising(error: RekindleError) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise error.with_traceback(None)

    return refuse
