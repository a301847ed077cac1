"""On a GPU: a step that runs from CUDA graphs gives the plain step's bits, and keeps its budget."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.square_step import square_step as train_step
from torch import nn
from torch.nn import functional as F

import rekindle
from rekindle import models
from rekindle.core.memory.allocator_steering import Arena
from rekindle.engines.cudagraph.arena import CudaPool
from rekindle.engines.cudagraph.graph_engine import CudaGraphEngine, CudaGraphRecorder
from rekindle.measuring.bitwise_compare import compare
from rekindle.planners.finish import finish
from rekindle.planners.lowering import choices
from rekindle.planners.problem import problem_of
from rekindle.torch_internals import clear_cublas_workspaces

Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Any]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()


class Noisy(nn.Module):
    """Draws from the default generator and from its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norm = nn.BatchNorm1d(32)
        self.generator = torch.Generator("cuda").manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            noise = torch.rand(x.shape, device=x.device, generator=self.generator)
            x = F.dropout(torch.tanh(layer(x) * noise), 0.3)
            x = self.norm(x) * torch.rand_like(x)
        return x


class Watched:
    """Like `optimize`, and keeps the step."""

    def __init__(self, **how: Any) -> None:
        self.how = {"engine": "cudagraph", **how}
        self.step: rekindle.TrainStep | None = None

    def __call__(self, *parts: Any) -> rekindle.TrainStep:
        self.step = rekindle.optimize(*parts, **self.how)
        return self.step

    @property
    def engine(self) -> CudaGraphEngine:
        assert self.step is not None
        found = self.step.captured.first.engine
        assert isinstance(found, CudaGraphEngine)
        return found

    def check_graphs(self) -> None:
        """It did run from graphs."""
        assert self.step is not None
        info = self.step.engine_info
        assert (info.name, info.reason) == ("cudagraph", "")
        assert info.n_graphs > 0


class DropAll(Watched):
    """Like `optimize`, with everything dropped that may be, under any budget."""

    def __call__(self, *parts: Any) -> rekindle.TrainStep:
        captured = rekindle.capture(*parts)
        profile = rekindle.profile(captured, device="H200")
        problem = problem_of(captured.graph, profile)
        chosen = replace(choices(problem, ()), hold_from=[problem.n_ops] * problem.n_cells)
        plan = finish(problem, chosen, planner="test", budget_bytes=10**12)
        self.how["plan"] = plan
        return super().__call__(*parts)


def noisy() -> Parts:
    model = Noisy().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return train_step, model, optimizer, torch.randn(64, 32, device="cuda")


def test_copies_in_a_graph_draw_what_was_drawn() -> None:
    watched = DropAll()
    assert compare(noisy, watched, steps=6).differences == ()
    watched.check_graphs()
    assert watched.engine._rng_twins._twin_of  # a random op was recomputed, in a graph


def test_a_new_seed_between_steps_is_followed() -> None:
    def run(step: Any, batch: Any) -> list[Any]:
        losses = []
        for index in range(6):
            if index in (2, 4):
                torch.manual_seed(100 + index)
            losses.append(step(batch))
        return losses

    ends = []
    for way in ("plain", "graph"):
        torch.manual_seed(0)
        function, model, optimizer, batch = noisy()
        step: Any = partial(function, model, optimizer)
        if way == "graph":
            step = DropAll()(function, model, optimizer, batch)
        ends.append([loss.detach().clone() for loss in run(step, batch)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


CASES = [("resnet18", 64, "70%"), ("bert-base", 8, "80%"), ("vit", 32, "60%"), ("gpt2", 2, "80%")]


@pytest.mark.filterwarnings("ignore:.*deterministic.*")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "batch", "budget"), CASES)
def test_the_zoo(name: str, batch: int, budget: str, precision: str) -> None:
    def make() -> Parts:
        gc.collect()
        work = models.build(name, batch=batch, precision=precision, device="cuda")
        return work.train_step, work.model, work.optimizer, work.batch

    watched = Watched(budget=budget)
    found = compare(make, watched, steps=5)
    assert found.differences == ()
    watched.check_graphs()
    assert found.budget_bytes is not None
    assert watched.engine.peak_bytes <= found.budget_bytes


def scheduled(**options: Any) -> Callable[[], Parts]:
    """A step whose learning rate is halved after every step, by hand."""

    def make() -> Parts:
        model = Noisy().cuda()
        lr = options.get("lr", 0.01)
        lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
        kind = options.get("kind", torch.optim.AdamW)
        rest = {k: v for k, v in options.items() if k not in ("lr", "kind")}
        optimizer = kind(model.parameters(), lr=lr, **rest)

        def after(*_: Any) -> None:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].mul_(0.5)
                else:
                    group["lr"] *= 0.5

        if options.get("kind") is None and not options.get("capturable"):
            optimizer.register_step_post_hook(after)
        return train_step, model, optimizer, torch.randn(64, 32, device="cuda")

    return make


@pytest.mark.parametrize(
    "options",
    [
        {"fused": True},
        {"foreach": True},
        {"foreach": False},
        {"fused": True, "lr": torch.tensor(0.01)},
        {"kind": torch.optim.SGD, "momentum": 0.9},
        {"kind": torch.optim.RMSprop},
    ],
)
def test_optimizers_beside_the_graph_with_changing_learning_rates(options: dict[str, Any]) -> None:
    watched = Watched()
    assert compare(scheduled(**options), watched, steps=6).differences == ()
    watched.check_graphs()
    assert not watched.engine.info.has_optimizer_graph


@pytest.mark.parametrize("kind", ["tensor", "number"])
def test_an_optimizer_in_the_graph(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A learning rate in a tensor is followed; a number that changes moves the optimizer out."""
    ends = []
    for way in ("plain", "graph"):
        torch.manual_seed(0)
        model = Noisy().cuda()
        lr: Any = torch.tensor(0.01, device="cuda") if kind == "tensor" else 0.01
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, capturable=True)
        batch = torch.randn(64, 32, device="cuda")
        watched = Watched()
        made = watched(train_step, model, optimizer, batch) if way == "graph" else None
        torch.manual_seed(1)
        with caplog.at_level(logging.INFO, logger="rekindle"):
            for index in range(8):
                if made:
                    made(batch)
                else:
                    train_step(model, optimizer, batch)
                if made and index == 3:
                    watched.check_graphs()
                    assert watched.engine.info.has_optimizer_graph
                if index >= 4:
                    for group in optimizer.param_groups:
                        if kind == "tensor":
                            group["lr"].mul_(0.5)
                        else:
                            group["lr"] *= 0.5
        ends.append([p.detach().clone() for p in model.parameters()])
        if made:
            watched.check_graphs()
            assert watched.engine.info.has_optimizer_graph is (kind == "tensor")
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_batch_that_the_step_brings_to_the_gpu() -> None:
    def from_host(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        return train_step(model, optimizer, batch.to("cuda"))

    def make() -> Parts:
        _, model, optimizer, batch = noisy()
        return from_host, model, optimizer, batch.cpu()

    watched = Watched()
    assert compare(make, watched, steps=5).differences == ()
    watched.check_graphs()
    assert [part.is_graph for part in watched.engine._parts] == [False, True, False]


def test_losses_are_safe_to_keep_and_batches_may_change() -> None:
    function, model, optimizer, batch = noisy()
    step = rekindle.optimize(function, model, optimizer, batch, engine="cudagraph")
    losses = [step(torch.randn(64, 32, device="cuda")) for _ in range(6)]
    values = [loss.item() for loss in losses]
    assert len(set(values)) == 6
    assert [loss.item() for loss in losses] == values


def test_a_capture_that_fails_leaves_the_generator_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = CudaGraphRecorder.capture

    def spoilt(self: Any, run: Any, *others: Any) -> Any:
        def and_wait() -> Any:
            found = run()
            torch.ones(1, device="cuda").item()  # not permitted in a capture
            return found

        return capture(self, and_wait, *others)

    monkeypatch.setattr(CudaGraphRecorder, "capture", spoilt)
    watched = Watched()
    assert compare(noisy, watched, steps=5).differences == ()
    assert "cannot be captured" in watched.engine.reason
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        torch.empty(1 << 20, device="cuda")
    del pool  # ends the process, if the allocator still takes the capture to be under way


def segments_of(engine: CudaGraphEngine) -> dict[int, int]:
    """The large segments of the pool that a step's graphs share."""
    recorder = engine._recorder
    assert isinstance(recorder, CudaGraphRecorder)
    (pool,) = set(recorder._pools.values())
    with torch.cuda.stream(recorder._stream):
        return pool.blocks()[0]


@pytest.mark.filterwarnings("ignore:.*deterministic.*")
@pytest.mark.parametrize(
    ("name", "batch", "budget"),
    [("bert-base", 16, "70%"), ("resnet50", 64, "60%"), ("resnet50", 64, None)],
)
def test_reserved_memory_stays_close_to_the_peak(name: str, batch: int, budget: str | None) -> None:
    """Relative to the memory reserved for the model and for other tests' tensors."""
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()
    others = torch.cuda.memory_allocated()
    work = models.build(name, batch=batch, precision="bf16", device="cuda")
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    parts = (work.train_step, work.model, work.optimizer, work.batch)
    watched = Watched(budget=budget)
    step = watched(*parts)
    for _ in range(4):
        step(work.batch)
    watched.check_graphs()
    assert len(segments_of(watched.engine)) == 1
    reserved = torch.cuda.memory_reserved() - unused - others
    assert reserved <= 1.02 * (watched.engine.peak_bytes - others)


@pytest.mark.filterwarnings("ignore:.*deterministic.*")
@pytest.mark.parametrize("budget", [None, "70%"])
def test_a_steered_step_has_the_plain_ones_bits(budget: str | None) -> None:
    def make() -> Parts:
        gc.collect()
        work = models.build("bert-base", batch=16, precision="bf16", device="cuda")
        return work.train_step, work.model, work.optimizer, work.batch

    watched = Watched(budget=budget)
    assert compare(make, watched, steps=4).differences == ()
    watched.check_graphs()
    steered = watched.engine.steered
    assert steered is not None
    assert steered.has_arena
    assert steered._n_mismatches <= 5


def test_plugs_do_not_count() -> None:
    """Steered, a step needs no more than otherwise: less, as blocks are no larger than asked."""
    peaks = []
    for is_steered in (True, False):
        gc.collect()
        torch.cuda.empty_cache()
        others = torch.cuda.memory_allocated()
        work = models.build("resnet18", batch=64, precision="bf16", device="cuda")
        watched = Watched()
        step = watched(work.train_step, work.model, work.optimizer, work.batch)
        if not is_steered:
            watched.engine.steered = None
        for _ in range(3):
            step(work.batch)
        watched.check_graphs()
        peaks.append(watched.engine.peak_bytes - others)
        del work, watched, step
    assert 0.9 * peaks[1] <= peaks[0] <= 1.001 * peaks[1]


def test_the_allocator_does_as_its_model() -> None:
    chance, mib = random.Random(0), 1 << 20
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream(device)):
        pool = CudaPool(device)
        before = pool.stats().large_bytes
        base = pool.reserve(512 * mib)
        model = Arena({base: 512 * mib})
        with torch.cuda.use_mem_pool(pool._pool, device):
            for _ in range(3000):
                if model.taken and chance.random() < 0.5:
                    address = chance.choice(list(model.taken))
                    pool.free(address)
                    model.free(address)
                    continue
                nbytes = chance.choice([chance.randrange(mib + 1, 40 * mib), 2 * mib, 16 * mib])
                expected = model.allocate(nbytes)
                if expected is not None:
                    assert pool.allocate(nbytes) == expected
        assert pool.blocks() == (model.segments, model.taken)
        assert pool.stats().large_bytes - before == model.taken_bytes
        pool.free_all()
        assert pool.blocks() == ({base: 512 * mib}, {})


def test_what_the_library_takes_is_taken_at_once() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    a = torch.randn(256, 256, device=device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        pool = CudaPool(device)
        cublas_workspace_bytes = pool.cublas_workspace_bytes()
        before = pool.stats().large_bytes
        pool.allocate_cublas_workspace()
        assert pool.stats().large_bytes - before == cublas_workspace_bytes > 0
        torch.mm(a, a)
        assert pool.stats().large_bytes - before == cublas_workspace_bytes
        clear_cublas_workspaces()
        assert pool.stats().large_bytes == before
