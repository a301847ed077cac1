"""What the backward pass of a compiled step computes again rather than reads, whatever the plan.

That is what follows from no more bytes than its own, element by element: a mask from its seed, a
wide copy from a short tensor, what an activation function returns from what it was given. Groups
compute it for themselves. For a call that is not fused, a matrix product, it is made late: by a
group that reads anyway what it follows from, so that it need not be kept until then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

from rekindle.core.rewrite.grouping import needed_by, topological_order
from rekindle.engines.inductor.call_index import CallIndex
from rekindle.engines.inductor.fusibility import is_simple
from rekindle.tracing.tape import Call

_MOST_CALLS = 32  # may be made again for one value
_SMALL = 1 / 16  # of a value's bytes: what is no more can be kept beside it
_SLACK = 1.02  # what is computed again may take so many of its own bytes to read


class AlwaysRecomputed:
    """What is computed again, and from what: `leaves`.

    `late` has what is made anew beside a call, by the call's node. Those that read it wait for that
    call: `order` has all calls so, and `needs` what each of them has to follow.
    """

    def __init__(self, units: CallIndex, ends: Collection[fx.Node]) -> None:
        """`ends` are the roots that must be there when the calls have been made."""
        self._units = units
        self.leaves: dict[fx.Node, list[fx.Node]] = {}
        self._read_later = units.read(call for call in units.calls if call.in_backward)
        self._fused_later = units.read(
            call for call in units.calls if call.in_backward and call.node in units.fusible
        )
        self._find()
        self.late: dict[fx.Node, list[fx.Node]] = {}
        needs = self._needs()
        for value in [v for v in self.leaves if v in units.read_by_others_later and v not in ends]:
            self._host(value, needs)
        order = topological_order(needs)
        place = {index: number for number, index in enumerate(order)}
        self.order = [units.calls[index] for index in order]
        self.needs = [{place[other] for other in needs[index]} for index in order]

    def reads(self, call: Call) -> Iterable[fx.Node]:
        """The roots that a call reads when what is computed again is computed for it."""
        for arg in call.node.all_input_nodes:
            root = self._units.root(arg)
            if call.node in self._units.fusible and self.is_for(root, call):
                yield from map(self._units.root, self.leaves[root])
            else:
                yield root

    def is_for(self, root: fx.Node, reader: Call) -> bool:
        """Whether a value is computed again for a reader of it, if that is fused."""
        return reader.in_backward and root in self.leaves

    def _find(self) -> None:
        """What of the forward pass can be had from no more bytes than its own."""
        units = self._units
        n_calls: dict[fx.Node, int] = {}
        for call in units.calls:
            is_single = len(call.results) == 1 and is_simple(call.node.target)
            if call.node not in units.fusible or not is_single or call.in_backward:
                continue
            (result,), inputs = call.results, call.node.all_input_nodes
            leaves: dict[fx.Node, None] = {}
            for arg in inputs:
                leaves.update(dict.fromkeys(self.leaves.get(units.root(arg), [arg])))
            n_calls[result] = 1 + sum(n_calls.get(units.root(arg), 0) for arg in inputs)
            if not self._is_worth_it(result, leaves) or n_calls[result] > _MOST_CALLS:
                del n_calls[result]
                continue
            self.leaves[result] = list(leaves)
            if result in self._fused_later:  # who reads it reads these in its place
                self._read_later.update(map(units.root, leaves))

    def _is_worth_it(self, result: fx.Node, leaves: Iterable[fx.Node]) -> bool:
        """Whether the backward pass gains if it computes a value from others instead of reading it.

        What it is computed from must not be more bytes. And where the value is in memory anyway,
        for a matrix product, what it is computed from must be there, too.
        """
        units = self._units
        large = self._large(result, leaves)
        if result in units.read_by_others_later:
            is_there = large <= self._read_later
        else:
            is_there = all(map(self._is_made_anyway, large))
        sizes = {units.root(leaf): units.nbytes(leaf) for leaf in leaves}
        is_less = sum(sizes.values()) <= _SLACK * units.nbytes(result)
        return is_less and (is_there or result not in units.read_by_others)

    def _large(self, result: fx.Node, leaves: Iterable[fx.Node]) -> set[fx.Node]:
        """The roots that count of what a value is computed from."""
        units, least = self._units, _SMALL * self._units.nbytes(result)
        return {units.root(leaf) for leaf in leaves if units.nbytes(leaf) > least}

    def _is_made_anyway(self, root: fx.Node) -> bool:
        """Whether a value is in memory whatever is fused."""
        call, units = self._units.maker.get(root), self._units
        return call is None or call.node not in units.fusible or root in units.read_by_others

    def _needs(self) -> list[set[int]]:
        """What each call has to follow."""
        calls, needs = self._units.calls, self._units.orders()
        made_by = {node: index for index, call in enumerate(calls) for node in call.results}
        for index, call in enumerate(calls):
            needs[index].update(made_by[root] for root in self.reads(call) if root in made_by)
        return needs

    def _host(self, value: fx.Node, needs: list[set[int]]) -> None:
        """Have a value made late, if there is a call that reads what it follows from.

        That must not need one of those that read the value.
        """
        units, large = self._units, self._large(value, self.leaves[value])
        backward = [(i, call) for i, call in enumerate(units.calls) if call.in_backward]
        readers = {
            i
            for i, call in backward
            if call.node not in units.fusible and value in self.reads(call)
        }
        for index, call in backward if len(large) == 1 else ():
            is_reader = call.node in units.fusible and large <= set(self.reads(call))
            if is_reader and readers.isdisjoint(needed_by(needs, index)):
                self.late.setdefault(call.node, []).append(value)
                for reader in readers:
                    needs[reader].add(index)
                return
