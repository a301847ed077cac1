"""Trains twice from the same state and compares every bit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rekindle.core.comparison import Comparison
from rekindle.fx.sandbox import random_states
from rekindle.fx.step import TrainStep

State = dict[str, Any]
Parts = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Any]


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
    optimize: Callable[..., TrainStep],
    *,
    steps: int,
    seed: int = 0,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Comparison:
    """Train plainly, then with `optimize`, on what `make` builds anew each time; compare the ends.

    `make` returns (train_step, model, optimizer, batch) and is called twice, under the same seed;
    the random generators are put back afterwards. `on_stage` is told what is about to happen.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        on_stage("building the model")
        torch.manual_seed(seed)
        train_step, model, optimizer, batch = make()
        torch.manual_seed(seed)
        on_stage(f"training {steps} steps without Rekindle")
        plain, plain_us = _train(lambda: train_step(model, optimizer, batch), steps)
        plain.update(state_of(model, optimizer))

        on_stage("building the model again")
        torch.manual_seed(seed)
        train_step, model, optimizer, batch = make()
        torch.manual_seed(seed)
        on_stage("capturing a step")
        start = time.perf_counter()
        step = optimize(train_step, model, optimizer, batch)
        capture_us = (time.perf_counter() - start) * 1e6
        on_stage(f"training {steps} steps with Rekindle")
        captured, captured_us = _train(lambda: step(batch), steps)
        captured.update(state_of(model, optimizer))
    return Comparison(
        graph=step.graph,
        capture_us=capture_us,
        plain_samples_us=plain_us,
        captured_samples_us=captured_us,
        compared=count_tensors(plain),
        differences=tuple(differences(plain, captured)),
    )


def _train(step: Callable[[], Any], steps: int) -> tuple[State, tuple[float, ...]]:
    """What each step returns, and how long it takes."""
    results: State = {}
    samples_us = []
    for index in range(1, steps + 1):
        start = time.perf_counter()
        result = step()
        leaves = [_copy(leaf) for leaf in pytree.tree_leaves(result)]  # waits for the device
        samples_us.append((time.perf_counter() - start) * 1e6)
        for position, leaf in enumerate(leaves):
            place = f".{position}" if len(leaves) > 1 else ""
            results[f"result {index}{place}"] = leaf
    return results, tuple(samples_us)


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
