"""A traced step: the tensors that enter it, its operator calls, and its results."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from rekindle.core.graph.graph import Source
from rekindle.core.uncopyable import Uncopyable
from rekindle.tracing import batch_tree
from rekindle.tracing.decisions import Decisions
from rekindle.tracing.step_state import Effect, EntryKind, StepState


class Meta(NamedTuple):
    """A tensor's layout; `storage` is an index into `Tape.storages`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int


class StorageMeta(NamedTuple):
    """A storage's size and device."""

    nbytes: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that enters the step: its name, and its placeholder in the graph."""

    kind: EntryKind
    name: str
    node: fx.Node
    tensor: torch.Tensor  # fake for a batch, and for optimizer state that does not exist yet


@dataclass(slots=True)
class Call:
    """Facts about one recorded operator call that its FX node has no place for."""

    serial: int  # counts calls in the order they were recorded, from 1
    node: fx.Node
    results: list[fx.Node]  # one for each new tensor that it returns
    writes: list[fx.Node]
    source: Source
    in_backward: bool
    in_optimizer: bool
    in_loss: bool
    in_model: bool
    grad_enabled: bool  # kernels may depend on it: without grad, a CPU LSTM saves less
    is_random: bool
    flops: int
    unchecked: Any = None  # the fake result's forms, if the kernel is checked in the first step
    may_need_less: bool = False  # see `forward_formulas`


@dataclass(frozen=True, slots=True)
class OptimizerCall:
    """One call of `optimizer.step`: the gradients it uses, and the autocast state."""

    node: fx.Node
    params: list[int]  # slots of the parameters that have a gradient
    grads: list[fx.Node]  # their gradients
    autocast: dict[str, torch.dtype]
    is_opaque: bool  # its operators could not be recorded


def run_optimizer(*grads: Any) -> None:
    """Target of the node for `optimizer.step()`; generated code puts the real call in its place."""
    raise NotImplementedError("stands for a call that the program makes")


@dataclass
class Tape:
    """The FX graph of a step, and facts about its nodes."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    entries: list[Entry] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    metas: dict[fx.Node, Meta] = field(default_factory=dict)
    storages: list[StorageMeta] = field(default_factory=list)
    held_until: dict[int, int] = field(default_factory=dict)  # storage -> a call's serial
    optimizer_calls: list[OptimizerCall] = field(default_factory=list)


@dataclass(frozen=True)
class GradUse:
    """How the step uses one parameter's `.grad`."""

    slot: int  # index into Recording.state.slots
    reads_old: bool  # False if the step clears the gradient from before it unread
    existed: bool  # before the step
    final: fx.Node | None  # after the step


@dataclass(frozen=True)
class Recording(Uncopyable):
    """A traced step and the user's objects it works on."""

    tape: Tape
    state: StepState
    batch_nodes: list[fx.Node]
    result: batch_tree.Structure
    result_nodes: list[fx.Node]
    grads: list[GradUse]
    effects: list[Effect]
    decisions: Decisions

    @property
    def outputs(self) -> list[fx.Node]:
        """Values live when the step ends: results, remaining gradients, module attributes."""
        return [
            *self.result_nodes,
            *(use.final for use in self.grads if use.final is not None),
            *(node for effect in self.effects for node in effect.nodes),
        ]

    def drop_dead_calls(self) -> None:
        """Remove calls without side effects whose results are never used."""
        alive = set(self.outputs)
        alive.update(grad for call in self.tape.optimizer_calls for grad in call.grads)
        kept = []
        for call in reversed(self.tape.calls):
            has_effect = call.writes or call.is_random or not call.results
            if has_effect or not alive.isdisjoint(call.results):
                alive.update(call.node.all_input_nodes)
                kept.append(call)
            else:
                self._erase(call.node)
        self.tape.calls[:] = kept[::-1]

    def _erase(self, node: fx.Node) -> None:
        """Remove a node and its `getitem` nodes from the graph."""
        for user in list(node.users):
            if user.target is operator.getitem:
                self._erase(user)
        self.tape.graph.erase_node(node)
