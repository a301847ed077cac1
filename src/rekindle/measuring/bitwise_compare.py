"""Trains twice from the same state and compares every bit."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.comparison import Comparison
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import Trace
from rekindle.measuring.meters import peak_bytes
from rekindle.measuring.timing import tensors_around
from rekindle.torch_internals import pytree
from rekindle.tracing.undo import random_states

State = dict[str, Any]
Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Any]


class Step(Protocol):
    """A step to train with, as `optimize` returns it."""

    @property
    def graph(self) -> StepGraph: ...
    @property
    def profile(self) -> Profile | None: ...
    @property
    def plan(self) -> Plan | None: ...
    @property
    def trace(self) -> Trace | None: ...
    @property
    def plain_trace(self) -> Trace | None: ...
    @property
    def plain_profile(self) -> Profile | None: ...
    @property
    def budget_bytes(self) -> int | None: ...
    @property
    def graphs_peak_bytes(self) -> int: ...
    @property
    def is_compiled(self) -> bool: ...
    def __call__(self, batch: Any) -> Any: ...


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """All that training changes, as copies in host memory. A key starts with the kind of the thing.

    >>> model = nn.Linear(3, 2)
    >>> list(state_of(model, torch.optim.SGD(model.parameters())))[:3]
    ['parameter weight', 'parameter bias', 'optimizer param_groups.0.lr']
    """
    state: State = {}
    for name, param in model.named_parameters():
        state[f"parameter {name}"] = _copy(param)
        if param.grad is not None:
            state[f"gradient {name}"] = _copy(param.grad)
    for name, buffer in model.named_buffers():
        state[f"buffer {name}"] = _copy(buffer)
    for path, leaf in pytree.tree_flatten_with_path(optimizer.state_dict())[0]:
        key = ".".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path)
        state[f"optimizer {key}"] = _copy(leaf)
    for index, generator in enumerate(random_states()):
        state[f"generator {f'cuda:{index - 1}' if index else 'cpu'}"] = _copy(generator)
    return state


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The keys of what is not the same, bit for bit, or is there on one side only.

    >>> differences({"x": torch.zeros(2), "n": 1}, {"x": -torch.zeros(2), "n": 1})
    ['x']
    """
    keys = dict.fromkeys((*a, *b))
    return [key for key in keys if key not in a or key not in b or not same(a[key], b[key])]


def count_tensors(state: Mapping[str, Any]) -> dict[str, int]:
    """How many tensors of each kind a state holds."""
    kinds = (key.partition(" ")[0] for key, v in state.items() if isinstance(v, torch.Tensor))
    return dict(Counter(kinds))


def compare(
    make: Callable[[], Parts],
    optimize: Callable[..., Step],
    *,
    steps: int,
    seed: int = 0,
    on_stage: Callable[[str], None] = lambda stage: None,
    unplanned: Callable[..., Step] | None = None,
) -> Comparison:
    """Train with `optimize`, then plainly, on what `make` builds anew each time; compare the ends.

    `make` returns (train_step, model, optimizer, batch) and is called for each training, under the
    same seed; the random generators are put back afterwards. `on_stage` is told what is about to
    happen. A plain step that runs out of memory, where the other has a budget, is a result and no
    error. A compiled step is compared with what `unplanned` makes, which drops nothing.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()

    def trained(prepare: Callable[..., Any], stage: str) -> _Training:
        on_stage("building the model")
        torch.manual_seed(seed)
        train_step, *objects = make()
        torch.manual_seed(seed)
        if prepare is not _plainly:
            on_stage("capturing a step")
        start = time.perf_counter()
        step = prepare(train_step, *objects)
        seconds = time.perf_counter() - start
        on_stage(f"training {steps} steps {stage}")
        found = _Training(step, *objects, steps=steps)
        found.step, found.prepare_us = step, seconds * 1e6
        return found

    with torch.random.fork_rng(devices=devices):
        captured = trained(optimize, "with Rekindle")
        step: Step = captured.step
        captured.peak_bytes = max(captured.peak_bytes, step.graphs_peak_bytes)
        found = Comparison(
            graph=step.graph,
            capture_us=captured.prepare_us,
            plain_samples_us=(),
            plain_peak_bytes=0,
            compared={},
            differences=(),
            plain_fits=False,
            captured_samples_us=tuple(captured.samples_us),
            captured_peak_bytes=captured.peak_bytes,
            budget_bytes=step.budget_bytes,
            profile=step.profile,
            plan=step.plan,
            trace=step.trace,
            plain_trace=step.plain_trace,
            plain_profile=step.plain_profile,
            is_compiled=step.is_compiled and unplanned is not None,
        )
        del step, captured.step  # two models at once might not fit
        gc.collect()
        other: _Training | None = None
        try:
            if found.is_compiled:
                assert unplanned is not None
                other = trained(unplanned, "with Rekindle, nothing dropped")
                del other.step
                gc.collect()
                found = _compared(found, captured.state, other.state)
            plain = trained(_plainly, "without Rekindle")
        except torch.OutOfMemoryError:
            if found.budget_bytes is None:
                raise
            return found
    found = replace(
        found,
        plain_fits=True,
        plain_samples_us=tuple(plain.samples_us),
        plain_peak_bytes=plain.peak_bytes,
    )
    if other is None:
        return _compared(found, captured.state, plain.state)
    return replace(found, rounding=_largest_difference(plain.state, other.state))


def _plainly(
    train_step: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> Callable[[Any], Any]:
    return partial(train_step, model, optimizer)


def _compared(found: Comparison, state: State, with_state: State) -> Comparison:
    return replace(
        found,
        compared=count_tensors(with_state),
        differences=tuple(differences(with_state, state)),
    )


def _largest_difference(a: State, b: State) -> float:
    """How far results are apart, as a share of them."""
    pairs = [(a[key].double(), b[key].double()) for key in a if _is_result(key, a[key])]
    return max(
        (
            float((x - y).abs().max() / x.abs().max().clamp_min(1e-30))
            for x, y in pairs
            if x.numel()
        ),
        default=0.0,
    )


def _is_result(key: str, value: Any) -> bool:
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_number and key.startswith("result ")


class _Training:
    """A few steps, each timed: what they return and leave. In the last, memory is watched."""

    step: Any  # which is dropped once nothing is asked of it any more
    prepare_us: float

    def __init__(
        self,
        step: Callable[[Any], Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        *,
        steps: int,
    ) -> None:
        self.state: State = {}
        self.samples_us: list[float] = []
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        for _ in range(steps - 1):
            self._train(step, batch)
        self.peak_bytes = peak_bytes(
            lambda: self._train(step, batch),
            device,
            lambda: tensors_around(model, optimizer, batch),
        )
        self.state.update(state_of(model, optimizer))

    def _train(self, step: Callable[[Any], Any], batch: Any) -> None:
        start = time.perf_counter()
        leaves = [_copy(leaf) for leaf in pytree.tree_leaves(step(batch))]  # waits for the device
        self.samples_us.append((time.perf_counter() - start) * 1e6)
        for position, leaf in enumerate(leaves):
            place = f".{position}" if len(leaves) > 1 else ""
            self.state[f"result {len(self.samples_us)}{place}"] = leaf


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def same(a: Any, b: Any) -> bool:
    """Whether two things are equal in type, form, place and every bit."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: unlike numbers, they tell -0.0 from 0.0, and a NaN equals itself."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
