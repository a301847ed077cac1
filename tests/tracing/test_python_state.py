"""Python state of every kind: captured steps train as plain ones do, or are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.python_state_programs import PLACES, USES, made
from torch.utils import _pytree as pytree

import rekindle
from rekindle.measuring.bitwise_compare import differences, state_of
from rekindle.torch_internals import FakeTensor

N_STEPS = 5


def batches() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(3, 4, generator=g) for _ in range(N_STEPS)]


def same(a: Any, b: Any) -> bool:
    leaves, spec = pytree.tree_flatten(a)
    others, other_spec = pytree.tree_flatten(b)
    return spec == other_spec and all(map(same_leaf, leaves, others))


def copied(value: Any) -> Any:
    """A copy of tensors and arrays; other objects are the same."""
    return pytree.tree_map_only(
        (torch.Tensor, np.ndarray, set),
        lambda x: x.clone() if isinstance(x, torch.Tensor) else x.copy(),
        value,
    )


def same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return type(a) is type(b) and (a == b or not isinstance(a, (int, float, str)))


def programs() -> list[Any]:
    """Every use in every place; most are for the slow tests."""
    return [
        pytest.param(place, use, marks=[pytest.mark.slow] if (i + j) % 4 else [])
        for i, place in enumerate(PLACES)
        for j, use in enumerate(USES)
    ]


@pytest.mark.parametrize(("place", "use"), programs())
def test_a_step_with_python_state(place: str, use: str) -> None:
    model, optimizer, plain_step, change, look = made(PLACES[place], USES[use])
    expected = []
    for i, batch in enumerate(batches()):
        loss = plain_step(model, optimizer, batch).detach().clone()
        expected.append((loss, copied(look())))
        change(i)
    plain = state_of(model, optimizer)

    model, optimizer, train_step, change, look = made(PLACES[place], USES[use])
    before = copied(look())
    try:
        step = rekindle.optimize(train_step, model, optimizer, batches()[0])
        if USES[use].initial[:4] != "iter":
            assert same(before, look()), "the capture left a trace"
        for i, batch in enumerate(batches()):
            loss = step(batch).detach().clone()
            assert torch.equal(loss, expected[i][0]), f"step {i}"
            assert same(look(), expected[i][1]), f"state after step {i}: {look()} {expected[i][1]}"
            change(i)
    except rekindle.CaptureError as error:
        if not USES[use].may_refuse:
            raise
        assert error.lineno  # noqa: PT017
        assert not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(look()))
    else:
        assert differences(plain, state_of(model, optimizer)) == []
        assert step.n_captures <= USES[use].max_captures
