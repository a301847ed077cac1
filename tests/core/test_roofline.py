"""FLOPs by the rules of a lecture, as exact integers; bytes and analytic times by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.hand_made import one_op
from torch import nn

import rekindle
from rekindle.core.cost.devices import Device
from rekindle.core.cost.roofline import OpRoofline, analytic_profile, bytes_moved, roofline_of
from rekindle.core.graph.graph import Phase, Role, StepGraph, op_name

D, H, K, N = 7, 11, 5, 13  # features, hidden, classes, batch: primes, so that no sum hides another


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    model(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def captured(model: nn.Module, batch: torch.Tensor) -> StepGraph:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return rekindle.capture(train_step, model, optimizer, batch).graph


def flops(graph: StepGraph, phase: Phase) -> list[int]:
    return [op.flops for op in graph.ops if op.phase is phase and op.flops]


def test_three_layers_without_bias() -> None:
    """A layer's backward pass is two products of its forward one's size; the first has but one."""
    model = nn.Sequential(
        nn.Linear(D, H, bias=False),
        nn.ReLU(),
        nn.Linear(H, H, bias=False),
        nn.ReLU(),
        nn.Linear(H, K, bias=False),
    )
    graph = captured(model, torch.randn(N, D))
    first, second, third = 2 * D * H * N, 2 * H**2 * N, 2 * H * K * N
    assert flops(graph, Phase.FORWARD) == [first, second, third]
    assert flops(graph, Phase.BACKWARD) == [third, third, second, second, first]
    assert graph.flops_by_phase() == {
        Phase.FORWARD: first + second + third,
        Phase.LOSS: 0,
        Phase.BACKWARD: first + 2 * second + 2 * third,
        Phase.OPTIMIZER: 0,
    }


def test_a_bias_adds_no_flops() -> None:
    with_bias, without = (
        captured(nn.Linear(D, H, bias=bias), torch.randn(N, D)) for bias in (True, False)
    )
    assert flops(with_bias, Phase.FORWARD) == flops(without, Phase.FORWARD) == [2 * D * H * N]
    assert flops(with_bias, Phase.BACKWARD) == flops(without, Phase.BACKWARD) == [2 * D * H * N]


def test_convolution_against_fully_connected() -> None:
    """c channels of d × d to as many: 18 c² d² with kernels of 3 × 3, 2 c² d⁴ fully connected."""
    c, d = 3, 5
    images = torch.randn(N, c, d, d)
    convolution = captured(nn.Conv2d(c, c, 3, padding=1, bias=False), images)
    connected = captured(nn.Linear(c * d**2, c * d**2, bias=False), images.flatten(1))
    assert flops(convolution, Phase.FORWARD) == [18 * c**2 * d**2 * N]
    assert flops(connected, Phase.FORWARD) == [2 * c**2 * d**4 * N]
    bytes_of = [graph.bytes_by_role()[Role.PARAM] for graph in (convolution, connected)]
    assert bytes_of == [4 * 9 * c**2, 4 * c**2 * d**4]


def test_convolution_backwards() -> None:
    """The second layer needs the gradients of weight and input, the first that of its weight."""
    c, d = 3, 5
    model = nn.Sequential(*(nn.Conv2d(c, c, 3, padding=1, bias=False) for _ in range(2)))
    graph = captured(model, torch.randn(N, c, d, d))
    once = 18 * c**2 * d**2 * N
    assert flops(graph, Phase.FORWARD) == [once, once]
    assert flops(graph, Phase.BACKWARD) == [2 * once, once]


def test_depthwise_convolution() -> None:
    """A channel for itself: 2 c k² d², of the c² k² kernel values c k² are left."""
    c, d, k = 6, 5, 3
    model = nn.Conv2d(c, c, k, padding=1, groups=c, bias=False)
    graph = captured(model, torch.randn(N, c, d, d))
    assert flops(graph, Phase.FORWARD) == [2 * c * k**2 * d**2 * N]
    assert graph.bytes_by_role()[Role.PARAM] == 4 * c * k**2


# Bytes


F32, BF16, I64 = "float32", "bfloat16", "int64"
MM = [((2, 3), F32), ((3, 5), F32)]


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (one_op("aten.mm.default", MM, [((2, 5), F32)]), 24 + 60 + 40),
        (one_op("aten.mm.default", [((2, 3), BF16), ((3, 5), BF16)], [((2, 5), BF16)]), 62),
        (one_op("aten.t.default", [((2, 3), F32)], [((3, 2), F32)], is_view=True), 0),
        # in place: read and written
        (one_op("aten.add_.Tensor", [((6,), F32), ((6,), F32)], [], mutates=(0,)), 24 + 48),
        (one_op("aten.zero_.default", [((6,), F32)], [], mutates=(0,)), 48),
        (one_op("aten.native_dropout.default", [((6,), F32)], [((6,), F32), ((6,), "bool")]), 54),
        (one_op("aten.argmax.default", [((6,), "float64")], [((), I64)]), 48 + 8),
        # only the rows that are looked up, not the whole table
        (one_op("aten.embedding.default", [((99, 4), F32), ((3,), I64)], [((3, 4), F32)]), 96),
        # an expanded value has no more bytes than its storage
        (one_op("aten.neg.default", [((1000,), F32)], [((1000,), F32)], nbytes=4), 8),
    ],
    ids=lambda case: case.ops[0].target if isinstance(case, StepGraph) else "",
)
def test_bytes_moved(graph: StepGraph, expected: int) -> None:
    assert bytes_moved(graph).tolist() == [expected]


def test_a_value_read_twice_is_counted_once() -> None:
    graph = one_op("aten.mul.Tensor", [((6,), F32)], [((6,), F32)])
    twice = dataclasses.replace(graph, ops=(dataclasses.replace(graph.ops[0], inputs=(0, 0)),))
    assert bytes_moved(twice).tolist() == bytes_moved(graph).tolist() == [48]


# Times

SLOW = Device("slow", 1 << 34, 1e3, 1e3, 2e3, 4e3, overhead_bytes=77)


def time_us(graph: StepGraph, device: Device) -> float:
    """The time of a graph's one op beyond its floor, by its factor."""
    [op] = graph.ops
    kind = roofline_of(op_name(op))
    return (analytic_profile(graph, device).costs[0].time_us - kind.floor_us) / kind.factor


def test_an_op_bound_by_flops() -> None:
    graph = one_op("aten.mm.default", MM, [((2, 5), F32)], flops=10**9)
    assert time_us(graph, SLOW) == pytest.approx(10**9 / 1e3)
    quick = dataclasses.replace(SLOW, float32_flops_per_us=4e3)
    assert time_us(graph, quick) == pytest.approx(10**9 / 4e3)
    wide = dataclasses.replace(SLOW, bandwidth_bytes_per_us=1e6)
    assert time_us(graph, wide) == time_us(graph, SLOW)


def test_an_op_bound_by_bytes() -> None:
    """Twice the bandwidth halves the time; FLOPs do not matter."""
    graph = one_op("aten.neg.default", [((10**6,), F32)], [((10**6,), F32)])
    wide = dataclasses.replace(SLOW, bandwidth_bytes_per_us=2e3)
    quick = dataclasses.replace(SLOW, float32_flops_per_us=1e9)
    assert time_us(graph, SLOW) > 8e6 / 1e3  # a bit less than the vendor's figure is reached
    assert time_us(graph, SLOW) == pytest.approx(2 * time_us(graph, wide))
    assert time_us(graph, quick) == time_us(graph, SLOW)


def test_the_data_type_decides_the_rate() -> None:
    forms = {dtype: [((2, 4), dtype), ((4, 6), dtype)] for dtype in (F32, BF16, "float64")}
    times = {
        dtype: time_us(one_op("aten.mm.default", form, [((2, 6), dtype)], flops=10**9), SLOW)
        for dtype, form in forms.items()
    }
    assert times[F32] == pytest.approx(10**9 / 1e3)
    assert times[BF16] == pytest.approx(10**9 / 4e3)
    assert times["float64"] == pytest.approx(10**9 / 500)


def test_convolutions_in_float32_run_on_tensor_cores() -> None:
    """Torch lets cuDNN use TF32, and matrix products not."""
    form = [((1, 4, 8, 8), F32), ((4, 4, 3, 3), F32)]
    graph = one_op("aten.convolution.default", form, [((1, 4, 8, 8), F32)], flops=10**9)
    assert time_us(graph, SLOW) == pytest.approx(10**9 / 2e3)


def products_us(batch: int, width: int) -> float:
    """The time of all products of two layers in half precision, forward and backward."""
    layers = (nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(2))
    graph = captured(nn.Sequential(*layers), torch.randn(batch, width, dtype=torch.bfloat16))
    costs = analytic_profile(graph, SLOW).costs
    return sum(c.time_us for o, c in zip(graph.ops, costs, strict=True) if op_name(o) == "mm")


def test_rows_of_odd_length_are_slow_and_an_odd_number_of_them_is_not() -> None:
    assert products_us(2001, 512) == pytest.approx(products_us(2000, 512), rel=0.01)
    assert products_us(2000, 513) > 3 * products_us(2000, 512)


def test_views_take_no_time() -> None:
    graph = one_op("aten.t.default", [((2, 3), F32)], [((3, 2), F32)], is_view=True)
    assert analytic_profile(graph, SLOW).times_us.tolist() == [0]


def test_the_profile_carries_the_devices_figures() -> None:
    graph = one_op("aten.mm.default", MM, [((2, 5), F32)])
    profile = analytic_profile(graph, SLOW)
    profile.check(graph)
    assert (profile.device, profile.allocator, profile.overhead_bytes) == ("slow", "cuda", 77)
    assert profile.to_host_us(24_000) == profile.to_device_us(24_000) == 10 + 1
    assert "analytic" in profile.method
    assert not any(cost.is_measured for cost in profile.costs)


def test_the_longest_prefix_decides_the_kind() -> None:
    kinds = {
        "": OpRoofline(1, 1),
        "conv": OpRoofline(2, 2),
        "conv_back": OpRoofline(3, 3),
        "mm": OpRoofline(4, 4),
    }
    found = {
        name: roofline_of(name, kinds).floor_us
        for name in ("conv", "conv_b", "conv_back", "conv_backward", "mm_", "addmm", "neg", "")
    }
    assert found == {
        **{"conv": 2, "conv_b": 2, "conv_back": 3, "conv_backward": 3},
        **{"mm_": 4, "addmm": 1, "neg": 1, "": 1},
    }


@pytest.mark.parametrize(
    "backward", ["convolution", "native_layer_norm", "max_pool2d_with_indices"]
)
def test_a_backward_op_has_a_kind_of_its_own(backward: str) -> None:
    assert roofline_of(f"{backward}_backward") is not roofline_of(backward)


def test_a_real_step_on_two_devices() -> None:
    """The same graph: memory as the allocator counts is the same, time goes with the device."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = rekindle.capture(train_step, model, optimizer, torch.randn(4096, 256))
    fast, slow = (rekindle.profile(step, device=name) for name in ("H100", "T4"))
    assert fast.step_us < slow.step_us / 3
    peaks = [
        rekindle.simulate(step.graph, profile).peak_bytes - profile.overhead_bytes
        for profile in (fast, slow)
    ]
    assert peaks[0] == peaks[1]
