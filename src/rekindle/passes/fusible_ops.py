"""The operators that Inductor fuses in every graph, whoever hands it over.

What else it fuses depends on the graph's operators. A recorded step (`engines/inductor`) has norms
and losses as one operator each; a joint graph of AOTAutograd (`dynamo`) has them decomposed, with
gathers and pooling of Inductor's own. Those lists are not merged: which kernels Inductor writes for
the one in the form of the other has not been compared on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from rekindle.torch_internals import OpOverload

aten = torch.ops.aten

_COPIES = frozenset((aten._to_copy.default, aten.clone.default))
_CREATIONS = frozenset(
    (
        *(aten.full.default, aten.full_like.default, aten.arange.default, aten.arange.start),
        *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default),
        *(aten.ones.default, aten.ones_like.default, aten.new_ones.default),
    )
)


def is_elementwise(target: Any) -> bool:
    """True if each element of the result depends on at most one element of each argument."""
    is_pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return is_pointwise or target in _COPIES or target in _CREATIONS


def is_reduction(target: Any) -> bool:
    """True for a sum, a mean, a variance and the like."""
    return isinstance(target, OpOverload) and torch.Tag.reduction in target.tags
