"""What others do about memory, as changes to a model."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

# The repeated blocks of the zoo's models, by the names of their classes.
BLOCKS = ("BasicBlock", "Bottleneck", "BertLayer", "GPT2Block", "EncoderBlock")


def checkpoint_every_block(model: nn.Module) -> int:
    """Wrap every repeated block in `torch.utils.checkpoint`; returns how many there are."""
    blocks = [module for module in model.modules() if type(module).__name__ in BLOCKS]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return len(blocks)
