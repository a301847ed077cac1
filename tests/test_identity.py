"""Nothing is found by a bare `id`: a freed object's number is soon another's."""

from __future__ import annotations

import ast
import gc
import linecache
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.equality import assert_trains_the_same
from support.square_step import square_step
from torch import nn

import rekindle
from rekindle import dynamo
from rekindle.core.identity import IdentityDict, IdentitySet
from rekindle.tracing.step_state import StepState

SRC = Path(rekindle.__file__).parent


def uses_of_id(source: str) -> Iterator[int]:
    """The lines on which `id` is used as a name of its own.

    >>> list(uses_of_id("found = {id(x): x}"))
    [1]
    >>> list(uses_of_id("row.id(x); find(id=3)"))
    []
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id == "id" and isinstance(node.ctx, ast.Load):
            yield node.lineno


def test_ids_are_taken_in_one_file() -> None:
    found = {
        f"{path.relative_to(SRC)}:{line}"
        for path in sorted(SRC.rglob("*.py"))
        if path.relative_to(SRC) != Path("core/identity.py")
        for line in uses_of_id(path.read_text(encoding="utf-8"))
    }
    assert found == set()


def test_collections_hold_their_members() -> None:
    """So that no other object can get a member's id."""
    names: IdentityDict[int] = IdentityDict()
    members = IdentitySet()
    for number in range(100):
        names[[number]] = number
        members.add([number])
    assert list(names) == list(members) == [[number] for number in range(100)]
    assert all([number] not in names and [number] not in members for number in range(100))
    first = next(iter(names))
    assert names.pop(first) == 0
    members.discard(first)
    assert (len(names), len(members)) == (99, 100)


# Tensors that a step frees, and constants that it makes after that


def constants_after_freed_gradients(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    """Gradients of before are freed, and as many constants made, which get their ids."""
    loss = model(batch).square().mean() * torch.tensor(1.5)
    optimizer.zero_grad()
    scales = [torch.tensor(1.0 + 0.25 * number) for number in range(40)]
    loss = loss * torch.stack(scales).prod().sqrt() + sum(
        model(batch * torch.tensor([0.5 + number / 64])).mean() for number in range(3)
    )
    loss.backward()
    optimizer.step()
    return loss


def gradient_read_after_it_was_cleared(
    model: nn.Module, optimizer: Any, batch: Any
) -> torch.Tensor:
    """The gradient is one of before the step, under another name."""
    old = [param.grad for param in model.parameters()]
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    for param, before in zip(model.parameters(), old, strict=True):
        if before is not None:
            param.grad += 0.5 * before
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    "function", [constants_after_freed_gradients, gradient_read_after_it_was_cleared]
)
@pytest.mark.parametrize("has_grads", [False, True])
def test_tensors_that_take_the_place_of_freed_ones(function: Any, has_grads: bool) -> None:
    batches = [torch.randn(4, 6) for _ in range(4)]

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if has_grads:
            model(batches[0]).sum().backward()
        return model, optimizer

    assert_trains_the_same(function, make, batches)


def test_the_name_of_a_freed_gradient_is_nobody_elses() -> None:
    model, optimizer = small()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    state = StepState(model, optimizer, [])
    grads = [param.grad for param in model.parameters()]
    assert [state.name_of(grad)[1] for grad in grads] == ["weight", "bias"]  # type: ignore[index]
    assert state.name_of(torch.zeros(1)) is None
    del grads
    optimizer.zero_grad()
    constants = [torch.tensor(float(number)) for number in range(1000)]
    assert all(state.name_of(constant) is None for constant in constants)


# What captures leave in dicts of the process


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_generated_sources_go_with_their_program() -> None:
    gc.collect()
    before = set(linecache.cache)
    step = rekindle.optimize(square_step, *small(), torch.ones(2, 4))
    step(torch.ones(2, 4))
    (name,) = (each for each in set(linecache.cache) - before if each.startswith("<rekindle"))
    assert linecache.getline(name, 1).startswith("def step(")
    del step
    gc.collect()
    assert set(linecache.cache) <= before


def compiled_by_options(options: dict[str, Any]) -> tuple[Any, Any]:
    torch.compiler.reset()
    known = set(dynamo._sessions)
    blocks = [nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3)]
    model = torch.compile(nn.Sequential(*blocks), backend=dynamo.backend, options=options)
    model(torch.ones(64, 8)).sum().backward()
    (session,) = set(dynamo._sessions) - known
    return model, session


def test_options_that_are_changed_and_used_again() -> None:
    options = {"budget": "100%", "lower": "eager"}
    first, roomy = compiled_by_options(options)
    options["budget"] = "90%"
    second, tight = compiled_by_options(options)
    assert (roomy.budget, tight.budget) == ("100%", "90%")
    assert tight.plans[0].plan.budget_bytes < roomy.plans[0].plan.budget_bytes
    assert first is not second


def test_sessions_go_with_the_compiled_code() -> None:
    gc.collect()
    before = set(dynamo._sessions)
    model, session = compiled_by_options({"budget": "100%", "lower": "eager"})
    assert session in set(dynamo._sessions) - before
    del model, session
    torch.compiler.reset()
    gc.collect()
    assert set(dynamo._sessions) <= before
