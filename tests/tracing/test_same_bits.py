"""Forms of operators that are said to compute the same bits: the table, and what it is used for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle.measuring.bitwise_compare import compare
from rekindle.rewriting import multi_tensor
from rekindle.tracing import same_bits
from rekindle.tracing.same_bits import Form

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TABLE = json.loads((resources.files("rekindle.tracing") / "same_bits.json").read_text())
MUL_SCALAR = Form("aten.mul.Scalar", "T float", "f16")


def forms(verdict: str) -> list[Form]:
    return [
        Form(name, pattern, dtype)
        for name, patterns in TABLE[verdict].items()
        for pattern, dtypes in patterns.items()
        for dtype in dtypes.split()
    ]


def proof(form: Form) -> bool | None:
    return multi_tensor.PROOFS.get(form.name, same_bits.overwrites_exactly)(form)


EQUAL = forms("equal")
SAMPLE = random.Random(0).sample(EQUAL, min(len(EQUAL), 250))
N_PARTS = 8


def test_the_table_is_made_with_several_versions_and_instruction_sets() -> None:
    versions = {version for version, _ in TABLE["made_with"]}
    assert len(versions) >= 2
    assert len(TABLE["made_with"]) >= 4
    assert len(EQUAL) > 4000
    assert not set(EQUAL) & set(forms("differs"))


def test_a_sample_of_the_table() -> None:
    assert [form for form in SAMPLE if proof(form) is not True] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(N_PARTS))
def test_the_whole_table(part: int) -> None:
    assert [form for form in EQUAL[part::N_PARTS] if proof(form) is not True] == []


def test_the_comparison_finds_a_difference() -> None:
    assert same_bits.overwrites_exactly(MUL_SCALAR) is False
    assert same_bits.overwrites_exactly(MUL_SCALAR._replace(dtype="f32")) is True
    assert MUL_SCALAR in forms("differs")


@pytest.mark.parametrize(
    ("found", "expected", "is_equal"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([0.0], [-0.0], False),
        ([1.0], [1.0 + 2**-52], False),
        ([float("nan")], [1.0], False),
    ],
)
def test_bits(found: list[float], expected: list[float], is_equal: bool) -> None:
    tensors = [torch.tensor(each, dtype=torch.float64) for each in (found, expected)]
    assert same_bits.equal_bits(*tensors) is is_equal


# What the table decides


def never(form: Form) -> bool:
    raise AssertionError(f"{form} is compared, although the table holds here")


def test_on_the_cpu_a_form_must_be_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_bits, "environment", lambda: tuple(TABLE["made_with"][0]))
    assert same_bits.is_same(EQUAL[0], CPU, never)
    assert not same_bits.is_same(MUL_SCALAR, CPU, never)
    assert not same_bits.is_same(Form("aten.mul.Tensor", "T T T", "f32"), CPU, never)
    assert not same_bits.is_same(Form("mine.op.default", "T", "f32"), CPU, never)
    assert not same_bits.is_same(None, CPU, never)


def test_on_cuda_a_form_must_not_be_refuted() -> None:
    assert same_bits.is_same(EQUAL[0], CUDA, never)
    assert same_bits.is_same(Form("mine.op.default", "T", "f32"), CUDA, never)
    assert not same_bits.is_same(MUL_SCALAR, CUDA, never)


def test_on_other_devices_nothing_is_swapped() -> None:
    assert not same_bits.is_same(EQUAL[0], torch.device("mps"), never)


@pytest.mark.parametrize("verdict", [True, False, None])
def test_with_another_torch_a_form_is_compared_once(
    verdict: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_bits, "environment", lambda: ("99.0", "AVX9000"))
    asked: list[Form] = []

    def prove(form: Form) -> bool | None:
        asked.append(form)
        return verdict

    results = {same_bits.is_same(EQUAL[0], CPU, prove) for _ in range(3)}
    assert results == {verdict is True}
    assert asked == [EQUAL[0]]
    assert not same_bits.is_same(MUL_SCALAR, CPU, never)  # refuted is refuted


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        ((torch.ones(3), 0.5), "T float int"),
        ((torch.ones(3), torch.ones(3)), "T T int"),
        ((torch.ones(3), torch.ones(())), "T T() int"),
        ((torch.ones(3), torch.ones((), dtype=torch.float64)), "T f64() int"),
        ((torch.ones(3, dtype=torch.float16), torch.ones(3)), "f16 T int"),
    ],
)
def test_forms_tell_kinds_of_arguments_apart(args: tuple[Any, ...], pattern: str) -> None:
    op = torch.ops.aten.add.Tensor
    assert same_bits.form_of(op, args, {}, torch.float32) == Form(str(op), pattern, "f32")
    assert same_bits.form_of(op, args, {"alpha": 2.0}, torch.float32) == Form(
        str(op), pattern.replace("int", "float"), "f32"
    )


# Whole steps whose backward pass could be written in place


class Backward(torch.autograd.Function):
    """The identity, with some functions in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.function(grad), None


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scaled": lambda g: torch.ops.aten.mul.Scalar(g, 0.1) + 0,
    "divided": lambda g: torch.ops.aten.div.Scalar(g, 3.0).mul(1 / 3),
    "added": lambda g: torch.ops.aten.add.Scalar(g, 0.1, 0.3).sub(0.7, alpha=3),
    "power": lambda g: (g.abs() + 0.1).pow(1.5).neg().exp(),
    "rounded": lambda g: (g * 1000).round().clamp(-5, 5).div(7),
    "mixed": lambda g: (g * torch.tensor(0.1, dtype=torch.float64)).sigmoid().mul(2),
    "rows": lambda g: (g.tanh() * g.new_ones(g.shape[-1])).addcmul(g.sin(), g.cos(), value=0.3),
    "transposed": lambda g: (g.t().contiguous().t() * g).erf().lerp(g, 0.3),
    "lower": lambda g: (g.float() * 0.3).mul(g).to(g.dtype).square(),
    "masked": lambda g: g.masked_fill(g > 0, 0.1).where(g < 1, g * 0.3),
}


class Model(nn.Module):
    def __init__(self, function: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(33, 33), nn.Linear(33, 33)).to(dtype)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Backward.apply(layer(x), self.function)
        return x


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_steps(name: str, dtype: torch.dtype) -> None:
    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = Model(FUNCTIONS[name], dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return train_step, model, optimizer, torch.randn(37, 33, dtype=dtype)

    assert compare(make, rekindle.optimize, steps=2).differences == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduce", [torch.var, torch.std])
def test_variances_under_autocast(reduce: Any, dtype: torch.dtype) -> None:
    """Their backward pass multiplies by a number in half precision."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            loss: torch.Tensor = reduce(model(batch), 1).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64))
        return step, model, torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(50, 16)

    assert compare(make, rekindle.optimize, steps=2).differences == ()


def test_proven_forms_are_still_written_in_place() -> None:
    """The table does not only refuse: a chain in float32 reuses memory."""
    torch.manual_seed(0)
    model = Model(FUNCTIONS["power"], torch.float32)
    step = rekindle.optimize(
        train_step, model, torch.optim.SGD(model.parameters()), torch.randn(37, 33)
    )
    overwritten = [name for name in ("abs", "add", "pow", "neg", "exp") if _is_swapped(step, name)]
    assert overwritten == ["abs", "add", "pow", "neg", "exp"]


def _is_swapped(step: rekindle.TrainStep, name: str) -> bool:
    lines = step.captured.code.splitlines()
    return any(f"aten_{name}" in line and "out=" in line for line in lines)
