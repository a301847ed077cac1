"""What a recording consists of: tensors that enter, calls, and the FX graph they form."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import fx

from rekindle.core.graph.graph import Source


class Kind(Enum):
    """What a tensor that enters the step is."""

    PARAM = "param"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"  # a tensor that a module holds as a plain attribute
    GRAD = "grad"  # a gradient that was there before the step
    OPT_STATE = "state"
    BATCH = "batch"
    EXTERNAL = "external"  # anything else the step refers to: closures, globals


class Meta(NamedTuple):
    """A tensor's description; `storage` is an index into `Tape.storages`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int


class StorageMeta(NamedTuple):
    """A storage's size and place."""

    nbytes: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that enters the step: how it is called, and its node in the graph."""

    kind: Kind
    name: str
    node: fx.Node
    tensor: torch.Tensor  # the real one, but for a batch and for optimizer state not yet created


@dataclass(slots=True)
class Call:
    """What is known of one recorded operator call, beside its node."""

    serial: int  # counts calls as they came, from 1
    node: fx.Node
    results: list[fx.Node]  # one for each tensor it returns that is new
    writes: list[fx.Node]
    source: Source
    in_backward: bool
    in_optimizer: bool
    in_loss: bool
    in_model: bool
    grad_enabled: bool  # some kernels look: an LSTM's on the CPU saves less when it is off
    is_random: bool
    flops: int


@dataclass(frozen=True, slots=True)
class OptimizerCall:
    """One call of `optimizer.step`: the gradients it finds, and whether autocast was on."""

    node: fx.Node
    params: list[int]  # the slots of the parameters that have a gradient
    grads: list[fx.Node]  # and these
    autocast: dict[str, torch.dtype]
    is_opaque: bool  # its operators could not be recorded


def run_optimizer(*grads: Any) -> None:
    """The node that stands for the user's `optimizer.step()`; programs put the real call here."""
    raise NotImplementedError("stands for a call that the program makes")


@dataclass
class Tape:
    """A recorded step: the FX graph, and the facts about its nodes that FX has no place for."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    entries: list[Entry] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    metas: dict[fx.Node, Meta] = field(default_factory=dict)
    storages: list[StorageMeta] = field(default_factory=list)
    held_until: dict[int, int] = field(default_factory=dict)  # storage -> a call's serial
    optimizer_calls: list[OptimizerCall] = field(default_factory=list)
