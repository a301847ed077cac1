"""What a capture returns: the tape, and how it is tied to the user's objects."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from rekindle.tracing import batch_tree
from rekindle.tracing.module_effects import Effect
from rekindle.tracing.step_state import StepState
from rekindle.tracing.tape import Tape


@dataclass(frozen=True)
class GradUse:
    """What the step does to one parameter's `.grad`."""

    slot: int  # into Recording.around.slots
    reads_old: bool  # the gradient from before the step matters (else it is cleared unread)
    was_there: bool
    final: fx.Node | None  # what is there after the step; None if nothing


@dataclass(frozen=True)
class Recording:
    """A captured step."""

    tape: Tape
    around: StepState
    batch_nodes: list[fx.Node]
    result: batch_tree.Structure
    result_nodes: list[fx.Node]
    grads: list[GradUse]
    effects: list[Effect]

    @property
    def outputs(self) -> list[fx.Node]:
        """What must be there when the step ends: results, gradients left, attributes set."""
        return [
            *self.result_nodes,
            *(use.final for use in self.grads if use.final is not None),
            *(node for effect in self.effects for node in effect.nodes),
        ]

    def drop_dead_calls(self) -> None:
        """Take calls off the tape whose results nobody uses and that change nothing."""
        alive = set(self.outputs)
        alive.update(grad for call in self.tape.optimizer_calls for grad in call.grads)
        kept = []
        for call in reversed(self.tape.calls):
            acts = call.writes or call.is_random or not call.results
            if acts or not alive.isdisjoint(call.results):
                alive.update(call.node.all_input_nodes)
                kept.append(call)
                continue
            self._erase(call.node)
        self.tape.calls[:] = kept[::-1]

    def _erase(self, node: fx.Node) -> None:
        """Take a node out of the graph, and with it what only takes its results apart."""
        for user in list(node.users):
            if user.target is operator.getitem:
                self._erase(user)
        self.tape.graph.erase_node(node)
