"""What operators allocate beside their results on a GPU, by rules read off measured profiles.

Convolutions are computed with the channels last: unless the tensors lie so already, which a graph
does not tell, they are copied to and fro. A matrix product does for a 1×1 convolution that skips
nothing, but its weights' gradient is found sample by sample and then summed up. Sums over rows,
gradients of attention and of an embedding's table are gathered in float32. What is not listed
needs nothing to speak of. The rules were read off profiles of an H200 (benchmarks/profiles).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rekindle.core.graph.graph import Op, StepGraph, Value
from rekindle.core.graph.op_names import nbytes_of, op_name

_ALIGNED = 8  # channels are filled up to a multiple of this
_SMALL_PICTURE = 100  # pixels: with fewer, a 1×1 convolution is computed as the others are
_MOST_FOR_SUM = 132 << 20
_ROWS_TOGETHER = 10  # of an embedding's gradient, summed up by one block
_SORTED_BYTES = 24  # an index, with its place, before and after sorting


def workspace_bytes(graph: StepGraph, op: Op) -> int:
    """What an op is likely to allocate beside its results."""
    rule = _RULES.get(op_name(op))
    inputs = [graph.values[value] for value in op.inputs]
    outputs = [graph.values[value] for value in op.outputs]
    return rule(inputs, outputs) if rule else 0


def _convolution(inputs: list[Value], outputs: list[Value]) -> int:
    picture, weight, result = inputs[0], inputs[1], outputs[0]
    if _is_product(picture, weight, result) and math.prod(picture.shape[2:]) >= _SMALL_PICTURE:
        return 0
    return _channels_last(picture, weight, result)


def _convolution_backward(inputs: list[Value], outputs: list[Value]) -> int:
    gradient, picture, weight = inputs[:3]
    copies = _channels_last(picture, weight, gradient)
    if not _is_product(picture, weight, gradient):
        return copies
    return min(4 * picture.shape[0] * math.prod(weight.shape), copies)


def _is_product(picture: Value, weight: Value, result: Value) -> bool:
    """Whether a convolution is a product of matrices: one pixel for one."""
    return math.prod(weight.shape[2:]) == 1 and picture.shape[2:] == result.shape[2:]


def _channels_last(picture: Value, weight: Value, result: Value) -> int:
    """Copies of all three, the channels filled up."""
    return sum(
        nbytes_of(value) * math.ceil(value.shape[1] / _ALIGNED) * _ALIGNED // max(value.shape[1], 1)
        for value in (picture, weight, result)
    )


def _sum(inputs: list[Value], outputs: list[Value]) -> int:
    """Of all rows; other sums have no partial ones to speak of."""
    source, result = inputs[0], outputs[0]
    is_of_all_rows = len(source.shape) > 1 and math.prod(result.shape) == source.shape[-1]
    return min(8 * math.prod(source.shape), _MOST_FOR_SUM) if is_of_all_rows else 0


def _attention_backward(inputs: list[Value], outputs: list[Value]) -> int:
    """The query's gradient."""
    return 4 * math.prod(outputs[0].shape)


def _embedding_backward(inputs: list[Value], outputs: list[Value]) -> int:
    indices, table = inputs[-1], outputs[0]
    rows, width = table.shape
    n_indices = math.prod(indices.shape)
    if n_indices < rows // _ROWS_TOGETHER:
        return _SORTED_BYTES * n_indices
    partial = min(n_indices, rows) + n_indices // _ROWS_TOGETHER
    return 4 * width * partial + _SORTED_BYTES * n_indices


_RULES: dict[str, Callable[[list[Value], list[Value]], int]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "sum": _sum,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "embedding_dense_backward": _embedding_backward,
}
