"""Early updates call the optimizer several times a step, each time with some of the gradients.

For every optimizer that is trusted to update parameters independently, with its options, that is
compared with one call.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from rekindle.measuring.bitwise_compare import differences, state_of
from rekindle.rewriting.step_forms import _INDEPENDENT_UPDATES

SHAPES = ((7,), (33, 17), (1,), (64, 64), (3, 5, 2), ())
FLAGS = ("foreach", "fused", "maximize", "amsgrad", "nesterov", "centered", "capturable")
NUMBERS = {"weight_decay": 0.1, "momentum": 0.9, "lr_decay": 0.1, "dampening": 0.0}


def configurations(kind: type, count: int = 12) -> list[dict[str, Any]]:
    """Options that an optimizer takes: none, each alone, and random combinations."""
    accepted = kind.__init__.__code__.co_varnames
    options: dict[str, Any] = {name: True for name in FLAGS if name in accepted}
    options |= {name: value for name, value in NUMBERS.items() if name in accepted}
    draw = random.Random(0)
    single = [{name: value} for name, value in options.items()]
    several = [
        {name: value for name, value in options.items() if draw.random() < 0.5}
        for _ in range(count)
    ]
    return [{}, *single, *several]


class Parameters(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList(torch.randn(shape, dtype=dtype) for shape in SHAPES)


def update(model: Parameters, optimizer: torch.optim.Optimizer, parts: list[list[int]]) -> None:
    """Give the gradients of some parameters at a time, and call the optimizer each time."""
    grads = [torch.randn_like(param) for param in model.all]
    for part in parts:
        for index in part:
            model.all[index].grad = grads[index].clone()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", _INDEPENDENT_UPDATES, ids=lambda kind: kind.__name__)
def test_in_parts_as_at_once(kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    n_compared = 0
    for options in configurations(kind):
        states = []
        whole = [list(range(len(SHAPES)))]
        for parts in (whole, [[5, 3], [0], [4, 1, 2]], [[i] for i in range(len(SHAPES))]):
            model = Parameters(dtype)
            try:
                optimizer = kind(model.parameters(), **options)
                torch.manual_seed(1)
                for _ in range(3):
                    update(model, optimizer, parts)
            except (ValueError, RuntimeError, TypeError, AssertionError):
                break  # options that exclude each other
            states.append(state_of(model, optimizer))
        for state in states[1:]:
            assert differences(states[0], state) == [], options
            n_compared += 1
    assert n_compared >= 2


def test_the_generator_makes_configurations() -> None:
    assert len(configurations(torch.optim.Adam)) > 10
    assert sum(len(configurations(kind)) for kind in _INDEPENDENT_UPDATES) > 150
