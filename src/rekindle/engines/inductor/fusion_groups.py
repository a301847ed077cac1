"""Turns a step in small parts (`normal`) into one whose parts are what the compiler fuses.

Matrix products, convolutions, attention and all else that a library does stay calls of their own.
What lies between, element by element or reductions of it, becomes groups, each one call of compiled
code (`inductor`). So the compiler never sees more than one group: what is kept, dropped, computed
again and when is for the plan alone to say, and a group that is computed again is the same code.

What a backward group can compute from no more bytes than it would read, it computes (`again`). One
of its results is written over what it is the last to read, where both have one form: the gradient
of a loss over logits, for one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from rekindle.core.rewrite.grouping import Groups
from rekindle.engines.inductor import decompositions
from rekindle.engines.inductor.always_recompute import AlwaysRecomputed
from rekindle.engines.inductor.call_index import CallIndex
from rekindle.engines.inductor.fusibility import is_simple
from rekindle.engines.inductor.group_compiler import Fusing
from rekindle.engines.inductor.output_aliasing import Path
from rekindle.engines.inductor.recording_builder import Builder
from rekindle.rewriting.multi_tensor import cast
from rekindle.torch_internals import OpOverload
from rekindle.tracing.tape import Call, EntryKind, OptimizerCall, Recording

aten = torch.ops.aten

_MOST_MEMBERS = 64
_MOST_READ = 6  # times the bytes of its largest tensor: what a group reads from others
_SHORT_BYTES = 1 << 16
_SOON = 4  # groups: what is not touched for longer, a plan may want to drop


def fused(recording: Recording, fusing: Fusing) -> Recording:
    """The step with groups of calls made one; `fusing` has the code of each kind of group."""
    return _Fuse(recording, fusing).run()


class _Over(NamedTuple):
    """A result of a group, and the input that it is written over."""

    output: fx.Node
    root: fx.Node


@dataclass
class _Inside:
    """The graph of one group: what it reads from outside, and what it makes for others.

    What is written `over` an input is not returned. The place is one more input of the graph: the
    compiler takes it for other memory, and writes there at once.
    """

    graph: fx.Graph
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    over: _Over | None = None


class _Fuse:
    def __init__(self, recording: Recording, fusing: Fusing) -> None:
        self.recording = recording
        self.tape = recording.tape
        self.fusing = fusing
        self.build = Builder(recording)
        self.units = CallIndex(self.tape, self.build.calls())
        ends = [*recording.outputs]
        for call in self.units.tail:
            ends += call.node.all_input_nodes if isinstance(call, Call) else call.grads
        self.ends = {self.units.root(node) for node in ends}
        self.again = AlwaysRecomputed(self.units, self.ends)
        self.calls = self.again.order
        self.params = {entry.node for entry in self.tape.entries if entry.kind is EntryKind.PARAM}

    def run(self) -> Recording:
        groups = self._groups()
        insides = self._insides(groups)
        casts = self._cast_together(groups)
        for group in groups.order():
            members = [self.calls[i] for i in groups.members[group]]
            if members[0].node in casts:
                continue
            if group in insides:
                self._emit(members, insides[group])
            elif self._is_as_recorded(members):
                self._keep(members[0])
        for call in self.units.tail:
            if isinstance(call, OptimizerCall):
                self._want(call.grads)
                self.build.keep_optimizer(call)
            else:
                self._keep(call)
        self._want(self.recording.outputs)
        return self.build.finish()

    def _cast_together(self, groups: Groups) -> set[fx.Node]:
        """Cast short parameters in one call, first of all: each cast would be a kernel to start.

        Returns the calls that are not to be made any more.
        """
        kinds: dict[Any, list[Call]] = {}
        for index, *others in groups.members.values():
            call = self.calls[index]
            if not others and self._is_short_cast(call):
                kinds.setdefault(call.node.kwargs["dtype"], []).append(call)
        for dtype, calls in kinds.items():
            leads = [self.build.lead[call.node.all_input_nodes[0]] for call in calls]
            made = self.build.emit(cast, (leads, dtype), {}, calls[0], writes=[])
            for call, result in zip(calls, made.results, strict=True):
                self.build.lead[call.node] = result
        return {call.node for calls in kinds.values() for call in calls}

    def _is_short_cast(self, call: Call) -> bool:
        """Whether a call of the forward pass casts a short parameter."""
        node = call.node
        is_cast = node.target is aten._to_copy.default and node.kwargs.keys() == {"dtype"}
        return (
            is_cast
            and node.all_input_nodes[0] in self.params
            and self.units.nbytes(node.all_input_nodes[0]) <= _SHORT_BYTES
            and not call.in_backward
            and node in self.units.fusible
            and self._is_as_recorded([call])
        )

    def _groups(self) -> Groups:
        """Merge what passes the most bytes first."""
        edges: list[tuple[int, int, int]] = []
        made_by = {node: index for index, call in enumerate(self.calls) for node in call.results}
        for index, call in enumerate(self.calls):
            for root in dict.fromkeys(self.again.reads(call)):
                if root not in made_by or self._is_read_anyway(root, call):
                    continue
                if self._may_merge(self.calls[made_by[root]], call):
                    edges.append((-self.units.nbytes(root), made_by[root], index))
        groups = Groups(self.again.needs)
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
        calls = [self.calls[index] for index in members]
        made = {node for call in calls for node in call.results}
        read = {root for call in calls for root in self.again.reads(call)}
        largest = max(map(self.units.nbytes, made | read), default=0)
        return sum(map(self.units.nbytes, read - made)) <= _MOST_READ * largest

    def _may_merge(self, first: Call, second: Call) -> bool:
        return first.in_backward == second.in_backward and all(
            call.node in self.units.fusible
            and call.node.target is not decompositions.batch_statistics
            for call in (first, second)
        )

    def _is_read_anyway(self, root: fx.Node, call: Call) -> bool:
        """Whether a call sums over rows what has to be in memory for somebody else.

        In one kernel with what makes it, all that this needs would be read twice.
        """
        if call.node.target is not aten.sum.dim_IntList or root not in self.units.read_by_others:
            return False
        summed, dims = call.node.args[:2]
        assert isinstance(summed, fx.Node)
        last = len(self.tape.metas[summed].shape) - 1
        return isinstance(dims, (list, tuple)) and last not in dims and -1 not in dims

    def _is_as_recorded(self, members: list[Call]) -> bool:
        """Whether a group is one call that is not fused, or whose own kernel is as good."""
        (first, *others), target = members, members[0].node.target
        if first.node not in self.units.fusible:
            return True
        if others or first.node in self.again.late or not isinstance(target, OpOverload):
            return False
        roots = [self.units.root(arg) for arg in first.node.all_input_nodes]
        return is_simple(target) and not any(self.again.is_for(root, first) for root in roots)

    def _insides(self, groups: Groups) -> dict[int, _Inside]:
        """The graph of each group that is compiled: of what somebody needs of it."""
        needed = set(self.ends)
        found: dict[int, _Inside] = {}
        order = groups.order()
        for place, group in reversed(list(enumerate(order))):
            members = [self.calls[i] for i in groups.members[group]]
            if self._is_as_recorded(members):
                needed |= self.units.read(members)
                continue
            late = {n for call in members for n in self.again.late.get(call.node, ())} & needed
            outputs = [n for call in members for n in call.results if n in needed]
            outputs += sorted(late, key=list(self.again.leaves).index)
            if outputs or any(call.writes for call in members):
                inside = self._inside(members, outputs)
                roots = {self.units.root(node) for node in inside.inputs}
                just_before = order[max(0, place - _SOON) : place]
                recent = [self.calls[i] for other in just_before for i in groups.members[other]]
                over = self._over(members, inside, (roots - needed) & self._touched(recent))
                found[group] = self._inside(members, outputs, over) if over else inside
                needed = (needed - late) | roots
        return found

    def _touched(self, calls: list[Call]) -> set[fx.Node]:
        """What some calls read or make."""
        made = {node for call in calls for node in call.results}
        return made.union(*map(self.again.reads, calls))

    def _over(self, members: list[Call], inside: _Inside, dying: set[fx.Node]) -> _Over | None:
        """What a backward group may write over what, if anything: the largest result, if several.

        `dying` is read here for the last time, and was not idle before: no plan would drop it.
        """
        if not members[0].in_backward or any(call.writes for call in members):
            return None
        found: list[_Over] = []
        for root in [r for r in map(self.units.root, inside.inputs) if r in dying]:
            if root in self.units.maker and not self._is_kept(root):
                path = Path(self.units, root, lambda node: self._is_inside(node, members))
                led_to = [output for output in inside.outputs if path.leads_to(output)]
                if len(led_to) == 1 and path.is_straight(led_to[0]):
                    found.append(_Over(led_to[0], root))
        return max(found, key=lambda over: self.units.nbytes(over.output), default=None)

    def _is_kept(self, node: fx.Node) -> bool:
        return self.tape.metas[node].storage in self.units.kept

    def _is_inside(self, node: fx.Node, members: list[Call]) -> bool:
        """Whether a group computes a value: its own, or again."""
        root, (first, *_) = self.units.root(node), members
        return any(root in call.results for call in members) or self.again.is_for(root, first)

    def _inside(
        self, members: list[Call], outputs: list[fx.Node], over: _Over | None = None
    ) -> _Inside:
        """A graph that computes some results of a group's members."""
        graph = fx.Graph()
        inner: dict[fx.Node, fx.Node] = {}
        inputs: list[fx.Node] = []

        def enter() -> fx.Node:
            with graph.inserting_after(placeholders[-1] if placeholders else graph._root):
                placeholders.append(graph.placeholder(f"input_{len(placeholders)}"))
            return placeholders[-1]

        def value(node: fx.Node) -> fx.Node:
            if node not in inner and not self._is_inside(node, members):
                inputs.append(node)
                inner[node] = enter()
            elif node not in inner:
                compute(self.units.maker[node])
            return inner[node]

        def compute(call: Call) -> None:
            args = fx.map_arg(call.node.args, value)
            kwargs = fx.map_arg(call.node.kwargs, value)
            inner[call.node] = graph.create_node("call_function", call.node.target, args, kwargs)
            for result in call.results:
                made = take(result)
                if self.units.has_mixed_types(
                    call
                ):  # where operators and the compiler do not agree
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
        made = {node: value(node) for node in outputs}
        if over is not None:
            graph.call_function(aten.copy_.default, (enter(), made.pop(over.output)))
        graph.output(list(made.values()))
        graph.eliminate_dead_code(is_impure_node=_stays)
        return _Inside(graph, inputs, list(made), over)

    def _emit(self, members: list[Call], inside: _Inside) -> None:
        """Make the one call that a group has become."""
        like = replace(
            members[-1],
            in_loss=any(call.in_loss for call in members),
            in_model=any(call.in_model for call in members),
        )
        self._want(inside.inputs)
        leads = [self.build.lead[node] for node in inside.inputs]
        writes = [self.build.lead[node] for call in members for node in call.writes]
        if inside.over:
            self.build.lead[inside.over.output] = place = self._reshaped(inside.over, like)
            leads.append(place)
            writes.append(place)
        function = self.fusing.function(inside.graph, [self.build.fake(node) for node in leads])
        made = self.build.emit(function, tuple(leads), {}, like, writes=writes, is_random=False)
        for node, result in zip(inside.outputs, made.results, strict=True):
            for view in self.units.views_of[node]:  # made anew, if there are any yet
                self.build.lead.pop(view, None)
            self.build.lead[node] = result

    def _reshaped(self, over: _Over, like: Call) -> fx.Node:
        """What is going to be overwritten, in the shape of what is written there."""
        root, shape = self.build.lead[over.root], self.tape.metas[over.output].shape
        if self.build.meta(root).shape == shape:
            return root
        args = (root, list(shape))
        return self.build.emit(aten.view.default, args, {}, like, writes=[]).results[0]

    def _keep(self, call: Call) -> None:
        self._want(call.node.all_input_nodes)
        self.build.keep(call)

    def _want(self, nodes: Iterable[fx.Node]) -> None:
        """Have views where they are needed first."""
        for node in nodes:
            if node not in self.build.lead:
                self._keep(self.units.maker[node])


def _stays(node: fx.Node) -> bool:
    """Whether a node has to be in a group's graph, though nobody reads it."""
    writes = (decompositions.batch_statistics, aten.copy_.default)
    return node.op in ("placeholder", "output") or node.target in writes
