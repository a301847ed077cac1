"""The share of a budget that each compiled graph gets.

A budget bounds the peak of the whole step: parameters, gradients and optimizer state, which are
live under every plan, and the tensors of the graphs. Dynamo captures one graph at a time. The first
of several assumes that the rest is like itself: it gets a share in proportion to its parameters and
activations, and the last gets everything that is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Role, StepGraph
from rekindle.core.graph.simulate import simulate
from rekindle.core.identity import IdentitySet
from rekindle.dynamo.planned_graph import PlannedGraph
from rekindle.units import format_bytes, parse_budget

_STATE_TENSORS = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Lion": 1, "Adafactor": 0, "Muon": 1}
_ADAM_STATE_TENSORS = 2  # of a parameter's size, for each parameter
_ASSUMED_ADAM = "no optimizer given: two tensors for each parameter, as Adam keeps them"


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """Bytes that are live throughout a step.

    `param_bytes` are those of trained parameters, `model_bytes` those of all parameters and
    buffers. `note` says what was assumed about the optimizer.
    """

    param_bytes: int
    model_bytes: int
    grad_bytes: int
    state_bytes: int
    note: str

    def outside(self, graph: StepGraph) -> int:
        """The static bytes that are not in a graph.

        Gradients of parameters that the graph does not read count: those of later graphs are live
        during its backward pass.
        """
        sums = graph.bytes_by_role()
        others = max(self.param_bytes - sums[Role.PARAM], 0)
        unread = max(self.model_bytes - sums[Role.PARAM] - sums[Role.BUFFER], 0)
        return unread + max(self.grad_bytes, others) + self.state_bytes


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """The part of a step's budget that one graph is planned within.

    `profile` has the graph's costs, with everything that is live outside it as overhead. The graph
    is planned for `planned_bytes`, which leaves `spare_bytes` of its share free. `is_relative` is
    True if the budget was given as a percentage.
    """

    profile: Profile
    budget_bytes: int
    planned_bytes: int
    spare_bytes: int
    ratio: float
    is_relative: bool
    note: str


def share_budget(
    step: StepGraph,
    profile: Profile,
    budget: int | str,
    static: StaticMemory,
    earlier: Sequence[PlannedGraph],
    *,
    spare_bytes: int,
    margin_ratio: float,
) -> BudgetShare:
    """The share of a graph, after those that were planned earlier.

    A budget in bytes leaves a margin for allocations that no forecast covers.
    """
    held_bytes = sum(each.kept_bytes for each in earlier)
    alone = replace(profile, overhead_bytes=profile.overhead_bytes + static.outside(step))
    profile = replace(alone, overhead_bytes=alone.overhead_bytes + held_bytes)
    sums, earlier_sums = step.bytes_by_role(), [each.graph.bytes_by_role() for each in earlier]
    plain_bytes = simulate(step, alone).peak_bytes + sum(s[Role.ACTIVATION] for s in earlier_sums)
    budget_bytes = parse_budget(budget, plain_bytes)
    is_relative = isinstance(budget, str) and budget.strip().endswith("%")
    ratio = 1.0
    if not is_relative:
        captured_bytes = sums[Role.PARAM] + sum(s[Role.PARAM] for s in earlier_sums)
        later_bytes = static.param_bytes - captured_bytes
        ratio = share_ratio(sums[Role.PARAM], sums[Role.ACTIVATION], later_bytes)
        spare_bytes = max(spare_bytes, int(margin_ratio * budget_bytes))
    floor = min(profile.overhead_bytes + entry_bytes(step), budget_bytes)
    planned_bytes = floor + int((budget_bytes - floor) * ratio) - spare_bytes
    words = [f"optimizer state: {format_bytes(static.state_bytes)} ({static.note})"]
    if is_relative:
        words.append("the budget is relative to this graph's peak with nothing dropped")
    elif ratio < 1:
        words.append(f"{ratio:.0%} of the rest, in proportion to its parameters and activations")
    else:
        words.append("everything that is left")
    if held_bytes:
        words.append(f"earlier graphs hold {format_bytes(held_bytes)}")
    return BudgetShare(
        profile, budget_bytes, planned_bytes, spare_bytes, ratio, is_relative, "; ".join(words)
    )


def share_ratio(param_bytes: int, activation_bytes: int, later_param_bytes: int) -> float:
    """A graph's part of what is left, if parameters of so many bytes belong to later graphs.

    >>> share_ratio(100, 900, 0), share_ratio(100, 900, 300)
    (1.0, 0.25)
    """
    own = param_bytes + activation_bytes
    if later_param_bytes <= 0 or own <= 0:
        return 1.0
    later = later_param_bytes * own / param_bytes if param_bytes else later_param_bytes
    return own / (own + later)


def static_of_model(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> StaticMemory:
    """What a model and its optimizer hold; gradients only if they exist now."""
    params = [p for p in model.parameters() if p.requires_grad]
    grads = [p.grad for p in params if p.grad is not None]
    every = [*model.parameters(), *model.buffers()]
    state_bytes, note = _state_bytes(params, optimizer)
    return StaticMemory(_nbytes(params), _nbytes(every), _nbytes(grads), state_bytes, note)


def static_of_graph(graph: StepGraph) -> StaticMemory:
    """What is known without the model: the parameters and buffers that a graph reads."""
    sums = graph.bytes_by_role()
    params, state_bytes = sums[Role.PARAM], _ADAM_STATE_TENSORS * sums[Role.PARAM]
    return StaticMemory(params, params + sums[Role.BUFFER], 0, state_bytes, _ASSUMED_ADAM)


def entry_bytes(graph: StepGraph) -> int:
    """The bytes of a graph's tensors that exist before it runs."""
    sums = graph.bytes_by_role()
    return sum(sums[role] for role in (Role.PARAM, Role.BUFFER, Role.INPUT))


def _state_bytes(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> tuple[int, str]:
    size = _nbytes(params)
    if optimizer is None:
        return _ADAM_STATE_TENSORS * size, _ASSUMED_ADAM
    existing = [value for state in optimizer.state.values() for value in state.values()]
    if existing:
        tensors = (value for value in existing if isinstance(value, torch.Tensor))
        return _nbytes(tensors), "as the optimizer has it"
    name, defaults = type(optimizer).__name__, optimizer.defaults
    count = _STATE_TENSORS.get(name, _ADAM_STATE_TENSORS)
    count += bool(name == "SGD" and defaults.get("momentum")) + bool(defaults.get("amsgrad"))
    return count * size, f"{name} has no state yet: {count} tensors for each parameter"


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors, each counted once; of a sharded tensor, those of the local shard."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in IdentitySet(tensors))
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
