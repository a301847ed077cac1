"""Gradients whose formula torch changes for fake tensors have the bits of the plain step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import operator_samples as samples
from support.equality import assert_trains_the_same
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.tracing.backward_formulas import FORMULAS

DTYPES = [torch.float32, torch.bfloat16]
UNREPEATABLE = {"linalg.lstsq"}  # with complex numbers, torch's own bits change from run to run


class Nothing(TorchDispatchMode):
    """A mode that does nothing, and that torch's formulas notice."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def gradients(op: Any, sample: Any, mode: Any) -> tuple[list[Any], set[str]]:
    """The gradients of one sample, and the names of the autograd nodes behind it."""
    values = (sample.input, sample.args, sample.kwargs)
    given, args, kwargs = samples.variant(values, torch.Tensor.clone)
    torch.manual_seed(0)
    leaves = pytree.tree_leaves(op(given, *args, **kwargs))
    results = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    inputs = pytree.tree_leaves((given, args, kwargs))
    inputs = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    names: set[str] = set()
    waiting: list[Any] = [result.grad_fn for result in results]
    while waiting:
        node = waiting.pop()
        if node is not None and node.name() not in names:
            names.add(node.name())
            waiting.extend(following for following, _ in node.next_functions)
    if not results or not inputs:
        return [], names
    torch.manual_seed(1)
    grads = [torch.randn_like(result) for result in results]
    with mode:
        return list(torch.autograd.grad(results, inputs, grads, allow_unused=True)), names


def same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def changed_formulas(infos: list[Any], most: int) -> set[str]:
    """Operators whose gradient has other bits under a mode, without a known node behind them."""
    found = set()
    for op in infos:
        for dtype in DTYPES:
            for sample in samples.samples(op, dtype, most):
                try:
                    plain, names = gradients(op, sample, nullcontext())
                    watched, _ = gradients(op, sample, Nothing())
                except Exception:  # torch refuses the sample
                    continue
                if any(t is not None and t.layout is not torch.strided for t in plain):
                    continue
                if not all(map(same, plain, watched)) and names.isdisjoint(FORMULAS):
                    found.add(op.name)
    return found - UNREPEATABLE


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_no_other_formula_changes(part: int) -> None:
    """Fails with the name of the operator if a release of torch adds one."""
    assert not changed_formulas(samples.OPERATORS[part::4], most=6)


def test_known_formulas_change() -> None:
    """Or the table has entries that nothing needs."""
    known = dict(FORMULAS)
    try:
        FORMULAS.clear()
        infos = [op for op in samples.OPERATORS if op.name in ("cumprod", "prod", "masked_fill")]
        assert changed_formulas(infos, most=8) == {"cumprod", "prod", "masked_fill"}
    finally:
        FORMULAS.update(known)


def bce(x: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(x, b.abs().clamp(0, 1), **options)


LOSSES: dict[str, Any] = {
    "cumprod": lambda x, b: x.cumprod(-1).sum(),
    "cumprod of zeros": lambda x, b: x.relu().cumprod(0).sum(),
    "cumprod in float": lambda x, b: x.bfloat16().cumprod(1, dtype=torch.float32).sum(),
    "vander": lambda x, b: torch.linalg.vander(x).sum(),
    "prod": lambda x, b: x.prod(),
    "prod of rows": lambda x, b: x.prod(-1, keepdim=True).sum(),
    "prod of zeros": lambda x, b: x.relu().prod(1).sum(),
    "prod in float": lambda x, b: x.bfloat16().prod(1, dtype=torch.float32).sum(),
    "max": lambda x, b: -x.max(),
    "max of equal": lambda x, b: -x.relu().max() - x.clamp(max=0).max(),
    "min": lambda x, b: x.min() * 3,
    "median": lambda x, b: -x.median(),
    "nanmedian": lambda x, b: -x.nanmedian(),
    "masked_fill": lambda x, b: x.masked_fill(b > 0, x.mean()).square().sum(),
    "masked_fill by a constant": lambda x, b: x.masked_fill(b > 0, torch.tensor(0.5)).exp().sum(),
    "bce": lambda x, b: bce(x, b),
    "bce in half": lambda x, b: bce(x.bfloat16(), b),
    "bce in half, weighted": lambda x, b: bce(
        x.bfloat16(), b, weight=b[0].exp(), pos_weight=b[1].exp(), reduction="sum"
    ),
    "autograd.grad": lambda x, b: (x * torch.autograd.grad(x.max(), x, retain_graph=True)[0]).sum(),
}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 6)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("name", LOSSES)
def test_steps_train_the_same(name: str) -> None:
    def train_step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = LOSSES[name](model(batch), batch[:, :6])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    g = torch.Generator().manual_seed(1)
    batches = [torch.randn(5, 8, generator=g) for _ in range(3)]
    step = assert_trains_the_same(train_step, made, batches)
    assert step.n_captures == 1


LAYOUTS: dict[str, Any] = {
    "transposed": lambda x: x.mT.clone(memory_format=torch.contiguous_format).mT,
    "every other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:1].expand(5, 6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["cumprod", "prod", "prod of rows", "max", "median", "bce"])
def test_layouts_of_gradients_are_those_of_the_plain_step(name: str, layout: str) -> None:
    """`is_contiguous` decides by them what the step does."""

    def train_step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
        made = LAYOUTS[layout](model(batch)).detach().requires_grad_()
        (grad,) = torch.autograd.grad(LOSSES[name](made, batch[:, :6]), made)
        loss: torch.Tensor = (model(batch) * grad).sum() * (2 if grad.is_contiguous() else 3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    g = torch.Generator().manual_seed(1)
    batches = [torch.randn(5, 8, generator=g) for _ in range(2)]
    assert_trains_the_same(train_step, made, batches)


def test_a_layout_that_depends_on_values_is_refused() -> None:
    """With a zero among its factors, the gradient of a product has another layout."""

    def train_step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
        factors = (model(batch) * batch[:, :6]).mT.clone(memory_format=torch.contiguous_format).mT
        loss = factors.prod(1).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batch = torch.randn(5, 8)
    step = rekindle.optimize(train_step, *made(), batch)
    step(batch)
    batch[0, 0] = 0.0
    with pytest.raises(rekindle.CaptureError, match="contiguous"):
        step(batch)


def test_gradients_of_such_gradients_are_refused() -> None:
    def train_step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
        loss = model(batch).prod(1).sum()
        (grad,) = torch.autograd.grad(loss, model.weight, create_graph=True)
        grad.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with pytest.raises(rekindle.CaptureError, match="ProdBackward1"):
        rekindle.optimize(train_step, *made(), torch.randn(5, 8))
