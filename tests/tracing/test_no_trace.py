"""A capture changes nothing, and between steps model and optimizer can be used as usual."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.equality import assert_trains_the_same, clone_result, differences, same, snapshot
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils import _pytree as pytree

import rekindle
from rekindle.core.graph.graph import Role

Made = tuple[nn.Module, torch.optim.Optimizer]


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def reads_a_value(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    """Stops with a CaptureError after forward, backward and update."""
    random.random()
    np.random.rand()
    torch.manual_seed(99)
    model.eval()
    loss = classify(model, optimizer, batch)
    loss.item()
    return loss


def wrong_shape(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    """Stops with torch's own error after forward, backward and update."""
    loss = classify(model, optimizer, batch)
    return batch[0] @ loss.expand(3, 7)


class Several(nn.Module):
    """Buffers, a frozen layer, a plain attribute and a tensor outside the registries."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)
        self.scale = torch.full((), 0.5)
        self.notes = {"calls": ["none"]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.frozen(x)).relu_()) * self.scale)


class Remembers(Several):
    """Keeps an activation and replaces a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.last = out.detach()
        self.mean = self.last.mean(0)
        return out


def made(cls: type[nn.Module] = Several) -> Made:
    model = cls()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def labelled(n: int = 3, rows: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(5)
    return [
        (torch.randn(rows, 6, generator=g), torch.randint(0, 3, (rows,), generator=g))
        for _ in range(n)
    ]


def identities(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The identities of all objects, and the version counters of tensors."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[f"attributes {path}"] = {key: id(value) for key, value in vars(module).items()}
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                assert tensor is not None
                found[f"tensor {path}.{key}"] = (id(tensor), tensor._version, tensor.data_ptr())
                found[f"grad {path}.{key}"] = id(tensor.grad), getattr(tensor.grad, "_version", 0)
    for group in optimizer.param_groups:
        found.setdefault("groups", []).append({key: id(value) for key, value in group.items()})
        found.setdefault("params", []).append([id(param) for param in group["params"]])
    found["state"] = {id(owner): id(state) for owner, state in optimizer.state.items()}
    found["state tensors"] = [
        (id(leaf), getattr(leaf, "_version", 0))
        for leaf in pytree.tree_leaves(list(optimizer.state.values()))
    ]
    found["optimizer"] = {key: id(value) for key, value in vars(optimizer).items()}
    return found


def world() -> dict[str, Any]:
    """Everything global that a capture replaces, and the generators that it must not advance."""
    return {
        "backward": torch.autograd.backward,
        "get_rng_state": (torch.get_rng_state, torch.random.get_rng_state),
        "set_rng_state": (torch.set_rng_state, torch.random.set_rng_state),
        "cuda": (torch.cuda.get_rng_state, torch.cuda.random.get_rng_state),
        "schedulers": (LRScheduler.step, vars(StepLR).get("step")),
        "global pre-hooks": dict(module_hooks._global_forward_pre_hooks),
        "global hooks": dict(module_hooks._global_forward_hooks),
        "always called": dict(module_hooks._global_forward_hooks_always_called),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "python random": random.getstate(),
        "numpy random": str(np.random.get_state()),
    }


STEPS: dict[str, tuple[Callable[..., Any], type[Exception] | None]] = {
    "success": (classify, None),
    "refused": (reads_a_value, rekindle.CaptureError),
    "own-error": (wrong_shape, RuntimeError),
}


@pytest.mark.parametrize("outcome", STEPS)
@pytest.mark.parametrize("history", ["fresh", "trained", "grads-left", "scheduler"])
def test_capture_leaves_no_trace(history: str, outcome: str) -> None:
    """With any history of the objects, and any end of the capture."""
    train_step, error = STEPS[outcome]
    model, optimizer = made(Remembers)
    batch = labelled()[0]
    if history == "scheduler":
        StepLR(optimizer, 1)
    if history != "fresh":
        classify(model, optimizer, batch)
    if history == "grads-left":
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    had_own_step = "step" in vars(optimizer)
    before = snapshot(model, optimizer), identities(model, optimizer), world()
    twin = copy.deepcopy((model, optimizer))
    for copied, param in zip(twin[0].parameters(), model.parameters(), strict=True):
        copied.grad = copy.deepcopy(param.grad)  # deepcopy leaves gradients out
    batch_before = copy.deepcopy(batch)

    if error is None:
        rekindle.capture(train_step, model, optimizer, batch)
    else:
        with pytest.raises(error) as info:
            rekindle.capture(train_step, model, optimizer, batch)
        assert type(info.value) is error

    assert not differences(before[0], snapshot(model, optimizer))
    assert identities(model, optimizer) == before[1]
    assert world() == before[2]
    assert not differences(snapshot(*twin), snapshot(model, optimizer))
    assert [name for name, _ in model.named_modules()] == [n for n, _ in twin[0].named_modules()]
    assert model.notes == {"calls": ["none"]}
    assert all(same(a, b) for a, b in zip(batch, batch_before, strict=True))
    assert all(tensor._version == 0 for tensor in batch)
    assert ("step" in vars(optimizer)) == had_own_step
    if history == "fresh":
        assert not optimizer.state
        assert optimizer.step.__func__ is torch.optim.AdamW.step


def test_the_users_own_error_arrives_unchanged() -> None:
    """torch's own error about shapes must not be wrapped, and must lead to the user's line."""
    model, optimizer = made()
    with pytest.raises(RuntimeError, match=r"5.*6.*3.*7") as info:
        rekindle.capture(wrong_shape, model, optimizer, labelled()[0])
    assert type(info.value) is RuntimeError
    assert info.value.__cause__ is None
    assert any(entry.name == "wrong_shape" for entry in info.traceback)


def reconstruct(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_capture_allocates_no_activations() -> None:
    """A batch of 16 GiB on the meta device is captured as one on the model's device."""
    rows, width = 1 << 22, 1024
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.empty(rows, width, device="meta")
    step = rekindle.capture(reconstruct, model, optimizer, batch)
    sums = step.graph.bytes_by_role()
    assert sums[Role.INPUT] == rows * width * 4
    tanh = next(op for op in step.graph.ops if op.target == "aten.tanh.default")
    kept = step.graph.storage_of(tanh.outputs[0])
    assert (kept.nbytes, kept.role, kept.device) == (rows * width * 4, Role.ACTIVATION, "cpu")


def test_capture_reads_no_batch() -> None:
    """An expanded tensor of 32 TiB has 32 bytes; only its shape is read."""
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.zeros(1, 8).expand(1 << 40, 8)
    step = rekindle.capture(reconstruct, model, optimizer, batch)
    addmm = next(op for op in step.graph.ops if op.target == "aten.addmm.default")
    assert step.graph.values[addmm.outputs[0]].shape == (1 << 40, 2)
    assert step.graph.storage_of(addmm.outputs[0]).nbytes == (1 << 40) * 2 * 4
    assert step.graph.bytes_by_role()[Role.INPUT] == 8 * 4


# Between the steps


class Trainings:
    """The same training with and without Rekindle, from the same state."""

    def __init__(self, make: Callable[[], Made] = made) -> None:
        self.plain, self.ours = make(), make()
        self.ours[0].load_state_dict(self.plain[0].state_dict())
        self.step = rekindle.optimize(classify, *self.ours, labelled()[0])

    def train(self, batches: Any) -> None:
        for batch in batches:
            state = torch.get_rng_state()
            expected = clone_result(classify(*self.plain, batch))
            torch.set_rng_state(state)
            assert same(expected, clone_result(self.step(batch)))
        self.compare()

    def compare(self) -> None:
        assert not differences(snapshot(*self.plain), snapshot(*self.ours))

    def both(self, change: Callable[[Any, Any], None]) -> None:
        for model, optimizer in (self.plain, self.ours):
            change(model, optimizer)


def test_state_dicts_are_live() -> None:
    both = Trainings()
    both.train(labelled())
    for plain, ours in zip(both.plain, both.ours, strict=True):
        leaves, spec = pytree.tree_flatten(plain.state_dict())
        our_leaves, our_spec = pytree.tree_flatten(ours.state_dict())
        assert spec == our_spec
        assert all(same(a, b) for a, b in zip(leaves, our_leaves, strict=True))
    assert both.ours[1].state_dict()["state"]


def test_state_dict_taken_before_a_step_follows_it() -> None:
    """A state dict shares memory with the parameters, in plain training as here."""
    both = Trainings()
    states = [model.state_dict() for model, _ in (both.plain, both.ours)]
    both.train(labelled())
    assert all(same(states[0][key], states[1][key]) for key in states[0])
    assert states[1]["head.weight"].data_ptr() == both.ours[0].head.weight.data_ptr()


def test_evaluation_between_steps() -> None:
    scores: dict[int, list[torch.Tensor]] = {}

    def evaluate(model: nn.Module, optimizer: Any, index: int) -> None:
        model.eval()
        with torch.no_grad():
            scores.setdefault(id(model), []).append(model(labelled()[0][0]))
        model.train()

    step = assert_trains_the_same(classify, made, labelled(4), after=evaluate)
    plain, ours = scores.values()
    assert all(same(a, b) for a, b in zip(plain, ours, strict=True))
    assert step.n_captures == 1


def test_save_and_resume() -> None:
    """A checkpoint saved in the middle continues in fresh objects as plain training does."""
    both = Trainings()
    both.train(labelled())
    file = io.BytesIO()
    torch.save([part.state_dict() for part in both.ours], file)
    file.seek(0)
    resumed = Trainings()
    for part, state in zip(resumed.ours, torch.load(file), strict=True):
        part.load_state_dict(state)
    resumed.plain = both.plain
    resumed.step = rekindle.optimize(classify, *resumed.ours, labelled()[0])
    resumed.compare()
    resumed.train(labelled(4)[1:])


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state_dict_between_steps(assign: bool) -> None:
    other, other_optimizer = made()
    for batch in labelled():
        classify(other, other_optimizer, batch)
    saved = copy.deepcopy((other.state_dict(), other_optimizer.state_dict()))

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state, optimizer_state = copy.deepcopy(saved)
        model.load_state_dict(state, assign=assign)
        if assign:
            optimizer.param_groups[0]["params"] = list(model.parameters())
        optimizer.load_state_dict(optimizer_state)

    both = Trainings()
    both.train(labelled(2))
    both.both(load)
    both.train(labelled(4)[2:])
    assert both.step.n_captures == 1


def test_assigning_a_state_dict_the_optimizer_does_not_see() -> None:
    """The optimizer keeps the old parameters: the new ones gather gradients and never change."""
    both = Trainings()
    both.train(labelled(2))
    state = copy.deepcopy(both.plain[0].state_dict())
    both.both(lambda model, _: model.load_state_dict(copy.deepcopy(state), assign=True))
    both.train(labelled(4)[2:])


def test_assigning_a_state_dict_when_the_step_uses_dot_data() -> None:
    """`param.data` is another tensor on the same memory; the next step has to find the new one."""

    def make() -> Made:
        model = nn.Linear(6, 3)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = classify(model, optimizer, batch)
        for param in model.parameters():
            param.data.clamp_(-0.05, 0.05)
        return loss

    def assign(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        optimizer.param_groups[0]["params"] = list(model.parameters())

    assert_trains_the_same(train_step, make, labelled(3), after=assign)


def test_changing_a_parameter_by_hand() -> None:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        with torch.no_grad():
            model.head.weight.mul_(0.5)
            model.head.bias[0] = 2.0
            model.scale.fill_(0.25)
        model.norm.running_mean.zero_()

    step = assert_trains_the_same(classify, made, labelled(4), after=change)
    assert step.n_captures == 1


def test_replacing_a_plain_tensor_attribute() -> None:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        model.scale = torch.full((), 0.1 * (index + 1))

    assert_trains_the_same(classify, made, labelled(4), after=change)


def test_deepcopy_of_a_captured_model_is_independent() -> None:
    both = Trainings()
    both.train(labelled(2))
    copied = copy.deepcopy(both.ours[0])
    before = copy.deepcopy(copied.state_dict())
    assert all(same(before[k], v) for k, v in both.ours[0].state_dict().items())
    both.train(labelled(4)[2:])
    assert all(same(before[k], v) for k, v in copied.state_dict().items())
    assert not same(before["head.weight"], both.ours[0].state_dict()["head.weight"])
    copied(labelled()[0][0]).sum().backward()
    assert both.ours[0].head.weight.grad is None


def test_adding_a_parameter_group() -> None:
    """A layer that the optimizer did not know is trained from then on."""

    def make() -> Made:
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        return model, torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)

    def add(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 1:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.3})

    assert_trains_the_same(classify, make, labelled(5), after=add)


def test_adding_a_group_of_a_frozen_layer() -> None:
    """Gradual unfreezing: the usual reason to add a group."""

    def make() -> Made:
        model = nn.Sequential(nn.Linear(6, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 3))
        return model, torch.optim.Adam(model[2].parameters(), lr=0.1)

    def add(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.3})

    step = assert_trains_the_same(classify, make, labelled(5), after=add)
    assert step.n_captures == 2
