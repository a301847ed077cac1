"""Lets the user's step run on their own objects and leaves no trace of it.

Fake tensors never touch real memory, but the step also changes Python objects: gradients appear,
the optimizer creates state, modules replace buffers. All that is noted before and put back after;
what a step did to modules is reported, since replaying the step has to do it, too.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from rekindle.torch_internals import disable_current_modes, set_version_counter

Undo = Callable[[], None]


def remember(obj: Any) -> Undo:
    """An undo for changes to a tree of dicts and lists: the same containers, the same contents."""
    if isinstance(obj, dict):
        content = dict(obj)
        inner = [remember(value) for value in content.values()]

        def undo() -> None:
            obj.clear()
            obj.update(content)
            for undo_one in inner:
                undo_one()

        return undo
    if isinstance(obj, list):
        items = list(obj)
        inner = [remember(item) for item in items]

        def undo_list() -> None:
            obj[:] = items
            for undo_one in inner:
                undo_one()

        return undo_list
    return lambda: None


def _remember_tensor(tensor: torch.Tensor) -> Undo:
    grad, version, requires_grad = tensor.grad, tensor._version, tensor.requires_grad
    is_leaf = tensor.is_leaf
    with disable_current_modes():  # tensors may be met while the step runs
        device, pointer, data = tensor.device, tensor.data_ptr(), tensor.data

    def undo() -> None:
        if tensor.device != device or tensor.data_ptr() != pointer:
            tensor.data = data
        if is_leaf and not tensor.is_leaf:
            tensor.detach_()
        if is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if is_leaf:
            tensor.grad = grad
        set_version_counter((tensor,), (version,))

    return undo


def random_states() -> list[Any]:
    """The state of every random generator a step might draw from."""
    states: list[Any] = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.extend(torch.cuda.get_rng_state_all())
    return states


def set_random_states(states: list[Any]) -> None:
    """Set every generator back to what `random_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


class PythonRandom:
    """The generators of `random` and numpy, whose draws cannot be part of a graph."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def restore(self) -> None:
        """Set both generators back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def is_unchanged(self) -> bool:
        """Whether neither was drawn from since."""
        now = PythonRandom()
        return pickle.dumps((now._python, now._numpy)) == pickle.dumps((self._python, self._numpy))


class Sandbox:
    """Notes the state of modules, tensors, optimizer and generators, and puts it back."""

    def __init__(
        self,
        modules: list[nn.Module],
        tensors: list[torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._undo: list[Undo] = [_remember_module(module) for module in modules]
        self._undo.extend(_remember_tensor(tensor) for tensor in tensors)
        self._undo.append(_remember_optimizer(optimizer))
        self.random_states = random_states()
        self.python_random = PythonRandom()

    def add(self, tensor: torch.Tensor) -> None:
        """Note one more tensor, met on the way."""
        self._undo.append(_remember_tensor(tensor))

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note one more optimizer, met on the way."""
        self._undo.append(_remember_optimizer(optimizer))

    def add_module(self, module: nn.Module) -> None:
        """Note one more module, met on the way."""
        self._undo.append(_remember_module(module))

    def moved_generators(self) -> bool:
        """Whether a torch generator was moved: by a seed, since fake operators draw nothing."""
        now = random_states()
        return not all(torch.equal(a, b) for a, b in zip(now, self.random_states, strict=False))

    def restore(self) -> None:
        """Put everything back as it was."""
        for undo in reversed(self._undo):
            undo()
        set_random_states(self.random_states)
        self.python_random.restore()
        torch.clear_autocast_cache()


def _remember_module(module: nn.Module) -> Undo:
    attributes = dict(module.__dict__)
    contents = [remember(module._parameters), remember(module._buffers)]
    if "_flat_weights" in attributes:  # nn.LSTM and its kin keep their parameters twice
        contents.append(remember(attributes["_flat_weights"]))

    def undo() -> None:
        module.__dict__.clear()
        module.__dict__.update(attributes)
        for undo_part in contents:
            undo_part()

    return undo


def _remember_optimizer(optimizer: torch.optim.Optimizer) -> Undo:
    attributes = dict(optimizer.__dict__)
    contents = [remember(optimizer.state), remember(optimizer.param_groups)]

    def undo() -> None:
        optimizer.__dict__.clear()
        optimizer.__dict__.update(attributes)
        for undo_part in contents:
            undo_part()

    return undo


@contextmanager
def replaced(obj: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for a while; one that came from the class is deleted again."""
    own = vars(obj).get(name, _MISSING)
    setattr(obj, name, value)
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(obj, name)
        else:
            setattr(obj, name, own)


_MISSING = object()
