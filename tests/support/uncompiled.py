"""Trains with the forms of a step that the compiler gets, without a compiler.

A group of calls runs as the compiler would get it: decomposed into operators, one by one.
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
from rekindle.engines.inductor.decompose import decompose
from rekindle.engines.inductor.fusion_groups import fuse
from rekindle.engines.inductor.group_compiler import CompiledGroup, GroupCompiler
from rekindle.engines.select_engine import EngineFactory
from rekindle.measuring.bitwise_compare import State, state_of
from rekindle.passes.matmul_padding import PaddingOptions
from rekindle.tracing.tape import Recording
from rekindle.tracing.trace import record

Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Sequence[Any]]
Form = Callable[[Recording], Recording]


def decomposed(recording: Recording) -> Recording:
    """The decomposed step, as on a CPU."""
    return decompose(recording, for_gpu=False)


def grouped(recording: Recording) -> Recording:
    """The step fused into groups, as on a CPU."""
    return _grouped(decompose(recording, for_gpu=False))


def grouped_for_gpu(recording: Recording, *, padding: PaddingOptions | None = None) -> Recording:
    """The step fused into groups, as on a GPU."""
    return _grouped(decompose(recording, for_gpu=True, padding=padding))


def _grouped(recording: Recording) -> Recording:
    compiler = GroupCompiler()
    made = fuse(recording, compiler)
    compiler.compile()
    return made


def recorded(parts: Parts) -> Recording:
    """The recorded step, on the first batch."""
    train_step, model, optimizer, batches = parts
    return record(train_step, model, optimizer, batches[0])


def seeded(seed: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Numbers from 0 to 1 that look random and depend on the seed alone."""
    positions = torch.arange(math.prod(shape), dtype=torch.float64, device=seed.device)
    numbers = positions * 0.754877666 + (seed % 1000003) * 0.569840291
    return (numbers - numbers.floor()).reshape(shape).float()


def run_uncompiled(function: CompiledGroup) -> None:
    """A stand-in for `CompiledGroup.compile`."""
    with torch.no_grad(), FakeTensorMode():
        inputs = [group_compiler.empty_tensor(spec) for spec in function.specs]
        graph = make_fx(function.on_fakes, decomposition_table=select_decomp_table())(*inputs)
    function.code = lambda given: graph(*given)


@contextmanager
def no_compiler() -> Iterator[None]:
    """Groups run uncompiled; masks depend on seeds all the same."""
    with (
        mock.patch.object(CompiledGroup, "compile", run_uncompiled),
        mock.patch.object(group_compiler, "compiled_groups", {}),
        mock.patch.object(decompositions, "uniform", seeded),
    ):
        yield


def train(parts: Parts, form: Form | None, steps: int = 3, **how: Any) -> State:
    """The results and final state of a few steps: plain, or captured and in a form."""
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
    """The same keys, shapes and strides, and nearly the same numbers.

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
