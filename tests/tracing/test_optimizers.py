"""Every optimizer, in every setting, trains as it does without Rekindle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.equality import assert_trains_the_same
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import rekindle


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(n: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator))
        for _ in range(n)
    ]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own, with a Python step count and a tensor state."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state["average"] = torch.zeros_like(param)
                state["step"] += 1
                update = state["average"] * beta1 + param.grad * (1 - beta1)
                param.add_(update.sign(), alpha=-group["lr"] / state["step"] ** 0.5)
                state["average"].lerp_(param.grad, 1 - beta2)


class Halving(torch.optim.Adam):
    """Subclasses an optimizer of torch, and calls its step."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.5


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, whose state it does not know."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.AdamW(self.param_groups[0]["params"], lr=1e-2)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for slow, param in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.lerp_(param, 0.5)
            param.copy_(slow)


class Unruly(torch.optim.Optimizer):
    """Reads its gradients as numpy arrays, which cannot be recorded."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                update = torch.from_numpy(param.grad.numpy() * group["lr"])
                param.data.sub_(update)


SETTINGS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd-nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
    ),
    "sgd-foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "sgd-fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    **{
        f"{name}-{setting or 'default'}": (
            cls,
            {"lr": 1e-2, **({setting: True} if setting else {})},
        )
        for name, cls in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW))
        for setting in ("", "foreach", "fused", "amsgrad")
    },
    "adam-weight-decay": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam-tensor-lr": (torch.optim.Adam, {"lr": torch.tensor(1e-2)}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2}),
    "rmsprop-centered": (torch.optim.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.9}),
    "rmsprop-foreach": (torch.optim.RMSprop, {"lr": 1e-2, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adagrad-foreach": (torch.optim.Adagrad, {"lr": 1e-2, "foreach": True}),
    "adagrad-fused": (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "own-class": (Lion, {}),
    "own-subclass": (Halving, {"lr": 1e-2}),
    "own-wrapper": (Lookahead, {}),
    "untraceable": (Unruly, {}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_optimizer(setting: str) -> None:
    cls, kwargs = SETTINGS[setting]

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        return model, cls(model.parameters(), **kwargs)  # type: ignore[call-arg]

    step = assert_trains_the_same(train_step, make, batches())
    written = {v for op in step.graph.ops for v in op.mutates}
    written_params = {step.graph.values[v].name for v in written}
    assert {"param_0_weight", "param_2_bias"} <= written_params, "the graph has the update"


@pytest.mark.parametrize("setting", SETTINGS)
def test_capture_in_the_middle_of_training(setting: str) -> None:
    """If optimizer state exists, as after a resume, the graph is the same as without."""
    cls, kwargs = SETTINGS[setting]
    model = small_model()
    optimizer = cls(model.parameters(), **kwargs)  # type: ignore[call-arg]
    fresh = rekindle.capture(train_step, model, optimizer, batches()[0])
    train_step(model, optimizer, batches()[0])
    resumed = rekindle.capture(train_step, model, optimizer, batches()[0])
    assert [op.target for op in resumed.graph.ops] == [op.target for op in fresh.graph.ops]
    assert resumed.graph.bytes_by_role() == fresh.graph.bytes_by_role()


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_capturable_is_refused_by_torch_on_the_cpu_just_the_same(cls: Any) -> None:
    """`capturable=True` needs an accelerator; the plain step's own error must reach the user."""
    model = small_model()
    optimizer = cls(model.parameters(), capturable=True)
    step = rekindle.optimize(train_step, model, optimizer, batches()[0])
    with pytest.raises(AssertionError, match="capturable"):
        step(batches()[0])


def test_several_parameter_groups() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        groups = [
            {"params": model[0].parameters(), "lr": 0.5, "momentum": 0.0},
            {"params": [model[2].weight], "weight_decay": 0.3},
            {"params": [model[2].bias]},
        ]
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    assert_trains_the_same(train_step, make, batches())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["lambda", "cosine", "onecycle"])
def test_schedulers_change_the_rate_without_a_new_capture(kind: str, fused: bool) -> None:
    schedulers: dict[int, Any] = {}

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        schedulers[id(optimizer)] = {
            "lambda": lambda: LambdaLR(optimizer, lambda epoch: 0.5**epoch),
            "cosine": lambda: CosineAnnealingLR(optimizer, T_max=3),
            "onecycle": lambda: OneCycleLR(optimizer, max_lr=0.2, total_steps=10),
        }[kind]()
        return model, optimizer

    def after(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        schedulers[id(optimizer)].step()

    step = assert_trains_the_same(train_step, make, batches(), after=after)
    assert step.n_captures == 1


def test_rate_set_by_hand() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def after(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.1

    step = assert_trains_the_same(train_step, make, batches(), after=after)
    assert step.n_captures == 1


def test_optimizer_hooks_run_once_a_step() -> None:
    calls: list[str] = []
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    step = rekindle.optimize(train_step, model, optimizer, batches()[0])
    assert calls == []
    step(batches()[0])
    assert calls == ["before", "after"]


def _removed_by_hand(model: nn.Module, loss: torch.Tensor) -> None:
    loss.backward()
    model.unused.grad = None


def _removed_by_a_list(model: nn.Module, loss: torch.Tensor) -> None:
    params = list(model.parameters())
    for param, grad in zip(
        params, torch.autograd.grad(loss, params, allow_unused=True), strict=True
    ):
        param.grad = grad


def _removed_after_a_change(model: nn.Module, loss: torch.Tensor) -> None:
    loss.backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)
    model.unused.grad = None


@pytest.mark.parametrize("is_there_first", [False, True])
@pytest.mark.parametrize(
    "backward", [_removed_by_hand, _removed_by_a_list, _removed_after_a_change]
)
def test_a_gradient_that_the_step_removes_is_not_used(backward: Any, is_there_first: bool) -> None:
    """A gradient from before the step must not be there when the optimizer runs."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.unused = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    def fill(model: nn.Module, *_: Any) -> None:
        for param in model.parameters():
            param.grad = torch.ones_like(param)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Model()
        if is_there_first:
            fill(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = model(batch).square().mean()
        backward(model, loss)
        optimizer.step()
        return loss

    batches = [torch.randn(3, 4) for _ in range(3)]
    assert_trains_the_same(train_step, make, batches, after=fill)
