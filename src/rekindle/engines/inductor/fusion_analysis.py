"""What fusion needs to know of a step: which calls are fusible, and what is always recomputed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from rekindle.core.rewrite.grouping import needed_by, topological_order
from rekindle.engines.inductor import decompositions
from rekindle.engines.inductor.rewriter import AnyCall, is_view
from rekindle.passes.fusible_ops import is_elementwise, is_reduction
from rekindle.torch_internals import OpOverload
from rekindle.tracing import rng
from rekindle.tracing.tape import Call, OptimizerCall, Tape

aten = torch.ops.aten

_MAX_CALLS = 32  # recomputed for one value
_SMALL_RATIO = 1 / 16  # of a value's bytes: smaller leaves can be kept as well
_READ_RATIO = 1.02  # leaves' bytes to the value's, at most
# On a CPU, given long and short numbers, these keep statistics that the compiler makes short.
_KEEP_LONG_STATISTICS = frozenset(
    (
        *(aten.native_layer_norm.default, aten.native_layer_norm_backward.default),
        *(aten.native_group_norm.default, aten.native_group_norm_backward.default),
    )
)
_OTHERS = frozenset(
    (
        *_KEEP_LONG_STATISTICS,
        *(aten.native_batch_norm.default, aten.native_batch_norm_backward.default),
        *(aten._softmax.default, aten._softmax_backward_data.default),
        *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
        *(aten.nll_loss_forward.default, aten.nll_loss_backward.default),
        *(aten.mse_loss.default, aten.mse_loss_backward.default),
        *(aten.hardtanh_backward.default, aten.leaky_relu_backward.default),
        *(aten.slice_backward.default, aten.select_backward.default),
        *(aten.constant_pad_nd.default, aten.cat.default, aten.stack.default),
        *(decompositions.log_sum_exp, decompositions.normalized_backward),
        decompositions.class_gradient,
    )
)
_SIMPLE_HALVES = (
    decompositions.draw_mask,
    decompositions.keep_masked,
    decompositions.normalized,
    decompositions.minus,
    decompositions.scores_gradient,
)


def is_simple(target: Any) -> bool:
    """True if each element of the result follows from at most one element of each argument."""
    return is_elementwise(target) or target in _SIMPLE_HALVES


def is_fusible(target: Any) -> bool:
    """True if the compiler can make it one kernel with its neighbours."""
    return is_simple(target) or target in _OTHERS or is_reduction(target)


class CallIndex:
    """The calls before the optimizer, without views (`calls`), and the rest (`tail`).

    A node's root is the tensor that it is a view of. `fusible` are the nodes of calls that may be
    fused. `read_by_unfused` are the roots that all other calls read, `read_in_backward_by_unfused`
    those that they read in the backward pass. Groups must not touch the storages in `untouchable`.
    """

    def __init__(self, tape: Tape, calls: Iterable[AnyCall]) -> None:
        self.tape = tape
        self.maker = {node: call for call in tape.calls for node in call.results}
        body, self.tail = _before_optimizer(list(calls))
        self._views = {call.node for call in body if is_view(call, tape)}
        self.views_of: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        for call in (each for each in body if each.node in self._views):
            for node in call.results:
                self.views_of[self.root(node)].append(node)
        self.calls = [call for call in body if call.node not in self._views]
        last = max((i for i, call in enumerate(self.calls) if call.in_backward), default=-1)
        self.untouchable = self._find_untouchable(body, self.calls[: last + 1])
        self.fusible = {c.node for c in self.calls[: last + 1] if self._is_fusible(c)}
        others = [call for call in self.calls if call.node not in self.fusible]
        self.read_by_unfused = self.read(others)
        self.read_in_backward_by_unfused = self.read(call for call in others if call.in_backward)

    def root(self, node: fx.Node) -> fx.Node:
        """The tensor that a node is a view of, through all views."""
        while node in self.maker and self.maker[node].node in self._views:
            storage = self.tape.metas[node].storage
            inputs = self.maker[node].node.all_input_nodes
            node = next(each for each in inputs if self.tape.metas[each].storage == storage)
        return node

    def read(self, calls: Iterable[Call]) -> set[fx.Node]:
        """The roots that some calls read."""
        return {self.root(arg) for call in calls for arg in call.node.all_input_nodes}

    def nbytes(self, node: fx.Node) -> int:
        """The bytes of a node's tensor."""
        meta = self.tape.metas[node]
        return math.prod(meta.shape) * meta.dtype.itemsize

    def has_mixed_dtypes(self, call: Call) -> bool:
        """True if an operator that is not pointwise gets floats of several dtypes."""
        target, metas = call.node.target, self.tape.metas
        types = {metas[node].dtype for node in call.node.all_input_nodes}
        is_mixed = sum(dtype.is_floating_point for dtype in types) > 1
        return is_mixed and isinstance(target, OpOverload) and not is_simple(target)

    def ordering(self) -> list[set[int]]:
        """The calls that each call must follow because of writes and random draws."""
        written = self._storages(node for call in self.calls for node in call.writes)
        users: dict[int, list[int]] = {}  # by storage: calls since the last write
        drawn: list[int] = []
        predecessors: list[set[int]] = []
        for index, call in enumerate(self.calls):
            writes = self._storages(call.writes)
            reads = self._storages((*call.node.all_input_nodes, *call.results)) & written
            predecessors.append({i for s in writes for i in users.get(s, ())})
            predecessors[index].update(users[s][0] for s in reads if s in users)
            for storage in writes:
                users[storage] = []
            for storage in reads | writes:
                users.setdefault(storage, []).append(index)
            if call.is_random or call.node.target in (rng.get_state, rng.set_state):
                predecessors[index].update(drawn[-1:])
                drawn.append(index)
        return predecessors

    def _storages(self, nodes: Iterable[fx.Node]) -> set[int]:
        return {self.tape.metas[node].storage for node in nodes}

    def _find_untouchable(self, body: list[Call], calls: list[Call]) -> set[int]:
        """The storages that no group may touch: written to, or the compiler cannot follow them."""
        strided = (c for c in body if c.node.target is aten.as_strided.default)
        return {
            *self._storages(node for call in calls for node in call.writes),
            *self._storages(node for call in strided for node in call.node.all_input_nodes),
            # complex tensors may have conjugate views
            *(meta.storage for meta in self.tape.metas.values() if meta.dtype.is_complex),
        }

    def _is_fusible(self, call: Call) -> bool:
        target = call.node.target
        storages = self._storages([*call.node.all_input_nodes, *call.results])
        devices = {self.tape.storages[storage].device for storage in storages}
        if call.is_random or len(devices) != 1 or not call.results:
            return False
        if target is decompositions.batch_statistics:
            return True
        if call.writes or storages & self.untouchable:
            return False
        if target in _KEEP_LONG_STATISTICS and self.has_mixed_dtypes(call):
            return {device.type for device in devices} != {"cpu"}
        return is_fusible(target)


def _before_optimizer(calls: list[AnyCall]) -> tuple[list[Call], list[AnyCall]]:
    """The calls before the optimizer is first called, and the rest."""
    is_end = [isinstance(call, OptimizerCall) or call.in_optimizer for call in calls]
    end = is_end.index(True) if True in is_end else len(calls)
    return [call for call in calls[:end] if isinstance(call, Call)], calls[end:]


class AlwaysRecomputed:
    """Values that the backward pass recomputes under every plan, and their sources (`leaves`).

    They follow pointwise from no more bytes than their own, as a dropout mask does from its seed.
    Fused groups recompute them for themselves. For an unfused call such as a matmul, a value is
    computed late, by a backward group that reads its sources anyway: `late` has these by the node
    of a call in that group. Their readers must run after it: `order` has all calls in such an
    order, and `predecessors` the positions that each must follow.
    """

    def __init__(self, step: CallIndex, ends: Collection[fx.Node]) -> None:
        """`ends` are the roots that are needed after all calls."""
        self._step = step
        self.leaves: dict[fx.Node, list[fx.Node]] = {}
        backward = [call for call in step.calls if call.in_backward]
        self._read_in_backward = step.read(backward)
        self._read_by_fused_backward = step.read(c for c in backward if c.node in step.fusible)
        self._find()
        self.late: dict[fx.Node, list[fx.Node]] = {}
        predecessors = self._find_predecessors()
        for value in self.leaves:
            if value in step.read_in_backward_by_unfused and value not in ends:
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
            predecessors[index].update(made_by[r] for r in self.reads(call) if r in made_by)
        return predecessors

    def _compute_late(self, value: fx.Node, predecessors: list[set[int]]) -> None:
        """Compute a value late, along with a backward call that depends on none of its readers."""
        step, large = self._step, self._large(value, self.leaves[value])
        backward = [(i, call) for i, call in enumerate(step.calls) if call.in_backward]
        unfused = [(i, call) for i, call in backward if call.node not in step.fusible]
        readers = {i for i, call in unfused if value in self.reads(call)}
        for index, call in backward if len(large) == 1 else ():
            is_reader = call.node in step.fusible and large <= set(self.reads(call))
            if is_reader and readers.isdisjoint(needed_by(predecessors, index)):
                self.late.setdefault(call.node, []).append(value)
                for reader in readers:
                    predecessors[reader].add(index)
                return
