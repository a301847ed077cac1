"""On a GPU: the captured step gives the plain step's bits, and holds no more memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.equality import assert_trains_the_same
from torch import nn

import rekindle
from rekindle import models


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(False)


ZOO = ["mlp", "lstm", "resnet-tiny", "resnet18", "bert-tiny", "gpt2-tiny", "vit-tiny"]


@pytest.mark.filterwarnings("ignore:.*deterministic.*")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str, precision: str) -> None:
    work = models.build(name, batch=4, precision=precision, device="cuda")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        fresh = models.build(name, batch=4, precision=precision, device="cuda")
        return fresh.model, fresh.optimizer

    assert_trains_the_same(work.train_step, make, [work.batch] * 3)


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Recurrent(nn.Module):
    def __init__(self, cls: type[nn.RNNBase], dropout: float) -> None:
        super().__init__()
        self.rnn = cls(5, 6, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.head = nn.Linear(64, 3)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 1, 192).transpose(1, 2).chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.head(out.transpose(1, 2).flatten(2).mean(1))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 64)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.GELU())
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return self.head(checkpoint(self.body, self.stem(x).mean(1), use_reentrant=False))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "lstm": (lambda: Recurrent(nn.LSTM, 0.0), (4, 7, 5)),
    "gru": (lambda: Recurrent(nn.GRU, 0.0), (4, 7, 5)),
    "attention": (lambda: Attention(0.0), (4, 32, 64)),
    "attention-dropout": (lambda: Attention(0.2), (4, 32, 64)),
    "torch-checkpoint": (Checkpointed, (4, 7, 5)),
}


@pytest.mark.filterwarnings("ignore:.*deterministic.*")
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, autocast: bool) -> None:
    build, shape = MODELS[name]
    g = torch.Generator().manual_seed(5)
    batches = [
        (torch.randn(*shape, generator=g).cuda(), torch.randint(0, 3, (4,), generator=g).cuda())
        for _ in range(3)
    ]

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build().cuda()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    assert_trains_the_same(train_step, make, batches)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    f"{cls.__name__}-{setting}": (cls, {"lr": 1e-2, **({setting: True} if setting else {})})
    for cls in (torch.optim.Adam, torch.optim.AdamW)
    for setting in ("", "foreach", "fused", "capturable", "amsgrad")
} | {
    "SGD-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD-fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2}),
    "RMSprop-capturable": (torch.optim.RMSprop, {"lr": 1e-2, "capturable": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "Adagrad-foreach": (torch.optim.Adagrad, {"lr": 1e-2, "foreach": True}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str) -> None:
    cls, kwargs = OPTIMIZERS[name]
    g = torch.Generator().manual_seed(5)
    batches = [
        (torch.randn(5, 6, generator=g).cuda(), torch.randint(0, 3, (5,), generator=g).cuda())
        for _ in range(4)
    ]

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
        return model, cls(model.parameters(), **kwargs)

    assert_trains_the_same(classify, make, batches)


def test_dropout_inside_cudnn_is_refused_with_advice() -> None:
    model = Recurrent(nn.LSTM, 0.3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(4, 7, 5).cuda(), torch.randint(0, 3, (4,)).cuda())
    with pytest.raises(rekindle.CaptureError, match=r"rnn has dropout .*\n.*nn\.Dropout between"):
        rekindle.optimize(classify, model, optimizer, batch)


def test_capture_allocates_nothing_on_the_device() -> None:
    work = models.build("resnet18", batch=64, precision="bf16", device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rekindle.capture(work.train_step, work.model, work.optimizer, work.batch)
    assert torch.cuda.max_memory_allocated() == before


def test_a_batch_far_larger_than_memory_is_captured() -> None:
    work = models.build("resnet18", batch=2, precision="bf16", device="cuda")
    images = torch.empty(1 << 20, 3, 224, 224, device="meta")
    labels = torch.empty(1 << 20, dtype=torch.int64, device="meta")
    step = rekindle.capture(work.train_step, work.model, work.optimizer, (images, labels))
    assert sum(step.graph.bytes_by_role().values()) > 100 * torch.cuda.mem_get_info()[1]


@pytest.mark.filterwarnings("ignore:.*deterministic.*")
@pytest.mark.parametrize("name", ["resnet18", "bert-tiny", "lstm"])
def test_peak_is_that_of_the_plain_step(name: str) -> None:
    work = models.build(name, batch=32, precision="bf16", device="cuda")
    step = rekindle.optimize(work.train_step, work.model, work.optimizer, work.batch)

    def peak(run: Any) -> int:
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated()

    plain = peak(lambda: work.train_step(work.model, work.optimizer, work.batch))
    assert peak(lambda: step(work.batch)) <= 1.01 * plain


def test_host_batches_are_moved_inside_the_step() -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        return classify(model, optimizer, [t.cuda(non_blocking=True) for t in batch])

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(6, 3).cuda()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    batches = [(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(3)]
    assert_trains_the_same(train_step, make, batches)
