"""Fake results have the metadata of the kernels' results: over torch's own samples, and by size."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import operator_samples as samples
from support.equality import assert_trains_the_same
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rekindle
from rekindle.tracing import kernel_check

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16]


def check(infos: list[Any], most: int) -> Counter[str]:
    """Run samples of some operators in all layouts; returns how often each kernel was checked."""
    checked: Counter[str] = Counter()
    differing, unchecked = [], set()
    for op in infos:
        for dtype in DTYPES:
            for sample in samples.samples(op, dtype, most):
                for change in samples.VARIANTS.values():
                    watch = samples.run(op, sample, change)
                    differing += watch.differing
                    unchecked |= watch.unchecked
                    checked.update(watch.checked)
    assert not differing, differing[:3]
    own = {name for name in unchecked if name.startswith("aten.")}
    own -= {f"aten.{name.removeprefix('aten::')}.default" for name in kernel_check._UNSAFE}
    assert not own, own
    return checked


NAMED = (
    *(
        "nn.functional.batch_norm",
        "nn.functional.layer_norm",
        "log_softmax",
        "fft.fft2",
        "fft.irfft",
    ),
    *("nn.functional.logsigmoid", "nn.functional.rrelu", "nn.functional.channel_shuffle"),
    *("nn.functional.group_norm", "nn.functional.mse_loss", "nn.functional.pad", "mm", "cumsum"),
)


@pytest.mark.parametrize("name", NAMED)
def test_operators_with_wrong_fakes(name: str) -> None:
    infos = [op for op in samples.OPERATORS if op.name == name]
    assert check(infos, most=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(16))
def test_all_operators(part: int) -> None:
    assert check(samples.OPERATORS[part::16], most=6)


# Large tensors are checked at smaller sizes


def called(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """A checked fake result; arguments are shapes with strides, or plain."""
    with FakeTensorMode():
        given = [
            torch.empty_strided(*arg) if isinstance(arg, tuple) and len(arg) == 2 else arg
            for arg in args
        ]
        return kernel_check.call(op, tuple(given), kwargs)


class Sizes:
    """Notes the bytes of the arguments of every kernel that a check runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.largest = 0
        make = kernel_check._made

        def noted(layouts: Any, fill: Any) -> Any:
            self.largest = max(self.largest, *(layout.end_bytes for layout in layouts), 0)
            return make(layouts, fill)

        monkeypatch.setattr(kernel_check, "_made", noted)
        kernel_check._verdicts.clear()


def test_large_tensors_are_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(monkeypatch)
    n = 1 << 18
    # The fake has the strides of its input, the kernel dense ones, in both sizes.
    x = ((n, 64, 128), (64 * 128, 1, 64))
    (out, mean, _), is_checked = called(
        aten.native_layer_norm.default, x, [128], ((128,), (1,)), ((128,), (1,)), 1e-5
    )
    small = torch.empty_strided((4, 6, 8), (48, 1, 6))
    real, real_mean, _ = torch.native_layer_norm(small, [8], torch.ones(8), torch.ones(8), 1e-5)
    assert is_checked
    assert real.is_contiguous() == out.is_contiguous()
    assert real_mean.is_contiguous() == mean.is_contiguous()
    assert 0 < sizes.largest < 8 << 20


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mm.default, [((1 << 20, 4096), (4096, 1)), ((4096, 512), (512, 1))]),
        (aten.add.Tensor, [((1 << 14, 1 << 14), (1, 1 << 14)), ((1, 1 << 14), (0, 1))]),
        (aten.embedding_dense_backward.default, None),
        (aten.sum.dim_IntList, [((1 << 15, 1 << 14), (1 << 14, 1)), [1]]),
    ],
)
def test_large_operators_are_checked(op: Any, args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(monkeypatch)
    if args is None:
        with FakeTensorMode():
            grad, index = torch.empty(1 << 16, 1024), torch.empty(1 << 16, dtype=torch.long)
            _, is_checked = kernel_check.call(op, (grad, index, 1 << 17, -1, False), {})
    else:
        _, is_checked = called(op, *args)
    assert is_checked
    assert 0 < sizes.largest < 8 << 20


# What a check leaves alone


def test_generators_keep_their_state() -> None:
    kernel_check._verdicts.clear()
    torch.manual_seed(3)
    own = torch.Generator().manual_seed(5)
    before = torch.get_rng_state(), own.get_state()
    called(aten.native_dropout.default, ((3, 4), (4, 1)), 0.5, True)
    called(aten.bernoulli.p, ((3, 4), (4, 1)), 0.5, generator=own)
    called(aten.rand.generator, [3], generator=own)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], own.get_state())


def test_repeated_calls_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(monkeypatch)
    called(aten.mul.Tensor, ((3, 5), (5, 1)), ((3, 5), (5, 1)))
    assert sizes.largest
    sizes.largest = 0
    called(aten.mul.Tensor, ((3, 5), (5, 1)), ((3, 5), (5, 1)))
    assert not sizes.largest
    called(aten.mul.Tensor, ((3, 5), (1, 3)), ((3, 5), (5, 1)))
    assert sizes.largest


def test_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "_MAX_VERDICTS", 4)
    kernel_check._verdicts.clear()
    threads = [
        threading.Thread(
            target=lambda k=k: [called(aten.neg.default, ((n, k), (k, 1))) for n in range(1, 9)]
        )
        for k in (1, 2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernel_check._verdicts) <= 4


# Whole steps


class Transposed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.last = norm, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([7, 16], dtype=torch.int32)
        return F.grouped_mm(x.flatten(0, 1), self.weight, offs=ends)


class ByStrides(nn.Module):
    """Decides by the strides of results whose fakes have others."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.function(self.first(x).unsqueeze(-1).permute(0, 2, 1, 3))
        like = torch.empty_like(y).fill_(2)
        total: torch.Tensor = (y * like).sum() * (2 if y.is_contiguous() else 3)
        return total + sum(y.stride())


FUNCTIONS = {
    "log_softmax": lambda x: x.log_softmax(1),
    "logsigmoid": F.logsigmoid,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "reflect": lambda x: F.pad(x.squeeze(-1), (1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "shuffle": lambda x: F.channel_shuffle(x, 2),
    "fft": lambda x: torch.fft.fft2(x).abs(),
    "instance_norm": lambda x: F.instance_norm(x, eps=1.0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
}

MODELS = {
    "batch norm": lambda: Transposed(nn.BatchNorm1d(4)),
    "layer norm": lambda: Transposed(nn.LayerNorm([4, 8])),
    "log softmax": lambda: Transposed(nn.LogSoftmax(1)),
    "experts": Experts,
    **{name: lambda f=f: ByStrides(f) for name, f in FUNCTIONS.items()},
}


def train_step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("name", MODELS)
def test_steps_train_the_same(name: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = MODELS[name]()
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    g = torch.Generator().manual_seed(1)
    assert_trains_the_same(train_step, make, [torch.randn(2, 8, 4, generator=g) for _ in range(3)])


# Operators of others are checked in the first step


@torch.library.custom_op("rekindle_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


@turned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    is_wrong = x.shape[0] > 6
    like = x if is_wrong else x.t()
    made = torch.empty_like(like, memory_format=torch.contiguous_format)
    return made if is_wrong else made.t()


turned.register_autograd(lambda ctx, grad: grad)


@pytest.mark.parametrize("budget", [None, "100%"])
def test_custom_operators_are_held_to_their_fakes(budget: str | None) -> None:
    def step_on(rows: int) -> Any:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def custom_step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
            loss: torch.Tensor = turned(model(batch)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        batch = torch.randn(rows, 8)
        step = rekindle.optimize(custom_step, model, optimizer, batch, budget=budget)
        before = model.weight.detach().clone()
        try:
            return step(batch)
        except rekindle.CaptureError:
            assert torch.equal(before, model.weight)
            raise

    step_on(4)
    with pytest.raises(rekindle.CaptureError, match="turned") as caught:
        step_on(8)
    assert caught.value.filename == __file__
