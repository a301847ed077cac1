"""Forward operators that torch runs otherwise in a capture: the plain step's bits, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.equality import assert_trains_the_same
from torch import nn

import rekindle

FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "svdvals": lambda a: torch.linalg.svdvals(a).sum(),
    "svd": lambda a: sum(part.abs().sum() for part in torch.linalg.svd(a)),
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a + a.mT).abs().sum(),
    "eigh": lambda a: sum(part.abs().sum() for part in torch.linalg.eigh(a + a.mT)),
    "nuclear norm": lambda a: torch.linalg.matrix_norm(a, "nuc"),
    "spectral norm": lambda a: torch.linalg.matrix_norm(a, 2),
    "cond": torch.linalg.cond,
    "rank": torch.linalg.matrix_rank,
    "pinv": lambda a: torch.linalg.pinv(a).sum(),
    "lstsq": lambda a: torch.linalg.lstsq(a, a.flip(0)).solution.sum(),
    "matrix_exp": lambda a: torch.matrix_exp(a).sum(),
    "cdist": lambda a: torch.cdist(a, a).sum(),
    "bilinear": lambda a: torch.bilinear(a, a, torch.full((8, 8, 8), 0.3), None).sum(),
}
# By function: refused without a gradient, with one, and under autocast.
REFUSED = {
    **dict.fromkeys(
        ("svdvals", "eigvalsh", "nuclear norm", "spectral norm", "cond", "rank"), "no gradient"
    ),
    **dict.fromkeys(("pinv", "bilinear"), "autocast"),
    "lstsq": "always",
}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("autocast", [None, False, True])
@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_plain_bits_or_a_refusal(name: str, has_gradient: bool, autocast: bool | None) -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        hidden = model(batch)
        argument = hidden if has_gradient else batch
        if autocast is None:
            factor = FUNCTIONS[name](argument)
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                factor = FUNCTIONS[name](argument)
        loss = (hidden * factor).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    reason = REFUSED.get(name)
    batches = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    if name == "pinv" and has_gradient and autocast:
        pytest.skip("its gradient fails in a plain step")
    is_refused = reason == "always" or (reason == "no gradient" and not has_gradient)
    if is_refused or (reason == "autocast" and autocast):
        model, optimizer = make()
        with pytest.raises(rekindle.CaptureError, match=r"linalg|_trilinear") as info:
            rekindle.optimize(train_step, model, optimizer, batches[0])
        assert info.value.filename == __file__
    else:
        assert_trains_the_same(train_step, make, batches)
