"""Splits a step into parts: spans of nodes that a CUDA graph can capture, and those between them.

A graph repeats exactly what it captured. Calls that touch host memory or count elements, and an
optimizer whose hyperparameters are Python numbers, therefore run outside of graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from rekindle.rewriting.apply_schedule import RewrittenStep
from rekindle.tracing import operators, rng
from rekindle.tracing.tape import Recording

_HOST_CALLS = (rng.get_state, rng.set_state)  # of a step that saves random state itself


@dataclass(eq=False)
class StepPart:
    """Consecutive nodes of a step, all captured in one graph or none.

    `entering` are results of earlier parts that it reads or frees, `leaving` its own results that
    later parts or the caller need.
    """

    nodes: list[fx.Node]
    is_graph: bool
    entering: list[fx.Node]
    leaving: list[fx.Node]


def split_step(
    recording: Recording, rewritten: RewrittenStep, *, device_type: str, with_optimizer: bool
) -> list[StepPart]:
    """The parts of a step in order; graphs capture the work of one type of device."""
    capturable: dict[fx.Node, bool] = {}
    for node in rewritten.nodes:
        if node in rewritten.optimizer_calls:
            capturable[node] = with_optimizer
        elif node in rewritten.calls:
            capturable[node] = _is_on_device(recording, rewritten, node, device_type)
        else:  # a `getitem` of a call's result
            capturable[node] = capturable[node.all_input_nodes[0]]
    spans: list[tuple[bool, list[fx.Node]]] = []
    for node in rewritten.nodes:
        if not spans or spans[-1][0] != capturable[node]:
            spans.append((capturable[node], []))
        spans[-1][1].append(node)
    made_in = {node: index for index, (_, nodes) in enumerate(spans) for node in nodes}
    used_in: list[dict[fx.Node, None]] = []
    for _, nodes in spans:
        used = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes)
        freed = [other for node in nodes for other in rewritten.frees.get(node, ())]
        used_in.append({**used, **dict.fromkeys(freed)})
    last = {rewritten.node_map[node]: len(spans) for node in recording.outputs}
    for index, used in enumerate(used_in):
        for node in used:
            last[node] = max(last.get(node, index), index)
    return [
        StepPart(
            nodes,
            is_graph,
            entering=[node for node in used_in[index] if made_in.get(node, index) < index],
            leaving=[node for node in nodes if last.get(node, index) > index],
        )
        for index, (is_graph, nodes) in enumerate(spans)
    ]


def _is_on_device(
    recording: Recording, rewritten: RewrittenStep, node: fx.Node, device_type: str
) -> bool:
    call, tape = rewritten.calls[node], recording.tape
    if call.node.target in _HOST_CALLS:
        return False
    indices: list[fx.Node] = []
    fx.map_arg(call.node.args[1:2], indices.append)
    if operators.counts_elements(call.node.target, (tape.metas[t].dtype for t in indices)):
        return False
    tensors = [*call.node.all_input_nodes, *call.results, *call.writes]
    return all(tape.storages[tape.metas[t].storage].device.type == device_type for t in tensors)
