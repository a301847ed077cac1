"""Models of any size, to study how memory grows with depth or length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rekindle.errors import ModelError
from rekindle.models.workload import ModelParts, ModelSpec, Workload
from rekindle.models.zoo import small, vision
from rekindle.models.zoo.catalog import build


@dataclass(frozen=True, slots=True)
class Family:
    """A model in many sizes. `size_name` says what a size is: a depth, a length.

    `sizes`, `extent` (further arguments of the builder, which the title names) and `default_batch`
    are the defaults; those with `cpu_` are for steps that are run on a CPU, which is slow.
    """

    name: str
    title: str
    size_name: str
    sizes: tuple[int, ...]
    extent: dict[str, int]
    default_batch: int
    build_fn: Callable[..., ModelParts]
    check: Callable[[int], None]
    needs: str | None
    cpu_sizes: tuple[int, ...]
    cpu_batch: int
    cpu_extent: dict[str, int]

    def build(self, size: int, **how: Any) -> Workload:
        """The model of that size; `how` has further arguments of `models.build`."""
        self.check(size)
        build_fn = partial(self.build_fn, size)
        spec = ModelSpec(f"{self.name}-{size}", "", self.default_batch, build_fn, self.needs)
        return build(spec, **how)


def _check_depth(depth: int) -> None:
    least = 14  # a block in each stage
    if depth >= least and depth % 3 == 2:
        return
    below = depth - (depth - 2) % 3
    near = f"{below} or {below + 3}" if below >= least else f"{least}"
    raise ModelError(
        f"a ResNet has 3 layers for each of its 4 or more blocks and 2 besides, and {depth} is "
        f"no such depth: take {near}"
    )


def _check_length(length: int) -> None:
    if length < 1:
        raise ModelError(f"a sequence has at least 1 position, and {length} is no such length")


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="resnet",
            title="ResNet on {image}x{image} images",
            size_name="depth",
            sizes=(50, 152, 500, 1001),
            extent={"image": 224},
            default_batch=32,
            build_fn=vision.resnet_of_depth,
            check=_check_depth,
            needs="torchvision",
            cpu_sizes=(50, 101, 152),
            cpu_batch=8,
            cpu_extent={"image": 128},
        ),
        Family(
            name="lstm",
            title="Unrolled LSTM, 2 layers of 256",
            size_name="length",
            sizes=(16, 32, 64, 128),
            extent={},
            default_batch=32,
            build_fn=small.lstm_stepped,
            check=_check_length,
            needs=None,
            cpu_sizes=(16, 32, 64),
            cpu_batch=32,
            cpu_extent={},
        ),
    )
}
