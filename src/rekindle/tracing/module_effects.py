"""Finds the attributes that a step sets on modules.

A module may replace a buffer, keep a hidden state for the next step, or switch itself to training
mode. Running the captured step has to do the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from rekindle.tracing import batch_tree

log = logging.getLogger("rekindle")

Attributes = dict[str, tuple[dict[str, Any], dict[str, Any]]]  # a module's buffers and __dict__

_ABSENT = object()


@dataclass(frozen=True)
class Effect:
    """The step sets `container[key]`; `before` is the value before the capture."""

    name: str
    container: dict[str, Any]
    key: str
    before: Any
    structure: batch_tree.Structure
    nodes: list[fx.Node]


def note_attributes(modules: dict[str, nn.Module]) -> Attributes:
    """The attributes of every module, for a comparison later."""
    return {path: (dict(m._buffers), dict(m.__dict__)) for path, m in modules.items()}


def find_effects(
    modules: dict[str, nn.Module], before: Attributes, node_of: Callable[[torch.Tensor], fx.Node]
) -> list[Effect]:
    """The attributes that the step set. Python numbers cannot be replayed; a warning names them."""
    effects: list[Effect] = []
    for path, module in modules.items():
        for store, old in zip((module._buffers, module.__dict__), before[path], strict=True):
            for key, value in store.items():
                if value is old.get(key, _ABSENT):
                    continue
                name = f"{path}.{key}" if path else key
                flat = batch_tree.flatten(value)
                if not flat.tensors and key != "training":
                    log.warning(
                        "the step sets %s to %r; the captured step will not set it", name, value
                    )
                    continue
                nodes = [node_of(tensor) for tensor in flat.tensors]
                effects.append(Effect(name, store, key, old.get(key), flat.structure, nodes))
    return effects
