"""Masks that keep fused attention from being used: taken away, or laid out as it wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from rekindle import dynamo, models
from rekindle.dynamo import compile_pipeline

MakeMask = Callable[[torch.Tensor], torch.Tensor | None]
LENGTH = 32


def true_everywhere(x: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(x.shape[2], device=x.device)[None, None, :, None] + 0
    return (rows >= 0).expand(x.shape[0], -1, x.shape[2], x.shape[2])


def stretched(x: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(x.shape[2], device=x.device)[None, None, :, None]
    return (rows >= 3).expand(x.shape[0], -1, x.shape[2], x.shape[2])


def of_the_batch(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :1, :, :1] > -100).expand(-1, -1, -1, x.shape[2])


def causal(x: torch.Tensor) -> torch.Tensor:
    place = torch.arange(x.shape[2], device=x.device)
    return (place[:, None] >= place)[None, None]


def added(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, 1, x.shape[2], x.shape[2], device=x.device)


class Attention(nn.Module):
    """Attention with a mask, given by its name or by its place."""

    def __init__(self, make: MakeMask, by_name: bool = True) -> None:
        super().__init__()
        self.make, self.by_name = make, by_name
        self.inner = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = self.make(q)
        if self.by_name:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The mask of every attention that was compiled."""
    found: list[Any] = []
    simplify = compile_pipeline.simplify_masks

    def seen(module: fx.GraphModule) -> None:
        simplify(module)
        module.graph.lint()
        for node in module.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                given: Sequence[Any] = (*node.args[3:4], node.kwargs.get("attn_mask"))
                found.append(given[0] if given[0] is not None else given[-1])

    monkeypatch.setattr(compile_pipeline, "simplify_masks", seen)
    return found


def step(model: Any) -> list[torch.Tensor]:
    x = torch.randn(4, LENGTH, 16, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (true_everywhere, "none"),
        (stretched, "contiguous"),
        (of_the_batch, "contiguous"),
        (causal, "same"),
        (added, "same"),
    ],
)
def test_masks_are_what_kernels_take(
    masks: list[Any], make: MakeMask, expected: str, by_name: bool
) -> None:
    model = Attention(make, by_name)
    plain = step(deepcopy(model))
    found = step(dynamo.compile(model, budget="10GiB", lower="eager"))
    (mask,) = masks
    is_contiguous = isinstance(mask, fx.Node) and mask.target == "contiguous"
    assert expected == ("none" if mask is None else "contiguous" if is_contiguous else "same")
    for mine, other in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, other, equal_nan=True)  # NaN: rows with nothing to look at


def test_sizes_that_vary(masks: list[Any]) -> None:
    model = Attention(true_everywhere)
    plain = step(deepcopy(model))
    found = step(dynamo.compile(model, budget="10GiB", lower="eager", dynamic=True))
    (mask,) = masks
    assert mask.target == "contiguous"
    for mine, other in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, other)


def test_bert_without_padding_has_no_mask(masks: list[Any]) -> None:
    pytest.importorskip("transformers")
    work = models.build("bert-tiny", batch=4, precision="fp32", device="cpu")
    compiled = dynamo.compile(work.model, budget="10GiB", lower="eager")
    work.train_step(compiled, work.optimizer, work.batch)
    assert masks == [None, None]
