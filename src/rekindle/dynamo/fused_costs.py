"""The costs of a joint graph's ops, without running them.

A fused op takes the time to read its inputs from memory and to write its results. A recomputation
writes its results only for opaque ops such as matmuls: fused readers compute them in their own
kernels. Opaque ops cost what the roofline says.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rekindle.core.cost.devices import Device, find_device
from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.cost.roofline import analytic_profile, bytes_moved
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.simulate import main_device
from rekindle.dynamo.joint_graph import TANGENTS, JointGraph
from rekindle.errors import ProfileError

_TIME_OVER_COPY_RATIO = 1.05  # as the roofline has it for element-wise kernels
_COPY_BANDWIDTH_RATIO = 0.9  # a plain copy's, of the vendor's bandwidth
_KERNEL_FLOOR_US = 2.4
_DEFAULT_GPU = "A100-80GB"
# The speeds of a CPU are unknown; only the ratio of times matters, and this is a common one.
_CPU = Device("CPU", 1 << 40, 50e3, 1e6, 1e6, 2e6, overhead_bytes=0)


def joint_profile(joint: JointGraph) -> Profile:
    """The forecast costs of a joint graph's ops."""
    step = joint.step
    device = _device_of(step)
    profile = analytic_profile(step, device)
    # Inductor converts layouts for convolutions itself: they need no workspace for it.
    costs = [replace(cost, workspace_bytes=0) for cost in profile.costs]
    moved = bytes_moved(step)
    per_us = device.bandwidth_bytes_per_us * _COPY_BANDWIDTH_RATIO
    opaque = [op for op in step.ops if not joint.is_fused[op.index]]
    written = {step.values[value].producer for op in opaque for value in op.inputs}
    for op in step.ops:
        if op.target == TANGENTS:
            costs[op.index] = OpCost(0.0)
        elif joint.is_fused[op.index]:
            nbytes = int(moved[op.index])
            result_bytes = sum(step.storage_of(v).nbytes for v in op.outputs)
            copy_bytes = nbytes if op.index in written else nbytes - result_bytes
            copy_floor_us = _KERNEL_FLOOR_US if op.index in written else 0.0
            costs[op.index] = OpCost(
                _KERNEL_FLOOR_US + _TIME_OVER_COPY_RATIO * nbytes / per_us,
                copy_us=copy_floor_us + _TIME_OVER_COPY_RATIO * max(copy_bytes, 0) / per_us,
            )
    is_gpu = device is not _CPU
    return replace(
        profile,
        costs=tuple(costs),
        allocator="cuda" if is_gpu else "exact",
        overhead_bytes=device.overhead_bytes if is_gpu else 0,
        method="analytic: roofline fitted on an H200, kernels as the compiler fuses them",
        versions={"torch": torch.__version__},
    )


def _device_of(graph: StepGraph) -> Device:
    """The device that a graph runs on; a common GPU if it is unknown."""
    if not main_device(graph).startswith("cuda"):
        return _CPU
    try:
        return find_device(torch.cuda.get_device_name(main_device(graph)))
    except ProfileError:
        return find_device(_DEFAULT_GPU)
