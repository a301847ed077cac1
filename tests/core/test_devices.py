"""GPUs by name: the ones known, how they are found, and adding one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle.core.cost import devices
from rekindle.core.cost.devices import Device, add_device, find_device
from rekindle.errors import ProfileError


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that a test adds are removed after it."""
    monkeypatch.setattr(devices, "DEVICES", dict(devices.DEVICES))


@pytest.mark.parametrize("name", ["H200", "A100-80GB", "H100", "L4", "T4", "RTX 4090"])
def test_known(name: str) -> None:
    assert find_device(name).name == name
    assert name in devices.DEVICES


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h200", "H200"),
        ("NVIDIA H200", "H200"),
        ("nvidia geforce rtx 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("RTX-4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("a100 80gb", "A100-80GB"),
        ("A100_80GB", "A100-80GB"),
        ("  l4 ", "L4"),
    ],
)
def test_spelled_otherwise(name: str, found: str) -> None:
    assert find_device(name).name == found


@pytest.mark.parametrize(
    ("name", "hint"), [("H2000", "'H200'"), ("RTX 4080", "'RTX 4090'"), ("A100", "'A100-")]
)
def test_an_unknown_name_lists_the_known_ones(name: str, hint: str) -> None:
    with pytest.raises(ProfileError) as caught:
        find_device(name)
    message = str(caught.value)
    assert f"unknown device {name!r}" in message
    assert f"Did you mean {hint}" in message
    assert "add_device" in message
    for known in devices.DEVICES:
        assert known in message


def test_a_name_like_no_other() -> None:
    with pytest.raises(ProfileError, match=r"unknown device 'quux'\. Known: ") as caught:
        find_device("quux")
    assert "Did you mean" not in str(caught.value)


def test_figures_are_of_the_right_size() -> None:
    """Rates are in FLOP and bytes a microsecond; tensor cores are no slower than plain units."""
    for name in devices.DEVICES:
        device = find_device(name)
        assert 8 << 30 <= device.memory_bytes <= 1 << 40, name
        assert 0.1e6 <= device.bandwidth_bytes_per_us <= 20e6, name
        plain, tf32, half = (
            device.float32_flops_per_us,
            device.tf32_flops_per_us,
            device.half_flops_per_us,
        )
        assert 1e6 <= plain <= tf32 < half <= 1e10, name
        assert device.host_bytes_per_us < device.bandwidth_bytes_per_us, name
        assert device.overhead_bytes < device.memory_bytes // 50, name


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_adding_a_device() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = rekindle.capture(train_step, model, optimizer, torch.ones(8, 4))
    with pytest.raises(ProfileError):
        rekindle.profile(captured, device="Abacus 9")
    abacus = Device("Abacus 9", 1 << 30, 1.0, 1.0, 1.0, 1.0, overhead_bytes=5)
    rekindle.add_device(abacus)
    assert list(devices.DEVICES)[-1] == "Abacus 9"
    profile = rekindle.profile(captured, device="nvidia abacus-9")
    assert (profile.device, profile.overhead_bytes) == ("Abacus 9", 5)
    assert profile.step_us > rekindle.profile(captured, device="T4").step_us


@pytest.mark.parametrize("name", ["H200", "h200", "NVIDIA H200"])
def test_replacing_a_device(name: str) -> None:
    """The user's figures count, however the name is spelled: both names stand for one GPU."""
    mine = Device(name, 1 << 30, 1.0, 1.0, 1.0, 1.0)
    add_device(mine)
    assert find_device(name) is mine
    assert find_device("H200") is mine
