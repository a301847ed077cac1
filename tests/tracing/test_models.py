"""Models of many kinds train to the same bits as without Rekindle."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.equality import assert_trains_the_same
from torch import nn
from torch.utils import checkpoint

Made = tuple[nn.Module, torch.optim.Optimizer]


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def made(model: nn.Module) -> Made:
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def labelled(*shape: int, n: int = 3, classes: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(5)
    return [
        (torch.randn(*shape, generator=g), torch.randint(0, classes, shape[:1], generator=g))
        for _ in range(n)
    ]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.conv(x))
        out += x
        return self.relu(out)


class Recurrent(nn.Module):
    def __init__(self, cls: type[nn.RNNBase], **kwargs: Any) -> None:
        super().__init__()
        self.rnn = cls(5, 6, num_layers=2, batch_first=True, **kwargs)
        self.head = nn.Linear(6 * (2 if kwargs.get("bidirectional") else 1), 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


class Attention(nn.Module):
    def __init__(self, dropout: float, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)
        self.dropout, self.causal = dropout, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 2, 12).transpose(1, 2).chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)
        return self.head(out.transpose(1, 2).flatten(2).mean(1))


class Noisy(nn.Module):
    """Draws its own random numbers, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.randn_like(x) * 0.1
        keep = torch.rand(x.shape[0], 1, device=x.device) > 0.3
        order = torch.randperm(x.shape[0], device=x.device)
        shift = torch.randint(0, 3, (x.shape[0], 1), device=x.device)
        return self.linear(x * keep)[order] + shift + torch.empty(1).normal_()


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + torch.rand(x.shape, generator=self.generator))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint.checkpoint(self.body, self.stem(x), use_reentrant=self.use_reentrant)
        return self.head(x)


class RunningAverage(nn.Module):
    """Replaces its buffer instead of changing it, and keeps a state as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(6))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        if self.last is not None:
            x = x + self.last
        self.last = x.detach().mean(0)
        return self.linear(x - self.average)


class ReshapesInPlace(nn.Module):
    """Changes shapes in place, also that of a detached tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        other = x.detach()
        other.unsqueeze_(0).transpose_(0, 1)
        y = x.relu()
        y.unsqueeze_(1)
        y = y.squeeze(1) + other.squeeze_(1).t_().t()
        return self.linear(y + x.view(-1).view_as(x))


IMAGE, VECTOR, SEQUENCE = (4, 4, 8, 8), (6, 6), (4, 7, 5)
MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.4), nn.Linear(9, 3)), VECTOR),
    "dropout-inplace": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.4, inplace=True), nn.Linear(9, 3)),
        VECTOR,
    ),
    "batch-norm": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Linear(9, 3)),
        VECTOR,
    ),
    "batch-norm-cumulative": (
        lambda: nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)),
        VECTOR,
    ),
    "layer-norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), VECTOR),
    "group-norm": (
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(256, 3)),
        IMAGE,
    ),
    "inplace-relu-and-add": (
        lambda: nn.Sequential(Residual(), Residual(), nn.Flatten(), nn.Linear(256, 3)),
        IMAGE,
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, groups=4, dilation=2, padding=2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 3),
        ),
        IMAGE,
    ),
    "conv1d-conv3d": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.Flatten(), nn.Linear(8, 3)
        ),
        VECTOR,
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), SEQUENCE),
    "lstm-dropout-bidirectional": (
        lambda: Recurrent(nn.LSTM, dropout=0.3, bidirectional=True),
        SEQUENCE,
    ),
    "gru": (lambda: Recurrent(nn.GRU), SEQUENCE),
    "rnn": (lambda: Recurrent(nn.RNN, dropout=0.2), SEQUENCE),
    "attention": (lambda: Attention(0.0, causal=False), (4, 7, 8)),
    "attention-causal": (lambda: Attention(0.0, causal=True), (4, 7, 8)),
    "attention-dropout": (lambda: Attention(0.3, causal=False), (4, 7, 8)),
    "transformer-layer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
            nn.Flatten(),
            nn.Linear(56, 3),
        ),
        (4, 7, 8),
    ),
    "random-draws": (Noisy, VECTOR),
    "own-generator": (OwnGenerator, VECTOR),
    "torch-checkpoint": (lambda: Checkpointed(use_reentrant=False), VECTOR),
    "torch-checkpoint-reentrant": (lambda: Checkpointed(use_reentrant=True), VECTOR),
    "replaced-buffer": (RunningAverage, VECTOR),
    "reshaped-in-place": (ReshapesInPlace, VECTOR),
    "weight-norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))),
        VECTOR,
    ),
    "spectral-norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))),
        VECTOR,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    build, shape = MODELS[name]
    assert_trains_the_same(classify, lambda: made(build()), labelled(*shape))


@pytest.mark.parametrize("name", ["batch-norm", "attention", "lstm", "convolutions", "dropout"])
def test_autocast_bf16(name: str) -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    build, shape = MODELS[name]
    step = assert_trains_the_same(train_step, lambda: made(build()), labelled(*shape))
    assert any(value.dtype == "bfloat16" for value in step.graph.values)


def test_autocast_around_the_step() -> None:
    import rekindle

    model, optimizer = made(nn.Sequential(nn.Linear(6, 3)))
    batch = labelled(6, 6)[0]
    step = rekindle.optimize(classify, model, optimizer, batch)
    twin, twin_optimizer = made(nn.Sequential(nn.Linear(6, 3)))
    twin.load_state_dict(model.state_dict())
    losses, plain = [], []
    for _ in range(3):  # a context of its own for each step: autocast caches cast weights in it
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(step(batch))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain.append(classify(twin, twin_optimizer, batch).detach())
    assert all(torch.equal(a, b) for a, b in zip(losses, plain, strict=True))
    assert step.n_captures == 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.body = nn.Linear(8, 8)
        self.decode = nn.Linear(8, 11, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decode(self.body(self.embed(ids)).tanh())


def test_tied_weights_and_embeddings() -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batches = [torch.randint(0, 11, (3, 5)) for _ in range(3)]
    step = assert_trains_the_same(train_step, lambda: made(Tied()), batches)
    names = [value.name for value in step.graph.values]
    assert "param_embed_weight" in names
    assert "param_decode_weight" not in names, "a tied weight is one value"


def test_frozen_and_unused_parameters_and_those_in_no_optimizer() -> None:
    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(6, 6)
            self.frozen.requires_grad_(False)
            self.used = nn.Linear(6, 3)
            self.unused = nn.Linear(6, 3)
            self.unoptimized = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(self.frozen(x)) + self.unoptimized

    def make() -> Made:
        model = Partial()
        params = [*model.frozen.parameters(), *model.used.parameters(), *model.unused.parameters()]
        return model, torch.optim.AdamW(params, lr=1e-2)

    assert_trains_the_same(classify, make, labelled(6, 6))


Point = namedtuple("Point", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    note: str = "kept"


@pytest.mark.parametrize(
    "pack",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: {"x": x, "y": y},
        lambda x, y: {"in": {"x": [x]}, "out": (y, "label", 3)},
        lambda x, y: UserDict(x=x, y=y),
        Point,
        Sample,
    ],
    ids=["tuple", "list", "dict", "nested", "mapping", "namedtuple", "dataclass"],
)
def test_batches_of_every_form(pack: Any) -> None:
    def unpack(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(batch, (Point, Sample)):
            return batch.x, batch.y
        if isinstance(batch, (tuple, list)):
            return batch[0], batch[1]
        if "in" in batch:
            return batch["in"]["x"][0], batch["out"][0]
        return batch["x"], batch["y"]

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        x, y = unpack(batch)
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "logits": logits, "scaled": (loss * 2, [loss.detach(), 5, None])}

    batches = [pack(x, y) for x, y in labelled(6, 6)]
    assert_trains_the_same(train_step, lambda: made(nn.Linear(6, 3)), batches)


def test_several_outputs() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 6)
            self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 1)])

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = self.body(x).relu()
            return self.heads[0](x), self.heads[1](x), x

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        logits, value, _ = model(batch[0])
        loss = F.cross_entropy(logits, batch[1]) + value.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, logits, value

    assert_trains_the_same(train_step, lambda: made(TwoHeads()), labelled(6, 6))


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("kind", ["norm", "value"])
def test_gradient_clipping(kind: str, foreach: bool | None) -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        if kind == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=foreach)
            norm = loss
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
        optimizer.step()
        return loss, norm

    build = MODELS["layer-norm"][0]
    assert_trains_the_same(train_step, lambda: made(build()), labelled(6, 6))


def test_clipping_of_a_parameter_list_kept_outside() -> None:
    """The step may refer to parameters in other ways than through the model."""
    kept: dict[int, list[nn.Parameter]] = {}

    def make() -> Made:
        model, optimizer = made(nn.Linear(6, 3))
        kept[id(model)] = list(model.parameters())
        return model, optimizer

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(kept[id(model)], 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert_trains_the_same(train_step, make, labelled(6, 6))


@pytest.mark.parametrize("where", ["start", "middle", "end", "to-zero", "never"])
def test_every_place_for_zero_grad(where: str) -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        if where == "start":
            optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if where == "middle":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if where == "end":
            optimizer.zero_grad()
        if where == "to-zero":
            optimizer.zero_grad(set_to_none=False)
        return loss

    step = assert_trains_the_same(
        train_step, lambda: made(MODELS["dropout"][0]()), labelled(6, 6, n=4)
    )
    leaves_gradients_that_matter = where in ("to-zero", "never")
    assert step.n_captures == (2 if leaves_gradients_that_matter else 1)


def test_gradient_accumulation_over_micro_batches() -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        total = torch.zeros((), device=batch[0].device)
        for x, y in zip(batch[0].chunk(3), batch[1].chunk(3), strict=True):
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    build = MODELS["batch-norm"][0]
    step = assert_trains_the_same(train_step, lambda: made(build()), labelled(9, 6))
    phases = [op.phase.name for op in step.graph.ops]
    assert phases.index("BACKWARD") < len(phases) - 1 - phases[::-1].index("FORWARD")


def test_learnable_loss_in_a_closure() -> None:
    scales: dict[int, nn.Parameter] = {}

    def make() -> Made:
        model = nn.Linear(6, 3)
        scales[id(model)] = nn.Parameter(torch.ones(()))
        params = [*model.parameters(), scales[id(model)]]
        return model, torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]) * scales[id(model)], batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, scales[id(model)]

    assert_trains_the_same(train_step, make, labelled(6, 6))


def test_constants_teachers_and_moving_averages() -> None:
    weight = torch.tensor([0.2, 0.3, 0.5])
    teacher = nn.Linear(6, 3).requires_grad_(False)
    averages: dict[int, nn.Module] = {}

    def make() -> Made:
        model, optimizer = made(nn.Linear(6, 3))
        averages[id(model)] = nn.Linear(6, 3)
        averages[id(model)].load_state_dict(model.state_dict())
        return model, optimizer

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        x, y = batch
        scale = torch.tensor(0.5)
        scale += 1
        loss = F.cross_entropy(model(x), y, weight=weight) * scale
        loss = loss + F.mse_loss(model(x), teacher(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average = averages[id(model)]
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.1)
        return loss, [p.detach().clone() for p in average.parameters()]

    assert_trains_the_same(train_step, make, labelled(6, 6))


def test_gradient_penalty() -> None:
    """A gradient inside the loss: backward through backward."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.cross_entropy(out, batch[1]) + slope.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def make() -> Made:
        return made(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))

    assert_trains_the_same(train_step, make, labelled(6, 6))
