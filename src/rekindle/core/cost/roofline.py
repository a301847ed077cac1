"""Analytic profiles: the time and memory of a step on a GPU that is not at hand (roofline model).

Williams et al., "Roofline: an insightful visual performance model", 2009. An op takes
`floor + factor × max(FLOPs / rate, bytes / bandwidth)`: the factor is how far a kind of operator
stays below the roofline, the floor is the time of its smallest kernel. Both were fitted to profiles
measured on an H200 (benchmarks/profiles) and are used for every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cost.devices import Device
from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.graph.graph import Op, StepGraph, Value, nbytes_of, op_name


class OpRoofline(NamedTuple):
    """The roofline parameters of one kind of operator: see the module's docstring."""

    factor: float
    floor_us: float


# By the longest prefix of the operator's name: "mm" also covers "mm_anything".
OP_ROOFLINES = {
    "": OpRoofline(1.05, 2.4),  # element-wise, and everything not listed
    "mm": OpRoofline(1.45, 4.0),
    "addmm": OpRoofline(1.45, 4.0),
    "bmm": OpRoofline(1.48, 3.5),
    "baddbmm": OpRoofline(1.48, 3.5),
    "convolution": OpRoofline(3.2, 8.0),
    "convolution_backward": OpRoofline(3.75, 16.0),
    "native_batch_norm": OpRoofline(7.9, 2.0),
    "native_batch_norm_backward": OpRoofline(7.2, 2.0),
    "batch_norm_elemt": OpRoofline(3.25, 2.0),
    "cudnn_batch_norm": OpRoofline(2.35, 2.0),
    "cudnn_batch_norm_backward": OpRoofline(3.05, 2.0),
    "native_layer_norm": OpRoofline(1.7, 1.6),
    "native_layer_norm_backward": OpRoofline(2.7, 5.6),
    "native_group_norm": OpRoofline(2.5, 3.0),
    "native_group_norm_backward": OpRoofline(4.0, 6.0),
    "_scaled_dot_product": OpRoofline(2.7, 6.0),
    "_scaled_dot_product_efficient_attention_backward": OpRoofline(2.36, 8.0),
    "_scaled_dot_product_cudnn_attention": OpRoofline(6.0, 6.0),
    "_scaled_dot_product_cudnn_attention_backward": OpRoofline(4.4, 8.0),
    "_scaled_dot_product_flash_attention": OpRoofline(6.0, 6.0),
    "_scaled_dot_product_flash_attention_backward": OpRoofline(4.4, 8.0),
    "_to_copy": OpRoofline(1.45, 1.9),
    "sum": OpRoofline(2.3, 7.0),
    "mean": OpRoofline(2.3, 5.0),
    "var": OpRoofline(2.5, 5.0),
    "linalg_vector_norm": OpRoofline(2.0, 5.0),
    "gelu": OpRoofline(1.42, 1.5),
    "gelu_backward": OpRoofline(1.3, 1.5),
    "native_dropout": OpRoofline(1.5, 2.0),
    "native_dropout_backward": OpRoofline(1.06, 1.5),
    "_log_softmax": OpRoofline(2.0, 3.0),
    "_log_softmax_backward_data": OpRoofline(1.35, 3.0),
    "nll_loss": OpRoofline(1.05, 10.0),
    "_softmax": OpRoofline(1.6, 3.0),
    "_softmax_backward_data": OpRoofline(1.6, 3.0),
    "max_pool2d_with_indices": OpRoofline(1.5, 3.0),
    "max_pool2d_with_indices_backward": OpRoofline(7.7, 3.0),
    "embedding": OpRoofline(1.5, 2.0),
    "embedding_dense_backward": OpRoofline(4.0, 65.0),
    "_fused": OpRoofline(1.15, 50.0),
    "_foreach": OpRoofline(1.1, 5.0),
    "_cudnn_rnn": OpRoofline(3.0, 50.0),
}
_MISALIGNED_FACTOR = 5.4  # measured on GPT-2's vocabulary of 50257 words
_TRANSPOSING = ("t", "transpose", "permute")
_REACHED_BANDWIDTH_RATIO = 0.9  # of the vendor's figure, by a plain copy

# Workspaces, by rules read off the same profiles. cuDNN computes convolutions in channels_last, so
# tensors are copied to that layout and back, unless they have it already, which the graph does not
# tell. A 1×1 convolution with stride 1 is a matmul, but its weight gradient is computed per sample
# and then summed. Row sums and the gradients of attention and embeddings accumulate in float32.
# Other operators need next to nothing.
_CHANNEL_MULTIPLE = 8  # channels are padded to a multiple of this
_MIN_PIXELS_FOR_MATMUL = 100  # below, a 1×1 convolution is computed like any other
_MAX_SUM_WORKSPACE_BYTES = 132 << 20
_EMBEDDING_ROWS_PER_BLOCK = 10  # of an embedding's gradient, summed by one thread block
_SORTED_INDEX_BYTES = 24  # an index with its position, before and after sorting


def analytic_profile(graph: StepGraph, device: Device) -> Profile:
    """The costs of a graph's ops on a device, from FLOPs and bytes."""
    traffic = bytes_moved(graph)
    costs = tuple(
        OpCost(
            _time_us(graph, op, int(nbytes), device),
            workspace_bytes(graph, op),
            copy_us=_copy_us(op, int(nbytes), device) if op.copy_target else None,
        )
        for op, nbytes in zip(graph.ops, traffic, strict=True)
    )
    return Profile(
        device=device.name,
        fingerprint=graph.fingerprint,
        costs=costs,
        allocator="cuda",
        overhead_bytes=device.overhead_bytes,
        to_host_bytes_per_us=device.host_bytes_per_us,
        to_device_bytes_per_us=device.host_bytes_per_us,
        method="analytic: roofline fitted on an H200",
    )


def bytes_moved(graph: StepGraph) -> NDArray[np.int64]:
    """The bytes each op reads and writes, each value counted once per direction; 0 for views."""
    sizes = [min(nbytes_of(value), graph.storages[value.storage].nbytes) for value in graph.values]

    def moved(op: Op) -> int:
        if op.is_view:
            return 0
        written = sum(sizes[v] for v in {*op.outputs, *op.mutates})
        if op_name(op).startswith("embedding") and not op.mutates:
            return 2 * written  # reads only the rows that are looked up
        return written + sum(sizes[v] for v in set(op.inputs))

    return np.array([moved(op) for op in graph.ops], dtype=np.int64)


def roofline_of(name: str, kinds: Mapping[str, OpRoofline] = OP_ROOFLINES) -> OpRoofline:
    """The parameters of an operator: those of the longest known name it starts with."""
    return kinds[max((known for known in kinds if name.startswith(known)), key=len)]


def _time_us(graph: StepGraph, op: Op, nbytes: int, device: Device) -> float:
    if op.is_view or not (op.outputs or op.mutates):
        return 0.0
    name = op_name(op)
    dtype = _compute_dtype(graph, op)
    if name.startswith("native_batch_norm") and dtype == "float32":
        name = name.replace("native", "cudnn")  # the kernel that a GPU runs for it
    rate = device.flops_per_us(dtype, tf32=name.startswith("convolution"))
    bandwidth = device.bandwidth_bytes_per_us * _REACHED_BANDWIDTH_RATIO
    params = roofline_of(name)
    if name in ("mm", "addmm", "bmm") and _is_misaligned(graph, op, dtype):
        params = params._replace(factor=params.factor * _MISALIGNED_FACTOR)
    return params.floor_us + params.factor * max(op.flops / rate, nbytes / bandwidth)


def _copy_us(op: Op, nbytes: int, device: Device) -> float:
    """The time of the element-wise operator that recomputes an op's result."""
    params = roofline_of(op.copy_target.split(".")[1])
    return params.floor_us + params.factor * nbytes / (
        device.bandwidth_bytes_per_us * _REACHED_BANDWIDTH_RATIO
    )


def _is_misaligned(graph: StepGraph, op: Op, dtype: str) -> bool:
    """True if a half-precision matrix has rows of odd length, which rules out fast kernels."""
    if dtype == "float32":
        return False
    lengths = (_row_length(graph, graph.values[v]) for v in (*op.inputs, *op.outputs))
    return any(length > 1 and length % 2 for length in lengths)


def _row_length(graph: StepGraph, value: Value) -> int:
    """The length of a row in memory: a transposed matrix keeps the layout of its base.

    Other views are assumed to be contiguous.
    """
    if value.producer is not None:
        view = graph.ops[value.producer]
        if view.is_view and op_name(view) in _TRANSPOSING:
            return _row_length(graph, graph.values[view.inputs[0]])
    return value.shape[-1] if value.shape else 1


def _compute_dtype(graph: StepGraph, op: Op) -> str:
    """The dtype an op computes in: that of its first floating-point input."""
    for value in (*op.inputs, *op.outputs):
        if "float" in graph.values[value].dtype:
            return graph.values[value].dtype
    return "float32"


def workspace_bytes(graph: StepGraph, op: Op) -> int:
    """The workspace that an op is likely to allocate."""
    rule = _WORKSPACE_RULES.get(op_name(op))
    inputs = [graph.values[value] for value in op.inputs]
    outputs = [graph.values[value] for value in op.outputs]
    return rule(inputs, outputs) if rule else 0


def _convolution(inputs: list[Value], outputs: list[Value]) -> int:
    image, weight, result = inputs[0], inputs[1], outputs[0]
    if _is_matmul(image, weight, result) and math.prod(image.shape[2:]) >= _MIN_PIXELS_FOR_MATMUL:
        return 0
    return _channels_last(image, weight, result)


def _convolution_backward(inputs: list[Value], outputs: list[Value]) -> int:
    gradient, image, weight = inputs[:3]
    copies = _channels_last(image, weight, gradient)
    if not _is_matmul(image, weight, gradient):
        return copies
    return min(4 * image.shape[0] * math.prod(weight.shape), copies)


def _is_matmul(image: Value, weight: Value, result: Value) -> bool:
    """True if a convolution is a matmul: 1×1 with stride 1."""
    return math.prod(weight.shape[2:]) == 1 and image.shape[2:] == result.shape[2:]


def _channels_last(image: Value, weight: Value, result: Value) -> int:
    """The bytes of channels_last copies of all three, with padded channels."""
    return sum(
        nbytes_of(value)
        * math.ceil(value.shape[1] / _CHANNEL_MULTIPLE)
        * _CHANNEL_MULTIPLE
        // max(value.shape[1], 1)
        for value in (image, weight, result)
    )


def _sum(inputs: list[Value], outputs: list[Value]) -> int:
    """Partial sums over all rows; other sums need next to none."""
    source, result = inputs[0], outputs[0]
    is_of_all_rows = len(source.shape) > 1 and math.prod(result.shape) == source.shape[-1]
    return min(8 * math.prod(source.shape), _MAX_SUM_WORKSPACE_BYTES) if is_of_all_rows else 0


def _attention_backward(inputs: list[Value], outputs: list[Value]) -> int:
    """The query's gradient in float32."""
    return 4 * math.prod(outputs[0].shape)


def _embedding_backward(inputs: list[Value], outputs: list[Value]) -> int:
    indices, table = inputs[-1], outputs[0]
    rows, width = table.shape
    n_indices = math.prod(indices.shape)
    if n_indices < rows // _EMBEDDING_ROWS_PER_BLOCK:
        return _SORTED_INDEX_BYTES * n_indices
    partial = min(n_indices, rows) + n_indices // _EMBEDDING_ROWS_PER_BLOCK
    return 4 * width * partial + _SORTED_INDEX_BYTES * n_indices


_WORKSPACE_RULES: dict[str, Callable[[list[Value], list[Value]], int]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "sum": _sum,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "embedding_dense_backward": _embedding_backward,
}
