"""Collections that compare their members by identity, and hold them.

A bare `id(...)` names an object only while that object lives: after that, another one may get the
same number. A member of these collections lives as long as it is one. `tests/test_identity.py`
forbids `id(...)` elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, MutableSet
from typing import Any, TypeVar

V = TypeVar("V")


class IdentityDict(MutableMapping[Any, V]):
    """A dict whose keys need not be hashable, and are found by identity alone.

    >>> one, other = [1], [1]
    >>> names = IdentityDict([(one, "one")])
    >>> names.get(one), names.get(other)
    ('one', None)
    """

    def __init__(self, items: Iterable[tuple[Any, V]] = ()) -> None:
        self._items: dict[int, tuple[Any, V]] = {}
        for key, value in items:
            self[key] = value

    def __getitem__(self, key: Any) -> V:
        return self._items[id(key)][1]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._items

    def __setitem__(self, key: Any, value: V) -> None:
        self._items[id(key)] = key, value

    def __delitem__(self, key: Any) -> None:
        del self._items[id(key)]

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)


class IdentitySet(MutableSet[Any]):
    """A set whose members need not be hashable, in the order in which they were added.

    >>> members = IdentitySet([[1], [1]])
    >>> len(members), [1] in members
    (2, False)
    """

    def __init__(self, members: Iterable[Any] = ()) -> None:
        self._members = IdentityDict((each, None) for each in members)

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: Any) -> None:
        """Add a member."""
        self._members[member] = None

    def discard(self, member: Any) -> None:
        """Remove a member, if it is one."""
        self._members.pop(member, None)
