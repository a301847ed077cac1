"""Turns a step in small parts (`normal`) into one whose parts are what the compiler fuses.

Matrix products, convolutions, attention and all else that a library does stay calls of their own.
What lies between, element by element or reductions of it, becomes groups, each one call of compiled
code (`inductor`). So the compiler never sees more than one group: what is kept, dropped, computed
again and when is for the plan alone to say, and a group that is computed again is the same code.

What a backward group needs of the forward pass, and what costs less bytes to compute than to read,
is computed in the group: a mask from its seed, a wide copy from a short tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from rekindle.core.grouping import Groups
from rekindle.fx import halves, rng
from rekindle.fx.fusible import KEEP_LONG_STATISTICS, is_fusible, is_simple
from rekindle.fx.inductor import Fusing
from rekindle.fx.rebuild import Builder, is_view
from rekindle.fx.recording import Recording
from rekindle.fx.tape import Call, OptimizerCall

aten = torch.ops.aten

_MOST_MEMBERS = 64
_MOST_AGAIN = 32  # so many calls may be made again for one value
_MOST_READ = 6  # times the bytes of its largest tensor: what a group reads from others
_SMALL = 1 / 16  # of a value's bytes: what is no more can be kept beside it
_SLACK = 1.02  # what is computed again may take so many of its own bytes to read


def fused(recording: Recording, fusing: Fusing) -> Recording:
    """The step with groups of calls made one; `fusing` has the code of each kind of group."""
    return _Fuse(recording, fusing).run()


@dataclass
class _Inside:
    """The graph of one group: what it reads from outside, and what it makes for others."""

    graph: fx.Graph
    inputs: list[fx.Node]
    outputs: list[fx.Node]


class _Fuse:
    def __init__(self, recording: Recording, fusing: Fusing) -> None:
        self.recording = recording
        self.tape = recording.tape
        self.fusing = fusing
        self.build = Builder(recording)
        self.maker = {node: call for call in self.tape.calls for node in call.results}
        self.body, self.tail = self._split()
        self.views = {c.node for c in self.body if is_view(c, self.tape)}
        self.units = [call for call in self.body if call.node not in self.views]
        self.unit_of = {node: i for i, call in enumerate(self.units) for node in call.results}
        last = max((i for i, call in enumerate(self.units) if call.in_backward), default=-1)
        self.kept = self._kept(self.units[: last + 1])
        self.is_fusible = [i <= last and self._fusible(c) for i, c in enumerate(self.units)]
        self.cheap: dict[fx.Node, list[fx.Node]] = {}  # what to compute again, and from what
        pairs = list(zip(self.units, self.is_fusible, strict=True))
        others = [call for call, is_fused in pairs if not is_fused]
        self.read_by_others = self._read(others)
        self.read_by_others_later = self._read(c for c in others if c.in_backward)
        self.read_later = self._read(c for c in self.units if c.in_backward)
        self._find_cheap()

    def run(self) -> Recording:
        groups = self._groups()
        insides = self._insides(groups)
        for group in groups.order():
            members = [self.units[i] for i in groups.members[group]]
            if group in insides:
                self._emit(members, insides[group])
            elif not self.is_fusible[group] or self._is_plain(members):
                self._keep(members[0])
        for call in self.tail:
            if isinstance(call, OptimizerCall):
                self._want(call.grads)
                self.build.keep_optimizer(call)
            else:
                self._keep(call)
        self._want(self.recording.outputs)
        return self.build.finish()

    def _split(self) -> tuple[list[Call], list[Call | OptimizerCall]]:
        """What comes before the optimizer is first called, and the rest."""
        calls = list(self.build.calls())
        is_end = [isinstance(call, OptimizerCall) or call.in_optimizer for call in calls]
        end = is_end.index(True) if True in is_end else len(calls)
        return [call for call in calls[:end] if isinstance(call, Call)], calls[end:]

    def _storages(self, nodes: Iterable[fx.Node]) -> set[int]:
        return {self.tape.metas[node].storage for node in nodes}

    def _kept(self, units: list[Call]) -> set[int]:
        """Storages that no group may touch: written to before the backward pass ends, or such that
        the compiler cannot follow (seen by address, or complex, with marks on views).
        """
        looks = (c for c in self.body if c.node.target is aten.as_strided.default)
        return {
            *self._storages(node for call in units for node in call.writes),
            *self._storages(node for call in looks for node in call.node.all_input_nodes),
            *(meta.storage for meta in self.tape.metas.values() if meta.dtype.is_complex),
        }

    def _root(self, node: fx.Node) -> fx.Node:
        """What a node looks at, through all views."""
        while node in self.maker and self.maker[node].node in self.views:
            storage = self.tape.metas[node].storage
            inputs = self.maker[node].node.all_input_nodes
            node = next(each for each in inputs if self.tape.metas[each].storage == storage)
        return node

    def _nbytes(self, node: fx.Node) -> int:
        meta = self.tape.metas[node]
        return math.prod(meta.shape) * meta.dtype.itemsize

    def _fusible(self, call: Call) -> bool:
        target = call.node.target
        storages = self._storages([*call.node.all_input_nodes, *call.results])
        devices = {self.tape.storages[storage].device for storage in storages}
        if call.is_random or len(devices) != 1 or not call.results:
            return False
        if target is halves.batch_statistics:
            return True
        if call.writes or storages & self.kept:
            return False
        if target in KEEP_LONG_STATISTICS and self._has_mixed_types(call):
            return {device.type for device in devices} != {"cpu"}
        return is_fusible(target)

    def _find_cheap(self) -> None:
        """What of the forward pass can be had from no more bytes than its own, and from whose."""
        n_calls: dict[fx.Node, int] = {}
        for index, call in enumerate(self.units):
            is_single = len(call.results) == 1 and is_simple(call.node.target)
            if not (self.is_fusible[index] and is_single) or call.in_backward:
                continue
            (result,), inputs = call.results, call.node.all_input_nodes
            leaves: dict[fx.Node, None] = {}
            for arg in inputs:
                leaves.update(dict.fromkeys(self.cheap.get(self._root(arg), [arg])))
            n_calls[result] = 1 + sum(n_calls.get(self._root(arg), 0) for arg in inputs)
            if self._is_worth_it(result, leaves) and n_calls[result] <= _MOST_AGAIN:
                self.cheap[result] = list(leaves)
            else:
                del n_calls[result]

    def _is_worth_it(self, result: fx.Node, leaves: Iterable[fx.Node]) -> bool:
        """Whether the backward pass gains if it computes a value from others instead of reading it.

        What it is computed from must not be more bytes. And where the value is in memory anyway,
        for a matrix product, what it is computed from must be there, too.
        """
        own = self._nbytes(result)
        sizes = {self._root(leaf): self._nbytes(leaf) for leaf in leaves}
        large = [root for root, nbytes in sizes.items() if nbytes > _SMALL * own]
        if result in self.read_by_others_later:
            is_there = all(root in self.read_later for root in large)
        else:
            is_there = all(self._is_made_anyway(root) for root in large)
        is_less = sum(sizes.values()) <= _SLACK * own
        return is_less and (is_there or result not in self.read_by_others)

    def _is_made_anyway(self, root: fx.Node) -> bool:
        """Whether a value is in memory whatever is fused."""
        index = self.unit_of.get(root)
        return index is None or not self.is_fusible[index] or root in self.read_by_others

    def _is_computed_again(self, root: fx.Node, reader: Call) -> bool:
        return reader.in_backward and root in self.cheap

    def _reads(self, index: int) -> Iterable[fx.Node]:
        """The roots that a unit reads when cheap ones are computed for it."""
        call = self.units[index]
        for arg in call.node.all_input_nodes:
            root = self._root(arg)
            if self.is_fusible[index] and self._is_computed_again(root, call):
                yield from (self._root(leaf) for leaf in self.cheap[root])
            else:
                yield root

    def _groups(self) -> Groups:
        """Merge what passes the most bytes first."""
        needs = self._orders()
        edges: list[tuple[int, int, int]] = []
        for index, call in enumerate(self.units):
            made = {root: self.unit_of[root] for root in self._reads(index) if root in self.unit_of}
            needs[index].update(made.values())
            for root, other in made.items():
                if self._may_merge(other, index) and not self._is_read_anyway(root, call):
                    edges.append((-self._nbytes(root), other, index))
        groups = Groups(needs)
        for _, first, second in sorted(edges):
            both = [groups.members[groups.group_of(i)] for i in (first, second)]
            if both[0] is not both[1] and self._may_be_one([*both[0], *both[1]]):
                groups.merge(first, second)
        return groups

    def _may_be_one(self, members: list[int]) -> bool:
        """Whether a group is not too large, and does not wait for too much at once.

        A sum of what many matrix products make would have to wait for the last, and hold them all.
        """
        if len(members) > _MOST_MEMBERS:
            return False
        made = {node for index in members for node in self.units[index].results}
        read = {root for index in members for root in self._reads(index)}
        largest = max(map(self._nbytes, made | read), default=0)
        return sum(map(self._nbytes, read - made)) <= _MOST_READ * largest

    def _orders(self) -> list[set[int]]:
        """What each unit has to follow, whatever it reads: writes, and draws of random numbers."""
        written = self._storages(node for call in self.units for node in call.writes)
        touched: dict[int, list[int]] = {}  # by storage: who has, from the last write on
        drawn: list[int] = []
        needs: list[set[int]] = []
        for index, call in enumerate(self.units):
            writes = self._storages(call.writes)
            reads = self._storages((*call.node.all_input_nodes, *call.results)) & written
            needs.append({i for s in writes for i in touched.get(s, ())})
            needs[index].update(touched[s][0] for s in reads if s in touched)
            for storage in writes:
                touched[storage] = []
            for storage in reads | writes:
                touched.setdefault(storage, []).append(index)
            if call.is_random or call.node.target in (rng.get_state, rng.set_state):
                needs[index].update(drawn[-1:])
                drawn.append(index)
        return needs

    def _may_merge(self, first: int, second: int) -> bool:
        calls = [self.units[first], self.units[second]]
        return (
            self.is_fusible[first]
            and self.is_fusible[second]
            and calls[0].in_backward == calls[1].in_backward
            and all(call.node.target is not halves.batch_statistics for call in calls)
        )

    def _is_read_anyway(self, root: fx.Node, call: Call) -> bool:
        """Whether a call sums over rows what has to be in memory for somebody else.

        In one kernel with what makes it, all that this needs would be read twice.
        """
        if call.node.target is not aten.sum.dim_IntList or root not in self.read_by_others:
            return False
        summed, dims = call.node.args[:2]
        assert isinstance(summed, fx.Node)
        last = len(self.tape.metas[summed].shape) - 1
        return isinstance(dims, (list, tuple)) and last not in dims and -1 not in dims

    def _read(self, calls: Iterable[Call]) -> set[fx.Node]:
        """What some calls read."""
        return {self._root(arg) for call in calls for arg in call.node.all_input_nodes}

    def _is_plain(self, members: list[Call]) -> bool:
        """Whether a group is one call whose own kernel is as good as a compiled one."""
        (first, *others), target = members, members[0].node.target
        if others or not isinstance(target, OpOverload):
            return False
        roots = [self._root(arg) for arg in first.node.all_input_nodes]
        return is_simple(target) and not any(self._is_computed_again(root, first) for root in roots)

    def _insides(self, groups: Groups) -> dict[int, _Inside]:
        """The graph of each group that is compiled: of what somebody needs of it."""
        ends = [*self.recording.outputs]
        for call in self.tail:
            ends += call.node.all_input_nodes if isinstance(call, Call) else call.grads
        needed = {self._root(node) for node in ends}
        found: dict[int, _Inside] = {}
        for group in reversed(groups.order()):
            members = [self.units[i] for i in groups.members[group]]
            if not self.is_fusible[group] or self._is_plain(members):
                needed.update(self._root(a) for c in members for a in c.node.all_input_nodes)
                continue
            outputs = [n for call in members for n in call.results if n in needed]
            if outputs or any(call.writes for call in members):
                found[group] = self._inside(members, outputs)
                needed.update(self._root(node) for node in found[group].inputs)
        return found

    def _inside(self, members: list[Call], outputs: list[fx.Node]) -> _Inside:
        """A graph that computes some results of a group's members."""
        graph = fx.Graph()
        own = {node for call in members for node in call.results}
        inner: dict[fx.Node, fx.Node] = {}
        inputs: list[fx.Node] = []
        in_backward = members[0].in_backward

        def is_inside(node: fx.Node) -> bool:
            root = self._root(node)
            return root in own or (in_backward and root in self.cheap)

        def value(node: fx.Node) -> fx.Node:
            if node not in inner and not is_inside(node):
                inputs.append(node)
                with graph.inserting_after(placeholders[-1] if placeholders else graph._root):
                    placeholders.append(graph.placeholder(f"input_{len(placeholders)}"))
                inner[node] = placeholders[-1]
            elif node not in inner:
                compute(self.maker[node])
            return inner[node]

        def compute(call: Call) -> None:
            args = fx.map_arg(call.node.args, value)
            kwargs = fx.map_arg(call.node.kwargs, value)
            inner[call.node] = graph.create_node("call_function", call.node.target, args, kwargs)
            for result in call.results:
                made = take(result)
                if self._has_mixed_types(call):  # where operators and the compiler do not agree
                    how: dict[str, Any] = {"dtype": self.tape.metas[result].dtype}
                    made = graph.call_function(aten._to_copy.default, (made,), how)
                inner[result] = made

        def take(result: fx.Node) -> fx.Node:
            if result not in inner:
                source, index = result.args
                assert isinstance(source, fx.Node)
                args = (take(source), index)
                inner[result] = graph.create_node("call_function", operator.getitem, args)
            return inner[result]

        placeholders: list[fx.Node] = []
        for call in members:
            if call.writes:
                compute(call)
        made = [value(node) for node in outputs]
        graph.output(made)
        graph.eliminate_dead_code(is_impure_node=_stays)
        return _Inside(graph, inputs, outputs)

    def _has_mixed_types(self, call: Call) -> bool:
        """Whether an operator that is more than element by element gets long and short numbers."""
        target, metas = call.node.target, self.tape.metas
        types = {metas[node].dtype for node in call.node.all_input_nodes}
        is_mixed = sum(dtype.is_floating_point for dtype in types) > 1
        return is_mixed and isinstance(target, OpOverload) and not is_simple(target)

    def _emit(self, members: list[Call], inside: _Inside) -> None:
        """Make the one call that a group has become."""
        self._want(inside.inputs)
        leads = [self.build.lead[node] for node in inside.inputs]
        function = self.fusing.function(inside.graph, [self.build.fake(node) for node in leads])
        like = replace(
            members[-1],
            in_loss=any(call.in_loss for call in members),
            in_model=any(call.in_model for call in members),
        )
        writes = [self.build.lead[node] for call in members for node in call.writes]
        made = self.build.emit(function, tuple(leads), {}, like, writes=writes, is_random=False)
        for node, result in zip(inside.outputs, made.results, strict=True):
            self.build.lead[node] = result

    def _keep(self, call: Call) -> None:
        self._want(call.node.all_input_nodes)
        self.build.keep(call)

    def _want(self, nodes: Iterable[fx.Node]) -> None:
        """Have views where they are needed first."""
        for node in nodes:
            if node not in self.build.lead:
                self._keep(self.maker[node])


def _stays(node: fx.Node) -> bool:
    """Whether a node has to be in a group's graph, though nobody reads it."""
    return node.op in ("placeholder", "output") or node.target is halves.batch_statistics
