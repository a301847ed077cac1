"""Every model of the zoo trains, is the same every time, and disturbs nothing around it."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rekindle.errors import ModelError
from rekindle.models import Workload, available, build
from rekindle.models.zoo.catalog import MODELS

_TEXT = {"sequence": 16, "layers": 2, "heads": 2, "hidden": 32, "vocab": 64}
_IMAGES = {"image": 64, "classes": 10}
SMALL: dict[str, dict[str, int]] = {
    "mlp": {"hidden": 16},
    "lstm": {"sequence": 4, "hidden": 16, "vocab": 32},
    "resnet-tiny": {},
    "resnet18": _IMAGES,
    "resnet50": _IMAGES,
    "resnet152": _IMAGES,
    "vit-tiny": {},
    "vit": {"image": 32, "patch": 8, "layers": 2, "heads": 2, "hidden": 32, "classes": 10},
    "bert-tiny": {"sequence": 16},
    "bert-base": _TEXT,
    "bert-large": _TEXT,
    "gpt2-tiny": {"sequence": 16},
    "gpt2": _TEXT,
}
# One model a family: enough where a test looks at what the family's code does.
FAMILIES = ("mlp", "lstm", "resnet-tiny", "vit-tiny", "bert-tiny", "gpt2-tiny")
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vit": 86_567_656,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "gpt2": 124_439_808,
}


def small(name: str, **settings: Any) -> Workload:
    return build(name, batch=2, **settings, **SMALL[name])


def run(work: Workload) -> torch.Tensor:
    return work.train_step(work.model, work.optimizer, work.batch)


def tensors(work: Workload) -> list[torch.Tensor]:
    return [*work.model.state_dict().values(), *tree_leaves(work.batch)]


class OperatorLog(TorchDispatchMode):
    """The operators that run, without the questions that only fake tensors are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_table_lists_every_model() -> None:
    assert [spec.name for spec in available()] == list(SMALL)
    assert {spec.needs for spec in available()} == {None, "torchvision", "transformers"}
    assert all(spec.summary and spec.default_batch > 0 for spec in available())


@pytest.mark.parametrize("name", SMALL)
def test_two_steps_train(name: str) -> None:
    work = small(name)
    assert work.model.training
    assert (work.name, work.batch_size, work.precision, work.device) == (name, 2, "fp32", "cpu")

    before = [p.detach().clone() for p in work.model.parameters()]
    first, second = run(work), run(work)

    assert first.shape == ()
    assert first.isfinite()
    assert second.isfinite()
    assert first != second
    moved = zip(before, work.model.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in moved)
    assert all(p.grad is None for p in work.model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bf16_step_multiplies_in_bf16_and_keeps_fp32_weights(name: str) -> None:
    work = small(name, precision="bf16")
    seen: set[torch.dtype] = set()
    for module in work.model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.register_forward_hook(lambda _m, _i, output: seen.add(output.dtype))
    loss = run(work)
    assert loss.isfinite()
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in work.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", SMALL)
def test_the_same_numbers_every_time_and_no_generator_disturbed(name: str) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = tensors(small(name))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]

    torch.manual_seed(1234)
    second = tensors(small(name))
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_fake_tensors_take_the_same_operators_as_real_ones(name: str) -> None:
    """No choice depends on values: else a captured step would not be the step that runs."""

    parts = MODELS[name].build_fn(2, **SMALL[name])
    parts.model.train()

    def operators(model: nn.Module, batch: Any) -> list[str]:
        with OperatorLog() as log:
            parts.loss_fn(model, batch).backward()
        # Saved tensors are detached once more where a tensor is a subclass.
        return [operator for operator in log.names if operator != "aten.detach.default"]

    fake_mode = FakeTensorMode()
    fake_model, fake_batch = copy.deepcopy((parts.model, parts.batch))
    for module in fake_model.modules():
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    store[key] = fake_mode.from_tensor(tensor)
    fake_batch = tree_map_only(torch.Tensor, fake_mode.from_tensor, fake_batch)
    real = operators(parts.model, parts.batch)
    with fake_mode:
        fake = operators(fake_model, fake_batch)
    assert "aten._local_scalar_dense.default" not in real
    assert real == fake


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_large_models_are_the_published_ones(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name].build_fn(1).model
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_vit_is_the_torchvision_one() -> None:
    from torchvision.models import vit_b_16

    with torch.device("meta"):
        ours, theirs = MODELS["vit"].build_fn(1).model, vit_b_16(weights=None)
    assert repr(ours) == repr(theirs)


def test_bert_has_tied_weights_dropout_and_only_masked_labels() -> None:
    work = small("bert-tiny")
    embedding = work.model.get_input_embeddings().weight
    assert work.model.get_output_embeddings().weight is embedding
    assert {m.p for m in work.model.modules() if isinstance(m, nn.Dropout)} == {0.1}

    assert set(work.batch) == {"input_ids", "labels"}
    scored = work.batch["labels"] != -100
    assert scored.sum(dim=1).tolist() == [2, 2]  # 15% of 16
    assert torch.equal(scored, work.batch["input_ids"] == 1023)


def test_gpt2_cannot_see_the_future() -> None:
    model = small("gpt2-tiny").model.eval()
    assert model.lm_head.weight is model.transformer.wte.weight
    tokens = torch.randint(1024, (1, 16))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 1024
    with torch.no_grad():
        a, b = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(a[:, :8], b[:, :8])
    assert not torch.allclose(a[:, 8:], b[:, 8:])


def test_sizes_and_batch_reach_the_model() -> None:
    work = build("lstm", batch=3, sequence=5, hidden=7)
    assert work.batch_size == 3
    assert [tuple(part.shape) for part in work.batch] == [(3, 5), (3, 5)]
    assert work.model.cells[0].from_hidden.weight.shape == (28, 7)
    assert torch.equal(work.batch[0][:, 1:], work.batch[1][:, :-1])


def test_the_generators_of_a_gpu_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.manual_seed`` would seed them too, even if only for what is built on the CPU."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    small("mlp")
    assert seeded == []


def test_the_cpu_is_built_on_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        work = small("mlp")
    assert {tensor.device.type for tensor in tensors(work)} == {"cpu"}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("resnet51", {}, r"no model named 'resnet51', did you mean 'resnet\d+'\? known: mlp, lstm"),
        ("zzz", {}, r"no model named 'zzz'; known: mlp, .*, gpt2$"),
        ("mlp", {"hiden": 4}, r"mlp has no size 'hiden', did you mean 'hidden'\?"),
        ("mlp", {"batch": 0}, r"whole number of at least 1, not 0"),
        ("mlp", {"batch": "8"}, r"whole number of at least 1, not '8'"),
        ("mlp", {"precision": "fp16"}, r"unknown precision 'fp16': use fp32 or bf16"),
        ("mlp", {"device": "H200"}, r"unknown device 'H200': use cpu or cuda"),
        ("mlp", {"device": "meta"}, r"unknown device 'meta': use cpu or cuda"),
    ],
)
def test_what_cannot_be_built_is_said(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(name, **settings)


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="'cuda' was asked for, but torch finds no GPU here"):
        build("mlp", device="cuda")


@pytest.mark.parametrize(
    ("name", "package"), [("resnet18", "torchvision"), ("gpt2", "transformers")]
)
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # what Python reads as: not to be imported
    with pytest.raises(ModelError, match=rf'needs {package} .*pip install "rekindle\[models\]"'):
        build(name)
