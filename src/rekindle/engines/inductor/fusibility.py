"""Which calls the compiler fuses: element by element, reductions, and what is made of both."""

from __future__ import annotations

from typing import Any

import torch

from rekindle.engines.inductor import decompositions
from rekindle.torch_internals import OpOverload

aten = torch.ops.aten

_COPIES = frozenset((aten._to_copy.default, aten.clone.default))
_MAKERS = frozenset(
    (
        *(aten.full.default, aten.full_like.default, aten.arange.default, aten.arange.start),
        *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default),
        *(aten.ones.default, aten.ones_like.default, aten.new_ones.default),
    )
)
_OTHERS = frozenset(
    (
        *(aten.native_layer_norm.default, aten.native_layer_norm_backward.default),
        *(aten.native_group_norm.default, aten.native_group_norm_backward.default),
        *(aten.native_batch_norm.default, aten.native_batch_norm_backward.default),
        *(aten._softmax.default, aten._softmax_backward_data.default),
        *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
        *(aten.nll_loss_forward.default, aten.nll_loss_backward.default),
        *(aten.mse_loss.default, aten.mse_loss_backward.default),
        *(aten.hardtanh_backward.default, aten.leaky_relu_backward.default),
        *(aten.slice_backward.default, aten.select_backward.default),
        *(aten.constant_pad_nd.default, aten.cat.default, aten.stack.default),
    )
)
# On a CPU, given long and short numbers, these keep statistics that the compiler makes short.
KEEP_LONG_STATISTICS = frozenset(
    (
        *(aten.native_layer_norm.default, aten.native_layer_norm_backward.default),
        *(aten.native_group_norm.default, aten.native_group_norm_backward.default),
    )
)
_OTHER_HALVES = (
    decompositions.log_sum_exp,
    decompositions.normalized_backward,
    decompositions.class_gradient,
)
_SIMPLE_HALVES = frozenset(
    (
        *(
            decompositions.draw_mask,
            decompositions.keep_masked,
            decompositions.normalized,
            decompositions.minus,
        ),
        decompositions.scores_gradient,
    )
)


def is_simple(target: Any) -> bool:
    """Whether each element of the result follows from one element of each argument, or of none."""
    if isinstance(target, OpOverload):
        return torch.Tag.pointwise in target.tags or target in _COPIES or target in _MAKERS
    return target in _SIMPLE_HALVES


def is_fusible(target: Any) -> bool:
    """Whether the compiler can make it one kernel with its neighbours."""
    if is_simple(target) or target in _OTHER_HALVES:
        return True
    is_reduction = isinstance(target, OpOverload) and torch.Tag.reduction in target.tags
    return is_reduction or target in _OTHERS
