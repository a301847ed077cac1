"""Trains with the forms that a step takes on its way to compiled code, without a compiler.

A group of calls runs as the compiler would get it: taken apart into small operators, one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import rekindle
from rekindle.engines.inductor import decompositions, group_compiler
from rekindle.engines.inductor.decompose import normalized
from rekindle.engines.inductor.fusion_groups import fused
from rekindle.engines.inductor.group_compiler import Fused, Fusing
from rekindle.engines.select_engine import EngineFactory
from rekindle.measuring.bitwise_compare import State, state_of
from rekindle.tracing.tape import Recording
from rekindle.tracing.trace import record

Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Sequence[Any]]
Form = Callable[[Recording], Recording]


def normal(recording: Recording) -> Recording:
    """In small parts, without side effects."""
    return normalized(recording, for_gpu=False)


def grouped(recording: Recording) -> Recording:
    """In groups, as on a CPU."""
    return _grouped(normalized(recording, for_gpu=False))


def grouped_for_gpu(recording: Recording) -> Recording:
    """In groups, as on a GPU."""
    return _grouped(normalized(recording, for_gpu=True))


def _grouped(recording: Recording) -> Recording:
    fusing = Fusing()
    made = fused(recording, fusing)
    fusing.compile()
    return made


def recorded(parts: Parts) -> Recording:
    """The step as it was captured, on the first batch."""
    train_step, model, optimizer, batches = parts
    return record(train_step, model, optimizer, batches[0])


def seeded(seed: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Numbers from 0 to 1 that look random and follow from the seed."""
    places = torch.arange(math.prod(shape), dtype=torch.float64, device=seed.device)
    numbers = places * 0.754877666 + (seed % 1000003) * 0.569840291
    return (numbers - numbers.floor()).reshape(shape).float()


def run_in_parts(function: Fused) -> None:
    """What stands in for `Fused.compile`."""
    with torch.no_grad(), FakeTensorMode():
        inputs = [group_compiler._empty(form) for form in function._forms]
        graph = make_fx(function.on_fakes, decomposition_table=select_decomp_table())(*inputs)
    function._code = lambda given: graph(*given)


@contextmanager
def no_compiler() -> Iterator[None]:
    """Groups run uncompiled, and masks follow from seeds all the same."""
    with (
        mock.patch.object(Fused, "compile", run_in_parts),
        mock.patch.object(group_compiler, "_compiled", {}),
        mock.patch.object(decompositions, "uniform", seeded),
    ):
        yield


def train(parts: Parts, form: Form | None, steps: int = 3, **how: Any) -> State:
    """All that a few steps return and leave: plainly, or captured and in a form."""
    train_step, model, optimizer, batches = parts
    with (
        no_compiler(),
        mock.patch.object(EngineFactory, "prepare", lambda self, recording: form(recording)),
    ):
        step: Callable[[Any], Any] = lambda batch: train_step(model, optimizer, batch)  # noqa: E731
        if form is not None:
            step = rekindle.optimize(train_step, model, optimizer, batches[0], **how)
        torch.manual_seed(1)
        found: State = {}
        for index in range(steps):
            leaves = pytree.tree_leaves(step(batches[index % len(batches)]))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            found |= {f"result {index}.{i}": t.detach().clone() for i, t in enumerate(tensors)}
    return found | state_of(model, optimizer)


def assert_close(found: State, expected: State, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    """The same things in the same forms, strides included, and nearly the same numbers.

    Random generators are not compared.
    """
    keys = [key for key in expected if not key.startswith("generator")]
    assert keys == [key for key in found if not key.startswith("generator")]
    for key in keys:
        a, b = found[key], expected[key]
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(
                a,
                b,
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda text, key=key: f"{key}: {text}",
            )
            assert a.stride() == b.stride(), key
        else:
            assert a == b, key
