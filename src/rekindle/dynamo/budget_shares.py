"""What a budget leaves to each compiled graph.

A budget bounds the peak of the whole step: parameters, gradients and the optimizer's state, which
are there whatever is planned, and what the graphs hold. Dynamo hands over one graph at a time. The
first of several cannot know what the next will need, and takes the rest to be like itself: it gets
a share in proportion to its parameters and activations, and the last gets all that is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from rekindle.core.graph.graph import Role, StepGraph

_RESIDENT = (Role.PARAM, Role.BUFFER, Role.INPUT)
_STATES = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Lion": 1, "Adafactor": 0, "Muon": 1}
_ADAM = 2  # tensors of a parameter's size that Adam keeps for it


@dataclass(frozen=True, slots=True)
class Static:
    """Bytes that are there throughout: of parameters and buffers, gradients, optimizer state.

    `param_bytes` are those of trained parameters alone, `model_bytes` those of all, and buffers.
    `note` says what was assumed.
    """

    param_bytes: int
    model_bytes: int
    grad_bytes: int
    state_bytes: int
    note: str

    def outside(self, graph: StepGraph) -> int:
        """What is there beside a graph's own tensors while it runs.

        The gradients of parameters that it does not read are taken to be there: those of later
        graphs are, when its backward pass runs.
        """
        sums = graph.bytes_by_role()
        others = max(self.param_bytes - sums[Role.PARAM], 0)
        unread = max(self.model_bytes - sums[Role.PARAM] - sums[Role.BUFFER], 0)
        return unread + max(self.grad_bytes, others) + self.state_bytes


def static_of_model(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Static:
    """What a model and its optimizer hold; gradients only where they are there now."""
    params = [p for p in model.parameters() if p.requires_grad]
    grads = [p.grad for p in params if p.grad is not None]
    every = [*model.parameters(), *model.buffers()]
    state, note = _state_bytes(params, optimizer)
    return Static(_nbytes(params), _nbytes(every), _nbytes(grads), state, note)


def static_of_graph(graph: StepGraph) -> Static:
    """What is known where the model is not: the parameters that a graph reads."""
    sums = graph.bytes_by_role()
    params = sums[Role.PARAM]
    note = "no optimizer given: two tensors for each parameter, as Adam keeps them"
    return Static(params, params + sums[Role.BUFFER], 0, _ADAM * params, note)


def _state_bytes(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> tuple[int, str]:
    size = _nbytes(params)
    if optimizer is None:
        note = "no optimizer given: two tensors for each parameter, as Adam keeps them"
        return _ADAM * size, note
    there = [value for state in optimizer.state.values() for value in state.values()]
    if there:
        return _nbytes(v for v in there if isinstance(v, torch.Tensor)), "as the optimizer has it"
    name, defaults = type(optimizer).__name__, optimizer.defaults
    count = _STATES.get(name, _ADAM)
    count += bool(name == "SGD" and defaults.get("momentum")) + bool(defaults.get("amsgrad"))
    return count * size, f"{name} has no state yet: {count} tensors for each parameter"


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors, each once; of a sharded one, those that are here."""
    local = {id(t): getattr(t, "_local_tensor", t) for t in tensors}
    return sum(t.numel() * t.element_size() for t in local.values())


@dataclass(frozen=True, slots=True)
class Weight:
    """What a graph's share is in proportion to: bytes of parameters, and of activations."""

    param_bytes: int
    activation_bytes: int


def weight_of(graph: StepGraph) -> Weight:
    """The bytes of a graph's parameters and activations."""
    sums = graph.bytes_by_role()
    return Weight(sums[Role.PARAM], sums[Role.ACTIVATION])


def share_of(weight: Weight, params_to_come: int) -> float:
    """A graph's share of what is left, where parameters of so many bytes are not in any graph yet.

    >>> share_of(Weight(100, 900), 0), share_of(Weight(100, 900), 300)
    (1.0, 0.25)
    """
    own = weight.param_bytes + weight.activation_bytes
    if params_to_come <= 0 or own <= 0:
        return 1.0
    others = params_to_come * own / weight.param_bytes if weight.param_bytes else params_to_come
    return own / (own + others)


def resident_bytes(graph: StepGraph) -> int:
    """What of a graph is there before it runs."""
    sums = graph.bytes_by_role()
    return sum(sums[role] for role in _RESIDENT)
