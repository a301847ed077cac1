"""What the ops of a joint graph cost, without running them, and with fusion in mind.

A fused op takes the time to read what it reads from memory and to write what others read there. A
recomputation writes only where an opaque op (a matrix product, say) is to read the result: whatever
else reads it computes it in its own kernel. Opaque ops cost what the roofline says.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rekindle.core.cost.devices import Device, find_device
from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.cost.roofline import analytic_profile, bytes_moved
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.simulate import main_device
from rekindle.dynamo.joint_graph import TANGENTS, Joint
from rekindle.errors import ProfileError

_FACTOR = 1.05  # over a plain copy, as the roofline has it for element-wise kernels
_REACHED = 0.9  # a plain copy's share of the vendor's bandwidth
_FLOOR_US = 2.4
_UNKNOWN_GPU = "A100-80GB"
# Of a CPU nothing is known: only how times compare matters, and this is a common ratio.
_CPU = Device("CPU", 1 << 40, 50e3, 1e6, 1e6, 2e6, overhead_bytes=0)


def device_of(graph: StepGraph) -> Device:
    """What is known of the device that a graph runs on; a common GPU where that is nothing."""
    if not main_device(graph).startswith("cuda"):
        return _CPU
    try:
        return find_device(torch.cuda.get_device_name(main_device(graph)))
    except ProfileError:
        return find_device(_UNKNOWN_GPU)


def joint_profile(joint: Joint, device: Device | None = None) -> Profile:
    """The costs of a joint graph's ops."""
    step = joint.step
    device = device or device_of(step)
    found = analytic_profile(step, device)
    # the compiler lays pictures out for its convolutions itself
    costs = [replace(cost, workspace_bytes=0) for cost in found.costs]
    moved = bytes_moved(step)
    per_us = device.bandwidth_bytes_per_us * _REACHED
    is_written = _is_written(joint)
    for op in step.ops:
        if op.target == TANGENTS:
            costs[op.index] = OpCost(0.0)
        elif joint.is_fused[op.index]:
            nbytes = int(moved[op.index])
            written = sum(step.storage_of(v).nbytes for v in op.outputs)
            again = nbytes if is_written[op.index] else nbytes - written
            floor_us = _FLOOR_US if is_written[op.index] else 0.0
            costs[op.index] = OpCost(
                _FLOOR_US + _FACTOR * nbytes / per_us,
                copy_us=floor_us + _FACTOR * max(again, 0) / per_us,
            )
    is_gpu = device is not _CPU
    return replace(
        found,
        costs=tuple(costs),
        allocator="cuda" if is_gpu else "exact",
        overhead_bytes=device.overhead_bytes if is_gpu else 0,
        method="analytic: roofline fitted on an H200, kernels as the compiler fuses them",
        versions={"torch": torch.__version__},
    )


def _is_written(joint: Joint) -> list[bool]:
    """Of each op: whether something that is not fused reads its results."""
    step = joint.step
    found = [False] * len(step.ops)
    for op in step.ops:
        if not joint.is_fused[op.index]:
            for value in op.inputs:
                producer = step.values[value].producer
                if producer is not None:
                    found[producer] = True
    return found
