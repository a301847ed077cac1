"""Lifts a recording to a `StepGraph`, which is independent of torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

from torch import fx

from rekindle.core.graph.graph import Op, Phase, Role, StepGraph
from rekindle.passes.graph_builder import GraphBuilder
from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators, same_bits
from rekindle.tracing.tape import Call, EntryKind, OptimizerCall, Recording, run_optimizer

_ROLE = {
    EntryKind.PARAM: Role.PARAM,
    EntryKind.BUFFER: Role.BUFFER,
    EntryKind.ATTRIBUTE: Role.BUFFER,
    EntryKind.OPT_STATE: Role.OPT_STATE,
    EntryKind.BATCH: Role.INPUT,
    EntryKind.EXTERNAL: Role.INPUT,
    EntryKind.GRAD: Role.GRAD,
}


def lift(recording: Recording) -> StepGraph:
    """The graph of a recorded step."""
    return _Lift(recording).graph()


class _Lift(GraphBuilder):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        self.tape = recording.tape

    def graph(self) -> StepGraph:
        for storage in self.tape.storages:
            self.add_storage(storage.nbytes, storage.device)
        for entry in self.tape.entries:
            self._add_value(entry.node, None, _ROLE[entry.kind])
        phases = _phases(self.tape.calls)
        calls = {call.node: call for call in self.tape.calls}
        opaque = {call.node: call for call in self.tape.optimizer_calls if call.is_opaque}
        for node in self.tape.graph.nodes:
            if node in calls:
                self._add_op(calls[node], phases[node])
            elif node in opaque:
                self._add_opaque_optimizer(opaque[node])
        serials = [call.serial for call in self.tape.calls]
        touched = {value.storage for value in self.values}  # calls may have been dropped
        held = {
            storage: bisect_right(serials, last) - 1
            for storage, last in self.tape.held_until.items()
            if storage in touched
        }
        grads = {self._storage(g) for c in self.tape.optimizer_calls for g in c.grads}
        return self.build(self._indices(self.recording.outputs), grads, held)

    def _storage(self, node: fx.Node) -> int:
        return self.tape.metas[node].storage

    def _add_value(self, node: fx.Node, producer: int | None, role: Role | None = None) -> int:
        meta = self.tape.metas[node]
        return self.add_value(node, meta.storage, meta.shape, meta.dtype, producer, role)

    def _indices(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.value_of[node] for node in nodes))

    def _add_op(self, call: Call, phase: Phase) -> None:
        index = len(self.ops)
        inputs = self._indices(call.node.all_input_nodes)
        outputs = tuple(self._add_value(node, index) for node in call.results)
        read = {self.values[value].storage for value in inputs}
        made = {self.values[value].storage for value in outputs}
        copy_op = None
        if isinstance(call.node.target, OpOverload) and len(call.results) == 3:
            device = self.tape.storages[self._storage(call.results[0])].device
            copy_op = operators.copy_op(call.node.target, device, bool(call.writes))
        self.ops.append(
            Op(
                index=index,
                name=call.node.name,
                target=_target(call.node),
                phase=phase,
                inputs=inputs,
                outputs=outputs,
                mutates=self._indices(call.writes),
                is_random=call.is_random,
                is_view=bool(made) and made <= read and not call.writes,
                flops=call.flops,
                source=call.source,
                copy_target=str(copy_op or ""),
                may_overwrite=self._may_overwrite(call),
            )
        )

    def _may_overwrite(self, call: Call) -> tuple[int, ...]:
        """The inputs whose storage the operator can write its result to, with the same bits."""
        target = call.node.target
        if not isinstance(target, OpOverload) or len(call.results) != 1 or call.writes:
            return ()
        if call.unchecked is not None:
            return ()  # the recorded call itself is checked
        metas, inputs = self.tape.metas, call.node.all_input_nodes
        if operators.overwriting(target) is None:
            if operators.in_place(target) is None:
                return ()
            inputs = [node for node in inputs if node is call.node.args[0]]
        result = metas[call.results[0]]
        given = fx.map_arg((call.node.args, dict(call.node.kwargs)), metas.__getitem__)
        form = same_bits.form_of(target, *given, result.dtype)
        device = self.tape.storages[result.storage].device
        if not same_bits.is_same(form, device, same_bits.overwrites_exactly):
            return ()
        storages = [metas[node].storage for node in call.node.all_input_nodes]
        return tuple(
            self.value_of[node]
            for node in inputs
            if metas[node]._replace(storage=result.storage) == result
            and metas[node].storage != result.storage
            and storages.count(metas[node].storage) == 1
            and self._fills_its_storage(node)
        )

    def _fills_its_storage(self, node: fx.Node) -> bool:
        meta = self.tape.metas[node]
        return (
            math.prod(meta.shape) * meta.dtype.itemsize == self.tape.storages[meta.storage].nbytes
        )

    def _add_opaque_optimizer(self, call: OptimizerCall) -> None:
        entries = self.tape.entries
        state = [e.node for e in entries if e.kind in (EntryKind.PARAM, EntryKind.OPT_STATE)]
        self.ops.append(
            Op(
                index=len(self.ops),
                name=call.node.name,
                target=f"rekindle.{run_optimizer.__name__}",
                phase=Phase.OPTIMIZER,
                inputs=self._indices([*call.grads, *state]),
                outputs=(),
                mutates=self._indices(state),
            )
        )


def _target(node: fx.Node) -> str:
    """The name of a node's target; for functions of Rekindle, without their address."""
    target = node.target
    return str(target) if isinstance(target, OpOverload) else f"rekindle.{target.__name__}"  # type: ignore[union-attr]


def _phases(calls: list[Call]) -> dict[fx.Node, Phase]:
    """The phase of each call's node.

    Calls after the last backward op belong to the optimizer (clipping, averaging). The loss is
    computed by loss functions of torch, by calls outside modules on the model's outputs, and by
    calls on the results of these.
    """
    last_backward = max((i for i, call in enumerate(calls) if call.in_backward), default=-1)
    of_model: set[fx.Node] = set()
    of_loss: set[fx.Node] = set()
    phases: dict[fx.Node, Phase] = {}
    for index, call in enumerate(calls):
        if call.in_backward:
            phases[call.node] = Phase.BACKWARD
        elif call.in_optimizer or index > last_backward:
            phases[call.node] = Phase.OPTIMIZER
        else:
            inputs = set(call.node.all_input_nodes)
            after_model = not call.in_model and not inputs.isdisjoint(of_model)
            is_loss = call.in_loss or after_model or not inputs.isdisjoint(of_loss)
            (of_loss if is_loss else of_model if call.in_model else set()).update(call.results)
            phases[call.node] = Phase.LOSS if is_loss else Phase.FORWARD
    return phases
