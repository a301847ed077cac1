"""Checks before each step that the user's objects are as they were captured, values aside."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch

from rekindle.fx.recording import Recording


def signature(tensor: torch.Tensor) -> Hashable:
    """What a capture depends on of a tensor: all but its values."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


class Guard:
    """Fetches the tensors a captured step works on, if they are still of the captured form."""

    def __init__(self, recording: Recording) -> None:
        self._places = [(slot.container, slot.key) for slot in recording.around.slots]
        tensors = [slot.get() for slot in recording.around.slots]
        self._signatures = [signature(tensor) for tensor in tensors]
        self._remember(tensors)
        self._grads = [(use.slot, use.was_there) for use in recording.grads if use.reads_old]
        self._effects = [
            (effect.container, effect.key, _form(effect.before)) for effect in recording.effects
        ]

    def fetch(self) -> list[torch.Tensor] | None:
        """The tensor in each slot, or None if something has changed its form."""
        try:
            tensors = [container[key] for container, key in self._places]
        except (KeyError, IndexError):
            return None
        if not self._are_the_last(tensors) and not self._have_the_form(tensors):
            return None
        if any((tensors[index].grad is not None) != there for index, there in self._grads):
            return None
        if any(_form(container.get(key)) != form for container, key, form in self._effects):
            return None
        return tensors

    def _are_the_last(self, tensors: list[Any]) -> bool:
        """Whether these are the very tensors of the last step, with their memory where it was.

        Hundreds of tensors are looked at before the first kernel starts, so this has to be quick.
        """
        return (
            all(map(operator.is_, tensors, self._last))
            and list(map(torch.Tensor.data_ptr, tensors)) == self._pointers
            and list(map(_requires_grad, tensors)) == self._requires_grad
        )

    def _have_the_form(self, tensors: list[Any]) -> bool:
        for tensor, expected in zip(tensors, self._signatures, strict=True):
            if not isinstance(tensor, torch.Tensor) or signature(tensor) != expected:
                return False
        self._remember(tensors)
        return True

    def _remember(self, tensors: list[torch.Tensor]) -> None:
        self._last = tensors
        self._pointers = list(map(torch.Tensor.data_ptr, tensors))
        self._requires_grad = list(map(_requires_grad, tensors))


_requires_grad = operator.attrgetter("requires_grad")


def _form(value: Any) -> Hashable:
    """A module's attribute: a tensor's signature, or a constant itself."""
    if isinstance(value, torch.Tensor):
        return signature(value)
    return value if isinstance(value, (bool, int, float, str)) else None
