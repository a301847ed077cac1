"""Cuts a step into parts: runs of nodes that a CUDA graph can hold, and what lies between them.

Work that touches host memory, and a call of the user's optimizer that reads Python numbers anew
each time, must run at every step; a graph would repeat what it saw when it was captured.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from rekindle.rewriting.apply_schedule import RewrittenStep
from rekindle.tracing import rng
from rekindle.tracing.tape import Recording

_HOST_CALLS = (rng.get_state, rng.set_state)  # of a step that saves random state itself


@dataclass(eq=False)
class Part:
    """Some nodes that run one after the other, all in one graph or none.

    `entering` are results of earlier parts that it reads or frees, `leaving` those of its own that
    later parts or the step's end need.
    """

    nodes: list[fx.Node]
    is_graph: bool
    entering: list[fx.Node]
    leaving: list[fx.Node]


def split(
    recording: Recording, listing: RewrittenStep, *, device_type: str, with_optimizer: bool
) -> list[Part]:
    """The parts of a step in order, for graphs that hold the work of one type of device.

    They may hold the optimizer's calls, too, if `with_optimizer`.
    """
    kinds = _kinds(recording, listing, device_type, with_optimizer)
    runs: list[tuple[bool, list[fx.Node]]] = []
    for node in listing.nodes:
        if not runs or runs[-1][0] != kinds[node]:
            runs.append((kinds[node], []))
        runs[-1][1].append(node)
    made_in = {node: index for index, (_, nodes) in enumerate(runs) for node in nodes}
    touched: list[dict[fx.Node, None]] = []
    for _, nodes in runs:
        used = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes)
        used.update(dict.fromkeys(freed for node in nodes for freed in listing.frees.get(node, ())))
        touched.append(used)
    last = {listing.renamed[node]: len(runs) for node in recording.outputs}
    for index, used in enumerate(touched):
        for node in used:
            last[node] = max(last.get(node, index), index)
    return [
        Part(
            nodes,
            is_graph,
            entering=[node for node in touched[index] if made_in.get(node, index) < index],
            leaving=[node for node in nodes if last.get(node, index) > index],
        )
        for index, (is_graph, nodes) in enumerate(runs)
    ]


def _kinds(
    recording: Recording, listing: RewrittenStep, device_type: str, with_optimizer: bool
) -> dict[fx.Node, bool]:
    """For each node: whether a graph may hold it."""
    kinds: dict[fx.Node, bool] = {}
    for node in listing.nodes:
        if node in listing.optimizer_calls:
            kinds[node] = with_optimizer
        elif node in listing.calls:
            kinds[node] = _is_on_device(recording, listing, node, device_type)
        else:  # one result of a call, taken out of it
            kinds[node] = kinds[node.all_input_nodes[0]]
    return kinds


def _is_on_device(
    recording: Recording, listing: RewrittenStep, node: fx.Node, device_type: str
) -> bool:
    call, tape = listing.calls[node], recording.tape
    if call.node.target in _HOST_CALLS:
        return False
    tensors = [*call.node.all_input_nodes, *call.results, *call.writes]
    return all(tape.storages[tape.metas[t].storage].device.type == device_type for t in tensors)
