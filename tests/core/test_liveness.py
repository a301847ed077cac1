"""Lifetimes of storages, on graphs written by hand and on a two-layer network."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from support.hand_made import BACKWARD, FORWARD, LOSS, UPDATE, Call, profile_of, step, storages
from torch import nn

import rekindle
from rekindle.core.graph.graph import Role, StepGraph
from rekindle.core.graph.liveness import Lifetime, analyze

# Storages 0 x, 1 w, 2 hidden, 3 activation, 4 loss, 5 its gradient, 6 the weight's gradient;
# values have the same numbers.
PLAIN = step(
    storages(
        (8, Role.INPUT),
        (8, Role.PARAM),
        (8, Role.TEMP),
        (8, Role.ACTIVATION),
        (4, Role.OUTPUT),
        (8, Role.GRAD_MAP),
        (8, Role.GRAD),
    ),
    entering=[0, 1],
    calls=[
        Call(FORWARD, [0, 1], [2]),
        Call(FORWARD, [2], [3]),
        Call(LOSS, [3], [4]),
        Call(BACKWARD, [3], [5]),
        Call(BACKWARD, [3, 5], [6]),
        Call(UPDATE, [1, 6], [], [1]),
        Call(UPDATE, [1], [], [1]),
    ],
    outputs=[4],
)


def test_a_plain_step() -> None:
    assert analyze(PLAIN).lifetimes == (
        Lifetime(0, None, 0, None, None, None),  # resident: neither born nor dying
        Lifetime(1, None, 0, None, None, None),
        Lifetime(2, 0, 1, None, None, 1),  # dead before the backward pass
        Lifetime(3, 1, 2, 3, 4, 4),
        Lifetime(4, 2, 2, None, None, None),  # born, and there after the step
        Lifetime(5, 3, None, 3, 4, 4),
        Lifetime(6, 4, None, 4, 4, 6),  # until the optimizer is done, not until it is read
    )


def test_the_arrays_say_the_same() -> None:
    liveness = analyze(PLAIN)
    assert liveness.birth.tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert liveness.death.tolist() == [6, 6, 1, 4, 6, 4, 6]
    assert liveness.release.tolist() == liveness.death.tolist()
    assert liveness.is_resident.tolist() == [True, True] + 5 * [False]
    assert np.flatnonzero(liveness.is_output).tolist() == [4]


def test_only_activations_are_listed_as_such() -> None:
    assert [lifetime.storage for lifetime in analyze(PLAIN).activations()] == [3]


def test_a_graph_is_analyzed_once() -> None:
    assert analyze(PLAIN) is analyze(PLAIN)


def test_what_is_held_is_released_later_but_dies_when_it_did() -> None:
    """`held_until` before the last use changes nothing."""
    graph = step(
        storages((8, Role.PARAM), *4 * [(8, Role.TEMP)], held_until={1: 3, 2: 1, 3: 2, 4: 3}),
        entering=[0],
        calls=[
            Call(FORWARD, [0], [1]),
            Call(FORWARD, [1], [2]),
            Call(FORWARD, [2], [3]),
            Call(FORWARD, [3], [4]),
        ],
    )
    liveness = analyze(graph)
    assert liveness.death.tolist() == [3, 1, 2, 3, 3]
    assert liveness.release.tolist() == [3, 3, 2, 3, 3]
    assert [lifetime.death for lifetime in liveness.lifetimes] == [None, 1, 2, 3, 3]


def test_views_and_in_place_ops_keep_their_storage_alive() -> None:
    """Storage 1 is made by op 0, changed in place by op 1, viewed by op 2; op 4 reads the view."""
    graph = step(
        storages((8, Role.PARAM), (8, Role.ACTIVATION), (8, Role.TEMP), (8, Role.GRAD_MAP)),
        entering=[0],
        calls=[
            Call(FORWARD, [0], [1]),  # value 1
            Call(FORWARD, [1], [], [1]),
            Call(FORWARD, [1], [1]),  # value 2, a view
            Call(LOSS, [2], [2]),  # value 3
            Call(BACKWARD, [2], [3]),  # value 4
            Call(BACKWARD, [4], [], [4]),
        ],
    )
    assert graph.ops[2].is_view
    assert analyze(graph).lifetimes[1:] == (
        Lifetime(1, 0, 3, 4, 4, 4),
        Lifetime(2, 3, 3, None, None, 3),
        Lifetime(3, 4, None, 4, 5, 5),
    )


def test_changing_a_storage_in_place_is_a_use_of_it() -> None:
    """The last forward use is an in-place op that reads nothing else, the last backward one too."""
    graph = step(
        storages((8, Role.PARAM), (8, Role.ACTIVATION)),
        entering=[0],
        calls=[
            Call(FORWARD, [0], [1]),
            Call(FORWARD, [], [], [1]),
            Call(BACKWARD, [1], []),
            Call(BACKWARD, [], [], [1]),
            Call(UPDATE, [0], [], [0]),
        ],
    )
    assert analyze(graph).lifetimes[1] == Lifetime(1, 0, 1, 2, 3, 3)


def test_gradients_from_before_and_for_after_the_step() -> None:
    """Storage 1 is an old gradient that enters; 2 is left for the next step."""
    graph = step(
        storages((8, Role.PARAM), (8, Role.GRAD), (8, Role.GRAD), (8, Role.GRAD)),
        entering=[0, 1],
        calls=[
            Call(BACKWARD, [0, 1], [2]),
            Call(BACKWARD, [0], [3]),
            Call(UPDATE, [2, 3], [], [0]),
            Call(UPDATE, [2], [], [0]),
        ],
        outputs=[2],
    )
    liveness = analyze(graph)
    assert [lifetime.birth for lifetime in liveness.lifetimes] == [None, None, 0, 1]
    assert [lifetime.death for lifetime in liveness.lifetimes] == [None, None, None, 3]
    assert liveness.release.tolist() == [3, 3, 3, 3]


def test_a_gradient_without_an_optimizer_dies_after_its_last_use() -> None:
    graph = step(
        storages((8, Role.PARAM), (8, Role.GRAD)),
        entering=[0],
        calls=[Call(BACKWARD, [0], [1]), Call(BACKWARD, [1], []), Call(BACKWARD, [0], [])],
    )
    assert analyze(graph).lifetimes[1].death == 1


def test_two_passes_in_one_step() -> None:
    """A parameter is read forward, backward, forward and backward: the first gap is what counts."""
    graph = step(
        storages((8, Role.PARAM), (8, Role.ACTIVATION), (8, Role.ACTIVATION)),
        entering=[0],
        calls=[
            Call(FORWARD, [0], [1]),
            Call(BACKWARD, [0, 1], []),
            Call(FORWARD, [0], [2]),
            Call(BACKWARD, [0, 2], []),
        ],
    )
    assert analyze(graph).lifetimes == (
        Lifetime(0, None, 0, 1, 3, None),
        Lifetime(1, 0, 0, 1, 1, 1),
        Lifetime(2, 2, 2, 3, 3, 3),
    )


def test_inactive_time() -> None:
    """Idle from the end of the last forward use to the start of the first backward use."""
    profile = profile_of(PLAIN, times_us=[1, 2, 4, 8, 16, 32, 64])
    lifetimes = analyze(PLAIN).lifetimes
    assert profile.starts_us.tolist() == [0, 1, 3, 7, 15, 31, 63, 127]
    assert lifetimes[3].inactive_us(profile.starts_us) == 0  # op 3 follows op 2 at once
    assert lifetimes[2].inactive_us(profile.starts_us) == 0  # not read in the backward pass
    assert lifetimes[5].inactive_us(profile.starts_us) == 0  # not there in the forward pass
    early = Lifetime(3, 0, 1, 4, 5, 5)
    assert early.inactive_us(profile.starts_us) == 4 + 8  # ops 2 and 3 pass meanwhile


def test_a_storage_nobody_touches() -> None:
    graph = step(storages((8, Role.PARAM), (8, Role.TEMP)), [0], [Call(FORWARD, [0], [])])
    liveness = analyze(graph)
    assert liveness.birth[1] > liveness.release[1]


class TwoLayers(nn.Module):
    """Z1 = W1 X, Z2 = σ(Z1), Z3 = W3 Z2, Z4 = σ(Z3)."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(3, 5, bias=False)
        self.w3 = nn.Linear(5, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.w3(torch.sigmoid(self.w1(x))))


def squared_error(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    x, y = batch
    loss = (0.5 * (model(x) - y) ** 2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def two_layer_graph() -> StepGraph:
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(4, 3), torch.randn(4, 2))
    return rekindle.capture(squared_error, model, optimizer, batch).graph


def test_two_layers_on_paper() -> None:
    """What autograd saves: σ its result (σ' = σ(1 - σ)), a product both factors, a square its base.

    So Z2 is kept twice over, by σ for ∇Z1 and by the second product for ∇W3; Z4 by σ for ∇Z3; the
    difference Z4 - Y by the square for ∇Z4. Z1 and Z3 are gone once σ has read them. X is saved as
    well, for ∇W1, but it is the batch. ∇W3 comes before ∇Z2: of a product's two gradients, autograd
    makes the weight's first.
    """
    graph = two_layer_graph()
    name = [op.name for op in graph.ops]
    computing = [op.name for op in graph.ops if not op.is_view]
    assert computing == [
        *("mm", "sigmoid", "mm_1", "sigmoid_1"),  # Z1 to Z4
        *("sub", "pow_1", "mul", "sum_1"),  # the loss
        *("ones_like", "mul_1", "pow_2", "mul_2", "mul_3"),  # back through it: ∇Z4
        *("sigmoid_backward", "mm_2", "mm_3"),  # ∇Z3, ∇W3, ∇Z2
        *("sigmoid_backward_1", "mm_4"),  # ∇Z1, ∇W1
        *("add_", "add__1"),
    ]
    found = {}
    for lifetime in analyze(graph).activations():
        bounds = (
            lifetime.birth,
            lifetime.last_forward_use,
            lifetime.first_backward_use,
            lifetime.last_backward_use,
            lifetime.death,
        )
        assert None not in bounds
        born, *rest = [name[index] for index in bounds if index is not None]
        found[born] = tuple(rest)
    assert found == {
        "sigmoid": ("mm_1", "mm_2", "sigmoid_backward_1", "sigmoid_backward_1"),  # Z2
        "sigmoid_1": ("sub", "sigmoid_backward", "sigmoid_backward", "sigmoid_backward"),  # Z4
        "sub": ("pow_1", "pow_2", "pow_2", "pow_2"),  # Z4 - Y
    }


def test_two_layers_the_other_storages() -> None:
    graph = two_layer_graph()
    name = [op.name for op in graph.ops]
    roles: dict[Role, list[str]] = {}
    for storage in graph.storages:
        value = next(value for value in graph.values if value.storage == storage.index)
        roles.setdefault(storage.role, []).append(value.name)
    assert roles == {
        Role.PARAM: ["param_w1_weight", "param_w3_weight"],
        Role.INPUT: ["batch_0", "batch_1"],
        Role.ACTIVATION: ["sigmoid", "sigmoid_1", "sub"],
        Role.TEMP: ["mm", "mm_1", "pow_1", "mul"],
        Role.OUTPUT: ["sum_1"],
        Role.GRAD: ["mm_2", "mm_4"],
        Role.GRAD_MAP: [
            *("ones_like", "mul_1", "pow_2", "mul_2", "mul_3"),
            *("sigmoid_backward", "mm_3", "sigmoid_backward_1"),
        ],
    }
    lifetimes = {
        value.name: analyze(graph).lifetimes[value.storage] for value in reversed(graph.values)
    }
    x, w1, w3 = (lifetimes[n] for n in ("batch_0", "param_w1_weight", "param_w3_weight"))
    assert (x.last_forward_use, x.first_backward_use) == (name.index("mm"), name.index("mm_4"))
    assert w3.first_backward_use == name.index("mm_3")
    assert w1.first_backward_use is None  # no one asks for the batch's gradient
    for gradient in ("mm_2", "mm_4"):
        assert lifetimes[gradient].death == len(name) - 1


def test_two_layers_idle_time() -> None:
    """With 1 µs for each op that computes and none for views: ops strictly between the two uses."""
    graph = two_layer_graph()
    profile = profile_of(graph, times_us=[0.0 if op.is_view else 1.0 for op in graph.ops])
    idle = [lifetime.inactive_us(profile.starts_us) for lifetime in analyze(graph).activations()]
    # Z2: from sigmoid_1 to sigmoid_backward; Z4: from pow_1 to mul_3; Z4 - Y: from mul to mul_1
    assert idle == [11, 8, 4]


def test_a_local_variable_holds_a_storage() -> None:
    """Z1 is dead once σ has read it, but a step that names it holds it until it returns."""

    def holding(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        hidden = model.w1(batch[0])
        loss = (0.5 * (torch.sigmoid(model.w3(torch.sigmoid(hidden))) - batch[1]) ** 2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(4, 3), torch.randn(4, 2))
    for train_step, is_held in ((holding, True), (squared_error, False)):
        graph = rekindle.capture(train_step, model, optimizer, batch).graph
        liveness = analyze(graph)
        z1 = next(value.storage for value in graph.values if value.name == "mm")
        assert graph.ops[liveness.death[z1]].name == "sigmoid"
        assert bool(liveness.release[z1] == len(graph.ops) - 1) is is_held
