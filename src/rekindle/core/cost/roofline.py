"""Analytic profiles: what a step would take on a GPU that is not there.

An op takes `floor + factor × max(FLOPs / rate, bytes / bandwidth)`. The factor says how far a kind
of operator stays from the roof, the floor what its smallest kernel takes; both were fitted to
profiles measured on an H200 (benchmarks/profiles) and are used for every device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cost.devices import Device
from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.cost.workspaces import workspace_bytes
from rekindle.core.graph.graph import Op, StepGraph, Value
from rekindle.core.graph.op_names import nbytes_of, op_name


class Kind(NamedTuple):
    """How operators of one kind perform: see the module's docstring."""

    factor: float
    floor_us: float


# By the operator's name, the longest prefix that fits: "mm" also stands for "mm_anything".
_KINDS = {
    "": Kind(1.05, 2.4),  # element-wise, and all that is not listed
    "mm": Kind(1.45, 4.0),
    "addmm": Kind(1.45, 4.0),
    "bmm": Kind(1.48, 3.5),
    "baddbmm": Kind(1.48, 3.5),
    "convolution": Kind(3.2, 8.0),
    "convolution_backward": Kind(3.75, 16.0),
    "native_batch_norm": Kind(7.9, 2.0),
    "native_batch_norm_backward": Kind(7.2, 2.0),
    "batch_norm_elemt": Kind(3.25, 2.0),
    "cudnn_batch_norm": Kind(2.35, 2.0),
    "cudnn_batch_norm_backward": Kind(3.05, 2.0),
    "native_layer_norm": Kind(1.7, 1.6),
    "native_layer_norm_backward": Kind(2.7, 5.6),
    "native_group_norm": Kind(2.5, 3.0),
    "native_group_norm_backward": Kind(4.0, 6.0),
    "_scaled_dot_product": Kind(2.7, 6.0),
    "_scaled_dot_product_efficient_attention_backward": Kind(2.36, 8.0),
    "_scaled_dot_product_cudnn_attention": Kind(6.0, 6.0),
    "_scaled_dot_product_cudnn_attention_backward": Kind(4.4, 8.0),
    "_scaled_dot_product_flash_attention": Kind(6.0, 6.0),
    "_scaled_dot_product_flash_attention_backward": Kind(4.4, 8.0),
    "_to_copy": Kind(1.45, 1.9),
    "sum": Kind(2.3, 7.0),
    "mean": Kind(2.3, 5.0),
    "var": Kind(2.5, 5.0),
    "linalg_vector_norm": Kind(2.0, 5.0),
    "gelu": Kind(1.42, 1.5),
    "gelu_backward": Kind(1.3, 1.5),
    "native_dropout": Kind(1.5, 2.0),
    "native_dropout_backward": Kind(1.06, 1.5),
    "_log_softmax": Kind(2.0, 3.0),
    "_log_softmax_backward_data": Kind(1.35, 3.0),
    "nll_loss": Kind(1.05, 10.0),
    "_softmax": Kind(1.6, 3.0),
    "_softmax_backward_data": Kind(1.6, 3.0),
    "max_pool2d_with_indices": Kind(1.5, 3.0),
    "max_pool2d_with_indices_backward": Kind(7.7, 3.0),
    "embedding": Kind(1.5, 2.0),
    "embedding_dense_backward": Kind(4.0, 65.0),
    "_fused": Kind(1.15, 50.0),
    "_foreach": Kind(1.1, 5.0),
    "_cudnn_rnn": Kind(3.0, 50.0),
}
_MISALIGNED = 5.4  # GPT-2's vocabulary of 50257 words
_TRANSPOSING = ("t", "transpose", "permute")
_REACHED_OF_BANDWIDTH = 0.9  # a plain copy's share of the vendor's figure


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
    """The bytes each op reads and writes, each value counted once each way; views move none."""
    sizes = [min(nbytes_of(value), graph.storages[value.storage].nbytes) for value in graph.values]

    def moved(op: Op) -> int:
        if op.is_view:
            return 0
        written = sum(sizes[v] for v in {*op.outputs, *op.mutates})
        if op_name(op).startswith("embedding") and not op.mutates:
            return 2 * written  # only the rows that are looked up
        return written + sum(sizes[v] for v in set(op.inputs))

    return np.array([moved(op) for op in graph.ops], dtype=np.int64)


def kind_of(name: str) -> Kind:
    """The kind of an operator: that of the longest known name it starts with."""
    fits = [known for known in _KINDS if name == known or name.startswith(known)]
    return _KINDS[max(fits, key=len)]


def _time_us(graph: StepGraph, op: Op, nbytes: int, device: Device) -> float:
    if op.is_view or not (op.outputs or op.mutates):
        return 0.0
    name = op_name(op)
    dtype = _compute_dtype(graph, op)
    if name.startswith("native_batch_norm") and dtype == "float32":
        name = name.replace("native", "cudnn")  # what a GPU runs there
    rate = device.flops_per_us(dtype, tf32=name.startswith("convolution"))
    bandwidth = device.bandwidth_bytes_per_us * _REACHED_OF_BANDWIDTH
    kind = kind_of(name)
    if name in ("mm", "addmm", "bmm") and _is_misaligned(graph, op, dtype):
        kind = kind._replace(factor=kind.factor * _MISALIGNED)
    return kind.floor_us + kind.factor * max(op.flops / rate, nbytes / bandwidth)


def _copy_us(op: Op, nbytes: int, device: Device) -> float:
    """The time of the operator that computes an op's result again: element by element."""
    kind = kind_of(op.copy_target.split(".")[1])
    return kind.floor_us + kind.factor * nbytes / (
        device.bandwidth_bytes_per_us * _REACHED_OF_BANDWIDTH
    )


def _is_misaligned(graph: StepGraph, op: Op, dtype: str) -> bool:
    """Whether a matrix in half precision has rows of odd length, which rules fast kernels out.

    How many rows there are does not matter.
    """
    if dtype == "float32":
        return False
    lengths = (_row_length(graph, graph.values[v]) for v in (*op.inputs, *op.outputs))
    return any(length > 1 and length % 2 for length in lengths)


def _row_length(graph: StepGraph, value: Value) -> int:
    """How many elements lie side by side: a transposed matrix lies as it was.

    Other views are taken for what they look like.
    """
    if value.producer is not None:
        view = graph.ops[value.producer]
        if view.is_view and op_name(view) in _TRANSPOSING:
            return _row_length(graph, graph.values[view.inputs[0]])
    return value.shape[-1] if value.shape else 1


def _compute_dtype(graph: StepGraph, op: Op) -> str:
    """The type an op computes in: that of its first floating-point input."""
    for value in (*op.inputs, *op.outputs):
        if "float" in graph.values[value].dtype:
            return graph.values[value].dtype
    return "float32"
