"""Trains with and without Rekindle from the same state, and compares every bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import rekindle
from rekindle.measuring.bitwise_compare import differences, same, state_of

Step = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that training may change, as a flat dict of copies."""
    found = state_of(model, optimizer)
    for name, param in model.named_parameters():
        found[f"requires_grad {name}"] = param.requires_grad
    for name, module in model.named_modules():
        found[f"training {name}"] = module.training
    return found


def clone_result(result: Any) -> Any:
    """A copy of a result, which later steps do not change."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), result)


def train(
    step: Callable[[Any], Any], batches: Sequence[Any], after: Callable[[int], None] | None = None
) -> list[Any]:
    """The results of a step on each batch in turn."""
    results = []
    for index, batch in enumerate(batches):
        results.append(clone_result(step(batch)))
        if after is not None:
            after(index)
    return results


def assert_trains_the_same(
    train_step: Step,
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    batches: Sequence[Any],
    *,
    after: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None,
) -> rekindle.TrainStep:
    """Train with and without Rekindle on the same batches; state and results must be bit-equal."""
    outcomes = []
    for use_rekindle in (False, True):
        torch.manual_seed(7)
        model, optimizer = make()
        torch.manual_seed(11)
        if use_rekindle:
            before = snapshot(model, optimizer)
            step = rekindle.optimize(train_step, model, optimizer, batches[0])
            trace = differences(before, snapshot(model, optimizer))
            assert not trace, f"capture left a trace: {trace}"
            run: Callable[[Any], Any] = step
        else:

            def run(batch: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
                return train_step(model, optimizer, batch)

        def follow(index: int, model: Any = model, optimizer: Any = optimizer) -> None:
            if after is not None:
                after(model, optimizer, index)

        results = train(run, copy.deepcopy(batches), follow)
        outcomes.append((results, snapshot(model, optimizer)))
    (plain_results, plain_state), (results, state) = outcomes
    assert not differences(plain_state, state)
    plain_leaves, plain_spec = pytree.tree_flatten(plain_results)
    leaves, spec = pytree.tree_flatten(results)
    assert plain_spec == spec
    assert all(same(a, b) for a, b in zip(plain_leaves, leaves, strict=True)), (
        plain_leaves,
        leaves,
    )
    return step
