"""Models of any size: the right number of layers, and sizes that there are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rekindle.errors import ModelError
from rekindle.models import build
from rekindle.models.zoo.catalog import FAMILIES
from rekindle.models.zoo.small import LSTMLanguageModel, next_token_loss


@pytest.mark.parametrize("depth", [14, 26, 50, 101])
def test_a_resnet_has_as_many_layers_as_asked_for(depth: int) -> None:
    pytest.importorskip("torchvision")
    model = FAMILIES["resnet"].build(depth, batch=1, image=32).model
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    shortcuts = [name for name, _ in model.named_modules() if name.endswith("downsample")]
    assert len(layers) - len(shortcuts) == depth


@pytest.mark.parametrize("depth", [50, 101, 152])
def test_the_usual_depths_are_torchvision_s(depth: int) -> None:
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        ours = FAMILIES["resnet"].build_fn(depth, 1, image=32).model
        theirs = models.get_model(f"resnet{depth}")
    shapes = [{n: tuple(p.shape) for n, p in m.named_parameters()} for m in (ours, theirs)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("resnet", 100, "100 is no such depth: take 98 or 101"),
        ("resnet", 1000, "take 998 or 1001"),
        ("resnet", 3, "take 14"),
        ("resnet", -8, "take 14"),
        ("lstm", 0, "0 is no such length"),
    ],
)
def test_a_size_that_there_is_not(family: str, size: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        FAMILIES[family].build(size)


def test_the_stepped_lstm_computes_what_the_other_computes() -> None:
    work = FAMILIES["lstm"].build(5, batch=3, hidden=16, vocab=20)
    other = LSTMLanguageModel(vocab=20, hidden=16, layers=2)
    other.load_state_dict(work.model.state_dict())
    expected = next_token_loss(other, work.batch)
    loss = work.train_step(work.model, work.optimizer, work.batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    same = build("lstm", batch=3, sequence=5, hidden=16, vocab=20)
    assert torch.equal(work.batch[0], same.batch[0])
