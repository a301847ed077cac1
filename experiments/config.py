"""The models, batch sizes and budgets to measure: for a GPU, and tiny ones for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ALL_PLANNERS = (
    *("auto", "mutwo", "chen-sqrt", "mincut"),
    *("chen-selective", "chen-recursive", "all", "none", "ilp"),
)
"""Every planner; the first are run first, since time may run out."""


class Step(NamedTuple):
    """A model of the zoo at one batch size."""

    model: str
    batch: int


class Range(NamedTuple):
    """A model of the zoo at several batch sizes."""

    model: str
    batches: tuple[int, ...]


class Budgeted(NamedTuple):
    """A step, and budgets for it in percent of its plain peak, the largest first."""

    step: Step
    percents: tuple[int, ...]


class Family(NamedTuple):
    """A family of models of `rekindle schemes`: the sizes to estimate, and those to run."""

    name: str
    estimated: tuple[int, ...]
    measured: tuple[int, ...]


class Cap(NamedTuple):
    """A memory limit, and the ways whose largest batch is run under it.

    For the ways `beyond`, a batch that is larger by 2% is run, too, which should not fit.
    """

    memory: str
    ways: tuple[str, ...]
    beyond: tuple[str, ...] = ()


class Compiled(NamedTuple):
    """A model that is compiled under a cap: batches for `torch.compile`, and for a plan.

    Batches are in rising order. The aim for the plan is `times` the batch of `torch.compile`, at
    `at_least` of its best speed.
    """

    model: str
    peer: tuple[int, ...]
    planned: tuple[int, ...]
    times: float
    at_least: float


@dataclass(frozen=True)
class Config:
    """The settings of all pieces.

    `gpu` is the name of the GPU in forecasts, `device` is where steps run. The budget of a step
    under a cap is the share `below_cap` of it. `quick` is the share of the plain step's speed that
    the larger batches must keep. A batch that does not fit is run again at the shares `retries` of
    it; a compiled one at the share `compiled_retry`.
    """

    name: str
    gpu: str
    device: str
    precision: str
    steps: int
    statistics: tuple[Step, ...]
    shares: tuple[Range, ...]
    sweeps: tuple[Range, ...]
    sweep_cap: str
    halves: tuple[Range, ...]
    half: str
    planned: tuple[Budgeted, ...]
    planners: tuple[str, ...]
    planners_limit_s: float
    families: tuple[Family, ...]
    family_batch: int
    fits: tuple[str, ...]
    checked: tuple[str, ...]
    caps: tuple[Cap, ...]
    compiled: tuple[Compiled, ...]
    compiled_cap: str
    below_cap: float = 0.97
    quick: float = 0.9
    retries: tuple[float, ...] = (1.0, 0.98, 0.93)
    compiled_retry: float = 0.93


_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

H200 = Config(
    name="h200",
    gpu="H200",
    device="cuda",
    precision="bf16",
    steps=5,
    statistics=(Step("resnet152", 128), Step("bert-base", 32), Step("bert-large", 32)),
    shares=(
        Range("resnet152", (*_BATCHES, 512, 1024)),
        Range("bert-base", _BATCHES),
        Range("bert-large", _BATCHES),
    ),
    sweeps=(
        Range("resnet152", (32, 128, 256, 512, 1024)),
        Range("bert-large", (8, 32, 64, 128, 256)),
    ),
    sweep_cap="40GiB",
    halves=(Range("resnet152", (32, 128, 256)), Range("bert-large", (32, 64))),
    half="50%",
    planned=(
        Budgeted(Step("resnet152", 128), (80, 65, 50, 40, 30)),
        Budgeted(Step("bert-large", 32), (80, 65, 50, 40, 35)),
    ),
    planners=ALL_PLANNERS,
    planners_limit_s=270.0,
    families=(
        Family("resnet", (50, 152, 500, 1001), (50, 152)),
        Family("lstm", (16, 32, 64, 128), (16, 64)),
    ),
    family_batch=32,
    fits=("resnet152", "bert-base", "bert-large"),
    checked=("resnet152", "bert-large"),
    caps=(
        Cap("16GiB", ("plain", "quick", "planned"), beyond=("plain", "planned")),
        Cap("24GiB", ("plain", "quick")),  # the largest planned batches take long there
        Cap("80GiB", ("plain", "quick")),
    ),
    compiled=(
        Compiled("resnet152", (168, 176, 184, 192), (464, 512), times=2.5, at_least=0.95),
        Compiled("bert-large", (10, 11, 12), (24, 48), times=2.0, at_least=0.88),
    ),
    compiled_cap="16GiB",
)

TINY = Config(
    name="tiny",
    gpu="H200",
    device="cpu",
    precision="fp32",
    steps=2,
    statistics=(Step("resnet-tiny", 8), Step("bert-tiny", 2)),
    shares=(Range("resnet-tiny", (1, 8, 64)), Range("mlp", (1, 8))),
    sweeps=(Range("resnet-tiny", (4, 8, 16)),),
    sweep_cap="12MiB",
    halves=(Range("resnet-tiny", (8,)),),
    half="80%",
    planned=(Budgeted(Step("resnet-tiny", 8), (80, 60)),),
    planners=("mutwo", "chen-sqrt", "none"),
    planners_limit_s=60.0,
    families=(Family("lstm", (1, 2), (1,)),),
    family_batch=1,
    fits=("mlp",),
    checked=("mlp",),
    caps=(Cap("128MiB", ("plain", "planned"), beyond=("plain", "planned")),),
    compiled=(Compiled("resnet-tiny", (12, 16), (16, 24), times=1.2, at_least=0.1),),
    compiled_cap="12MiB",
)

CONFIGS = {config.name: config for config in (H200, TINY)}
