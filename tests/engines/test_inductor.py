"""The compiled engine: near the plain step, and bit for bit the same under every budget.

Compiling takes seconds a kind of group, so tests share what is compiled, within the process.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.fused_steps import Block, Convolutions
from support.uncompiled import assert_close, run_uncompiled
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rekindle
from rekindle.engines.inductor import group_compiler
from rekindle.engines.inductor.group_compiler import CompiledGroup
from rekindle.measuring.bitwise_compare import Parts, State, differences, state_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
STEPS = 10


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def short_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return train_step(model, optimizer, batch)


def labels(count: int) -> Tensor:
    return torch.arange(count) % 3


def text() -> Parts:
    """Blocks with attention, layer norm and dropout."""
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Flatten(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    return train_step, model, optimizer, (torch.randn(128, 4, 16), labels(128))


def images() -> Parts:
    """Convolutions with batch norm."""
    model = Convolutions(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return train_step, model, optimizer, (torch.randn(48, 3, 6, 6), labels(48))


def layers(count: int = 64, depth: int = 2) -> Parts:
    """Without random numbers."""
    parts = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(depth)]
    model = nn.Sequential(*parts, nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return train_step, model, optimizer, (torch.randn(count, 8), labels(count))


def short_layers() -> Parts:
    return short_step, *layers(512, 4)[1:]


MODELS: dict[str, Callable[[], Parts]] = {
    "text": text,
    "images": images,
    "layers": layers,
    "short layers": short_layers,
}


@dataclass(frozen=True)
class Trained:
    """A training: its results and final state, and the step that it used."""

    state: State
    step: rekindle.TrainStep | None
    peak_bytes: int


@cache
def trained(name: str, budget: str | None = None, engine: str | None = "inductor") -> Trained:
    """A few steps from the same start; without an engine, plainly."""
    torch.manual_seed(0)
    step_function, model, optimizer, batch = MODELS[name]()
    step: rekindle.TrainStep | None = None
    if engine is not None:
        parts = (step_function, model, optimizer, batch)
        step = rekindle.optimize(*parts, engine=engine, budget=budget)
    torch.manual_seed(1)
    results: State = {}
    for index in range(STEPS):
        result = step(batch) if step is not None else step_function(model, optimizer, batch)
        results[f"result {index}"] = result.detach().clone()
    state = {**results, **state_of(model, optimizer)}
    peak_bytes = 0 if step is None else step.measure(batch, steps=1).peak_bytes
    return Trained(state, step, peak_bytes)


def check_plans(name: str) -> None:
    """Parameters, gradients, buffers, optimizer state, random generators and losses are equal."""
    plain = trained(name)
    for budget in ("80%", "60%"):
        planned = trained(name, budget)
        assert planned.step is not None
        assert planned.step.captured.is_compiled
        assert differences(plain.state, planned.state) == []
        assert planned.step.budget_bytes is not None
        assert planned.peak_bytes <= planned.step.budget_bytes
        assert planned.peak_bytes < plain.peak_bytes
    assert planned.step.plan is not None
    assert planned.step.plan.recompute_us > 0


def check_near_the_plain_step(name: str, rtol: float) -> None:
    plain, compiled = trained(name, engine=None), trained(name)
    assert compiled.step is not None
    assert compiled.step.captured.is_compiled
    numbers = {k: v for k, v in plain.state.items() if not k.startswith("optimizer state")}
    found = {k: v for k, v in compiled.state.items() if not k.startswith("optimizer state")}
    assert_close(found, numbers, rtol=rtol, atol=rtol / 10)
    assert numbers["result 9"] < numbers["result 0"]


def compiled_groups(step: rekindle.TrainStep) -> set[CompiledGroup]:
    """The distinct compiled groups that a step calls."""
    targets = (call.node.target for call in step.captured.recording.tape.calls)
    return {target for target in targets if isinstance(target, CompiledGroup)}


def check_forms(name: str) -> None:
    """Each result has its own memory, and the shape, strides and dtype of the fake tensor."""
    step = trained(name).step
    assert step is not None
    functions = compiled_groups(step)
    assert len(functions) == step.engine_info.n_compiled > 0
    for function in functions:
        given = [group_compiler.empty_tensor(spec).zero_() for spec in function.specs]
        made = function(*given)
        with FakeTensorMode():
            told = function.on_fakes(
                *(group_compiler.empty_tensor(spec) for spec in function.specs)
            )
        assert [(t.shape, t.stride(), t.dtype) for t in made] == [
            (t.shape, t.stride(), t.dtype) for t in told
        ]
        places = {t.untyped_storage().data_ptr() for t in (*made, *given) if t.numel()}
        assert len(places) == len([t for t in (*made, *given) if t.numel()])


@pytest.mark.slow
def test_blocks_with_dropout() -> None:
    check_plans("text")
    check_forms("text")
    state, plain = trained("text").state, trained("text", engine=None).state
    assert state["result 9"] < state["result 0"]
    assert state["result 0"].item() == pytest.approx(plain["result 0"].item(), rel=0.2)


def test_convolutions_with_batch_norm() -> None:
    check_plans("images")
    check_forms("images")
    check_near_the_plain_step("images", 1e-3)


def test_layers_in_short_numbers() -> None:
    check_plans("short layers")
    check_forms("short layers")
    check_near_the_plain_step("short layers", 0.05)


class Dropped(nn.Module):
    """The mask shows in the result, and in the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(50, 40))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout((x * self.weight).exp(), 0.25)


def test_the_gradient_has_the_mask_of_the_forward_pass() -> None:
    def step_function(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        result = model(batch)
        result.sum().backward()
        optimizer.step()
        return result

    model = Dropped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = rekindle.optimize(step_function, model, optimizer, torch.ones(50, 40), engine="inductor")
    first, second = step(torch.ones(50, 40)), step(torch.ones(50, 40))
    assert not torch.equal(first != 0, second != 0)
    for result in (first, second):
        assert (result != 0).float().mean().item() == pytest.approx(0.75, abs=0.05)
    torch.testing.assert_close(model.weight.grad, second.detach())


def test_another_batch_is_compiled_for() -> None:
    """Of another shape: both then run, and near the plain step."""

    def squares(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    states = []
    batches = [torch.randn(16, 8), torch.randn(24, 8)]
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step: Callable[[Any], Any] = partial(squares, model, optimizer)
        if is_compiled:
            step = rekindle.optimize(squares, model, optimizer, batches[0], engine="inductor")
        results = {f"result {i}": step(batches[i % 2]).detach() for i in range(4)}
        states.append({**results, **dict(model.named_parameters())})
    assert isinstance(step, rekindle.TrainStep)
    assert step.n_captures == 2
    assert_close(states[1], states[0], rtol=1e-4, atol=1e-5)


def test_what_is_equal_is_compiled_once() -> None:
    """In a step, among its layers; in a process, among steps."""
    names: list[str] = []

    def count(function: CompiledGroup) -> None:
        names.append(function.__name__)
        run_uncompiled(function)

    with (
        mock.patch.object(CompiledGroup, "compile", count),
        mock.patch.object(group_compiler, "compiled_groups", {}),
    ):
        step = rekindle.optimize(*text(), engine="inductor")
        calls = [
            c
            for c in step.captured.recording.tape.calls
            if isinstance(c.node.target, CompiledGroup)
        ]
        assert len(names) == len(set(names))
        assert len(calls) > 2 * len(names)
        n_compiled = len(names)
        rekindle.optimize(*text(), engine="inductor")
        assert len(names) == n_compiled


def test_without_a_compiler_it_is_the_plain_step(caplog: pytest.LogCaptureFixture) -> None:
    def fail(function: CompiledGroup) -> None:
        raise RuntimeError("no C++ compiler was found\nand so on")

    plain = trained("layers", engine=None).state
    torch.manual_seed(0)
    step_function, model, optimizer, batch = layers()
    with (
        mock.patch.object(CompiledGroup, "compile", fail),
        mock.patch.object(group_compiler, "compiled_groups", {}),
        caplog.at_level(logging.WARNING, logger="rekindle"),
    ):
        parts = (step_function, model, optimizer, batch)
        step = rekindle.optimize(*parts, engine="inductor", budget="90%")
    assert "running without the compiler: no C++ compiler was found" in caplog.messages
    assert not step.captured.is_compiled
    torch.manual_seed(1)
    results = {f"result {i}": step(batch).detach().clone() for i in range(STEPS)}
    assert differences(plain, {**results, **state_of(model, optimizer)}) == []


BARE_CHILD = """
import logging, sys
sys.path[:0] = sys.argv[1:3]
logging.basicConfig(level=logging.WARNING)
from engines import test_inductor
plain, found = (test_inductor.trained("layers", engine=each) for each in (None, "inductor"))
assert not found.step.captured.is_compiled
assert not test_inductor.differences(plain.state, found.state)
"""


def test_on_a_machine_without_a_compiler(tmp_path: Path) -> None:
    folders = [str(Path(__file__).parents[1]), str(Path(rekindle.__file__).parents[1])]
    command = [sys.executable, "-W", "ignore", "-c", BARE_CHILD, *folders]
    nothing = {
        "CXX": str(tmp_path / "no-compiler"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "no-cache"),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **nothing}, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "WARNING:rekindle:running without the compiler: " in ended.stderr


CHILD = """
import sys
sys.path[:0] = sys.argv[1:3]
import json, torch
torch.set_num_threads(1)
from engines import test_inductor
from torch._dynamo.utils import counters
found = test_inductor.trained("layers")
results = [found.state[f"result {i}"].item().hex() for i in range(3)]
n_functions = found.step.engine_info.n_compiled
print(json.dumps([results, n_functions, dict(counters["inductor"])]))
"""


@pytest.mark.slow
def test_layers_verified_and_in_a_second_process(tmp_path: Path) -> None:
    """That finds what was compiled in Inductor's cache on disk, and computes the same bits."""
    check_forms("layers")
    check_near_the_plain_step("layers", 1e-3)
    found = rekindle.verify(*layers(), budget="95%", engine="inductor", steps=2)
    assert found.equal
    assert found.is_compiled
    assert 0 <= found.rounding < 1e-3
    first = trained("layers")
    folders = [str(Path(__file__).parents[1]), str(Path(rekindle.__file__).parents[1])]
    command = [sys.executable, "-W", "ignore", "-c", CHILD, *folders]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):  # the first fills the cache
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False
        )
        assert ended.returncode == 0, ended.stderr
    results, n_functions, counts = json.loads(ended.stdout.splitlines()[-1])
    assert counts.get("fxgraph_cache_hit") == n_functions
    assert not counts.get("fxgraph_cache_miss")
    assert results == [first.state[f"result {i}"].item().hex() for i in range(3)]
