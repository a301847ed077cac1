"""Other techniques that save memory, applied to a model: checkpoints and `torch.compile`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rekindle.errors import ModelError

# The repeated blocks of the zoo's models, by the names of their classes.
BLOCKS = ("BasicBlock", "Bottleneck", "BertLayer", "GPT2Block", "EncoderBlock")
_CONTAINERS = (nn.ModuleList, nn.Sequential)


def checkpoint_every_block(model: nn.Module) -> int:
    """Wrap every repeated block in `torch.utils.checkpoint`; returns the number of blocks."""
    blocks = repeated_blocks(model)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return len(blocks)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats: those known by name, else those with the most weights.

    A block is repeated if its class occurs more than once in an `nn.ModuleList` or `nn.Sequential`.
    Modules made of others are preferred to plain sequences, and those to single layers.
    """
    named = [module for module in model.modules() if type(module).__name__ in BLOCKS]
    if named:
        return named
    groups = [group for group in _groups(model) if len(group) > 1]
    if not groups:
        raise ModelError("the model repeats no block, so there is none to checkpoint")
    kind = type(max(groups, key=_rank)[0])
    return [block for group in _groups(model) for block in group if type(block) is kind]


def compiled(model: nn.Module, activation_share: float | None = None) -> nn.Module:
    """`torch.compile` of a model, which may keep `activation_share` of the activations."""
    if activation_share is not None:
        from rekindle.torch_internals import functorch_config  # slow: loads the compiler

        functorch_config.activation_memory_budget = activation_share
    return torch.compile(model)  # type: ignore[return-value]


def _groups(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Modules of one class in one container, for every class and container."""
    for container in model.modules():
        if isinstance(container, _CONTAINERS):
            kinds: dict[type[nn.Module], list[nn.Module]] = {}
            for child in container:
                kinds.setdefault(type(child), []).append(child)
            yield from kinds.values()


def _rank(group: list[nn.Module]) -> tuple[int, int]:
    """The preference for a group: by the kind of module, then by the number of weights."""
    first = group[0]
    kind = 2 if any(True for _ in first.children()) else 0
    if isinstance(first, _CONTAINERS):
        kind = 1
    return kind, sum(param.numel() for block in group for param in block.parameters())
