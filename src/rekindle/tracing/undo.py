"""Undoes what tracing a step does to tensors, the optimizer and random generators.

Containers are restored key by key and never emptied: if a restore is interrupted, no attribute is
missing, and restoring once more completes it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import operator
import pickle
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch

from rekindle.torch_internals import disable_current_modes, set_version_counter

Undo = Callable[[], None]

# Below the functions of `signal`, which turn numbers into enums: a step must not wait for that.
_set_handler, _get_handler = _signal.signal, _signal.getsignal
_SIGINT = int(signal.SIGINT)


def remember(obj: Any) -> Undo:
    """An undo for changes to a tree of dicts and lists: the same containers, the same contents."""
    if not isinstance(obj, (dict, list)):
        return lambda: None
    content: Any = dict(obj) if isinstance(obj, dict) else list(obj)
    values = content.values() if isinstance(obj, dict) else content
    inner = [remember(value) for value in values]

    def undo() -> None:
        if isinstance(obj, dict):
            _restore_dict(obj, content)
        else:
            obj[:] = content
        for undo_one in inner:
            undo_one()

    return undo


def _restore_dict(changed: dict[Any, Any], content: dict[Any, Any]) -> None:
    """Give a dict its former content, in its former order."""
    for key, value in content.items():
        if key not in changed or changed[key] is not value:
            changed[key] = value
    for key in [key for key in changed if key not in content]:
        del changed[key]
    if not all(map(operator.is_, changed, content)):  # a deleted key came back at the end
        for key in content:
            changed[key] = changed.pop(key)


def _remember_tensor(tensor: torch.Tensor) -> Undo:
    grad, version, requires_grad = tensor.grad, tensor._version, tensor.requires_grad
    is_leaf, attributes = tensor.is_leaf, dict(vars(tensor))
    with disable_current_modes():  # the step may be running
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
        _restore_dict(vars(tensor), attributes)

    return undo


def _remember_attributes(obj: torch.optim.Optimizer, *containers: Any) -> Undo:
    """An undo for changes to an object's attributes, and to the contents of some of them."""
    attributes = dict(obj.__dict__)
    contents = [remember(container) for container in containers]

    def undo() -> None:
        _restore_dict(obj.__dict__, attributes)
        for undo_content in contents:
            undo_content()

    return undo


def random_states() -> list[Any]:
    """The state of torch's default generator on every device."""
    states: list[Any] = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.extend(torch.cuda.get_rng_state_all())
    return states


def set_random_states(states: list[Any]) -> None:
    """Set every default generator to what `random_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def _seeds() -> list[int]:
    """The seed of torch's default generator on every device."""
    seeds = [torch.initial_seed()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        seeds.extend(generator.initial_seed() for generator in torch.cuda.default_generators)
    return seeds


class Sandbox:
    """Notes the state of tensors, optimizers and generators, and restores it."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._undo: list[Undo] = []
        for tensor in tensors:
            self.add_tensor(tensor)
        self.add_optimizer(optimizer)
        self._is_alone = threading.active_count() == 1
        self._random_states = random_states()
        self._seeds = _seeds()
        self.is_only_drawer = False  # True if no other thread has drawn from them meanwhile
        self.note_python_random()

    def note_python_random(self) -> None:
        """Note the state of Python's and numpy's generators, as it is now."""
        self._python_random = random.getstate(), np.random.get_state()

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Note one more tensor."""
        self._undo.append(_remember_tensor(tensor))

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note one more optimizer."""
        undo = _remember_attributes(optimizer, optimizer.state, optimizer.param_groups)
        self._undo.append(undo)

    def seeded_torch(self) -> bool:
        """True if the step seeded a torch generator; fake operators do not advance one.

        Other threads may: where there are any, only seeds are compared.
        """
        if not self._is_alone:
            return _seeds()[: len(self._seeds)] != self._seeds
        now = random_states()
        return not all(torch.equal(a, b) for a, b in zip(now, self._random_states, strict=False))

    def used_python_random(self) -> bool:
        """True if the step used `random` or numpy's generator, whose draws cannot be recorded."""
        now = random.getstate(), np.random.get_state()
        return pickle.dumps(now) != pickle.dumps(self._python_random)

    def restore(self) -> None:
        """Restore everything; if interrupted, another call completes it.

        Numbers that other threads have drawn meanwhile must not be drawn again.
        """
        for undo in reversed(self._undo):
            undo()
        if self._is_alone or self.seeded_torch():
            set_random_states(self._random_states)
        if self._is_alone or self.is_only_drawer:
            random.setstate(self._python_random[0])
            np.random.set_state(self._python_random[1])
        torch.clear_autocast_cache()

    def forget(self) -> None:
        """Hold no tensor any more, such as a gradient that a step frees."""
        self._undo = []


class Interruptible:
    """Handles SIGINT at once in a part of an uninterrupted block, until `end` or the part's end.

    No generator: one that an interrupt abandons between `__enter__` and the block would set the
    deferring handler when it is garbage-collected, and no interrupt would ever come through again.
    """

    def __init__(self, handler: Any, defer: Any, came: list[FrameType | None]) -> None:
        """Without a `handler`, there is nothing to do: see `uninterrupted`."""
        self._handler, self._defer, self._came = handler, defer, came
        self.must_wait: Callable[[FrameType | None], bool] | None = None

    def __enter__(self) -> Interruptible:
        if self._handler is not None:
            at_once = self._handler if self.must_wait is None else self._handle
            _set_handler(_SIGINT, at_once)
            self.handle_waiting()
        return self

    def unless(self, must_wait: Callable[[FrameType | None], bool]) -> Interruptible:
        """Wait for `handle_waiting` where this is True of the interrupted frame."""
        self.must_wait = must_wait
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        assert self.must_wait is not None
        if self.must_wait(frame):
            self._defer(number, frame)
        else:
            self._handler(number, frame)

    def handle_waiting(self) -> None:
        """Handle a SIGINT that has arrived and waits."""
        if self._came:
            self._handler(_SIGINT, self._came.pop())

    def end(self) -> None:
        """Defer SIGINT from now on."""
        if self._handler is not None:
            _set_handler(_SIGINT, self._defer)

    def __exit__(self, *_: object) -> None:
        self.end()


@contextmanager
def uninterrupted() -> Iterator[Callable[[], Interruptible]]:
    """Finish the block before a SIGINT that arrives in it is handled.

    Yields a context manager for parts of the block in which SIGINT is handled at once. Only the
    main thread handles signals: in any other thread there is nothing to defer. A block that must be
    undone if it fails is a `try` inside of this one, around such a part: a generator that an
    interrupt abandons, as it may where a `with` ends, would be finished at some later time.
    """
    handler = _get_handler(_SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: Interruptible(None, None, [])
        return
    came: list[FrameType | None] = []

    def defer(number: int, frame: FrameType | None) -> None:
        came.append(frame)

    _set_handler(_SIGINT, defer)
    try:
        yield lambda: Interruptible(handler, defer, came)
    finally:
        _set_handler(_SIGINT, handler)
    if came:
        handler(_SIGINT, came[0])
