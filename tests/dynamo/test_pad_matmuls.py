"""Matrix products with sides that suit a GPU: the same numbers, every large tensor once."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rekindle import dynamo
from rekindle.dynamo import compile_pipeline
from rekindle.dynamo.session import CompileOptions
from rekindle.measuring.meters import Resident, peak_bytes
from rekindle.passes.matmul_padding import MATMULS, PaddingOptions, pad_matmuls

aten = torch.ops.aten
_WORDS, _WIDTH = 1001, 64


class Speaker(nn.Module):
    """A language model with an odd number of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.inner = nn.Sequential(nn.Linear(_WIDTH, 256), nn.GELU(), nn.Linear(256, _WIDTH))
        self.bias = nn.Parameter(torch.zeros(_WORDS))

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.inner(self.words(words)).view(-1, _WIDTH)
        scores = nn.functional.linear(found, self.words.weight, self.bias)
        loss = nn.functional.cross_entropy(scores.float(), words.view(-1))
        return loss, scores.view(*words.shape, _WORDS)


ON_THE_CPU = PaddingOptions(device_types=("cpu",), min_flops=1 << 26)


def compiled(model: nn.Module, **how: Any) -> dynamo.CompiledModel:
    planned = dynamo.compile(model, **how)
    planned.session.tuning = CompileOptions(padding=ON_THE_CPU)
    return planned


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs that were changed."""
    found: list[fx.Graph] = []

    def seen(graph: fx.Graph, options: PaddingOptions) -> None:
        pad_matmuls(graph, options)
        graph.lint()
        found.append(graph)

    monkeypatch.setattr(compile_pipeline, "pad_matmuls", seen)
    return found


def trained(model: Any, words: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
    """All gradients of a step, and its scores."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss, scores = model(words)
    (loss + scores.float().square().mean()).backward()
    return [parameter.grad.clone() for parameter in model.parameters()], scores


def words() -> torch.Tensor:
    return torch.randint(0, _WORDS, (16, 128), generator=torch.Generator().manual_seed(5))


@pytest.mark.slow
def test_numbers_and_strides_are_what_they_were(graphs: list[fx.Graph]) -> None:
    model = Speaker()
    expected, plain = trained(deepcopy(model), words())
    planned = compiled(model, budget="10GiB")
    found, scores = trained(planned, words())
    torch.testing.assert_close(scores, plain)
    assert scores.stride() == plain.stride()
    for mine, other in zip(found, expected, strict=True):
        assert (mine - other).norm() <= 0.01 * other.norm()  # bfloat16
    pads = graphs[0].find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    large = [node for node in pads if node.meta["val"].numel() > 1e6]
    assert [tuple(node.meta["val"].shape) for node in large] == [(2048, 1008)]
    users = {user.target for user in large[0].users}  # both products, and the sum for the bias
    assert users == {aten.mm.default, aten.permute.default, aten.slice.Tensor}
    products = [node for node in graphs[0].nodes if node.target in MATMULS]
    sides = {side for node in products for side in node.meta["val"].shape}
    assert sides == {2048, 1008, 256, 64}


def test_the_forecast_is_what_a_step_takes() -> None:
    model, batch = Speaker(), words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    planned = compiled(model, budget="100%", optimizer=optimizer)
    held: list[Any] = []

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            held[:] = planned(batch)
        held[0].backward()
        optimizer.step()
        held.clear()

    step()
    resident = [Resident(each, each.nbytes) for each in (*model.parameters(), batch)]
    peak = peak_bytes(step, torch.device("cpu"), lambda: resident)
    forecast = planned.session.forecast_bytes
    assert 0.7 * forecast <= peak <= 1.02 * forecast  # where it can, Inductor writes in place


def product(
    shape: tuple[int, int, int], dtype: torch.dtype, options: PaddingOptions
) -> list[tuple[int, ...]]:
    """The shapes of what is in a graph with one product, once it is changed."""
    rows, inner, columns = shape
    graph = fx.Graph()
    with FakeTensorMode():
        a, b = graph.placeholder("a"), graph.placeholder("b")
        a.meta["val"] = torch.empty(rows, inner, dtype=dtype)
        b.meta["val"] = torch.empty(inner, columns, dtype=dtype)
        made = graph.call_function(aten.mm.default, (a, b))
        made.meta["val"] = torch.empty(rows, columns, dtype=dtype)
        graph.output((made,))
        pad_matmuls(graph, options)
    graph.lint()
    calls = graph.find_nodes(op="call_function", target=aten.mm.default)
    return [tuple(each.meta["val"].shape) for each in calls[0].all_input_nodes]


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((512, 512, 511), torch.bfloat16, [(512, 512), (512, 512)]),
        ((511, 512, 512), torch.bfloat16, [(511, 512), (512, 512)]),  # rows do not matter
        ((512, 509, 512), torch.bfloat16, [(512, 512), (512, 512)]),
        ((512, 512, 511), torch.float32, [(512, 512), (512, 511)]),  # without TF32
        ((512, 512, 511), torch.float64, [(512, 512), (512, 511)]),
        ((16, 512, 511), torch.bfloat16, [(16, 512), (512, 511)]),  # too small
    ],
)
def test_what_is_changed(
    shape: tuple[int, int, int], dtype: torch.dtype, expected: list[tuple[int, ...]]
) -> None:
    assert product(shape, dtype, ON_THE_CPU) == expected


def test_nothing_is_changed_on_a_cpu() -> None:
    assert product((2048, 2048, 511), torch.bfloat16, PaddingOptions()) == [
        (2048, 2048),
        (2048, 511),
    ]
