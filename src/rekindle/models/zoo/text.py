"""Language models from transformers, with random weights and random tokens.

No batch carries an attention mask: with one, transformers reads its values to choose a kernel, and
a step whose operators depend on values cannot be captured as one graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rekindle.models.workload import ModelParts, require

IGNORED = -100  # the label that transformers and cross_entropy leave out of the loss
MASKED_SHARE = 0.15  # of the tokens, as in BERT's own pre-training


def masked_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, over the masked positions only."""
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def _masked_tokens(batch: int, sequence: int, vocab: int) -> dict[str, Tensor]:
    """The same number of masked tokens in each row, at least 1: the mean of none is NaN."""
    tokens = torch.randint(1, vocab - 1, (batch, sequence))  # 0 is padding, vocab - 1 is [MASK]
    count = max(1, round(MASKED_SHARE * sequence))
    chosen = torch.rand(batch, sequence).topk(count, dim=1).indices
    masked = torch.zeros(batch, sequence, dtype=torch.bool).scatter(1, chosen, True)
    return {
        "input_ids": tokens.masked_fill(masked, vocab - 1),
        "labels": tokens.masked_fill(~masked, IGNORED),
    }


def bert(
    batch: int,
    *,
    sequence: int = 512,
    layers: int = 12,
    heads: int = 12,
    hidden: int = 768,
    vocab: int = 30522,
) -> ModelParts:
    """Masked-language-model pre-training; the decoder shares the embedding's weight."""
    transformers = require("transformers")
    config = transformers.BertConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=max(512, sequence),
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = transformers.BertForMaskedLM(config)
    return ModelParts(model, _masked_tokens(batch, sequence, vocab), masked_token_loss)


def causal_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss; it shifts the labels by one position itself."""
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


def _causal_attention() -> str:
    """Register transformers' sdpa attention under a name for which it makes no mask.

    Under the name "sdpa", GPT-2 reads position ids to see whether sequences are packed, and assumes
    that they are on fake tensors: the captured step would build a mask that the real one does not,
    and attention would run another kernel. Without a mask both run the causal kernel.
    """
    name = "rekindle_causal_sdpa"
    sdpa = require("transformers.integrations.sdpa_attention").sdpa_attention_forward
    require("transformers").AttentionInterface.register(name, sdpa)
    return name


def gpt2(
    batch: int,
    *,
    sequence: int = 1024,
    layers: int = 12,
    heads: int = 12,
    hidden: int = 768,
    vocab: int = 50257,
) -> ModelParts:
    """Next-token pre-training; the head shares the embedding's weight."""
    transformers = require("transformers")
    config = transformers.GPT2Config(
        vocab_size=vocab,
        n_positions=max(1024, sequence),
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        bos_token_id=vocab - 1,
        eos_token_id=vocab - 1,
        use_cache=False,
        attn_implementation=_causal_attention(),
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # its default, set without a warning
    return ModelParts(model, {"input_ids": torch.randint(vocab, (batch, sequence))}, causal_loss)
