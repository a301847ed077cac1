"""Rewrites a recording into small functional calls that the compiler can fuse and recompute.

In-place ops return new tensors, dropout masks become functions of a seed, batch norm and
log-softmax are split, and equal calls are made once. Results are those of the recorded step except
for rounding, and for which elements dropout drops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from rekindle.engines.inductor import decompositions
from rekindle.engines.inductor.fusion_analysis import is_fusible, is_simple
from rekindle.engines.inductor.gpu_layouts import CONVOLUTIONS, GpuLayouts
from rekindle.engines.inductor.rewriter import Rewriter, is_view
from rekindle.passes.fx_nodes import item_path
from rekindle.passes.matmul_padding import PaddingOptions
from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators
from rekindle.tracing.tape import Call, OptimizerCall, Recording

aten = torch.ops.aten

# These accept any memory format, and keep it.
_LAYOUT_PRESERVING = (
    *CONVOLUTIONS,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
)


def decompose(
    recording: Recording, *, for_gpu: bool, padding: PaddingOptions | None = None
) -> Recording:
    """The same step in small functional calls, for the compiler of a GPU or CPU."""
    return _Decomposer(recording, for_gpu, padding or PaddingOptions()).run()


class _Decomposer(Rewriter):
    def __init__(self, recording: Recording, for_gpu: bool, padding: PaddingOptions) -> None:
        super().__init__(recording)
        self.gpu_layouts = GpuLayouts(self, padding) if for_gpu else None
        self.seeds = self._draw_seeds()
        self._n_masks: Counter[torch.device] = Counter()

    def run(self) -> Recording:
        for call in self.builder.calls():
            if isinstance(call, OptimizerCall):
                self.builder.keep_optimizer(call)
                self.computed = {}
                self.outdated = set(self.builder.tape.metas)
                if self.gpu_layouts is not None:
                    self.gpu_layouts.padded = {}
            elif call.in_optimizer:
                self.builder.keep(call)
            else:
                self._rewrite(call)
                for result in self.analysis.ends.intersection((*call.results, *call.writes)):
                    self.restore_strides(result, call)
                self.pin(call.results, call)
        return self.builder.finish()

    def _rewrite(self, call: Call) -> None:
        target = call.node.target
        if self.analysis.is_dropout(call):
            self._dropout(call)
        elif self.analysis.is_bernoulli(call):
            self._bernoulli(call)
        elif target is aten.native_batch_norm.default and call.node.args[5]:
            self._batch_norm(call)
        elif target is aten.native_batch_norm_backward.default and call.node.args[7]:
            self._batch_norm_backward(call)
        elif target is aten._log_softmax.default:
            self._log_softmax(call)
        elif target is aten.nll_loss_backward.default and self._is_over_rows(call):
            self._class_gradient(call)
        elif target is aten._log_softmax_backward_data.default and self._is_of_class_gradient(call):
            self._scores_gradient(call)
        elif self.gpu_layouts is not None and self.gpu_layouts.rewrite(call):
            pass
        elif self.analysis.is_functionalizable(call):
            self._functionalize(call)
        elif call.writes or call.is_random or not isinstance(target, OpOverload):
            self._keep(call)
        else:
            self._compute_once(call)

    def _args(self, call: Call) -> Any:
        """A recorded call's positional arguments, on new nodes."""
        return self.builder.arguments(call)[0]

    def _keep(self, call: Call) -> None:
        """Add a recorded call, on tensors with layouts that it accepts."""
        stays_view = is_view(call, self.old) and self.builder.stays_view(call)
        if not stays_view and not self._accepts_any_layout(call):
            for arg in call.node.all_input_nodes:
                self.restore_layout(arg, call)
        self.builder.keep(call)

    def _accepts_any_layout(self, call: Call) -> bool:
        """True if a call does the same for any layout, by itself or because it will be compiled."""
        target = call.node.target
        if target in _LAYOUT_PRESERVING or is_simple(target):
            return True
        return is_fusible(target) and self.analysis.is_compiled(call)

    def _compute_once(self, call: Call) -> None:
        key = self._key(call)
        if key in self.computed:
            self.builder.map_results(call, self.computed[key])
            return
        self._keep(call)
        if key is not None:
            self.computed[key] = self.builder.tape.calls[-1]

    def _key(self, call: Call) -> Hashable:
        """The target and arguments of a call; None if its result must not be shared."""
        inputs = call.node.all_input_nodes
        may_change = not self.pinned.isdisjoint(self.analysis.storages(inputs))
        made = self.analysis.storages(call.results)
        if not inputs or may_change or not self.analysis.unshareable.isdisjoint(made):
            return None
        args = self.builder.arguments(call)
        return call.node.target, call.in_backward, call.grad_enabled, repr(args)

    def _functionalize(self, call: Call) -> None:
        (written,) = call.writes
        assert isinstance(call.node.target, OpOverload)
        was = self.builder.meta(self.node_map[written])
        args, kwargs = self.builder.arguments(call)
        (result,) = self.emit(operators.out_of_place(call.node.target), args, call, kwargs).results
        if self.builder.meta(result).dtype is not was.dtype:
            kwargs = {"dtype": was.dtype}
            (result,) = self.emit(aten._to_copy.default, (result,), call, kwargs).results
        self.node_map[written] = result
        self.functionalized.add(written)

    def _draw_seeds(self) -> dict[torch.device, fx.Node]:
        """The seeds of all masks, by device."""
        found: dict[torch.device, list[Call]] = {}
        for call in (each for each in self.old.calls if not each.in_optimizer):
            if self.analysis.is_dropout(call) or self.analysis.is_bernoulli(call):
                made = [*call.results, *call.writes][0]
                storage = self.old.storages[self.old.metas[made].storage]
                found.setdefault(storage.device, []).append(call)
        seeds: dict[torch.device, fx.Node] = {}
        for device, calls in found.items():
            args, draw = (len(calls), str(device)), decompositions.draw_seeds
            seeded = self.builder.emit(draw, args, {}, calls[0], writes=(), is_random=True)
            seeds[device] = seeded.results[0]
        return seeds

    def _dropout(self, call: Call) -> None:
        tensor, p, _ = self._args(call)
        mask = self._mask(tensor, p, call)
        scale = 0.0 if p == 1 else 1 / (1 - p)
        (result,) = self.emit(decompositions.keep_masked, (tensor, mask, scale), call).results
        for recorded in call.results:
            self.node_map[recorded] = result if recorded.args[1] == 0 else mask

    def _mask(self, of: fx.Node, p: float, call: Call) -> fx.Node:
        device = self.builder.device(of)
        seeds = self.seeds[device], 0, self._n_masks[device]
        (row,) = self.emit(aten.select.int, seeds, call).results
        (seed,) = self.emit(aten.select.int, (row, 0, 0), call).results
        self._n_masks[device] += 1
        args = (seed, list(self.builder.meta(of).shape), p)
        return self.emit(decompositions.draw_mask, args, call).results[0]

    def _bernoulli(self, call: Call) -> None:
        (written,), (_, p) = call.writes, self._args(call)
        mask = self._mask(self.node_map[written], 1 - p, call)
        kwargs = {"dtype": self.old.metas[written].dtype}
        self.node_map[written] = self.emit(aten._to_copy.default, (mask,), call, kwargs).results[0]
        self.functionalized.add(written)

    def _batch_norm(self, call: Call) -> None:
        tensor, weight, bias, running_mean, running_var, _, momentum, eps = self._args(call)
        statistics = (tensor, running_mean, running_var, momentum, eps)
        found = self.builder.emit(decompositions.batch_statistics, statistics, {}, call)
        mean, deviation = found.results
        normalized = (tensor, weight, bias, mean, deviation)
        (result,) = self.emit(decompositions.normalized, normalized, call).results
        for recorded in call.results:
            _, (index,) = item_path(recorded)
            self.node_map[recorded] = (result, mean, deviation)[index]

    def _batch_norm_backward(self, call: Call) -> None:
        """In training, it does not read running statistics."""
        grad, tensor, weight, _, _, mean, deviation, _, _, wanted = self._args(call)
        args = (grad, tensor, weight, mean, deviation, wanted)
        self.builder.map_results(call, self.emit(decompositions.normalized_backward, args, call))

    def _log_softmax(self, call: Call) -> None:
        tensor, dim, _ = self._args(call)
        dtype = self.old.metas[call.results[0]].dtype
        (row,) = self.emit(decompositions.log_sum_exp, (tensor, dim), call).results
        (result,) = self.emit(decompositions.minus, (tensor, row, dtype), call).results
        self.node_map[call.results[0]] = result

    def _is_over_rows(self, call: Call) -> bool:
        """True if a loss is over rows of classes without weights."""
        args = self._args(call)
        return args[3] is None and len(self.builder.meta(args[1]).shape) == 2

    def _class_gradient(self, call: Call) -> None:
        """Pointwise: the operator would fill memory with zeros first."""
        grad, _, target, _, reduction, ignored, total = self._args(call)
        shape = list(self.old.metas[call.results[0]].shape)
        args = (grad, target, shape, ignored, total, reduction)
        self.builder.map_results(call, self.emit(decompositions.class_gradient, args, call))

    def _is_of_class_gradient(self, call: Call) -> bool:
        """True if log-softmax backward is given a class gradient."""
        grad, _, dim, _ = self._args(call)
        return grad.target is decompositions.class_gradient and dim in (1, -1)

    def _scores_gradient(self, call: Call) -> None:
        """Without a sum over all classes."""
        class_gradient, scores, _, dtype = self._args(call)
        grad, target, _, *options = class_gradient.args
        args = (scores, grad, target, *options, dtype)
        self.builder.map_results(call, self.emit(decompositions.scores_gradient, args, call))
