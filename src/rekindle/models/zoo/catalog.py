"""The models of the zoo by name, those that come in any size, and how they are built."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import AdamW

from rekindle.errors import ModelError
from rekindle.models.workload import (
    ModelParts,
    ModelSpec,
    Workload,
    check_settings,
    make_train_step,
)
from rekindle.models.zoo import small, text, vision
from rekindle.torch_internals import pytree

SEED = 0
LEARNING_RATE = 1e-4

_BERT_LARGE = partial(text.bert, layers=24, heads=16, hidden=1024)
_BERT_TINY = partial(text.bert, sequence=64, layers=2, heads=2, hidden=128, vocab=1024)
_GPT2_TINY = partial(text.gpt2, sequence=64, layers=2, heads=2, hidden=128, vocab=1024)
_RESNET_TINY = "3 residual blocks, 32x32 images"
_VIT_TINY = partial(vision.vit, image=32, patch=4, layers=2, heads=2, hidden=64, classes=10)


def _resnet(depth: int, default_batch: int) -> ModelSpec:
    build_fn = partial(vision.resnet, depth)
    summary = f"ResNet-{depth} on 224x224 images, 1000 classes"
    return ModelSpec(f"resnet{depth}", summary, default_batch, build_fn, "torchvision")


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec("mlp", "perceptron, 4 hidden layers of 512", 64, small.mlp),
        ModelSpec("lstm", "2 LSTM layers unrolled by hand over 32 tokens", 32, small.lstm),
        ModelSpec("resnet-tiny", _RESNET_TINY, 16, vision.resnet_tiny, "torchvision"),
        _resnet(18, 64),
        _resnet(50, 64),
        _resnet(152, 32),
        ModelSpec("vit-tiny", "2 layers on 32x32 images", 16, _VIT_TINY, "torchvision"),
        ModelSpec("vit", "ViT-B/16 on 224x224 images", 64, vision.vit, "torchvision"),
        ModelSpec("bert-tiny", "2 layers, sequence 64, masked", 8, _BERT_TINY, "transformers"),
        ModelSpec("bert-base", "12 layers, sequence 512, masked", 16, text.bert, "transformers"),
        ModelSpec("bert-large", "24 layers, sequence 512, masked", 8, _BERT_LARGE, "transformers"),
        ModelSpec("gpt2-tiny", "2 layers, sequence 64, causal", 8, _GPT2_TINY, "transformers"),
        ModelSpec("gpt2", "12 layers, sequence 1024, causal", 8, text.gpt2, "transformers"),
    )
}


def available() -> list[ModelSpec]:
    """Every model of the zoo; within a family, small ones first.

    >>> [spec.name for spec in available() if spec.needs is None]
    ['mlp', 'lstm']
    """
    return list(MODELS.values())


def build(
    name: str | ModelSpec,
    *,
    batch: int | None = None,
    precision: str = "fp32",
    device: str | torch.device = "cpu",
    **size: int,
) -> Workload:
    """Build a model with its optimizer, a batch of random data and its training step.

    The numbers depend on name and sizes alone: model and batch are drawn on the CPU from a fixed
    seed, and the global generators are not changed. ``size`` has arguments of the model, which
    ``ModelSpec.sizes`` lists. A ``ModelSpec`` in place of the name need not be in the zoo.

    >>> work = build("mlp", batch=4, hidden=8)
    >>> [tuple(part.shape) for part in work.batch]
    [(4, 784), (4,)]
    >>> loss = work.train_step(work.model, work.optimizer, work.batch)
    >>> loss.shape
    torch.Size([])
    """
    spec = name if isinstance(name, ModelSpec) else find(name)
    batch_size = spec.default_batch if batch is None else batch
    target = check_settings(batch_size, precision, device)
    parts = _seeded_parts(spec, batch_size, size)

    model = parts.model.train().to(target)
    on_target = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(target), parts.batch)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    train_step = make_train_step(parts.loss_fn, precision=precision, device_type=target.type)
    return Workload(
        name=spec.name,
        train_step=train_step,
        model=model,
        optimizer=optimizer,
        batch=on_target,
        batch_size=batch_size,
        precision=precision,
        device=str(target),
    )


def find(name: str) -> ModelSpec:
    """The model of that name; the error for an unknown name suggests the closest."""
    if name not in MODELS:
        raise ModelError(f"no model named {name!r}{did_you_mean(name, MODELS)}")
    return MODELS[name]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the closest known name, if there is one, and all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ";"
    return f"{hint} known: {', '.join(known)}"


def _seeded_parts(spec: ModelSpec, batch: int, size: dict[str, int]) -> ModelParts:
    for argument in size:
        if argument not in spec.sizes:
            raise ModelError(
                f"{spec.name} has no size {argument!r}{did_you_mean(argument, spec.sizes)}"
            )
    # Not torch.manual_seed, which would also seed the GPU's generators.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(SEED)
        return spec.build_fn(batch, **size)


@dataclass(frozen=True, slots=True)
class Family:
    """A model in many sizes. `size_name` says what a size is: a depth, a length.

    `sizes`, `extent` (further arguments of the builder, which the title names) and `default_batch`
    are the defaults; those with `cpu_` are for steps that are run on a CPU, which is slow.
    """

    name: str
    title: str
    size_name: str
    sizes: tuple[int, ...]
    extent: dict[str, int]
    default_batch: int
    build_fn: Callable[..., ModelParts]
    check: Callable[[int], None]
    needs: str | None
    cpu_sizes: tuple[int, ...]
    cpu_batch: int
    cpu_extent: dict[str, int]

    def build(self, size: int, **how: Any) -> Workload:
        """The model of that size; `how` has further arguments of `models.build`."""
        self.check(size)
        build_fn = partial(self.build_fn, size)
        spec = ModelSpec(f"{self.name}-{size}", "", self.default_batch, build_fn, self.needs)
        return build(spec, **how)


def _check_depth(depth: int) -> None:
    least = 14  # a block in each stage
    if depth >= least and depth % 3 == 2:
        return
    below = depth - (depth - 2) % 3
    near = f"{below} or {below + 3}" if below >= least else f"{least}"
    raise ModelError(
        f"a ResNet has 3 layers for each of its 4 or more blocks and 2 besides, and {depth} is "
        f"no such depth: take {near}"
    )


def _check_length(length: int) -> None:
    if length < 1:
        raise ModelError(f"a sequence has at least 1 position, and {length} is no such length")


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="resnet",
            title="ResNet on {image}x{image} images",
            size_name="depth",
            sizes=(50, 152, 500, 1001),
            extent={"image": 224},
            default_batch=32,
            build_fn=vision.resnet_of_depth,
            check=_check_depth,
            needs="torchvision",
            cpu_sizes=(50, 101, 152),
            cpu_batch=8,
            cpu_extent={"image": 128},
        ),
        Family(
            name="lstm",
            title="Unrolled LSTM, 2 layers of 256",
            size_name="length",
            sizes=(16, 32, 64, 128),
            extent={},
            default_batch=32,
            build_fn=small.lstm_stepped,
            check=_check_length,
            needs=None,
            cpu_sizes=(16, 32, 64),
            cpu_batch=32,
            cpu_extent={},
        ),
    )
}
