"""Generated models, compiled operator by operator: the bits of torch's own `aot_eager`.

The models return their loss with other outputs, as those of transformers do: in all layouts, used
by the loss in several ways. What `compile` rewrites must show in no bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rekindle import dynamo

N_GENERATED = 24


class Generated(nn.Module):
    """Convolutions, norms and attention in a random order; returns a loss and other outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.kinds = [draw.choice(sorted(STAGES)) for _ in range(draw.randint(2, 5))]
        self.stages = nn.ModuleList(
            nn.ModuleList(
                [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LayerNorm(8), nn.Linear(8, 8)]
            )
            for _ in self.kinds
        )
        self.head = nn.Conv2d(8, draw.choice((3, 5)), 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shown = [draw.choice(sorted(OUTPUTS)) for _ in range(draw.randint(1, 3))]
        self.losses = [draw.choice(sorted(OUTPUTS)) for _ in range(draw.randint(1, 2))]
        self.is_channels_last = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.is_channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        outputs = {}
        for number, (kind, layers) in enumerate(zip(self.kinds, self.stages, strict=True)):
            x = STAGES[kind](x, layers)
            if number == 0:
                outputs["hidden"] = x
        logits = self.head(x) * self.scale.exp()
        made = {each: OUTPUTS[each](logits) for each in {*self.shown, *self.losses}}
        outputs |= {f"out_{each}": made[each] for each in self.shown}
        loss = sum((made[each] * made[each].sigmoid()).mean() for each in self.losses)
        return {"loss": loss, **outputs}


def _attend(x: torch.Tensor, layers: nn.ModuleList) -> torch.Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    q = layers[3](tokens).unflatten(-1, (2, 4)).transpose(1, 2)
    n = q.shape[-2]
    mask = torch.ones(q.shape[0], 1, 1, 1, dtype=torch.bool).expand(-1, 1, n, n)
    mixed = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    return (tokens + mixed.transpose(1, 2).flatten(2)).transpose(1, 2).unflatten(2, x.shape[2:])


STAGES: dict[str, Callable[[torch.Tensor, nn.ModuleList], torch.Tensor]] = {
    "attention": _attend,
    "conv": lambda x, layers: F.gelu(layers[0](x)),
    "dropout": lambda x, layers: F.dropout(layers[0](x), 0.3),
    "norm": lambda x, layers: layers[1](x).relu(),
    "layer": lambda x, layers: layers[2](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "linear": lambda x, layers: layers[3](x.transpose(1, 3)).tanh().transpose(1, 3),
    "pool": lambda x, layers: F.interpolate(F.max_pool2d(x, 2), size=x.shape[2:]) + x,
}
OUTPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "larger": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "last": lambda x: x.permute(0, 2, 3, 1),
    "transposed": lambda x: x.transpose(2, 3),
    "matrix": lambda x: x.flatten(1) @ x.flatten(1).t(),
    "flipped": lambda x: (x.flatten(1) @ x.flatten(1).t()).t(),
    "pooled": lambda x: x.mean((2, 3)),
    "picked": lambda x: x[:, 0],
}


def trained(
    model: nn.Module, compiled: Callable[..., Any], batch: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The losses, gradients and outputs of two steps, and the state after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, torch.Tensor] = {}
    for number in range(2):
        torch.manual_seed(number)
        results = compiled(**batch)
        results["loss"].backward()
        grads = {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        outputs = {f"output {n}": v for n, v in results.items() if isinstance(v, torch.Tensor)}
        found |= {f"{n} {number}": v.detach().clone() for n, v in (grads | outputs).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(model: nn.Module, batch: dict[str, Any], budget: str = "100%") -> None:
    copy = deepcopy(model)
    try:
        expected = trained(model, torch.compile(model, backend="aot_eager"), batch)
    except RuntimeError as error:  # kernels return other strides than torch's fakes
        pytest.skip(f"torch itself fails: {error}")
    torch.compiler.reset()
    found = trained(copy, dynamo.compile(copy, budget=budget, lower="eager"), batch)
    assert found.keys() == expected.keys()
    differ = [name for name, each in expected.items() if not torch.equal(each, found[name])]
    assert differ == []
    strides = [name for name, each in expected.items() if each.stride() != found[name].stride()]
    assert strides == []


@pytest.mark.parametrize("seed", range(4))
def test_generated(seed: int) -> None:
    assert_equal(Generated(seed), {"x": torch.randn(4, 8, 6, 6)})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, N_GENERATED))
def test_more_generated(seed: int) -> None:
    assert_equal(Generated(seed), {"x": torch.randn(4, 8, 6, 6)})


def _clip() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import CLIPConfig, CLIPModel

    common = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text = common | {"vocab_size": 100, "max_position_embeddings": 32, "eos_token_id": 99}
    vision = common | {"image_size": 32, "patch_size": 8}
    heads = {"num_attention_heads": 4}
    config = CLIPConfig(text_config=text | heads, vision_config=vision | heads, projection_dim=16)
    ids, pixels = torch.randint(2, 90, (4, 16)), torch.randn(4, 3, 32, 32)
    return CLIPModel(config), {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


def _segformer() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_labels=5, hidden_sizes=[16, 32, 64, 64], depths=[1] * 4, decoder_hidden_size=32
    )
    pixels, labels = torch.randn(2, 3, 64, 64), torch.randint(0, 5, (2, 64, 64))
    return SegformerForSemanticSegmentation(config), {"pixel_values": pixels, "labels": labels}


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    ids = torch.randint(0, 100, (4, 16))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return BertForMaskedLM(config), batch


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    ids = torch.randint(0, 100, (4, 16))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids, "use_cache": False}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("make", [_clip, _segformer, _bert, _gpt2])
def test_transformers(make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    torch.manual_seed(0)
    model, batch = make()
    assert_equal(model.train(), batch)
