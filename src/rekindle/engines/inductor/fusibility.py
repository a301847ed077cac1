"""Which calls the compiler fuses: element by element, reductions, and what is made of both."""

from __future__ import annotations

from typing import Any

import torch

from rekindle.engines.inductor import decompositions
from rekindle.passes.fusible_ops import is_elementwise, is_reduction

aten = torch.ops.aten

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
    return is_elementwise(target) or target in _SIMPLE_HALVES


def is_fusible(target: Any) -> bool:
    """Whether the compiler can make it one kernel with its neighbours."""
    is_other = target in _OTHER_HALVES or target in _OTHERS
    return is_simple(target) or is_other or is_reduction(target)
