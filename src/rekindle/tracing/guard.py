"""Checks before each step that the user's objects have not changed since the capture.

Values of tensors may change. Thousands of objects are checked before the first kernel starts, so
whole lists are compared, which unchanged objects pass by identity (decision 8).
"""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

import torch

from rekindle.core.identity import IdentitySet
from rekindle.core.uncopyable import Uncopyable
from rekindle.tracing.contents import (
    ABSENT,
    CONSTANTS,
    Content,
    freeze,
    is_live,
    nested_owners,
    signature,
)
from rekindle.tracing.python_state import WriteKind
from rekindle.tracing.step_state import Effect
from rekindle.tracing.tape import Recording

_requires_grad = operator.attrgetter("requires_grad")
_code = operator.attrgetter("__code__", "__defaults__")


class Guard(Uncopyable):
    """Fetches the tensors that a captured step works on, if nothing relevant has changed.

    After a refusal, `reason` explains it, and `changed` names the Python value that has changed, if
    it was one.
    """

    def __init__(self, recording: Recording) -> None:
        state = recording.state
        self.reason = ""
        self.changed = ""
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
        self._python = _PythonGuard(state.contents, recording.effects)
        self._functions, self._code = state.functions, list(map(_code, state.functions))

    def fetch(self) -> list[torch.Tensor] | None:
        """The tensor in each slot; None if something has changed, which `reason` explains."""
        self.changed = ""
        if not self._python.is_unchanged():  # first: it follows containers that were replaced
            self.changed = self._python.changed
            return self._refuse(self._python.reason)
        if list(map(_code, self._functions)) != self._code:
            return self._refuse("a function has other code or defaults")
        try:
            tensors = [container[key] for container, key in self._places]
            tied = [container[key] for container, key in self._ties]
        except (KeyError, IndexError, TypeError):
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


class _PythonGuard:
    """Compares the Python state with that of the capture.

    Most of it is dicts of modules that never change: they are compared in one go, by identity.
    """

    def __init__(self, contents: list[Content], effects: list[Effect]) -> None:
        self.reason = ""
        self.changed = ""
        unread, written = set(), set()
        replaced = IdentitySet()
        for effect in effects:
            place = effect.content, effect.key
            if effect.kind in (WriteKind.APPEND, WriteKind.ADD):
                unread.add(place)
            else:
                written.add(place)
                # What an overwritten entry held is compared there, and not kept alive here.
                replaced |= IdentitySet(nested_owners(effect.content.before.get(effect.key)))
        self._contents = [c for c in contents if c.is_shared or c.owner not in replaced]
        self._unread = {c: {k for each, k in unread if each is c} for c in self._contents}
        self._written = {c: {k for each, k in written if each is c} for c in self._contents}
        self._frozen: dict[Content, dict[Any, Any]] = {}
        self._shown: dict[tuple[Content, Any], str] = {}
        self._owners: dict[tuple[Content, Any], Any] = {}  # entries with a content of their own
        owners = IdentitySet(content.owner for content in self._contents)
        self._live_contents: list[Content] = []
        self._others: list[Content] = []
        for content in self._contents:
            kept = {k: v for k, v in content.before.items() if k not in self._unread[content]}
            self._frozen[content] = {key: freeze(value) for key, value in kept.items()}
            own_content = {k: v for k, v in kept.items() if v in owners}
            self._owners.update(((content, key), value) for key, value in own_content.items())
            shown = {k: _short(v) for k, v in kept.items() if isinstance(v, CONSTANTS)}
            self._shown.update(((content, key), text) for key, text in shown.items())
            if is_live(content) and not self._unread[content] and not self._written[content]:
                self._live_contents.append(content)
            else:
                self._others.append(content)
            content.before = {}
            content.forget()
        objects = [c for c in self._contents if not isinstance(c.owner, (type, dict, list))]
        self._objects = [content.owner for content in objects]
        self._types = list(map(type, self._objects))
        self._remember()

    def _remember(self) -> None:
        self._live: list[Any] = [content.read() for content in self._live_contents]
        self._sizes = list(map(len, self._live))
        self._filled = [each for each in self._live if each]
        self._keys = list(chain.from_iterable(self._filled))
        self._values = list(chain.from_iterable(each.values() for each in self._filled))
        self._last = [self._stable(content) for content in self._others]

    def _stable(self, content: Content) -> dict[Any, Any] | None:
        """The entries that the step does not write to; None if it writes to any."""
        return None if self._unread[content] or self._written[content] else dict(content.read())

    def is_unchanged(self) -> bool:
        """True if the Python state is that of the capture; if not, `reason` says what differs."""
        if list(map(type, self._objects)) != self._types:
            self.reason = "an object has another class"
            return False
        try:
            if self._is_identical():
                return True
            if not all(map(self._is_equal, self._contents)):
                return False
        except (RuntimeError, TypeError, ValueError) as error:  # values that cannot be compared
            self.reason = f"a value cannot be compared with that of the capture ({error})"
            return False
        self._remember()
        return True

    def _is_identical(self) -> bool:
        """True if every entry is the object that it was in the last step."""
        if list(map(len, self._live)) != self._sizes:
            return False
        if list(chain.from_iterable(self._filled)) != self._keys:
            return False
        values = chain.from_iterable(each.values() for each in self._filled)
        if not all(map(operator.is_, values, self._values)):
            return False
        return all(
            (last is not None and content.is_identical(last)) or self._is_equal(content)
            for content, last in zip(self._others, self._last, strict=True)
        )

    def _is_equal(self, content: Content) -> bool:
        """True if a content equals that of the capture; if not, notes the first change."""
        now, frozen = content.read(), self._frozen[content]
        unread = self._unread[content]
        for key in (*frozen, *(key for key in now if key not in frozen and key not in unread)):
            value = now.get(key, ABSENT)
            if value is self._owners.get((content, key), ABSENT) and value is not ABSENT:
                continue
            if key in frozen and value is not ABSENT and freeze(value) == frozen[key]:
                if _follow(content, key, value):
                    continue
                self.reason = f"{content.label(key)} is another object, and held elsewhere, too"
                return False
            self.changed = content.label(key)
            before = self._shown.get((content, key)) if key in frozen else repr(ABSENT)
            is_shown = value is ABSENT or isinstance(value, CONSTANTS)
            self.reason = f"{self.changed} has changed"
            self.reason += f" from {before}" if before is not None else ""
            self.reason += f" to {_short(value)}" if is_shown else ""
            return False
        if content.is_reordered(frozen) and not unread:
            self.changed = content.path
            self.reason = f"the order of {content.path} has changed"
            return False
        return True


def _follow(content: Content, key: Any, value: Any) -> bool:
    """Rebind the contents of what an entry held to what it holds now, which equals it."""
    for path, child in content.children.get(key, ()):
        owner = value
        for index in path:
            owner = owner[index]
        if owner is child.owner:
            continue
        if not child.rebind(owner):
            return False
        now = child.read()
        if not all(_follow(child, each, now[each]) for each in child.children if each in now):
            return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
