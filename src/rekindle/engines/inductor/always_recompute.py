"""Chooses values that the backward pass recomputes under every plan, instead of reading them.

These are values that follow pointwise from no more bytes than their own: a dropout mask from its
seed, an expanded tensor from a short one, an activation function's result from its input. Fused
groups recompute them for themselves. For an unfused call such as a matmul, the value is computed
late, by a backward group that reads its sources anyway, so that it need not be kept until then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

from rekindle.core.rewrite.grouping import needed_by, topological_order
from rekindle.engines.inductor.call_index import CallIndex
from rekindle.engines.inductor.fusibility import is_simple
from rekindle.tracing.tape import Call

_MAX_CALLS = 32  # recomputed for one value
_SMALL_RATIO = 1 / 16  # of a value's bytes: smaller leaves can be kept as well
_READ_RATIO = 1.02  # leaves' bytes to the value's, at most


class AlwaysRecomputed:
    """The recomputed values, and what they are computed from (`leaves`).

    `late` has the values that are recomputed along with a call, by the call's node. Their readers
    must run after that call: `order` has all calls in such an order, and `predecessors` the
    positions that each must follow.
    """

    def __init__(self, step: CallIndex, ends: Collection[fx.Node]) -> None:
        """`ends` are the roots that are needed after all calls."""
        self._step = step
        self.leaves: dict[fx.Node, list[fx.Node]] = {}
        self._read_in_backward = step.read(call for call in step.calls if call.in_backward)
        self._read_by_fused_backward = step.read(
            call for call in step.calls if call.in_backward and call.node in step.fusible
        )
        self._find()
        self.late: dict[fx.Node, list[fx.Node]] = {}
        predecessors = self._find_predecessors()
        for value in [
            v for v in self.leaves if v in step.read_in_backward_by_unfused and v not in ends
        ]:
            self._compute_late(value, predecessors)
        order = topological_order(predecessors)
        position = {index: new for new, index in enumerate(order)}
        self.order = [step.calls[index] for index in order]
        self.predecessors = [{position[other] for other in predecessors[index]} for index in order]

    def reads(self, call: Call) -> Iterable[fx.Node]:
        """The roots that a call reads when recomputed values are recomputed for it."""
        for arg in call.node.all_input_nodes:
            root = self._step.root(arg)
            if call.node in self._step.fusible and self.applies_to(root, call):
                yield from map(self._step.root, self.leaves[root])
            else:
                yield root

    def applies_to(self, root: fx.Node, reader: Call) -> bool:
        """True if a value is recomputed for a reader, if that is fused."""
        return reader.in_backward and root in self.leaves

    def _find(self) -> None:
        """Find the forward values that follow from no more bytes than their own."""
        step = self._step
        n_calls: dict[fx.Node, int] = {}
        for call in step.calls:
            is_single = len(call.results) == 1 and is_simple(call.node.target)
            if call.node not in step.fusible or not is_single or call.in_backward:
                continue
            (result,), inputs = call.results, call.node.all_input_nodes
            leaves: dict[fx.Node, None] = {}
            for arg in inputs:
                leaves.update(dict.fromkeys(self.leaves.get(step.root(arg), [arg])))
            n_calls[result] = 1 + sum(n_calls.get(step.root(arg), 0) for arg in inputs)
            if not self._saves_reads(result, leaves) or n_calls[result] > _MAX_CALLS:
                del n_calls[result]
                continue
            self.leaves[result] = list(leaves)
            if result in self._read_by_fused_backward:  # its fused readers read these instead
                self._read_in_backward.update(map(step.root, leaves))

    def _saves_reads(self, result: fx.Node, leaves: Iterable[fx.Node]) -> bool:
        """True if the backward pass reads less if it recomputes a value.

        Its leaves must not have more bytes. If the value is in memory anyway, for a matmul, its
        leaves must be, too.
        """
        step = self._step
        large = self._large(result, leaves)
        if result in step.read_in_backward_by_unfused:
            are_in_memory = large <= self._read_in_backward
        else:
            are_in_memory = all(map(self._is_made_anyway, large))
        sizes = {step.root(leaf): step.nbytes(leaf) for leaf in leaves}
        is_less = sum(sizes.values()) <= _READ_RATIO * step.nbytes(result)
        return is_less and (are_in_memory or result not in step.read_by_unfused)

    def _large(self, result: fx.Node, leaves: Iterable[fx.Node]) -> set[fx.Node]:
        """The roots among a value's leaves that are large compared to it."""
        step, least = self._step, _SMALL_RATIO * self._step.nbytes(result)
        return {step.root(leaf) for leaf in leaves if step.nbytes(leaf) > least}

    def _is_made_anyway(self, root: fx.Node) -> bool:
        """True if a value is in memory however calls are fused."""
        call, step = self._step.maker.get(root), self._step
        return call is None or call.node not in step.fusible or root in step.read_by_unfused

    def _find_predecessors(self) -> list[set[int]]:
        calls, predecessors = self._step.calls, self._step.ordering()
        made_by = {node: index for index, call in enumerate(calls) for node in call.results}
        for index, call in enumerate(calls):
            predecessors[index].update(
                made_by[root] for root in self.reads(call) if root in made_by
            )
        return predecessors

    def _compute_late(self, value: fx.Node, predecessors: list[set[int]]) -> None:
        """Compute a value late, along with a backward call that reads its large leaf.

        That call must not depend on one that reads the value.
        """
        step, large = self._step, self._large(value, self.leaves[value])
        backward = [(i, call) for i, call in enumerate(step.calls) if call.in_backward]
        readers = {
            i for i, call in backward if call.node not in step.fusible and value in self.reads(call)
        }
        for index, call in backward if len(large) == 1 else ():
            is_reader = call.node in step.fusible and large <= set(self.reads(call))
            if is_reader and readers.isdisjoint(needed_by(predecessors, index)):
                self.late.setdefault(call.node, []).append(value)
                for reader in readers:
                    predecessors[reader].add(index)
                return
