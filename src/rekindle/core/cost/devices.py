"""GPUs by name, with the figures that an analytic profile needs.

Rates are the vendors' figures for dense matrices; `roofline` holds the share that is reached. Users
add their own GPUs with `add_device`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from rekindle.core.notebook import html_table, one_line
from rekindle.errors import ProfileError
from rekindle.units import format_bytes

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of GPU. FLOP rates are in FLOP per microsecond (1 TFLOP/s = 1e6)."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_us: float
    float32_flops_per_us: float
    tf32_flops_per_us: float
    half_flops_per_us: float
    host_bytes_per_us: float = 24e3
    overhead_bytes: int = 10 * MIB  # libraries' workspaces that stay allocated

    def flops_per_us(self, dtype: str, *, tf32: bool = False) -> float:
        """The rate of matmuls in a dtype; float32 may run on tensor cores as TF32."""
        if dtype in ("bfloat16", "float16"):
            return self.half_flops_per_us
        if dtype == "float64":
            return self.float32_flops_per_us / 2
        return self.tf32_flops_per_us if tf32 else self.float32_flops_per_us

    def _facts(self) -> dict[str, object]:
        return {
            "name": self.name,
            "memory": format_bytes(self.memory_bytes),
            "bandwidth": f"{self.bandwidth_bytes_per_us / 1e6:.3g} TB/s",
            "bfloat16": f"{self.half_flops_per_us / 1e6:.4g} TFLOP/s",
        }

    __repr__ = one_line
    _repr_html_ = html_table


def _gpu(
    name: str, gib: int, *tera_per_s: float, host_gb_per_s: float = 24, overhead_mib: int = 10
) -> Device:
    bandwidth, float32, tf32, half = (rate * 1e6 for rate in tera_per_s)
    return Device(
        name, gib * GIB, bandwidth, float32, tf32, half, host_gb_per_s * 1e3, overhead_mib * MIB
    )


# name, GiB, TB/s, TFLOP/s in float32, TF32 and half precision. Without tensor cores for a dtype,
# the rate is that of the CUDA cores. A T4 has none for bfloat16: half means float16 there.
_TABLE = (
    _gpu("B200", 180, 8.0, 75, 1100, 2250, host_gb_per_s=55, overhead_mib=98),
    _gpu("H200", 140, 4.8, 67, 495, 990, host_gb_per_s=55, overhead_mib=98),
    _gpu("H100", 80, 3.35, 67, 495, 990, host_gb_per_s=55, overhead_mib=98),
    _gpu("H100-PCIe", 80, 2.0, 51, 378, 756, host_gb_per_s=55, overhead_mib=98),
    _gpu("A100-80GB", 80, 2.04, 19.5, 156, 312),
    _gpu("A100-40GB", 40, 1.56, 19.5, 156, 312),
    _gpu("A10", 24, 0.6, 31.2, 62.5, 125),
    _gpu("A6000", 48, 0.768, 38.7, 77.4, 154.8),
    _gpu("L40S", 48, 0.864, 91.6, 183, 366),
    _gpu("L4", 24, 0.3, 30.3, 60, 121),
    _gpu("V100", 32, 0.9, 15.7, 15.7, 125, host_gb_per_s=12),
    _gpu("T4", 16, 0.32, 8.1, 8.1, 65, host_gb_per_s=12),
    _gpu("RTX 3090", 24, 0.936, 35.6, 35.6, 71),
    _gpu("RTX 4090", 24, 1.008, 82.6, 82.6, 165),
    _gpu("RTX 5090", 32, 1.79, 104.8, 104.8, 209.5, host_gb_per_s=55),
)
DEVICES = {device.name: device for device in _TABLE}


def add_device(device: Device) -> None:
    """Make a GPU known by its name, or replace one.

    >>> add_device(Device("Toy", 8 * GIB, 0.5e6, 10e6, 20e6, 40e6))
    >>> find_device("toy").memory_bytes == 8 * GIB
    True
    """
    for name in [name for name in DEVICES if _squeezed(name) == _squeezed(device.name)]:
        del DEVICES[name]
    DEVICES[device.name] = device


def find_device(name: str) -> Device:
    """The GPU of that name, case-insensitive, or of a longer name as CUDA reports it."""
    for device in DEVICES.values():
        if _squeezed(device.name) == _squeezed(name):
            return device
    given = set(_words(name))
    fits = [device for device in DEVICES.values() if given.issuperset(_words(device.name))]
    if fits:
        return max(fits, key=lambda device: len(set(_words(device.name))))
    close = [known for known in DEVICES if _squeezed(known).startswith(_squeezed(name))]
    close = close or difflib.get_close_matches(name, DEVICES, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ProfileError(
        f"unknown device {name!r}.{hint} Known: {', '.join(DEVICES)}. Add yours with "
        "rekindle.add_device(rekindle.Device(...))."
    )


def _words(name: str) -> list[str]:
    return name.lower().replace("-", " ").replace("_", " ").split()


def _squeezed(name: str) -> str:
    vendors = ("nvidia", "geforce", "tesla", "quadro")
    return "".join(word for word in _words(name) if word not in vendors)
