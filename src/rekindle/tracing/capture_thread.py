"""Makes a capture private to its thread: one at a time, and seen by no other thread.

Some calls can only be intercepted by replacing an attribute of torch, which all threads share. Its
replacement asks who calls: where the capture's dispatch mode is on, in the capturing thread and in
those of autograd's that work for it, that is the capture's function; everyone else gets the
original. `ThreadPatches` installs replacements for the time of a capture.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rekindle import torch_internals
from rekindle.torch_internals import TorchDispatchMode, dispatch_modes

_MISSING = object()

# Held by captures and measurements, which change settings of the process: other threads wait.
capture_lock = threading.RLock()
_registry_lock = threading.Lock()


class Patch:
    """An attribute whose value, a function, depends on the thread that calls it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.own = vars(owner).get(name, _MISSING)
        self.original = getattr(owner, name)
        self.uses: list[tuple[TorchDispatchMode, Callable[..., Any]]] = []
        self.n_calls_elsewhere = 0  # by threads that do not capture
        self.wrapper = _dispatching(self)

    @property
    def is_set(self) -> bool:
        """True if the attribute is the wrapper, so that nobody else has replaced it since."""
        return vars(self.owner).get(self.name) is self.wrapper

    def remove(self) -> None:
        """Give the attribute its former value; one inherited from the class is deleted."""
        if self.own is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)


def _dispatching(patch: Patch) -> Callable[..., Any]:
    original = patch.original

    def call(*args: Any, **kwargs: Any) -> Any:
        modes = dispatch_modes()
        for mode, function in patch.uses if modes else ():
            if mode in modes:
                return function(*args, **kwargs)
        patch.n_calls_elsewhere += 1
        return original(*args, **kwargs)

    torch_internals.skip_code(call.__code__)  # Dynamo compiles what it calls
    return functools.wraps(original)(call)


class ThreadPatches:
    """The functions that a capture puts in place of others, inside the context, for its thread.

    They are called where the capture's dispatch mode is on. The context is entered and left while
    interrupts are deferred.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode = mode
        self._patches: list[Patch] = []

    @property
    def is_active(self) -> bool:
        """True in the capturing thread, and in autograd's while they work for it."""
        return self._mode in dispatch_modes()

    def __enter__(self) -> ThreadPatches:
        # Without it, Dynamo would trace in other threads what is replaced here.
        torch_internals.compile_lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in reversed(self._patches):
            _uninstall(patch, self._mode)
        torch_internals.compile_lock.release()

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> Patch:
        """Call `function` in place of the attribute of a module, a class or an object."""
        patch = _install(owner, name, self._mode, function)
        self._patches.append(patch)
        return patch


_installed: list[Patch] = []


def is_replacement(value: Any) -> bool:
    """True for a function that a capture has put in place of another."""
    return any(value is patch.wrapper for patch in _installed)


def _install(owner: Any, name: str, mode: TorchDispatchMode, function: Callable[..., Any]) -> Patch:
    with _registry_lock:
        for patch in _installed:
            if patch.owner is owner and patch.name == name and patch.is_set:
                break
        else:
            patch = Patch(owner, name)
            _installed.append(patch)
            setattr(owner, name, patch.wrapper)
        patch.uses = [(mode, function), *patch.uses]
        return patch


def _uninstall(patch: Patch, mode: TorchDispatchMode) -> None:
    """End a use of a patch, and remove it after the last one.

    If other code has replaced the attribute meanwhile, it may put back the wrapper, which calls the
    original: a module's or class's patch is noted, and the next capture removes it.
    """
    with _registry_lock:
        patch.uses = [use for use in patch.uses if use[0] is not mode]
        if patch.uses:
            return
        if patch.is_set:
            patch.remove()
        elif isinstance(patch.owner, (type, ModuleType)):
            return
        _installed.remove(patch)


def _after_fork_in_child() -> None:
    """No other thread of the parent's is here: what one has locked or replaced ends."""
    modes = dispatch_modes()
    if any(mode in modes for patch in _installed for mode, _ in patch.uses):
        return  # the capturing thread itself has forked
    locks: list[Any] = [capture_lock, _registry_lock]
    if _installed:
        locks.append(torch_internals.compile_lock)
    for lock in locks:
        lock._at_fork_reinit()  # as the standard library does with its own
    for patch in _installed:
        if patch.is_set:
            patch.remove()
    _installed.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
