"""A recorded step as a compiler likes it: what it may fuse is there in small parts.

- What is computed twice alike is computed once.
- An op that writes over what the step itself has made makes something new instead: in one kernel
  with its neighbours it costs nothing.
- Dropout multiplies by a mask that is a function of a seed, so that no mask is ever kept.
- A batch norm in training finds statistics, and applies them: to compute it again takes the second
  half alone. Log-softmax is two halves for the same reason.
- On a GPU, convolutions get their tensors with channels last, as the fast ones want them, and
  matrix products sides that are multiples of eight.

Numbers are those of the recorded step but for rounding, and for which elements dropout drops.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from rekindle.fx import halves, ops
from rekindle.fx.fusible import is_fusible
from rekindle.fx.rebuild import Builder, is_view
from rekindle.fx.recording import Recording
from rekindle.fx.tape import Call, Meta, OptimizerCall

aten = torch.ops.aten

_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
# These take tensors in whatever order of memory, and keep it.
_ANY_ORDER = frozenset(
    (
        *_CONVOLUTIONS,
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
    )
)
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_ALIGNED = 8  # numbers of two bytes: fast products want tensors to lie in memory in such pieces
_WORTH_FLOPS = 1 << 30  # a smaller product is not worth padding


def normalized(recording: Recording, *, for_gpu: bool) -> Recording:
    """The same step in small parts without side effects, for the compiler of a GPU or CPU."""
    return _Normal(recording, for_gpu).run()


class _Normal:
    def __init__(self, recording: Recording, for_gpu: bool) -> None:
        self.for_gpu = for_gpu
        self.build = Builder(recording)
        self.old = recording.tape
        self.lead = self.build.lead
        self.computed: dict[Hashable, Call] = {}  # by what is computed
        calls = [call for call in self.old.calls if not call.in_optimizer]
        self.calls = calls
        self.written = {self.old.metas[node].storage for call in calls for node in call.writes}
        recording_ends = [g for call in self.old.optimizer_calls for g in call.grads]
        self.ends = {*recording.outputs, *recording_ends}
        self.last_use = self._last_uses()
        self.maker = {node: call for call in calls for node in call.results}
        self.padded: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.made_at = {node: call.serial for call in calls for node in call.results}
        self.entered = {self.old.metas[entry.node].storage for entry in self.old.entries}
        self._n_masks = 0
        self.seeds = self._draw_seeds()

    def run(self) -> Recording:
        for call in self.build.calls():
            if isinstance(call, OptimizerCall):
                self.build.keep_optimizer(call)
            elif call.in_optimizer:
                self.build.keep(call)
            else:
                self._rewrite(call)
                for result in self.ends.intersection((*call.results, *call.writes)):
                    self._as_recorded(result, call)
        return self.build.finish()

    def _rewrite(self, call: Call) -> None:
        target = call.node.target
        if target is aten.native_dropout.default and call.is_random:
            self._dropout(call)
        elif self._is_coin(call):
            self._toss_coins(call)
        elif target is aten.native_batch_norm.default and call.node.args[5]:
            self._batch_norm(call)
        elif target is aten.native_batch_norm_backward.default and call.node.args[7]:
            self._batch_norm_backward(call)
        elif target is aten._log_softmax.default:
            self._log_softmax(call)
        elif target in _CONVOLUTIONS and self._has_channels_last(call):
            self._convolution(call)
        elif target in _PRODUCTS and self._is_misaligned(call):
            self._product(call)
        elif self._is_replaceable(call):
            self._out_of_place(call)
        elif call.writes or call.is_random or not isinstance(target, OpOverload):
            self._keep(call)
        else:
            self._compute_once(call)

    def _keep(self, call: Call) -> None:
        """Make a call as it was, on tensors of the forms it knows."""
        target = call.node.target
        if is_view(call, self.old) and self._can_look(call):
            self.build.keep(call)
            return
        if target not in _ANY_ORDER and not is_fusible(target):
            for arg in call.node.all_input_nodes:
                self._as_recorded(arg, call)
        self.build.keep(call)

    def _can_look(self, call: Call) -> bool:
        """Whether a view can be had of what takes its argument's place, however that lies."""
        try:
            return self.build.is_view_of(call)
        except RuntimeError:  # "view size is not compatible with input tensor's size and stride"
            return False

    def _compute_once(self, call: Call) -> None:
        key = self._key(call)
        known = self.computed.get(key) if key is not None else None
        if known is not None:
            self.build.follow(call, known)
            return
        self._keep(call)
        if key is not None:
            self.computed[key] = self.build.tape.calls[-1]

    def _key(self, call: Call) -> Hashable:
        """What a call computes; None if that may change, or cannot be told."""
        inputs = call.node.all_input_nodes
        if not inputs or any(self.old.metas[node].storage in self.written for node in inputs):
            return None
        args = fx.map_arg((call.node.args, dict(call.node.kwargs)), self.lead.__getitem__)
        return call.node.target, call.in_backward, repr(args)

    def _is_replaceable(self, call: Call) -> bool:
        """Whether an in-place call may make a new tensor instead."""
        target = call.node.target
        return (
            isinstance(target, OpOverload)
            and not call.is_random
            and ops.is_in_place(target)
            and torch.Tag.pointwise in target.tags
            and ops.out_of_place(target) is not None
            and self._is_unseen(call)
        )

    def _is_unseen(self, call: Call) -> bool:
        """Whether nobody looks later on at what a call writes over, but for what it is given."""
        if len(call.writes) != 1 or call.node.args[0] is not call.writes[0]:
            return False
        (written,) = call.writes
        storage = self.old.metas[written].storage
        return storage not in self.entered and not any(
            other is not written and last > call.serial and self.made_at.get(other, 0) < call.serial
            for other, last in self.last_use.get(storage, {}).items()
        )

    def _out_of_place(self, call: Call) -> None:
        (written,) = call.writes
        assert isinstance(call.node.target, OpOverload)
        was = self.build.meta(self.lead[written])
        args = fx.map_arg(call.node.args, self.lead.__getitem__)
        kwargs = fx.map_arg(call.node.kwargs, self.lead.__getitem__)
        (result,) = self._emit(ops.out_of_place(call.node.target), args, call, kwargs).results
        if self.build.meta(result).dtype is not was.dtype:
            how = {"dtype": was.dtype}
            (result,) = self._emit(aten._to_copy.default, (result,), call, how).results
        self.lead[written] = result

    def _emit(
        self, target: Any, args: tuple[Any, ...], like: Call, kwargs: dict[str, Any] | None = None
    ) -> Call:
        """Add a call without side effects."""
        return self.build.emit(target, args, kwargs or {}, like, writes=(), is_random=False)

    def _draw_seeds(self) -> fx.Node | None:
        drawn = [
            call
            for call in self.calls
            if self._is_coin(call)
            or (call.node.target is aten.native_dropout.default and call.is_random)
        ]
        if not drawn:
            return None
        made = [*drawn[0].results, *drawn[0].writes][0]
        device = self.old.storages[self.old.metas[made].storage].device
        args = (len(drawn), str(device))
        seeds = self.build.emit(halves.draw_seeds, args, {}, drawn[0], writes=(), is_random=True)
        return seeds.results[0]

    def _dropout(self, call: Call) -> None:
        node, p, _ = call.node.args
        assert isinstance(node, fx.Node)
        assert isinstance(p, float)
        tensor = self.lead[node]
        mask = self._mask(list(self.build.meta(tensor).shape), p, call)
        scale = 0.0 if p == 1 else 1 / (1 - p)
        (result,) = self._emit(halves.keep_masked, (tensor, mask, scale), call).results
        for recorded in call.results:
            self.lead[recorded] = result if recorded.args[1] == 0 else mask

    def _mask(self, shape: list[int], p: float, call: Call) -> fx.Node:
        (row,) = self._emit(aten.select.int, (self.seeds, 0, self._n_masks), call).results
        (seed,) = self._emit(aten.select.int, (row, 0, 0), call).results
        self._n_masks += 1
        return self._emit(halves.draw_mask, (seed, shape, p), call).results[0]

    def _is_coin(self, call: Call) -> bool:
        """Whether a call fills a new tensor with ones and zeros, as dropout does on a CPU."""
        is_coin = call.node.target is aten.bernoulli_.float and not call.node.kwargs
        return is_coin and self._is_unseen(call)

    def _toss_coins(self, call: Call) -> None:
        (written,), p = call.writes, call.node.args[1]
        assert isinstance(p, float)
        meta = self.build.meta(self.lead[written])
        mask = self._mask(list(meta.shape), 1 - p, call)
        how = {"dtype": meta.dtype}
        self.lead[written] = self._emit(aten._to_copy.default, (mask,), call, how).results[0]

    def _batch_norm(self, call: Call) -> None:
        leads = [self.lead[a] if isinstance(a, fx.Node) else a for a in call.node.args]
        tensor, weight, bias, running_mean, running_var, _, momentum, eps = leads
        writes = [self.lead[node] for node in call.writes]
        found = self.build.emit(
            halves.batch_statistics,
            (tensor, running_mean, running_var, momentum, eps),
            {},
            call,
            writes=writes,
        )
        mean, deviation = found.results
        args = (tensor, weight, bias, mean, deviation)
        (result,) = self._emit(halves.normalized, args, call).results
        for recorded in call.results:
            index = recorded.args[1]
            assert isinstance(index, int)
            self.lead[recorded] = (result, mean, deviation)[index]

    def _batch_norm_backward(self, call: Call) -> None:
        """It does not read running statistics in training."""
        args = list(fx.map_arg(call.node.args, self.lead.__getitem__))
        args[3:5] = [None, None]
        self.build.follow(call, self._emit(call.node.target, tuple(args), call))

    def _log_softmax(self, call: Call) -> None:
        node, dim, _ = call.node.args
        assert isinstance(node, fx.Node)
        tensor, dtype = self.lead[node], self.old.metas[call.results[0]].dtype
        (row,) = self._emit(halves.log_sum_exp, (tensor, dim), call).results
        (result,) = self._emit(halves.minus, (tensor, row, dtype), call).results
        self.lead[call.results[0]] = result

    def _has_channels_last(self, call: Call) -> bool:
        return self.for_gpu and len(self.old.metas[call.node.all_input_nodes[0]].shape) == 4

    def _convolution(self, call: Call) -> None:
        args: list[Any] = list(fx.map_arg(call.node.args, self.lead.__getitem__))
        is_backward = call.node.target is aten.convolution_backward.default
        for index in range(3 if is_backward else 2):
            args[index] = self._channels_last(args[index], call)
        made = self.build.emit(call.node.target, tuple(args), {}, call)
        self.build.follow(call, made)

    def _channels_last(self, node: fx.Node, like: Call) -> fx.Node:
        """A tensor with its channels last, as it is or as it is made so."""
        if self.build.fake(node).is_contiguous(memory_format=torch.channels_last):
            return node
        how = {"memory_format": torch.channels_last}
        if node.target is aten._to_copy.default:  # of a weight: cast it to that order at once
            return self._once(node.target, node.args, {**node.kwargs, **how}, like)
        return self._once(aten.clone.default, (node,), how, like)

    def _is_misaligned(self, call: Call) -> bool:
        """Whether a large product of short numbers has a side that slows it down."""
        a, b = (self.old.metas[node] for node in call.node.all_input_nodes[-2:])
        return (
            self.for_gpu
            and a.dtype.itemsize == 2
            and 2 * math.prod((*a.shape, b.shape[1])) >= _WORTH_FLOPS
            and any(self._missing(call))
            and not call.node.kwargs
            and len(call.node.args) == len(call.node.all_input_nodes)
        )

    def _missing(self, call: Call) -> tuple[int, int, int]:
        """How much is missing to rows, the side that is summed over, and columns of a product.

        The sides along which tensors lie in memory matter: the first tensor's, the second's and
        the result's, which lies along its rows.
        """
        a, b = (self.old.metas[node] for node in call.node.all_input_nodes[-2:])
        rows, inner, columns = (-side % _ALIGNED for side in (*a.shape, b.shape[1]))
        is_inner = a.stride[1] == 1 or b.stride[0] == 1
        return (0 if a.stride[1] == 1 else rows), (inner if is_inner else 0), columns

    def _product(self, call: Call) -> None:
        """A product of tensors with zeros added to their sides; a part of it is the result."""
        *bias, a, b = call.node.all_input_nodes
        rows, inner, columns = self._missing(call)
        pad = aten.constant_pad_nd.default
        args = [self._once(pad, (self.lead[each], [0, columns]), {}, call) for each in bias]
        args += [self._padded(a, rows, inner, call), self._padded(b, inner, columns, call)]
        (result,) = self.build.emit(call.node.target, tuple(args), {}, call, writes=()).results
        shape = self.old.metas[a].shape[0], self.old.metas[b].shape[1]
        self.lead[call.node] = self._corner(result, shape, call)

    def _corner(self, node: fx.Node, shape: tuple[int, int], like: Call) -> fx.Node:
        """The part of a matrix that was there before zeros were added."""
        for dim, (side, whole) in enumerate(zip(shape, self.build.meta(node).shape, strict=True)):
            if side != whole:
                (node,) = self._emit(aten.slice.Tensor, (node, dim, 0, side), like).results
        return node

    def _padded(self, node: fx.Node, rows: int, columns: int, like: Call) -> fx.Node:
        """A matrix with rows and columns of zeros added, which others look at from then on, too."""
        call = self.maker.get(node)
        if call is not None and call.node.target is aten.t.default:
            (base,) = call.node.all_input_nodes
            turned = self._padded(base, columns, rows, like)
            return self._once(aten.t.default, (turned,), {}, like)
        lead = self.lead[node]
        if not rows and not columns:
            return lead
        if (lead, rows, columns) not in self.padded:
            missing = [0, columns, 0, rows]
            whole = self._once(aten.constant_pad_nd.default, (lead, missing), {}, like)
            (height, width), *_ = self.build.meta(lead)
            self.lead[node] = self._corner(whole, (height, width), like)
            for known in (lead, self.lead[node]):
                self.padded[known, rows, columns] = whole
        return self.padded[lead, rows, columns]

    def _once(self, target: Any, args: Any, kwargs: Any, like: Call) -> fx.Node:
        key = (target, repr(args), repr(kwargs))
        if key not in self.computed:
            self.computed[key] = self._emit(target, args, like, kwargs)
        return self.computed[key].results[0]

    def _as_recorded(self, node: fx.Node, like: Call) -> None:
        """Have a tensor in memory in the order in which it was recorded."""
        lead = self.lead[node]
        meta, now = self.old.metas[node], self.build.meta(lead)
        if _order(meta) == _order(now):
            return
        how = {"memory_format": torch.contiguous_format}
        if _order(meta) != _order(meta._replace(stride=_contiguous(meta.shape))):
            self.lead[node] = self._once(halves.in_order, (lead, list(meta.stride)), {}, like)
        elif lead.target is aten._to_copy.default:
            self.lead[node] = self._once(lead.target, lead.args, {**lead.kwargs, **how}, like)
        else:
            self.lead[node] = self._once(aten.clone.default, (lead,), how, like)

    def _last_uses(self) -> dict[int, dict[fx.Node, int]]:
        """For each storage, when each of the nodes on it is last read."""
        found: dict[int, dict[fx.Node, int]] = {}
        for call in self.old.calls:
            for node in call.node.all_input_nodes:
                found.setdefault(self.old.metas[node].storage, {})[node] = call.serial
        for node in self.ends:
            found.setdefault(self.old.metas[node].storage, {})[node] = 1 << 62
        return found


def _order(meta: Meta) -> list[int]:
    """How a tensor lies in memory: a dimension of one element makes no difference."""
    return [step for size, step in zip(meta.shape, meta.stride, strict=True) if size != 1]


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
