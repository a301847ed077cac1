"""A step is captured again for new shapes and modes; all captures stay bit-equal."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.equality import assert_trains_the_same
from torch import nn

import rekindle

Made = tuple[nn.Module, torch.optim.Optimizer]


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def made() -> Made:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def labelled(*rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(5)
    return [(torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)) for n in rows]


def new_captures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "captured the step again" in r.getMessage()]


def test_batch_shapes(caplog: pytest.LogCaptureFixture) -> None:
    """The last, smaller batch of every epoch costs one more capture in all."""
    with caplog.at_level(logging.INFO, logger="rekindle"):
        step = assert_trains_the_same(classify, made, labelled(5, 2, 5, 2, 7, 5, 7, 2))
    assert step.n_captures == 3
    assert new_captures(caplog) == [
        "captured the step again, for a batch of shape (2, 6), (2,)",
        "captured the step again, for a batch of shape (7, 6), (7,)",
    ]
    assert {r.levelname for r in caplog.records if "again" in r.getMessage()} == {"INFO"}


def test_graph_stays_that_of_the_first_batch() -> None:
    model, optimizer = made()
    step = rekindle.optimize(classify, model, optimizer, labelled(5)[0])
    first = step.graph.fingerprint
    for batch in labelled(4, 3):
        step(batch)
    assert step.graph.fingerprint == first


def test_no_more_than_the_bound_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fed with ever new shapes must not grow without end, and must stay right."""
    assert rekindle.CapturedStep.max_captures == 16
    monkeypatch.setattr(rekindle.CapturedStep, "max_captures", 3)
    step = assert_trains_the_same(classify, made, labelled(2, 3, 4, 5, 6, 2, 6, 3))
    assert step.n_captures == 3


def test_training_and_evaluation_mode() -> None:
    """Dropout and batch norm do other things in evaluation mode, per module."""

    def switch(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        model.train(index % 3 != 0)
        if index == 3:
            model[2].train()

    step = assert_trains_the_same(classify, made, labelled(*[5] * 8), after=switch)
    assert step.n_captures == 3


@pytest.mark.parametrize("kept_in", ["variable", "dict"])
def test_mode_of_a_module_outside_the_model(kept_in: str) -> None:
    """A teacher model that the step refers to has a mode as well."""
    teacher = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    teachers = {"first": teacher}

    def learn(model: nn.Module, optimizer: Any, x: torch.Tensor, target: torch.Tensor) -> Any:
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def from_variable(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        return learn(model, optimizer, batch[0], teacher(batch[0]).detach())

    def from_dict(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        return learn(model, optimizer, batch[0], teachers["first"](batch[0]).detach())

    def make() -> Made:
        teacher.train()
        return made()

    def switch(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        teacher.train(index != 1)

    train_step = from_variable if kept_in == "variable" else from_dict
    assert_trains_the_same(train_step, make, labelled(*[5] * 4), after=switch)


def test_freezing_and_thawing_a_layer() -> None:
    def freeze(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        model[0].requires_grad_(index % 2 == 1)

    step = assert_trains_the_same(classify, made, labelled(*[5] * 5), after=freeze)
    assert step.n_captures == 2


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    if batch["flag"] is True:
        loss = loss * 3
    if type(batch["flag"]) is float:
        loss = loss + 5
    loss = loss * batch["scale"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_plain_values_in_the_batch_are_part_of_the_key() -> None:
    """1, 1.0 and True are equal in Python, but not to the step."""
    settings = [
        (1, 0.5),
        (True, 0.5),
        (1.0, 0.5),
        (False, 0.5),
        (None, 0.25),
        (1, 0.5),
        (True, 0.5),
    ]
    batches = [
        {"x": x, "y": y, "flag": flag, "scale": scale}
        for (x, y), (flag, scale) in zip(labelled(*[4] * 7), settings, strict=True)
    ]
    step = assert_trains_the_same(scaled, made, batches)
    assert step.n_captures == 5


def test_the_same_tensor_twice_in_the_first_batch() -> None:
    """An autoencoder's first batch may be (x, x); the next one need not be."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def make() -> Made:
        model = nn.Linear(6, 6)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    x, y = (batch[0] for batch in labelled(5, 5))
    assert_trains_the_same(train_step, make, [(x, x), (x, y), (y, x)])


@pytest.mark.parametrize("shared_first", [True, False])
def test_batch_tensors_that_share_memory(shared_first: bool) -> None:
    """Writing to one of them shows in the other only if they share memory."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        batch[0].mul_(2)
        labels = torch.zeros(len(batch[1]), dtype=torch.long)
        loss = F.cross_entropy(model(batch[1].view(5, 6)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x, y = (batch[0] for batch in labelled(5, 5))
    batches = [(x, x.view(5, 6)), (y, x), (x, x.view(5, 6))]
    if shared_first:
        model, optimizer = made()
        with pytest.raises(rekindle.CaptureError, match="share memory"):
            rekindle.optimize(train_step, model, optimizer, batches[0])
    else:
        assert_trains_the_same(train_step, made, batches[1:])


def test_the_step_may_write_to_its_batch() -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        batch[0].mul_(0.5)
        return classify(model, optimizer, batch), batch[0]

    assert_trains_the_same(train_step, made, labelled(5, 5, 5))


def image_model() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
    )
    model(torch.zeros(2, 3, 5, 5))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_strides_of_the_batch() -> None:
    """Kernels go by strides, and what they return does as well."""
    g = torch.Generator().manual_seed(1)
    images = [torch.randn(2, 3, 5, 5, generator=g) for _ in range(4)]
    labels = torch.tensor([0, 2])
    batches = [
        (x.to(memory_format=torch.channels_last) if index % 2 else x, labels)
        for index, x in enumerate(images)
    ]
    step = assert_trains_the_same(classify, image_model, batches)
    assert step.n_captures == 2


def test_strides_of_the_model() -> None:
    def convert(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 0:
            model.to(memory_format=torch.channels_last)

    g = torch.Generator().manual_seed(1)
    batches = [(torch.randn(2, 3, 5, 5, generator=g), torch.tensor([0, 2])) for _ in range(3)]
    step = assert_trains_the_same(classify, image_model, batches, after=convert)
    assert step.n_captures == 2


def test_another_precision() -> None:
    def make() -> Made:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0].to(model[0].weight.dtype)), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def convert(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 1:
            model.to(torch.float64)

    step = assert_trains_the_same(train_step, make, labelled(*[5] * 4), after=convert)
    assert step.n_captures == 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).tanh()))


def test_untying_weights() -> None:
    """Two layers share one tensor when captured and have one each afterwards."""

    def make() -> Made:
        model = Tied()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def untie(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 1:
            model.second.weight = nn.Parameter(model.first.weight.detach() * 0.5)
            optimizer.add_param_group({"params": [model.second.weight]})

    assert_trains_the_same(classify, make, labelled(*[5] * 4), after=untie)


def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "dropout-rate": lambda model: setattr(model[2], "p", 0.7),
    "norm-momentum": lambda model: setattr(model[1], "momentum", 0.5),
    "forward-hook": lambda model: model[4].register_forward_hook(double),
    "tensor-hook": lambda model: model[4].weight.register_hook(lambda grad: grad * 2),
    "new-layer": lambda model: model.append(nn.Softplus()),
    "replaced-layer": lambda model: model.__setitem__(3, nn.ReLU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_changed_between_steps(change: str) -> None:
    """Settings, hooks and layers are the model's form, too: a step must not go on as before."""

    def after(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 1:
            CHANGES[change](model)

    def make() -> Made:
        model, _ = made()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    assert_trains_the_same(classify, make, labelled(*[5] * 4), after=after)


@pytest.mark.parametrize("starts_in_training_mode", [True, False])
def test_a_step_that_switches_to_training_mode_itself(starts_in_training_mode: bool) -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        model.train()
        return classify(model, optimizer, batch)

    def make() -> Made:
        model, optimizer = made()
        return model.train(starts_in_training_mode), optimizer

    modes: list[bool] = []

    def after(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        modes.append(model.training and model[2].training)
        if index == 1:
            model.eval()

    step = assert_trains_the_same(train_step, make, labelled(*[5] * 4), after=after)
    assert all(modes)
    assert step.n_captures == 2


def test_a_step_that_freezes_a_layer_itself() -> None:
    """Changes of `requires_grad` by the step are either replayed or refused."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = classify(model, optimizer, batch)
        model[0].requires_grad_(False)
        return loss

    with contextlib.suppress(rekindle.CaptureError):
        assert_trains_the_same(train_step, made, labelled(*[5] * 3))


def test_a_batch_that_gathers_gradients() -> None:
    """`x.grad` of an input is either as in the plain step or refused."""
    x, y = labelled(5)[0]
    model, optimizer = made()
    twin = copy.deepcopy((model, optimizer))
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    try:
        step = rekindle.optimize(classify, model, optimizer, (ours, y))
    except rekindle.CaptureError:
        return
    state = torch.get_rng_state()
    step((ours, y))
    torch.set_rng_state(state)
    classify(*twin, (plain, y))
    assert ours.grad is not None
    assert torch.equal(ours.grad, plain.grad)


def test_one_thread_at_a_time() -> None:
    """A second thread gets an error; the first one's step is as if alone."""
    model, optimizer = made()
    twin = copy.deepcopy((model, optimizer))
    batch = labelled(5)[0]
    inside, go_on = threading.Event(), threading.Event()

    def wait(*args: Any) -> None:
        inside.set()
        assert go_on.wait(20)

    handle = optimizer.register_step_pre_hook(wait)
    step = rekindle.optimize(classify, model, optimizer, batch)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(step(batch)))
    state = torch.get_rng_state()
    thread.start()
    try:
        assert inside.wait(20)
        with pytest.raises(RuntimeError, match="one thread at a time"):
            step(batch)
    finally:
        go_on.set()
        thread.join(20)
    torch.set_rng_state(state)
    assert torch.equal(results[0], classify(*twin, batch))
    for param, other in zip(model.parameters(), twin[0].parameters(), strict=True):
        assert torch.equal(param, other)
    handle.remove()
    step(batch)  # the step is free again


def test_a_failed_step_can_be_called_again() -> None:
    """An error in the middle of a step, here from a hook, leaves the step usable."""
    model, optimizer = made()
    batch = labelled(5)[0]

    def fail(*args: Any) -> None:
        raise ValueError("not today")

    step = rekindle.optimize(classify, model, optimizer, batch)
    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ValueError, match="not today"):
        step(batch)
    assert torch.is_grad_enabled()
    handle.remove()
    before = model[0].weight.detach().clone()
    step(batch)
    assert not torch.equal(before, model[0].weight)
