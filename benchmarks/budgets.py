"""Holds measured peaks on the CPU against budgets, to the byte, over many small programs.

    python benchmarks/budgets.py [--out FILE] [--programs N] [--first SEED] [--planner NAME]

Each seed makes one program: a model (recurrent layers, convolutions, attention, perceptrons, odd
layouts), an optimizer, a precision, and a planner unless one is named. It is optimized for its
least peak, for its plain peak, and for budgets between; every budget is one run of three steps,
each of which is measured. A run is over its budget if any of its steps took one byte more. `least`
counts budgets that `InfeasibleBudget` had named as possible and that were refused.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write
from torch import nn

sys.path.insert(0, str(ROOT / "src"))

import rekindle
from rekindle.measuring.meters import peak_bytes

ON_CPU = torch.device("cpu")
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the way from the least peak to the plain one
STEPS = 3

Program = tuple[str, Callable[[], nn.Module], Callable[[], torch.Tensor]]


class Recurrent(nn.Module):
    """One recurrent module, not unrolled, and a linear layer."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layers = kind(**options)
        width = options.get("proj_size") or options["hidden_size"]
        self.last = nn.Linear(width * (2 if options.get("bidirectional") else 1), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All steps of the sequence."""
        out: torch.Tensor = self.last(self.layers(x)[0])
        return out


class Attention(nn.Module):
    """Transformer layers."""

    def __init__(self, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last layer's states."""
        out: torch.Tensor = self.layers(x)
        return out


class Turned(nn.Module):
    """A norm on transposed inputs, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize each channel over time."""
        return torch.relu(self.last(self.norm(x.transpose(1, 2)).transpose(1, 2)))


def recurrent(pick: random.Random) -> Program:
    """An `nn.LSTM`, `nn.GRU` or `nn.RNN`."""
    kind = pick.choice([nn.LSTM, nn.LSTM, nn.GRU, nn.RNN])
    options: dict[str, Any] = {
        "input_size": pick.choice([3, 16]),
        "hidden_size": pick.choice([5, 16, 24]),
        "num_layers": pick.choice([1, 2]),
        "batch_first": pick.random() < 0.5,
        "bidirectional": pick.random() < 0.4,
        "bias": pick.random() < 0.8,
    }
    options["dropout"] = pick.choice([0.0, 0.3]) if options["num_layers"] > 1 else 0.0
    if kind is nn.LSTM and pick.random() < 0.3:
        options["proj_size"] = 4
    shape = pick.choice([2, 4]), pick.choice([2, 4]), options["input_size"]
    label = f"{kind.__name__} {options}"
    return label, lambda: Recurrent(kind, **options), lambda: torch.randn(shape)


def perceptron(pick: random.Random) -> Program:
    """Linear layers, activations, norms and dropout."""
    width = pick.choice([7, 16, 32])
    makers: list[Callable[[], nn.Module]] = []
    for _ in range(pick.randint(2, 4)):
        makers.append(lambda: nn.Linear(width, width))
        makers.append(
            pick.choice(
                [
                    nn.ReLU,
                    nn.GELU,
                    nn.SiLU,
                    nn.LogSigmoid,
                    nn.Softplus,
                    nn.RReLU,
                    lambda: nn.ReLU(inplace=True),
                    lambda: nn.Dropout(0.2),
                    lambda: nn.LayerNorm(width),
                    lambda: nn.BatchNorm1d(width),
                    lambda: nn.Softmax(-1),
                    nn.PReLU,
                ]
            )
        )
    rows = pick.choice([3, 32, 129])
    return (
        "perceptron",
        lambda: nn.Sequential(*(m() for m in makers)),
        lambda: torch.randn(rows, width),
    )


def convolutions(pick: random.Random) -> Program:
    """Convolutions, norms, pools and pads."""
    channels = pick.choice([4, 8])
    makers: list[Callable[[], nn.Module]] = [lambda: nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(pick.randint(1, 4)):
        makers.append(
            pick.choice(
                [
                    lambda: nn.Conv2d(channels, channels, 3, padding=1),
                    lambda: nn.Conv2d(channels, channels, 1, groups=2),
                    lambda: nn.BatchNorm2d(channels),
                    lambda: nn.GroupNorm(2, channels),
                    lambda: nn.InstanceNorm2d(channels),
                    nn.ReLU,
                    nn.Hardswish,
                    lambda: nn.MaxPool2d(2),
                    lambda: nn.AvgPool2d(2),
                    lambda: nn.ReflectionPad2d(1),
                    lambda: nn.ReplicationPad2d(1),
                    lambda: nn.ChannelShuffle(2),
                    lambda: nn.Upsample(scale_factor=2),
                    lambda: nn.Dropout2d(0.2),
                ]
            )
        )
    is_last = pick.random() < 0.3
    side = pick.choice([16, 19])

    def batch() -> torch.Tensor:
        x = torch.randn(4, 3, side, side)
        return x.to(memory_format=torch.channels_last) if is_last else x

    return "convolutions", lambda: nn.Sequential(*(m() for m in makers)), batch


def attention(pick: random.Random) -> Program:
    """Transformer encoder layers."""
    layers, dropout = pick.choice([1, 1, 2]), pick.choice([0.0, 0.1])
    return "attention", lambda: Attention(16, 2, layers, dropout), lambda: torch.randn(4, 10, 16)


def turned(pick: random.Random) -> Program:
    """Norms on transposed inputs."""
    layers = pick.randint(1, 3)
    return (
        "turned",
        lambda: nn.Sequential(*(Turned(12) for _ in range(layers))),
        lambda: torch.randn(6, 9, 12),
    )


PLANNERS = ("auto", *5 * ("chen-recursive",), *2 * ("chen-sqrt",))
KINDS = (recurrent, recurrent, perceptron, convolutions, attention, turned)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params),
}


def train_step_of(precision: str) -> Callable[..., torch.Tensor]:
    """The training step, in float32 or under autocast."""

    def train_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        is_half = precision == "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half):
            loss: torch.Tensor = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def run_program(seed: int, planner: str | None = None) -> dict[str, Any]:
    """All budgets of one program, with the planner that the seed draws or a given one."""
    pick = random.Random(seed)
    label, make, batch_of = pick.choice(KINDS)(pick)
    optimizer_name = pick.choice(sorted(OPTIMIZERS))
    precision = pick.choice(["fp32", "fp32", "bf16"])
    planner = planner or pick.choice(PLANNERS)
    train_step = train_step_of(precision)

    def optimized(budget: int | str) -> tuple[Any, torch.Tensor]:
        torch.manual_seed(seed)
        model = make()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        batch = batch_of()
        step = rekindle.optimize(
            train_step, model, optimizer, batch, budget=budget, planner=planner
        )
        return step, batch

    case: dict[str, Any] = {
        "seed": seed,
        "program": label,
        "optimizer": optimizer_name,
        "precision": precision,
        "planner": planner,
        "runs": [],
    }
    try:
        optimized(1)
    except rekindle.CaptureError as error:
        return case | {"refused": str(error)}
    except rekindle.InfeasibleBudget as error:
        least = error.least_peak_bytes
    try:
        plain = optimized("100%")[0].budget_bytes
    except rekindle.InfeasibleBudget as error:  # not every planner finds the plain step
        plain = error.budget_bytes
    for share in SHARES:
        budget = int(least + share * (plain - least))
        try:
            step, batch = optimized(budget)
        except rekindle.InfeasibleBudget as error:
            case["runs"].append({"budget": budget, "needs": error.least_peak_bytes})
            continue
        peaks = [
            peak_bytes(partial(step, batch), ON_CPU, partial(step.captured.around, batch))
            for _ in range(STEPS)
        ]
        case["runs"].append({"budget": budget, "forecast": step.plan.peak_bytes, "peaks": peaks})
    return case


def main() -> None:
    """Run all programs and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/budgets_cpu.json")
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--planner", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("rekindle").setLevel(logging.ERROR)
    cases: list[dict[str, Any]] = []
    start = time.perf_counter()
    runs = over = refused_least = 0
    for seed in range(options.first, options.first + options.programs):
        case = run_program(seed, options.planner)
        cases.append(case)
        if len(cases) % 10 == 0:
            write(options.out, "budgets", cases)  # so that a run may be ended early
        for run in case["runs"]:
            if "peaks" not in run:
                refused_least += 1
                print(f"seed {seed}: {run['budget']} refused, needs {run['needs']}", flush=True)
                continue
            runs += 1
            excess = max(run["peaks"]) - run["budget"]
            if excess > 0:
                over += 1
                print(
                    f"seed {seed}: {case['program']}, {case['optimizer']}, {case['precision']}: "
                    f"{excess} over {run['budget']} ({run['forecast']} forecast), {run['peaks']}",
                    flush=True,
                )
    seconds = time.perf_counter() - start
    print(f"{runs} runs, {over} over the budget, {refused_least} refused, {seconds:.0f} s")
    write(options.out, "budgets", cases)


if __name__ == "__main__":
    main()
