"""Trains twice from the same state and compares every bit."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rekindle.core.graph.comparison import Comparison
from rekindle.errors import RekindleError
from rekindle.measuring.meters import peak_bytes
from rekindle.measuring.timing import resident_tensors
from rekindle.torch_internals import pytree
from rekindle.tracing.undo import random_states

State = dict[str, Any]
Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Any]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Copies in host memory of all that training changes. Keys start with the kind of the value."""
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
    """The keys whose values differ in any bit, or that only one of the two has."""
    keys = dict.fromkeys((*a, *b))
    return [key for key in keys if key not in a or key not in b or not same(a[key], b[key])]


def compare(
    make: Callable[[], Parts],
    optimize: Callable[..., Any],
    *,
    steps: int,
    on_stage: Callable[[str], None] = lambda stage: None,
    unplanned: Callable[..., Any] | None = None,
) -> Comparison:
    """Train with `optimize`, then without Rekindle, each time from a fresh `make()`; compare.

    `make` returns (train_step, model, optimizer, batch) and is called before each training, with
    the same seed; the random generators are restored afterwards. `optimize` returns a `TrainStep`.
    `on_stage` is called with a description of each stage as it begins. If there is a budget, a
    plain step that runs out of memory is a result, not an error. A compiled step is compared with
    the step that `unplanned` returns, which is compiled, too, and recomputes nothing. If anything
    differs, the plain training is run once more, to see whether it is deterministic at all.
    """
    if type(steps) is not int or steps < 1:
        raise RekindleError(f"steps must be a whole number of at least 1, and is {steps!r}")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()

    def trained(prepare: Callable[..., Any] | None, stage: str) -> _Training:
        on_stage("building the model")
        torch.manual_seed(0)
        train_step, model, optimizer, batch = make()
        torch.manual_seed(0)
        start = time.perf_counter()
        if prepare is None:
            step = partial(train_step, model, optimizer)
        else:
            on_stage("capturing a step")
            step = prepare(train_step, model, optimizer, batch)
        training = _Training(step, prepare_us=(time.perf_counter() - start) * 1e6)
        on_stage(f"training {steps} steps {stage}")
        for _ in range(steps - 1):
            training.train(batch)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        resident = partial(resident_tensors, model, optimizer, batch)
        training.peak_bytes = peak_bytes(partial(training.train, batch), device, resident)
        training.state.update(state_of(model, optimizer))
        return training

    with torch.random.fork_rng(devices=devices):
        captured = trained(optimize, "with Rekindle")
        step = captured.step
        found = Comparison(
            graph=step.graph,
            capture_us=captured.prepare_us,
            plain_samples_us=(),
            plain_peak_bytes=0,
            compared={},
            differences=(),
            plain_fits=False,
            captured_samples_us=tuple(captured.samples_us),
            captured_peak_bytes=max(captured.peak_bytes, step.graphs_peak_bytes),
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
                other = trained(unplanned, "with Rekindle, nothing dropped")
                del other.step
                gc.collect()
                found = _compared(found, captured.state, other.state)
            plain = trained(None, "without Rekindle")
            if other is None and differences(plain.state, captured.state):
                del plain.step
                gc.collect()
                again = trained(None, "without Rekindle, once more")
                uneven = tuple(differences(plain.state, again.state))
                found = replace(found, plain_differences=uneven)
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


def _compared(found: Comparison, state: State, expected: State) -> Comparison:
    kinds = (key.partition(" ")[0] for key, v in expected.items() if isinstance(v, torch.Tensor))
    return replace(
        found, compared=dict(Counter(kinds)), differences=tuple(differences(expected, state))
    )


def _largest_difference(a: State, b: State) -> float:
    """The largest difference between results, relative to the largest element of each."""
    largest = 0.0
    for key, value in a.items():
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        if key.startswith("result ") and is_number and value.numel():
            x, y = value.double(), b[key].double()
            largest = max(largest, float((x - y).abs().max() / x.abs().max().clamp_min(1e-30)))
    return largest


@dataclass
class _Training:
    """The results, times and final state of a few steps, and the memory peak of the last one."""

    step: Any
    prepare_us: float
    peak_bytes: int = 0
    samples_us: list[float] = field(default_factory=list)
    state: State = field(default_factory=dict)

    def train(self, batch: Any) -> None:
        start = time.perf_counter()
        leaves = [_copy(leaf) for leaf in pytree.tree_leaves(self.step(batch))]  # synchronizes
        self.samples_us.append((time.perf_counter() - start) * 1e6)
        for position, leaf in enumerate(leaves):
            suffix = f".{position}" if len(leaves) > 1 else ""
            self.state[f"result {len(self.samples_us)}{suffix}"] = leaf


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def same(a: Any, b: Any) -> bool:
    """True if two values are equal in type, shape, device and every bit."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, by which -0.0 differs from 0.0 and a NaN equals itself."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
