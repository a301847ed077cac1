"""A recorded step as a compiler likes it: what it may fuse is there in small parts.

- What is computed twice alike is computed once.
- An op that writes over what the step itself has made makes something new instead: in one kernel
  with its neighbours it costs nothing.
- Dropout multiplies by a mask that is a function of a seed, so that no mask is ever kept.
- A batch norm in training finds statistics, and applies them: to compute it again takes the second
  half alone. Log-softmax is two halves for the same reason.
- On a GPU, convolutions, matrix products and attention get the forms that fast ones want: see
  `for_gpu`.

Numbers are those of the recorded step but for rounding, and for which elements dropout drops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import fx

from rekindle.engines.inductor import decompositions
from rekindle.engines.inductor.fusibility import is_fusible, is_simple
from rekindle.engines.inductor.gpu_layouts import CONVOLUTIONS, ForGpu
from rekindle.engines.inductor.recording_builder import is_view
from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators
from rekindle.tracing.tape import Call, OptimizerCall, Recording

aten = torch.ops.aten

# These take tensors in whatever order of memory, and keep it.
_ANY_ORDER = frozenset(
    (
        *CONVOLUTIONS,
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
    )
)


def normalized(recording: Recording, *, for_gpu: bool) -> Recording:
    """The same step in small parts without side effects, for the compiler of a GPU or CPU."""
    return _Normal(recording, for_gpu).run()


class _Normal(ForGpu):
    def __init__(self, recording: Recording, for_gpu: bool) -> None:
        super().__init__(recording)
        self.for_gpu = for_gpu
        self.calls = [call for call in self.old.calls if not call.in_optimizer]
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
        elif self.for_gpu and self.rewrite_for_gpu(call):
            pass
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
        (result,) = self._emit(operators.out_of_place(call.node.target), args, call, kwargs).results
        if self.build.meta(result).dtype is not was.dtype:
            how = {"dtype": was.dtype}
            (result,) = self._emit(aten._to_copy.default, (result,), call, how).results
        self.lead[written] = result
        self.replaced.add(written)

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
            call = self.build.emit(
                decompositions.draw_seeds, args, {}, calls[0], writes=(), is_random=True
            )
            seeds[device] = call.results[0]
        return seeds

    def _dropout(self, call: Call) -> None:
        node, p, _ = call.node.args
        assert isinstance(node, fx.Node)
        assert isinstance(p, float)
        tensor = self.lead[node]
        mask = self._mask(tensor, p, call)
        scale = 0.0 if p == 1 else 1 / (1 - p)
        (result,) = self._emit(decompositions.keep_masked, (tensor, mask, scale), call).results
        for recorded in call.results:
            self.lead[recorded] = result if recorded.args[1] == 0 else mask

    def _mask(self, of: fx.Node, p: float, call: Call) -> fx.Node:
        device = self.build.device(of)
        seeds = self.seeds[device], 0, self._n_masks[device]
        (row,) = self._emit(aten.select.int, seeds, call).results
        (seed,) = self._emit(aten.select.int, (row, 0, 0), call).results
        self._n_masks[device] += 1
        args = (seed, list(self.build.meta(of).shape), p)
        return self._emit(decompositions.draw_mask, args, call).results[0]

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
            decompositions.batch_statistics,
            (tensor, running_mean, running_var, momentum, eps),
            {},
            call,
            writes=writes,
        )
        mean, deviation = found.results
        args = (tensor, weight, bias, mean, deviation)
        (result,) = self._emit(decompositions.normalized, args, call).results
        for recorded in call.results:
            index = recorded.args[1]
            assert isinstance(index, int)
            self.lead[recorded] = (result, mean, deviation)[index]

    def _batch_norm_backward(self, call: Call) -> None:
        """It does not read running statistics in training."""
        args = fx.map_arg(call.node.args, self.lead.__getitem__)
        grad, tensor, weight, _, _, mean, deviation, _, _, wanted = args
        args = (grad, tensor, weight, mean, deviation, wanted)
        self.build.follow(call, self._emit(decompositions.normalized_backward, args, call))

    def _log_softmax(self, call: Call) -> None:
        node, dim, _ = call.node.args
        assert isinstance(node, fx.Node)
        tensor, dtype = self.lead[node], self.old.metas[call.results[0]].dtype
        (row,) = self._emit(decompositions.log_sum_exp, (tensor, dim), call).results
        (result,) = self._emit(decompositions.minus, (tensor, row, dtype), call).results
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
            decompositions.class_gradient, (grad, target, shape, ignored, total, reduction), call
        )
        self.build.follow(call, made)

    def _is_of_classes(self, call: Call) -> bool:
        """Whether what a log-softmax is given back is a class gradient."""
        grad, dim = call.node.args[0], call.node.args[2]
        assert isinstance(grad, fx.Node)
        return self.lead[grad].target is decompositions.class_gradient and dim in (1, -1)

    def _scores_gradient(self, call: Call) -> None:
        """Without a sum over all classes."""
        args: list[Any] = list(fx.map_arg(call.node.args, self.lead.__getitem__))
        class_gradient, scores, _, dtype = args
        grad, target, _, *how = class_gradient.args
        made = self._emit(decompositions.scores_gradient, (scores, grad, target, *how, dtype), call)
        self.build.follow(call, made)
