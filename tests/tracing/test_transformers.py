"""Models from transformers, which branch on masks, train to the same bits as without Rekindle."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.equality import assert_trains_the_same
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rekindle

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY = 32


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config)


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = MODELS[name]().train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches(mask: str, n: int = 3) -> list[Any]:
    g = torch.Generator().manual_seed(2)
    found: list[Any] = []
    for index in range(n):
        ids = torch.randint(0, VOCABULARY, (3, 8), generator=g)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if mask != "none":
            batch["attention_mask"] = torch.ones(3, 8, dtype=torch.long)
        if mask.startswith("padding"):
            batch["attention_mask"][index, 8 - index - 1 :] = 0
        is_encoding = mask == "padding-encoding"
        found.append(transformers.BatchEncoding(batch) if is_encoding else batch)
    return found


@pytest.mark.parametrize("mask", ["none", "ones", "padding", "padding-encoding"])
@pytest.mark.parametrize("name", MODELS)
def test_bit_equal(name: str, mask: str) -> None:
    """With any mask: a plain step reads a mask of ones and leaves it out, for another kernel."""
    step = assert_trains_the_same(train_step, lambda: made(name), batches(mask))
    assert step.n_captures == 1


@pytest.mark.parametrize("name", MODELS)
def test_masks_of_ones_and_padding_in_turn(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """One capture for masks of ones and one for padding; the log names the line that asks."""
    mixed = [batches("ones")[0], batches("padding")[1], batches("ones")[2], batches("padding")[2]]
    with caplog.at_level(logging.INFO, logger="rekindle"):
        step = assert_trains_the_same(train_step, lambda: made(name), mixed)
    assert step.n_captures == 2
    (again,) = [r.getMessage() for r in caplog.records if "captured the step again" in r.message]
    assert "is another one for this batch" in again
    assert "transformers" in again


def test_a_capture_without_values_is_not_used_for_a_batch() -> None:
    """A forecast on fake tensors always masks; training looks at the mask."""
    model, optimizer = made("llama")
    batch = batches("ones")[0]
    with FakeTensorMode() as mode:
        fakes = {key: mode.from_tensor(value) for key, value in batch.items()}
    step = rekindle.optimize(train_step, model, optimizer, fakes)
    assert step.n_captures == 1
    step(batch)
    assert step.n_captures == 2


@pytest.mark.parametrize("name", MODELS)
def test_labels_that_are_the_inputs(name: str) -> None:
    """A language model's batch often contains one tensor twice."""
    shared = [{**batch, "labels": batch["input_ids"]} for batch in batches("none")]
    assert_trains_the_same(train_step, lambda: made(name), shared)


def test_packed_positions() -> None:
    """Positions that restart within a row mean several texts, which must not mix."""
    packed = batches("none")
    for batch in packed:
        positions = torch.cat([torch.arange(5), torch.arange(3)])
        batch["position_ids"] = positions.expand(3, 8).contiguous()
    assert_trains_the_same(train_step, lambda: made("llama"), packed)


def test_evaluation_of_a_trained_model() -> None:
    """transformers reads values in evaluation as usual: nothing is left patched."""
    logits: list[torch.Tensor] = []

    def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        model.eval()
        with torch.no_grad():
            logits.append(model(**batches("padding")[0]).logits)
        model.train()

    assert_trains_the_same(train_step, lambda: made("bert"), batches("padding"), after=evaluate)
    assert all(torch.equal(a, b) for a, b in zip(logits[:3], logits[3:], strict=True))
