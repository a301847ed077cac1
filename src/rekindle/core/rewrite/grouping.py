"""Groups of ops that run as one: a partition of the graph without cycles between groups.

Merging two groups must not create a cycle: no op outside may depend on one member while another
member depends on it. A topological order of all groups is maintained, so that only the groups
between the two have to be searched (Pearce and Kelly, "A dynamic topological sort algorithm for
directed acyclic graphs", 2007).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter


class Groups:
    """A partition of ops; at first each op is a group of its own.

    `needs[i]` are the ops that op i depends on, all of them earlier.
    """

    def __init__(self, needs: Sequence[Iterable[int]]) -> None:
        count = len(needs)
        self._group_of = list(range(count))
        self.members: dict[int, list[int]] = {index: [index] for index in range(count)}
        self._before: list[set[int]] = [set(each) for each in needs]
        self._after: list[set[int]] = [set() for _ in range(count)]
        for index, each in enumerate(self._before):
            for needed in each:
                self._after[needed].add(index)
        self._order: list[int | None] = list(range(count))
        self._place = list(range(count))

    def group_of(self, op: int) -> int:
        """The group of an op: the index of one of its members."""
        return self._group_of[op]

    def order(self) -> list[int]:
        """The groups in topological order."""
        return [group for group in self._order if group is not None]

    def merge(self, first: int, second: int) -> bool:
        """Merge the groups of two ops, of which the second depends on the first.

        False if that would create a cycle. Groups in between run before the merged one, unless they
        depend on the first.
        """
        a, b = self._group_of[first], self._group_of[second]
        if a == b:
            return True
        begin, end = self._place[a], self._place[b]
        later = self._between(a, b)
        if later is None:
            return False
        window = [g for g in self._order[begin : end + 1] if g is not None and g not in (a, b)]
        earlier = [group for group in window if group not in later]
        moved: list[int | None] = [*earlier, a, *(group for group in window if group in later)]
        moved += [None] * (end + 1 - begin - len(moved))
        self._order[begin : end + 1] = moved
        for place, group in enumerate(moved, begin):
            if group is not None:
                self._place[group] = place
        self._join(a, b)
        return True

    def _between(self, a: int, b: int) -> set[int] | None:
        """The groups before `b` that depend on `a`; None if `b` depends on one of them."""
        limit = self._place[b]
        stack = [g for g in self._after[a] if g != b and self._place[g] < limit]
        seen = set(stack)
        while stack:
            following = self._after[stack.pop()]
            if b in following:
                return None
            new = {g for g in following if self._place[g] < limit} - seen
            seen |= new
            stack.extend(new)
        return seen

    def _join(self, a: int, b: int) -> None:
        for member in self.members[b]:
            self._group_of[member] = a
        self.members[a] = sorted(self.members[a] + self.members.pop(b))
        for needed in self._before[b]:
            self._after[needed] = (self._after[needed] - {b}) | {a}
        for following in self._after[b]:
            self._before[following] = (self._before[following] - {b}) | {a}
        self._before[a] = (self._before[a] | self._before[b]) - {a, b}
        self._after[a] = (self._after[a] | self._after[b]) - {a, b}


def needed_by(needs: Sequence[Iterable[int]], op: int) -> set[int]:
    """The transitive dependencies of an op."""
    found: set[int] = set()
    stack = list(needs[op])
    while stack:
        each = stack.pop()
        if each not in found:
            found.add(each)
            stack.extend(needs[each])
    return found


def topological_order(needs: Sequence[Iterable[int]]) -> list[int]:
    """A topological order of all ops, as close to their own order as possible."""
    sorter = TopologicalSorter(dict(enumerate(needs)))
    sorter.prepare()
    ready = sorted(sorter.get_ready())  # a heap
    found: list[int] = []
    while ready:
        found.append(heapq.heappop(ready))
        sorter.done(found[-1])
        for op in sorter.get_ready():
            heapq.heappush(ready, op)
    return found
