"""Fuses the calls of a decomposed step into groups, each one call of compiled code.

Matmuls, convolutions, attention and other library calls stay calls of their own. The compiler never
sees more than one group, so that the plan decides what is kept and recomputed (docs/decisions/033).
A backward group may write a result over an input that it is the last to read (034).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from rekindle.core.rewrite.grouping import Groups
from rekindle.engines.inductor import decompositions
from rekindle.engines.inductor.fusion_analysis import AlwaysRecomputed, CallIndex, is_simple
from rekindle.engines.inductor.group_compiler import WRITES, GroupCompiler
from rekindle.engines.inductor.rewriter import RecordingBuilder
from rekindle.engines.strides import contiguous_stride
from rekindle.passes.fx_nodes import RESHAPES
from rekindle.rewriting.multi_tensor import cast
from rekindle.torch_internals import OpOverload
from rekindle.tracing.tape import Call, EntryKind, OptimizerCall, Recording

aten = torch.ops.aten

_MAX_MEMBERS = 64
_MAX_READ_RATIO = 6  # bytes that a group reads, to those of its largest tensor
_SMALL_PARAM_BYTES = 1 << 16
_RECENT_GROUPS = 4  # a plan may want to drop what was used earlier than that


def fuse(recording: Recording, compiler: GroupCompiler) -> Recording:
    """The step with groups of calls fused; `compiler` gets each kind of group to compile."""
    return _GroupFusion(recording, compiler).run()


class _Overwrite(NamedTuple):
    """A result of a group, and the input that it is written over."""

    output: fx.Node
    root: fx.Node


@dataclass
class _GroupGraph:
    """The graph of one group: its inputs, and its results that others need.

    A result that is written over an input is not returned. Its memory is one more input of the
    graph: the compiler takes it for separate memory, and writes the result there directly.
    """

    graph: fx.Graph
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    overwrite: _Overwrite | None = None


class _GroupFusion:
    def __init__(self, recording: Recording, compiler: GroupCompiler) -> None:
        self.recording = recording
        self.tape = recording.tape
        self.compiler = compiler
        self.builder = RecordingBuilder(recording)
        self.step = CallIndex(self.tape, self.builder.calls())
        ends = [*recording.outputs]
        for call in self.step.tail:
            ends += call.node.all_input_nodes if isinstance(call, Call) else call.grads
        self.ends = {self.step.root(node) for node in ends}
        self.recomputed = AlwaysRecomputed(self.step, self.ends)
        self.calls = self.recomputed.order
        self.params = {entry.node for entry in self.tape.entries if entry.kind is EntryKind.PARAM}

    def run(self) -> Recording:
        groups = self._groups()
        graphs = self._group_graphs(groups)
        casts = self._batch_casts(groups)
        for group in groups.order():
            members = [self.calls[i] for i in groups.members[group]]
            if members[0].node in casts:
                continue
            if group in graphs:
                self._emit(members, graphs[group])
            elif self._stays_as_recorded(members):
                self._keep(members[0])
        for call in self.step.tail:
            if isinstance(call, OptimizerCall):
                self._ensure_views(call.grads)
                self.builder.keep_optimizer(call)
            else:
                self._keep(call)
        self._ensure_views(self.recording.outputs)
        return self.builder.finish()

    def _batch_casts(self, groups: Groups) -> set[fx.Node]:
        """Cast small parameters by one foreach call at the start; returns the calls it replaces."""
        kinds: dict[Any, list[Call]] = {}
        for index, *others in groups.members.values():
            call = self.calls[index]
            if not others and self._is_small_param_cast(call):
                kinds.setdefault(call.node.kwargs["dtype"], []).append(call)
        for dtype, calls in kinds.items():
            args = [self.builder.node_map[call.node.all_input_nodes[0]] for call in calls]
            made = self.builder.emit(cast, (args, dtype), {}, calls[0], writes=[])
            for call, result in zip(calls, made.results, strict=True):
                self.builder.node_map[call.node] = result
        return {call.node for calls in kinds.values() for call in calls}

    def _is_small_param_cast(self, call: Call) -> bool:
        node = call.node
        return (
            node.target is aten._to_copy.default
            and node.kwargs.keys() == {"dtype"}
            and node.all_input_nodes[0] in self.params
            and self.step.nbytes(node.all_input_nodes[0]) <= _SMALL_PARAM_BYTES
            and not call.in_backward
            and node in self.step.fusible
            and self._stays_as_recorded([call])
        )

    def _groups(self) -> Groups:
        """Merge calls greedily along the edges that pass the most bytes."""
        edges: list[tuple[int, int, int]] = []
        made_by = {node: index for index, call in enumerate(self.calls) for node in call.results}
        for index, call in enumerate(self.calls):
            for root in dict.fromkeys(self.recomputed.reads(call)):
                if root not in made_by or self._is_column_sum(root, call):
                    continue
                if self._may_merge(self.calls[made_by[root]], call):
                    edges.append((-self.step.nbytes(root), made_by[root], index))
        groups = Groups(self.recomputed.predecessors)
        for _, first, second in sorted(edges):
            both = [groups.members[groups.group_of(i)] for i in (first, second)]
            if both[0] is not both[1] and self._may_be_group([*both[0], *both[1]]):
                groups.merge(first, second)
        return groups

    def _may_be_group(self, members: list[int]) -> bool:
        """True if a group is not too large, and does not wait for too many inputs."""
        # A sum of many matmuls' results would wait for the last one, and keep all of them alive.
        if len(members) > _MAX_MEMBERS:
            return False
        calls = [self.calls[index] for index in members]
        made = {node for call in calls for node in call.results}
        read = {root for call in calls for root in self.recomputed.reads(call)}
        largest = max(map(self.step.nbytes, made | read), default=0)
        return sum(map(self.step.nbytes, read - made)) <= _MAX_READ_RATIO * largest

    def _may_merge(self, first: Call, second: Call) -> bool:
        are_fusible = self.step.fusible.issuperset((first.node, second.node))
        has_statistics = decompositions.batch_statistics in (first.node.target, second.node.target)
        return first.in_backward == second.in_backward and are_fusible and not has_statistics

    def _is_column_sum(self, root: fx.Node, call: Call) -> bool:
        """True if a call sums over rows a value that must be in memory for an unfused call."""
        # Fused with the value's producer, it would read the producer's inputs twice.
        if call.node.target is not aten.sum.dim_IntList or root not in self.step.read_by_unfused:
            return False
        summed, dims = call.node.args[:2]
        assert isinstance(summed, fx.Node)
        last = len(self.tape.metas[summed].shape) - 1
        return isinstance(dims, (list, tuple)) and last not in dims and -1 not in dims

    def _stays_as_recorded(self, members: list[Call]) -> bool:
        """True if a group is one call that is unfused, or whose own kernel is as good."""
        (first, *others), target = members, members[0].node.target
        if first.node not in self.step.fusible:
            return True
        if others or first.node in self.recomputed.late or not isinstance(target, OpOverload):
            return False
        roots = [self.step.root(arg) for arg in first.node.all_input_nodes]
        is_recomputed = any(self.recomputed.applies_to(root, first) for root in roots)
        return is_simple(target) and not is_recomputed

    def _group_graphs(self, groups: Groups) -> dict[int, _GroupGraph]:
        """The graphs of all compiled groups, with the results that are needed."""
        needed = set(self.ends)
        found: dict[int, _GroupGraph] = {}
        order = groups.order()
        for position, group in reversed(list(enumerate(order))):
            members = [self.calls[i] for i in groups.members[group]]
            if self._stays_as_recorded(members):
                needed |= self.step.read(members)
                continue
            late = {n for call in members for n in self.recomputed.late.get(call.node, ())} & needed
            outputs = [n for call in members for n in call.results if n in needed]
            outputs += sorted(late, key=list(self.recomputed.leaves).index)
            if outputs or any(call.writes for call in members):
                group_graph = self._group_graph(members, outputs)
                roots = {self.step.root(node) for node in group_graph.inputs}
                recent_groups = order[max(0, position - _RECENT_GROUPS) : position]
                recent = [self.calls[i] for other in recent_groups for i in groups.members[other]]
                used = {node for call in recent for node in call.results}
                last_read = (roots - needed) & used.union(*map(self.recomputed.reads, recent))
                overwrite = self._find_overwrite(members, group_graph, last_read)
                if overwrite:
                    group_graph = self._group_graph(members, outputs, overwrite)
                found[group] = group_graph
                needed = (needed - late) | roots
        return found

    def _find_overwrite(
        self, members: list[Call], group_graph: _GroupGraph, last_read: set[fx.Node]
    ) -> _Overwrite | None:
        """The result that a backward group may write over an input: the largest, if several.

        `last_read` are inputs without later readers that were used recently: no plan drops them.
        """
        if not members[0].in_backward or any(call.writes for call in members):
            return None
        found: list[_Overwrite] = []
        for root in [r for r in map(self.step.root, group_graph.inputs) if r in last_read]:
            is_touchable = self.tape.metas[root].storage not in self.step.untouchable
            if root in self.step.maker and is_touchable:
                path = _ElementwisePath(self.step, root, partial(self._is_inside, members))
                dependent = [output for output in group_graph.outputs if path.leads_to(output)]
                if len(dependent) == 1 and path.is_elementwise(dependent[0]):
                    found.append(_Overwrite(dependent[0], root))
        return max(found, key=lambda overwrite: self.step.nbytes(overwrite.output), default=None)

    def _is_inside(self, members: list[Call], node: fx.Node) -> bool:
        """True if a group computes a value: one of its own, or a recomputed one."""
        root, (first, *_) = self.step.root(node), members
        is_own = any(root in call.results for call in members)
        return is_own or self.recomputed.applies_to(root, first)

    def _group_graph(
        self, members: list[Call], outputs: list[fx.Node], overwrite: _Overwrite | None = None
    ) -> _GroupGraph:
        graph = fx.Graph()
        inner: dict[fx.Node, fx.Node] = {}
        inputs: list[fx.Node] = []

        def enter() -> fx.Node:
            with graph.inserting_after(placeholders[-1] if placeholders else graph._root):
                placeholders.append(graph.placeholder(f"input_{len(placeholders)}"))
            return placeholders[-1]

        def value(node: fx.Node) -> fx.Node:
            if node not in inner and not self._is_inside(members, node):
                inputs.append(node)
                inner[node] = enter()
            elif node not in inner:
                compute(self.step.maker[node])
            return inner[node]

        def compute(call: Call) -> None:
            args = fx.map_arg(call.node.args, value)
            kwargs = fx.map_arg(call.node.kwargs, value)
            inner[call.node] = graph.create_node("call_function", call.node.target, args, kwargs)
            for result in call.results:
                made = take(result)
                if self.step.has_mixed_dtypes(call):  # Inductor may choose another result dtype
                    kwargs = {"dtype": self.tape.metas[result].dtype}
                    made = graph.call_function(aten._to_copy.default, (made,), kwargs)
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
        if overwrite is not None:
            graph.call_function(aten.copy_.default, (enter(), made.pop(overwrite.output)))
        graph.output(list(made.values()))
        graph.eliminate_dead_code(is_impure_node=_is_impure)
        return _GroupGraph(graph, inputs, list(made), overwrite)

    def _emit(self, members: list[Call], group_graph: _GroupGraph) -> None:
        """Add the one call that replaces a group."""
        in_loss = any(call.in_loss for call in members)
        in_model = any(call.in_model for call in members)
        template = replace(members[-1], in_loss=in_loss, in_model=in_model)
        self._ensure_views(group_graph.inputs)
        args = [self.builder.node_map[node] for node in group_graph.inputs]
        writes = [self.builder.node_map[node] for call in members for node in call.writes]
        if group_graph.overwrite:
            overwritten = self._overwritten_input(group_graph.overwrite, template)
            self.builder.node_map[group_graph.overwrite.output] = overwritten
            args.append(overwritten)
            writes.append(overwritten)
        fakes = [self.builder.fakes[node] for node in args]
        function = self.compiler.function(group_graph.graph, fakes)
        made = self.builder.emit(function, tuple(args), {}, template, writes=writes)
        for node, result in zip(group_graph.outputs, made.results, strict=True):
            for view in self.step.views_of[node]:  # to be created again on demand
                self.builder.node_map.pop(view, None)
            self.builder.node_map[node] = result

    def _overwritten_input(self, overwrite: _Overwrite, template: Call) -> fx.Node:
        """The input that is overwritten, in the shape of the result."""
        root, shape = self.builder.node_map[overwrite.root], self.tape.metas[overwrite.output].shape
        if self.builder.meta(root).shape == shape:
            return root
        args = (root, list(shape))
        return self.builder.emit(aten.view.default, args, {}, template, writes=[]).results[0]

    def _keep(self, call: Call) -> None:
        self._ensure_views(call.node.all_input_nodes)
        self.builder.keep(call)

    def _ensure_views(self, nodes: Iterable[fx.Node]) -> None:
        """Create views where they are first needed."""
        for node in nodes:
            if node not in self.builder.node_map:
                self._keep(self.step.maker[node])


def _is_impure(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.target in WRITES


@dataclass(eq=False)
class _ElementwisePath:
    """How the results of a group depend on one of its inputs, which has a storage of its own.

    A result may be written over the input if each of its elements depends on the input's element at
    the same position and on no other, and if no other result depends on the input: otherwise code
    could read what it has overwritten. `is_inside` is True for the values that the group computes.
    """

    step: CallIndex
    root: fx.Node
    is_inside: Callable[[fx.Node], bool]
    depends: dict[fx.Node, bool] = field(default_factory=dict)

    def leads_to(self, node: fx.Node) -> bool:
        """True if a result depends on the input at all."""
        if node not in self.depends:
            is_view = self.step.root(node) is self.root
            args = self.step.maker[node].node.all_input_nodes if self.is_inside(node) else []
            self.depends[node] = is_view or any(map(self.leads_to, args))
        return self.depends[node]

    def is_elementwise(self, output: fx.Node) -> bool:
        """True if each element of a result depends only on the input's at its position."""
        if not self._have_same_layout(output):
            return False
        passed: set[fx.Node] = set()
        waiting = [output]
        while waiting:
            node = waiting.pop()
            if node is self.root or node in passed:
                continue
            passed.add(node)
            args = [a for a in self.step.maker[node].node.all_input_nodes if self.leads_to(a)]
            if not self._keeps_positions(node, args):
                return False
            waiting += args
        has_padding = any(self._shape(node)[-1:] != self._shape(output)[-1:] for node in passed)
        rows = {math.prod(self._shape(node)[:-1]) for node in (self.root, *passed)}
        return len(rows) == 1 if has_padding else True

    def _keeps_positions(self, node: fx.Node, args: list[fx.Node]) -> bool:
        """True if a call keeps elements at their positions, or pads or slices rows at their end."""
        call = self.step.maker[node].node
        if call.target in RESHAPES:
            return True
        if call.target is aten.slice.Tensor:
            return _slices_rows_from_start(call, len(self._shape(node)))
        if call.target is aten.constant_pad_nd.default:
            pads: Any = call.args[1]
            return pads[0] == 0 and not any(pads[2:])
        return is_simple(call.target) and all(self._shape(a) == self._shape(node) for a in args)

    def _have_same_layout(self, output: fx.Node) -> bool:
        """True if input and result fill their storages in the same order."""
        metas, storages = self.step.tape.metas, self.step.tape.storages
        a, b = metas[self.root], metas[output]
        sizes = {self.step.nbytes(self.root), self.step.nbytes(output)}
        sizes |= {storages[each.storage].nbytes for each in (a, b)}
        devices = {storages[each.storage].device for each in (a, b)}
        is_alike = (a.shape, a.stride) == (b.shape, b.stride)
        are_contiguous = all(each.stride == contiguous_stride(each.shape) for each in (a, b))
        are_same = a.dtype == b.dtype and len(sizes) == len(devices) == 1
        return are_same and (is_alike or are_contiguous)

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        return self.step.tape.metas[node].shape


def _slices_rows_from_start(call: fx.Node, n_dims: int) -> bool:
    """True if a slice takes the first elements of each row."""
    given: dict[str, Any] = dict(zip(("dim", "start", "end", "step"), call.args[1:], strict=False))
    is_last = given.get("dim", 0) in (-1, n_dims - 1)
    return is_last and given.get("start") in (0, None) and given.get("step", 1) == 1
