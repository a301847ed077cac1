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
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from rekindle.fx import halves, ops
from rekindle.fx.fusible import is_fusible, is_simple
from rekindle.fx.rebuild import Builder, is_view
from rekindle.fx.recording import Recording
from rekindle.fx.replaceable import Replaceable
from rekindle.fx.strides import contiguous_stride, in_memory, is_dense
from rekindle.fx.tape import Call, OptimizerCall

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
        self.padded: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.outdated: set[fx.Node] = set()  # new nodes from before the optimizer's last call
        self.replaced: set[fx.Node] = set()  # recorded nodes that were written to, and are not
        self.known = Replaceable(recording, self.build.calls())
        self.pinned = self.known.pinned
        self.calls = [call for call in self.old.calls if not call.in_optimizer]
        entries = (entry.node for entry in self.old.entries)
        pinned = (node for node in entries if self.old.metas[node].storage in self.pinned)
        # the new storages of what is pinned
        self.in_place = {self.build.meta(self.lead[node]).storage for node in pinned}
        self.seeds = self._draw_seeds()
        self._n_masks: Counter[torch.device] = Counter()

    def run(self) -> Recording:
        for call in self.build.calls():
            if isinstance(call, OptimizerCall):
                self.build.keep_optimizer(call)
                self.computed, self.padded = {}, {}
                self.outdated = set(self.build.tape.metas)
            elif call.in_optimizer:
                self.build.keep(call)
            else:
                self._rewrite(call)
                for result in self.known.ends.intersection((*call.results, *call.writes)):
                    self._exactly_as_recorded(result, call)
                self._pin(call.results, call)
        return self.build.finish()

    def _pin(self, nodes: Iterable[fx.Node], like: Call) -> None:
        """Have what is pinned as it was recorded from the start: views see what is written."""
        for node in nodes:
            if self.old.metas[node].storage in self.pinned:
                self._as_recorded(node, like)
                self.in_place.add(self.build.meta(self.lead[node]).storage)

    def _rewrite(self, call: Call) -> None:
        target = call.node.target
        if self.known.is_dropout(call):
            self._dropout(call)
        elif self.known.is_coin(call):
            self._toss_coins(call)
        elif target is aten.native_batch_norm.default and call.node.args[5]:
            self._batch_norm(call)
        elif target is aten.native_batch_norm_backward.default and call.node.args[7]:
            self._batch_norm_backward(call)
        elif target is aten._log_softmax.default:
            self._log_softmax(call)
        elif target is aten.nll_loss_backward.default and self._is_of_rows(call):
            self._class_gradient(call)
        elif target is aten._log_softmax_backward_data.default and self._is_of_classes(call):
            self._scores_gradient(call)
        elif target in _CONVOLUTIONS and self._has_channels_last(call):
            self._convolution(call)
        elif target in _PRODUCTS and self._is_misaligned(call):
            self._product(call)
        elif self.known.is_replaceable(call):
            self._out_of_place(call)
        elif call.writes or call.is_random or not isinstance(target, OpOverload):
            self._keep(call)
        else:
            self._compute_once(call)

    def _keep(self, call: Call) -> None:
        """Make a call as it was, on tensors of the forms it knows."""
        can_look = is_view(call, self.old) and self._can_look(call)
        if not can_look and not self._takes_any_order(call):
            for arg in call.node.all_input_nodes:
                self._as_recorded(arg, call)
        self.build.keep(call)

    def _takes_any_order(self, call: Call) -> bool:
        """Whether a call does the same however its tensors lie: if not by itself, then compiled."""
        target = call.node.target
        if target in _ANY_ORDER or is_simple(target):
            return True
        return is_fusible(target) and self.known.is_compiled(call)

    def _can_look(self, call: Call) -> bool:
        """Whether a view can be had of what takes its argument's place, however that lies."""
        try:
            return self.build.is_view_of(call)
        except (RuntimeError, ValueError):  # "Cannot view a tensor with shape ... and strides ..."
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
        changes = not self.pinned.isdisjoint(self.known.storages(inputs))
        if (
            not inputs
            or changes
            or not self.known.own.isdisjoint(self.known.storages(call.results))
        ):
            return None
        args = fx.map_arg((call.node.args, dict(call.node.kwargs)), self.lead.__getitem__)
        return call.node.target, call.in_backward, call.grad_enabled, repr(args)

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
        self.replaced.add(written)

    def _emit(
        self, target: Any, args: tuple[Any, ...], like: Call, kwargs: dict[str, Any] | None = None
    ) -> Call:
        """Add a call without side effects."""
        return self.build.emit(target, args, kwargs or {}, like, writes=(), is_random=False)

    def _draw_seeds(self) -> dict[torch.device, fx.Node]:
        """The seeds of all masks, for each device."""
        found: dict[torch.device, list[Call]] = {}
        for call in self.calls:
            if self.known.is_dropout(call) or self.known.is_coin(call):
                made = [*call.results, *call.writes][0]
                device = self.old.storages[self.old.metas[made].storage].device
                found.setdefault(device, []).append(call)
        seeds: dict[torch.device, fx.Node] = {}
        for device, calls in found.items():
            args = (len(calls), str(device))
            call = self.build.emit(halves.draw_seeds, args, {}, calls[0], writes=(), is_random=True)
            seeds[device] = call.results[0]
        return seeds

    def _dropout(self, call: Call) -> None:
        node, p, _ = call.node.args
        assert isinstance(node, fx.Node)
        assert isinstance(p, float)
        tensor = self.lead[node]
        mask = self._mask(tensor, p, call)
        scale = 0.0 if p == 1 else 1 / (1 - p)
        (result,) = self._emit(halves.keep_masked, (tensor, mask, scale), call).results
        for recorded in call.results:
            self.lead[recorded] = result if recorded.args[1] == 0 else mask

    def _mask(self, of: fx.Node, p: float, call: Call) -> fx.Node:
        device = self.build.device(of)
        seeds = self.seeds[device], 0, self._n_masks[device]
        (row,) = self._emit(aten.select.int, seeds, call).results
        (seed,) = self._emit(aten.select.int, (row, 0, 0), call).results
        self._n_masks[device] += 1
        args = (seed, list(self.build.meta(of).shape), p)
        return self._emit(halves.draw_mask, args, call).results[0]

    def _toss_coins(self, call: Call) -> None:
        (written,), p = call.writes, call.node.args[1]
        assert isinstance(p, float)
        mask = self._mask(self.lead[written], 1 - p, call)
        how = {"dtype": self.old.metas[written].dtype}
        self.lead[written] = self._emit(aten._to_copy.default, (mask,), call, how).results[0]
        self.replaced.add(written)

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
        args = fx.map_arg(call.node.args, self.lead.__getitem__)
        grad, tensor, weight, _, _, mean, deviation, _, _, wanted = args
        args = (grad, tensor, weight, mean, deviation, wanted)
        self.build.follow(call, self._emit(halves.normalized_backward, args, call))

    def _log_softmax(self, call: Call) -> None:
        node, dim, _ = call.node.args
        assert isinstance(node, fx.Node)
        tensor, dtype = self.lead[node], self.old.metas[call.results[0]].dtype
        (row,) = self._emit(halves.log_sum_exp, (tensor, dim), call).results
        (result,) = self._emit(halves.minus, (tensor, row, dtype), call).results
        self.lead[call.results[0]] = result

    def _is_of_rows(self, call: Call) -> bool:
        """Whether a loss is over rows of classes that all weigh the same."""
        scores, weight = call.node.args[1], call.node.args[3]
        assert isinstance(scores, fx.Node)
        return weight is None and len(self.old.metas[scores].shape) == 2

    def _class_gradient(self, call: Call) -> None:
        """Element by element: the operator would fill memory with zeros first."""
        args: list[Any] = list(fx.map_arg(call.node.args, self.lead.__getitem__))
        grad, _, target, _, reduction, ignored, total = args
        shape = list(self.old.metas[call.results[0]].shape)
        made = self._emit(
            halves.class_gradient, (grad, target, shape, ignored, total, reduction), call
        )
        self.build.follow(call, made)

    def _is_of_classes(self, call: Call) -> bool:
        """Whether what a log-softmax is given back is a class gradient."""
        grad, dim = call.node.args[0], call.node.args[2]
        assert isinstance(grad, fx.Node)
        return self.lead[grad].target is halves.class_gradient and dim in (1, -1)

    def _scores_gradient(self, call: Call) -> None:
        """Without a sum over all classes."""
        args: list[Any] = list(fx.map_arg(call.node.args, self.lead.__getitem__))
        class_gradient, scores, _, dtype = args
        grad, target, _, *how = class_gradient.args
        made = self._emit(halves.scores_gradient, (scores, grad, target, *how, dtype), call)
        self.build.follow(call, made)

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
        return self._laid_out(node, torch.channels_last, like)

    def _laid_out(self, node: fx.Node, order: torch.memory_format, like: Call) -> fx.Node:
        """A copy in another order. What was cast (a weight) is cast to that order at once."""
        is_cast = node.target is aten._to_copy.default and node not in self.outdated
        if is_cast and not self._is_in_place(node.args):
            kwargs = {**node.kwargs, "memory_format": order}
            return self._once(aten._to_copy.default, node.args, kwargs, like)
        return self._once(aten.clone.default, (node,), {"memory_format": order}, like)

    def _is_in_place(self, args: Iterable[Any]) -> bool:
        """Whether one of these new nodes may be written to."""
        nodes = (arg for arg in args if isinstance(arg, fx.Node))
        return any(self.build.meta(node).storage in self.in_place for node in nodes)

    def _is_misaligned(self, call: Call) -> bool:
        """Whether a large product of short numbers has a side that slows it down."""
        *bias, a, b = (self.old.metas[node] for node in _tensors(call))
        return (
            self.for_gpu
            and a.dtype.itemsize == 2
            and 2 * math.prod((*a.shape, b.shape[1])) >= _WORTH_FLOPS
            and any(self._missing(call))
            and not call.node.kwargs
            and all(each.shape == b.shape[1:] for each in bias)
        )

    def _missing(self, call: Call) -> tuple[int, int, int]:
        """How much is missing to rows, the side that is summed over, and columns of a product.

        The sides along which tensors lie in memory matter: the first tensor's, the second's and
        the result's, which lies along its rows.
        """
        a, b = (self.old.metas[node] for node in _tensors(call)[-2:])
        rows, inner, columns = (-side % _ALIGNED for side in (*a.shape, b.shape[1]))
        is_inner = a.stride[1] == 1 or b.stride[0] == 1
        return (0 if a.stride[1] == 1 else rows), (inner if is_inner else 0), columns

    def _product(self, call: Call) -> None:
        """A product of tensors with zeros added to their sides; a part of it is the result."""
        *bias, a, b = _tensors(call)
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
        call = self.known.maker.get(node)
        is_turned = call is not None and call.node.target is aten.t.default
        if is_turned and node not in self.replaced:
            assert call is not None
            (base,) = call.node.all_input_nodes
            turned = self._padded(base, columns, rows, like)
            return self._once(aten.t.default, (turned,), {}, like)
        lead = self.lead[node]
        if not rows and not columns:
            return lead
        if (lead, rows, columns) not in self.padded:
            missing = [0, columns, 0, rows]
            whole = self._once(aten.constant_pad_nd.default, (lead, missing), {}, like)
            if self._is_in_place([lead]):
                return whole
            self.padded[lead, rows, columns] = whole
            if self.old.metas[node].storage not in self.known.entered | self.known.own:
                (height, width), *_ = self.build.meta(lead)
                self.lead[node] = self._corner(whole, (height, width), like)
                self.padded[self.lead[node], rows, columns] = whole
        return self.padded[lead, rows, columns]

    def _once(self, target: Any, args: Any, kwargs: Any, like: Call) -> fx.Node:
        """What a call without side effects returns, made once unless it may have changed."""
        if self._is_in_place(args):
            return self._emit(target, args, like, kwargs).results[0]
        key = (target, repr(args), repr(kwargs))
        if key not in self.computed:
            self.computed[key] = self._emit(target, args, like, kwargs)
        return self.computed[key].results[0]

    def _as_recorded(self, node: fx.Node, like: Call) -> None:
        """Have a tensor in memory in the order in which it was recorded."""
        lead = self.lead[node]
        meta, now = self.old.metas[node], self.build.meta(lead)
        contiguous = meta._replace(stride=contiguous_stride(meta.shape))
        wanted = meta if is_dense(meta) else contiguous
        if in_memory(now) in (in_memory(meta), in_memory(wanted)):
            return
        if in_memory(wanted) == in_memory(contiguous):
            self.lead[node] = self._laid_out(lead, torch.contiguous_format, like)
        else:
            self.lead[node] = self._once(halves.in_order, (lead, list(meta.stride)), {}, like)

    def _exactly_as_recorded(self, node: fx.Node, like: Call) -> None:
        """The same for what others get to see: optimizers compare strides that do not matter."""
        self._as_recorded(node, like)
        lead, meta = self.lead[node], self.old.metas[node]
        if self.build.meta(lead).stride == meta.stride or not is_dense(meta):
            return
        if meta.stride == contiguous_stride(meta.shape):
            for shape in ([size for size in meta.shape if size != 1], list(meta.shape)):
                (lead,) = self._emit(aten.view.default, (lead, shape), like).results
            self.lead[node] = lead
        else:
            self.lead[node] = self._once(halves.in_order, (lead, list(meta.stride)), {}, like)


def _tensors(call: Call) -> list[fx.Node]:
    """A matrix product's arguments; a tensor may be there twice."""
    return [node for node in call.node.args if isinstance(node, fx.Node)]
