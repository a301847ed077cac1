"""Values that a step reads: known ones are decisions, and steps stay bit-equal; others are refused.

Programs are generated: a value of some provenance goes through views, casts, reductions and
comparisons, is read, and changes the loss.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.equality import assert_trains_the_same
from torch import nn

import rekindle

Tensor = torch.Tensor


class Model(nn.Module):
    """A linear layer, and a buffer that the step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("limits", torch.linspace(-1, 1, 24).view(4, 6))
        self.register_buffer("is_started", torch.zeros((), dtype=torch.bool))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(n: int = 5) -> list[Any]:
    g = torch.Generator().manual_seed(3)
    found = []
    for index in range(n):
        x = torch.randn(4, 6, generator=g) + (index % 2)
        y = torch.randint(0, 3, (4,), generator=g)
        found.append({"x": x, "y": y, "mask": torch.rand(4, 6, generator=g) < (index % 3) / 2})
    return found


# A value's provenance: (4, 6) floats

LEAVES: dict[str, Callable[[Model, Any], Tensor]] = {
    "arange": lambda model, batch: torch.arange(24.0).view(4, 6) - 9,
    "literal": lambda model, batch: torch.tensor([[1.0, -2.0, 0.5]] * 8).view(4, 6),
    "full": lambda model, batch: torch.full((4, 6), 0.5),
    "batch": lambda model, batch: batch["x"],
    "mask": lambda model, batch: batch["mask"].float(),
    "buffer": lambda model, batch: model.limits,
    "parameter": lambda model, batch: model.linear.weight.repeat(2, 1)[:4],
    "activation": lambda model, batch: model(batch["x"]).repeat(1, 2),
    "random": lambda model, batch: torch.randn(4, 6),
    "dropout": lambda model, batch: F.dropout(batch["x"]),
}
KNOWN = {"arange", "literal", "full", "batch", "mask", "buffer"}


def written(x: Tensor) -> Tensor:
    x = x.clone()
    x[1:3].mul_(2)
    x[0, 5] = 3
    return x


def copied(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x).add_(1)


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.t().contiguous().t(),
    "rows": lambda x: torch.cat([x[1:], x[:1]]),
    "double": lambda x: x.double().float(),
    "half": lambda x: x.bfloat16().float(),
    "detach": lambda x: x.detach(),
    "sort": lambda x: x.sort(dim=1).values,
    "sum": lambda x: x - x.sum(dim=0, keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "where": lambda x: torch.where(x > 0, x, -1.0),
    "in place": written,
    "copied": copied,
    "expand": lambda x: x[:1].expand(4, 6),
}

# What is done with it: a number for the loss

READS: dict[str, Callable[[Tensor], float]] = {
    "if": lambda x: 2.0 if x.mean() > 0.2 else 1.0,
    "any": lambda x: 2.0 if (x > 1.5).any() else 1.0,
    "all": lambda x: 2.0 if bool((x < 2).all()) else 1.0,
    "int": lambda x: int(x.argmax()),
    "item": lambda x: (x > 0).sum().item() / 8,
    "float": lambda x: float(x[0, 0]),
    "list": lambda x: len(set((x[0] > 0).tolist())),
    "numpy": lambda x: float(np.asarray((x[:2] > 0).sum())),
    "format": lambda x: len(f"{x.max():.1f}"),
    "equal": lambda x: 2.0 if torch.equal(x > 0, x > 0.1) else 1.0,
    "index": lambda x: [1.0, 2.0, 3.0][(x > 0).sum() % 3],
    "nonzero": lambda x: len(torch.nonzero(x > 0)),
    "unique": lambda x: len(torch.unique(x > 0)),
    "rows": lambda x: len(x[x[:, 0] > 0]),
    "masked": lambda x: torch.masked_select(x, x[:, :1] > 0).numel() / 8,
    "repeated": lambda x: torch.repeat_interleave((x[0] > 0).long()).numel(),
}


def step_of(leaves: list[str], steps: list[str], read: str) -> Callable[..., Any]:
    def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        value = LEAVES[leaves[0]](model, batch)
        for leaf in leaves[1:]:
            value = value + LEAVES[leaf](model, batch)
        for name in steps:
            value = STEPS[name](value)
        number = READS[read](value)
        loss = F.cross_entropy(model(batch["x"]), batch["y"]) * number
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, number

    return train_step


def check(leaves: list[str], steps: list[str], read: str) -> None:
    train_step = step_of(leaves, steps, read)
    if KNOWN.issuperset(leaves):
        step = assert_trains_the_same(train_step, made, batches())
        if {"batch", "mask"}.isdisjoint(leaves):
            assert step.n_captures == 1
        return
    with pytest.raises(rekindle.CaptureError) as info:
        rekindle.optimize(train_step, *made(), batches()[0])
    assert info.value.filename == __file__


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("leaf", ["arange", "batch", "activation", "random"])
def test_every_way_to_read(leaf: str, read: str) -> None:
    check([leaf], [], read)


@pytest.mark.parametrize("leaf", LEAVES)
def test_every_provenance(leaf: str) -> None:
    check([leaf], ["in place"], "any")


@pytest.mark.parametrize("step", STEPS)
def test_every_step_between(step: str) -> None:
    check(["batch", "buffer"], [step], "item")


@pytest.mark.slow
@pytest.mark.hypothesis
@settings(deadline=None)
@given(
    st.lists(st.sampled_from([*LEAVES]), min_size=1, max_size=3),
    st.lists(st.sampled_from([*STEPS]), max_size=4),
    st.sampled_from([*READS]),
)
def test_generated(leaves: list[str], steps: list[str], read: str) -> None:
    check(leaves, steps, read)


def trained(number_of: Callable[[Any, Any], float]) -> Callable[..., Any]:
    """A step whose loss is multiplied by a number that it reads."""

    def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        number = number_of(model, batch)
        loss = F.cross_entropy(model(batch["x"]), batch["y"]) * number
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def test_one_capture_for_each_outcome() -> None:
    step = assert_trains_the_same(
        trained(lambda model, batch: 2.0 if batch["x"].mean() > 0.5 else 1.0), made, batches(6)
    )
    assert step.n_captures == 2


def test_the_rows_of_a_known_mask() -> None:
    """The mask is the batch's, the rows are the model's; their number is a decision."""

    def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        rows = model(batch["x"])[batch["y"] != 0]
        kept = torch.masked_select(model(batch["x"]), batch["mask"][:, :1])
        loss = rows.square().sum() + kept.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, rows.detach()

    assert_trains_the_same(train_step, made, batches())


@pytest.mark.parametrize("is_flat", [True, False])
def test_ctc_loss(is_flat: bool) -> None:
    """What it keeps for its backward pass is as large as the longest target."""

    def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        scores = model(batch["x"]).log_softmax(-1).unsqueeze(1).repeat(3, 2, 1)
        lengths = 1 + batch["y"][:2].clamp(max=1) + batch["y"][2:].clamp(max=1)
        targets = torch.ones(2, 3, dtype=torch.long)
        if is_flat:
            targets = targets[torch.arange(3) < lengths[:, None]]
        loss = F.ctc_loss(scores, targets, torch.tensor([12, 11]), lengths)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert_trains_the_same(train_step, made, batches())


def test_a_batch_that_the_step_writes_to_before() -> None:
    """The value is that of the batch as the step has changed it; the guard changes nothing."""

    def number(model: Any, batch: Any) -> float:
        batch["x"].mul_(2).sub_(1)
        return 2.0 if batch["x"].mean() > 0 else 1.0

    step = assert_trains_the_same(trained(number), made, batches(6))
    assert step.n_captures == 2


def test_a_write_after_the_read_does_not_count() -> None:
    def number(model: Any, batch: Any) -> float:
        found = 2.0 if batch["x"].mean() > 0.5 else 1.0
        batch["x"].fill_(0.25)
        return found

    assert_trains_the_same(trained(number), made, batches(6))


def test_a_flag_that_the_step_sets() -> None:
    """Initialisation by the first batch, as flows and quantizers do it."""

    def number(model: Any, batch: Any) -> float:
        if not model.is_started:
            model.limits.copy_(batch["x"])
            model.is_started.fill_(True)
        return 1.0 + float(model.limits.sum() > 0)

    step = assert_trains_the_same(trained(number), made, batches())
    assert step.n_captures == 2


def test_a_number_that_the_step_counts_is_refused() -> None:
    def number(model: Any, batch: Any) -> float:
        model.count += 1
        return 1.0 / int(model.count)

    with pytest.raises(rekindle.CaptureError, match="buffer that the step changes"):
        rekindle.optimize(trained(number), *made(), batches()[0])


def test_a_number_that_is_never_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Right, but a capture in every step: a warning names the line."""
    monkeypatch.setattr(rekindle.CapturedStep, "max_captures", 3)
    step = assert_trains_the_same(
        trained(lambda model, batch: batch["x"].sum().item()), made, batches(6)
    )
    assert step.n_captures == 3
    messages = [record.getMessage() for record in caplog.records]
    (warning,) = [text for text in messages if "more than 3 captures" in text]
    assert f"the value that {__file__}" in warning


def test_a_learning_rate_that_the_optimizer_reads_is_no_decision() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Model()
        return model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))

    def change(model: Any, optimizer: torch.optim.Optimizer, index: int) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.5)

    step = assert_trains_the_same(trained(lambda *_: 1.0), make, batches(4), after=change)
    assert step.n_captures == 1


def test_a_buffer_changed_by_the_user() -> None:
    def number(model: Any, batch: Any) -> float:
        return 2.0 if model.limits.sum() > 0 else 1.0

    def change(model: Any, optimizer: torch.optim.Optimizer, index: int) -> None:
        model.limits.add_(1 if index % 2 else -1)

    step = assert_trains_the_same(trained(number), made, batches(6), after=change)
    assert step.n_captures == 2


def test_a_tensor_outside_of_the_model() -> None:
    outside = torch.tensor(1.0)

    def number(model: Any, batch: Any) -> float:
        return 2.0 if outside > 0 else 1.0

    def change(model: Any, optimizer: torch.optim.Optimizer, index: int) -> None:
        outside.neg_()

    step = assert_trains_the_same(trained(number), made, batches(6), after=change)
    assert step.n_captures == 2


# Random numbers: comparisons with what lies outside of their range

COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@pytest.mark.parametrize("limit", [-0.5, 0, 0.0, 0.3, 1.0, 1, 1.5])
@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layerdrop(name: str, limit: float, dtype: torch.dtype) -> None:
    """Drawn numbers are in [0, 1); the draw itself advances the random stream."""
    compare = COMPARISONS[name]
    is_known = limit not in (0, 1, 0.3) or (
        limit != 0.3
        and (
            (limit == 0 and name in ("<", ">="))
            or (limit == 1 and (name in ("<=", ">") or dtype is not torch.bfloat16))
        )
    )

    def number(model: Any, batch: Any) -> float:
        if compare(torch.rand([], dtype=dtype), limit):
            return 2.0
        return 1.0 + float(torch.nn.functional.dropout(batch["x"]).numel())

    def drawing(model: Any, optimizer: Any, batch: Any) -> Any:
        return trained(number)(model, optimizer, batch), torch.rand(2)

    if is_known:
        assert_trains_the_same(drawing, made, batches(2))
        return
    with pytest.raises(rekindle.CaptureError, match="depends on random numbers"):
        rekindle.optimize(drawing, *made(), batches()[0])


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda x: torch.empty(1).uniform_(0.0, 1.0),
    "bernoulli": lambda x: torch.empty_like(x).bernoulli_(0.5).sum(),
    "dropout": lambda x: F.dropout(x).sum(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_memory_that_is_drawn_into_is_random(name: str) -> None:
    """The refusal names the draw, not the memory that it fills."""

    def number(model: Any, batch: Any) -> float:
        return float(DRAWS[name](batch["x"]).item())

    with pytest.raises(rekindle.CaptureError, match="depends on random numbers"):
        rekindle.optimize(trained(number), *made(), batches()[0])
