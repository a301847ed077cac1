"""Checks before each step that the user's objects have not changed since the capture.

Values of tensors may change. Hundreds of objects are checked before the first kernel starts, so
whole lists are compared, which unchanged objects pass by identity (decision 8).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Hashable
from itertools import starmap
from typing import Any

import torch
from torch import nn

from rekindle.core.identity import IdentityDict
from rekindle.core.uncopyable import Uncopyable
from rekindle.tracing import batch_tree
from rekindle.tracing.tape import Recording

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_requires_grad = operator.attrgetter("requires_grad")


def signature(tensor: torch.Tensor) -> Hashable:
    """The properties of a tensor that a capture depends on: all but its values."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


class Guard(Uncopyable):
    """Fetches the tensors that a captured step works on, if nothing relevant has changed."""

    def __init__(self, recording: Recording) -> None:
        state = recording.state
        self.reason = ""
        self._places = [(slot.container, slot.key) for slot in state.slots]
        self._names = [slot.name for slot in state.slots]
        self._ties = [(slot.container, slot.key) for slot, _ in state.ties]
        self._tied_to = [index for _, index in state.ties]
        self._optimizer = state.optimizer
        self._group_sizes = [len(g["params"]) for g in state.optimizer.param_groups]
        tensors = [slot.get() for slot in state.slots]
        self._signatures = [signature(tensor) for tensor in tensors]
        self._tensor_hooks = _tensor_hooks(tensors)
        self._remember(tensors)
        self._grads = [(use.slot, use.existed) for use in recording.grads if use.reads_old]
        self._effects = [(e.container, e.key, _without_values(e.before)) for e in recording.effects]
        changing: IdentityDict[set[str]] = IdentityDict()
        for effect in recording.effects:
            changing.setdefault(effect.container, set()).add(effect.key)
        self._modules = _ModuleAttributes([*state.modules.items()], changing)

    def fetch(self) -> list[torch.Tensor] | None:
        """The tensor in each slot; None if something has changed, which `reason` explains."""
        try:
            tensors = [container[key] for container, key in self._places]
            tied = [container[key] for container, key in self._ties]
        except (KeyError, IndexError):
            return self._refuse("a tensor was removed")
        if not all(map(operator.is_, tied, map(tensors.__getitem__, self._tied_to))):
            return self._refuse("other tensors are tied, or parameters were regrouped")
        if [len(group["params"]) for group in self._optimizer.param_groups] != self._group_sizes:
            return self._refuse("the optimizer has other parameters")
        if not self._are_unchanged(tensors) and not self._match(tensors):
            return None
        if _tensor_hooks(tensors) != self._tensor_hooks:
            return self._refuse("a tensor has other hooks")
        if any((tensors[index].grad is not None) != existed for index, existed in self._grads):
            return self._refuse("gradients from before the step were added or cleared")
        for container, key, before in self._effects:
            if _without_values(container.get(key)) != before:
                return self._refuse(f"{key} has another structure, shape or dtype")
        if not self._modules.are_unchanged():
            return self._refuse(self._modules.first_change())
        return tensors

    def _refuse(self, reason: str) -> list[torch.Tensor] | None:
        self.reason = reason
        return None

    def _are_unchanged(self, tensors: list[Any]) -> bool:
        """True if these are the tensors of the last step, at the same addresses."""
        return (
            all(map(operator.is_, tensors, self._last))
            and list(map(torch.Tensor.data_ptr, tensors)) == self._pointers
            and list(map(_requires_grad, tensors)) == self._requires_grad
        )

    def _match(self, tensors: list[Any]) -> bool:
        """True if these tensors have the captured signatures."""
        for tensor, expected, name in zip(tensors, self._signatures, self._names, strict=True):
            if not isinstance(tensor, torch.Tensor) or signature(tensor) != expected:
                self._refuse(f"{name} has another shape, dtype, device or requires_grad")
                return False
        self._remember(tensors)
        return True

    def _remember(self, tensors: list[torch.Tensor]) -> None:
        self._last = tensors
        self._pointers = list(map(torch.Tensor.data_ptr, tensors))
        self._requires_grad = list(map(_requires_grad, tensors))


class _ModuleAttributes:
    """The attributes, submodules and hooks of modules. Tensors are checked by their slots."""

    def __init__(
        self, modules: list[tuple[str, nn.Module]], changing: IdentityDict[set[str]]
    ) -> None:
        self._named = modules
        self._all_before = [self._constants(module.__dict__, changing) for _, module in modules]
        self._changing = changing
        pairs = [(m.__dict__, c) for (_, m), c in zip(modules, self._all_before, strict=True)]
        self._plain = [(now, constants) for now, constants in pairs if len(now) == len(constants)]
        self._mixed = [(now, constants) for now, constants in pairs if len(now) != len(constants)]
        self._contents: list[dict[Any, Any]] = []
        for _, module in modules:
            self._contents += [module._modules, module._parameters, module._buffers]
            self._contents += [vars(module)[name] for name in _HOOKS if name in vars(module)]
        self._sizes = list(map(len, self._contents))
        self._parts = [
            (content, dict(content))
            for content in self._contents
            if content and not any(isinstance(v, torch.Tensor) for v in content.values())
        ]

    @staticmethod
    def _constants(attributes: dict[str, Any], changing: IdentityDict[set[str]]) -> dict[str, Any]:
        effects = changing.get(attributes, ())
        return {
            key: copy.copy(value)
            if type(value) in (list, dict, set) and not key.startswith("_")
            else value
            for key, value in attributes.items()
            if not isinstance(value, torch.Tensor) and key not in effects
        }

    def are_unchanged(self) -> bool:
        """True if no module has changed."""
        try:
            return (
                all(starmap(operator.eq, self._plain))
                and list(map(len, self._contents)) == self._sizes
                and all(content == before for content, before in self._parts)
                and all(
                    self._constants(now, self._changing) == before for now, before in self._mixed
                )
            )
        except (RuntimeError, ValueError):  # a replaced value cannot be compared
            return False

    def first_change(self) -> str:
        """A description of the first change."""
        for (path, module), before in zip(self._named, self._all_before, strict=True):
            now = self._constants(module.__dict__, self._changing)
            for key in now.keys() | before.keys():
                if now.get(key) is not before.get(key) and now.get(key) != before.get(key):
                    name = f"{path}.{key}" if path else key
                    return f"{name} has changed from {before.get(key)!r} to {now.get(key)!r}"
        return "submodules or hooks have changed"


def _tensor_hooks(tensors: list[torch.Tensor]) -> list[Any]:
    """Copies of the dicts of hooks that users registered on tensors."""
    found = zip(
        map(operator.attrgetter("_backward_hooks"), tensors),
        map(operator.attrgetter("_post_accumulate_grad_hooks"), tensors),
        strict=True,
    )
    return [
        (index, *(dict(each) for each in hooks if each))
        for index, hooks in enumerate(found)
        if hooks != (None, None)
    ]


def _without_values(value: Any) -> Hashable:
    """A module's attribute without the values of its tensors."""
    flat = batch_tree.flatten(value)
    leaves = tuple(leaf for leaf in flat.structure.leaves if isinstance(leaf, (int, float, str)))
    return str(flat.structure.spec), leaves, tuple(map(signature, flat.tensors))
