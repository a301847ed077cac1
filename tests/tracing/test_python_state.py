"""Python state of every kind: captured steps train as plain ones do, or are refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from support.python_state_programs import PLACES, USES, made
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
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


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_a_value_that_keeps_changing_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    weight = 1.0

    def train_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        return update(model(batch).square().mean() * weight, optimizer)

    step = rekindle.optimize(train_step, *small(), batches()[0])
    with caplog.at_level(logging.WARNING, logger="rekindle"):
        for weight in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):  # noqa: B007
            step(batches()[0])
    (record,) = caplog.records
    assert record.getMessage().startswith("weight changes between steps")
    assert "in the batch as a tensor" in record.getMessage()


def test_captures_for_changed_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rekindle.CapturedStep, "max_captures", 3)
    box = {"n": 0}

    def train_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        return update(model(batch).square().mean() * (1 + box["n"]), optimizer)

    step = rekindle.optimize(train_step, *small(), batches()[0])
    for box["n"] in range(6):
        step(batches()[0])
    assert step.n_captures == 3


@functools.lru_cache
def _cached(n: int) -> torch.Tensor:
    return torch.ones(n) * 2


def test_a_fake_tensor_in_a_cache_is_an_error_that_names_its_line() -> None:
    def train_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        return update(model(batch).square().mean() * _cached(3).sum(), optimizer)

    _cached.cache_clear()
    with pytest.raises(rekindle.CaptureError, match="leaves a tensor behind") as info:
        rekindle.optimize(train_step, *small(), batches()[0])
    assert info.value.lineno == _cached.__wrapped__.__code__.co_firstlineno + 2
    _cached.cache_clear()
    _cached(3)
    rekindle.optimize(train_step, *small(), batches()[0])


def test_a_step_that_differs_when_it_is_traced_again_is_refused() -> None:
    def train_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        return update(model(batch).square().mean() * time.perf_counter(), optimizer)

    with pytest.raises(rekindle.CaptureError, match="traced a second time: mul has other arg"):
        rekindle.optimize(train_step, *small(), batches()[0])


def assert_same_with_changes(
    train_step: Any, change: Callable[[torch.optim.Optimizer, int], Any]
) -> rekindle.TrainStep:
    """Train plainly and captured, each step in the context that `change` returns for it."""
    trained = []
    for captured in (False, True):
        model, optimizer = small()
        step: Any = functools.partial(train_step, model, optimizer)
        if captured:
            step = rekindle.optimize(train_step, model, optimizer, batches()[0])
        for i, batch in enumerate(batches()):
            with change(optimizer, i):
                step(batch)
        trained.append(state_of(model, optimizer))
    assert differences(*trained) == []
    assert isinstance(step, rekindle.TrainStep)
    return step


def test_settings_of_the_optimizer_that_the_step_reads_are_guarded() -> None:
    def train_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = update(model(batch).square().mean(), optimizer)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.mul_(1 - group["lr"])
        return loss

    def change(optimizer: torch.optim.Optimizer, i: int) -> Any:
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + i % 2)
        return nullcontext()

    assert_same_with_changes(train_step, change)


SETTINGS: dict[str, Any] = {
    "default dtype": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "attention kernels": lambda: sdpa_kernel(SDPBackend.MATH),
    "oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(torch.neg, torch.neg),
    "default device": lambda: torch.device("cpu"),
    "module hooks": lambda: global_hook(lambda module, args, output: output * 2),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def global_hook(hook: Any) -> Iterator[None]:
    handle = register_module_forward_hook(hook)
    yield
    handle.remove()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("setting", SETTINGS)
def test_global_settings_around_some_steps(setting: str) -> None:
    def train_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        heads = model(batch).view(1, 1, 3, 2)
        scores = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return update((scores * torch.tensor(0.5).to(torch.float32)).square().mean(), optimizer)

    step = assert_same_with_changes(
        train_step, lambda optimizer, i: SETTINGS[setting]() if i % 2 else nullcontext()
    )
    assert step.n_captures <= 3


def test_verify_leaves_python_state_alone_and_starts_both_trainings_from_it() -> None:
    hidden, log = torch.zeros(2), list[torch.Tensor]()

    def train_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        nonlocal hidden
        loss = update((model(batch) + hidden).square().mean(), optimizer)
        hidden = torch.tanh(loss.detach() + hidden)
        log.append(loss.detach())
        return loss

    assert rekindle.verify(train_step, *small(), batches()[0], budget="100%").equal
    assert not log
    assert torch.equal(hidden, torch.zeros(2))


@torch.library.custom_op("rekindle_test::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + next(_noise) * 1e-3)


@noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_noise = itertools.count()


def test_verify_says_that_the_plain_step_is_not_deterministic() -> None:
    def train_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        return update(loss + noise(loss.detach()), optimizer)

    found = rekindle.verify(train_step, *small(), batches()[0], budget="100%")
    assert not found.equal
    assert not found.is_deterministic
    assert "not deterministic" in repr(found)


@dataclasses.dataclass
class LayeredConfig:
    """A setting that is only to be read layer by layer; `getattr` on the whole is an error."""

    scale: float = 2.0
    has_layers: bool = True

    def __getattribute__(self, name: str) -> Any:
        if name == "scale" and super().__getattribute__("has_layers"):
            raise KeyError("scale may vary from layer to layer")
        return super().__getattribute__(name)

    def of_layer(self) -> float:
        return float(self.__dict__["scale"])


def test_a_config_that_refuses_to_be_read() -> None:
    """Its fields are compared all the same: a new value means a new capture."""
    config = LayeredConfig()
    configs = {"first": [config]}

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss = (model(batch) * configs["first"][0].of_layer()).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = batches()[0]
    step = rekindle.optimize(train_step, model, optimizer, x)
    assert torch.equal(step(x), model(x).mul(2.0).sum())
    config.__dict__["scale"] = 3.0
    assert torch.equal(step(x), model(x).mul(3.0).sum())
