"""Replaces parts of torch and transformers while a step is traced.

The dispatcher does not see calls of modules, optimizers and schedulers, nor reads of memory and of
random state. They are recorded or refused here.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from rekindle.core.identity import IdentityDict, IdentitySet
from rekindle.torch_internals import (
    FAKE_TENSOR_LOGGER,
    compiling_nothing,
    disable_current_modes,
)
from rekindle.tracing.capture_thread import Patch, ThreadPatches
from rekindle.tracing.preconditions import DRAWS, SEEDS
from rekindle.tracing.recorder import Recorder, is_dispatching


@contextmanager
def intercepted(
    recorder: Recorder,
    patches: ThreadPatches,
    modules: dict[str, nn.Module],
    *,
    on_unknown: Callable[[nn.Module], None],
    on_optimizer: Callable[[torch.optim.Optimizer], None],
) -> Iterator[Callable[[], bool]]:
    """Intercept while the step runs.

    `on_unknown` is called with modules that are not in `modules`, `on_optimizer` with each
    optimizer before it steps. Yields a function that returns True if another thread has drawn from
    Python's or numpy's random generator since.
    """
    with ExitStack() as stack:
        _track_modules(patches, recorder, modules, on_unknown)
        _refuse_schedulers(patches, recorder)
        stack.enter_context(_OptimizerHook(patches, on_optimizer))
        _record_random_state(patches, recorder)
        draws = list(_refuse_seeds_and_draws(patches, recorder))
        stack.enter_context(compiling_nothing())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_MemoryReadsRefused(recorder))
        stack.enter_context(_Quiet(patches))
        torch.clear_autocast_cache()
        yield lambda: any(patch.n_calls_elsewhere for patch in draws)


class _OptimizerHook:
    """Calls a function with each optimizer that steps in the capturing thread.

    Steps that run in other threads meanwhile ignore it: see `is_own_hook`.
    """

    def __init__(
        self, patches: ThreadPatches, function: Callable[[torch.optim.Optimizer], None]
    ) -> None:
        self._patches, self._function = patches, function

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._patches.is_active:
            self._function(optimizer)

    def __enter__(self) -> None:
        self._handle = register_optimizer_step_pre_hook(self)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


def is_own_hook(hook: Any) -> bool:
    """True if a hook on optimizers is a capture's, which other threads do not notice."""
    return isinstance(hook, _OptimizerHook)


class _Quiet:
    """In the capturing thread, ignores a logger and a warning about fake tensors.

    The logger repeats the user's errors, which are raised. The warning is about addresses, which
    recurrent layers only compare. Python's filters of warnings are the process's: this one stands
    among them, and matches in the capturing thread only.
    """

    def __init__(self, patches: ThreadPatches) -> None:
        self._patches = patches
        self._filter: Any = ("ignore", self, Warning, None, 0)
        self._logger = logging.getLogger(FAKE_TENSOR_LOGGER)

    def match(self, text: str) -> bool:
        """True if a warning is ignored: the part of a regular expression in a filter."""
        return self._patches.is_active and text.startswith(_DATA_POINTER_WARNING)

    def filter(self, record: logging.LogRecord) -> bool:
        """True if a message is logged: none that comes while an operator of a capture is called."""
        return not self._patches.is_active and not is_dispatching()

    def __enter__(self) -> None:
        self._logger.addFilter(self)
        warnings.filters.insert(0, self._filter)  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        self._logger.removeFilter(self)
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]


_DATA_POINTER_WARNING = "Accessing the data pointer of FakeTensor"


class _MemoryReadsRefused(TorchFunctionMode):
    """Refuses functions that read the memory of a real or fake tensor without an operator."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _SET_DATA:
            self._recorder.refuse(
                "assigns to .data of a tensor",
                "Write to the tensor in place: with torch.no_grad(): p.copy_(new).",
            )
        if func in _MEMORY_READS:
            value = self._recorder.known_value(args[0])
            if value is not None:
                with disable_current_modes():
                    return func(value.clone(), *args[1:], **(kwargs or {}))
            self._recorder.refuse(
                f"reads {_MEMORY_READS[func]} during the step",
                "The step is captured once, on tensors without values: stay with torch operators, "
                "or do it outside the step: loss = step(batch); print(f'{loss:.3f}').",
            )
        return func(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_MEMORY_READS = {
    torch.Tensor.tolist: "a tensor's memory (.tolist())",
    torch.Tensor.numpy: "a tensor's memory (.numpy())",
    torch.Tensor.__array__: "a tensor's memory (.numpy(), np.asarray())",
    torch.Tensor.__format__: "the value of a tensor (a format string)",
}


def _track_modules(
    patches: ThreadPatches,
    recorder: Recorder,
    modules: dict[str, nn.Module],
    on_unknown: Callable[[nn.Module], None],
) -> None:
    paths = IdentityDict((module, path) for path, module in modules.items())
    made_here = IdentitySet()  # modules that the step itself creates

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        made_here.add(module)
        plain_init.original(module, *args, **kwargs)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in paths:
            paths[module] = type(module).__name__
            if module not in made_here:
                on_unknown(module)
        recorder.module_path.append(paths[module])
        try:
            return plain_call.original(module, *args, **kwargs)
        finally:
            recorder.module_path.pop()

    # Not a global hook on modules: compiled code of other threads would notice one.
    plain_call = patches.replace(nn.Module, "__call__", call)
    plain_init = patches.replace(nn.Module, "__init__", init)


def _refuse_schedulers(patches: ThreadPatches, recorder: Recorder) -> None:
    def step(*args: Any, **kwargs: Any) -> None:
        recorder.refuse(
            "steps a learning-rate scheduler inside the training step",
            "Call scheduler.step() after step(batch), outside: the next step uses the new rate.",
        )

    for scheduler in (LRScheduler, *_subclasses(LRScheduler)):
        if "step" in vars(scheduler):
            patches.replace(scheduler, "step", step)


def _subclasses(cls: type) -> Iterator[type]:
    subclass: type
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _record_random_state(patches: ThreadPatches, recorder: Recorder) -> None:
    """Record reads and writes of random state, as `torch.utils.checkpoint` makes them."""

    def patch(module: Any, kind: str) -> None:
        def get(device: Any = kind) -> torch.Tensor:
            with disable_current_modes():
                state = plain.original() if kind == "cpu" else plain.original(device)
            return recorder.get_random_state(_generator_name(device), state)

        def set_(new_state: torch.Tensor, device: Any = kind) -> None:
            recorder.set_random_state(_generator_name(device), new_state)

        plain = patches.replace(module, "get_rng_state", get)
        patches.replace(module, "set_rng_state", set_)

    for module in (torch, torch.random):
        patch(module, "cpu")
    for module in (torch.cuda, torch.cuda.random):
        patch(module, "cuda")


def _refuse_seeds_and_draws(patches: ThreadPatches, recorder: Recorder) -> Iterator[Patch]:
    """Refuse to seed torch's generators, and to draw from those of `random` and numpy.

    Yields the patches of the latter. A generator's state does not tell who has changed it: another
    thread may have.
    """

    def seed(*args: Any, **kwargs: Any) -> None:
        recorder.refuse(*SEEDS)

    def draw(*args: Any, **kwargs: Any) -> None:
        recorder.refuse(*DRAWS)

    for module in (torch, torch.random, torch.cuda, torch.cuda.random):
        for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
            if name in vars(module):
                patches.replace(module, name, seed)
    for module, kind in ((random, random.Random), (np.random, np.random.RandomState)):
        for name, function in list(vars(module).items()):
            is_method = isinstance(getattr(function, "__self__", None), kind)
            if is_method and name.replace("_", "") not in ("getstate", "setstate"):
                yield patches.replace(module, name, draw)


def _generator_name(device: Any) -> str:
    """The device of a generator, with its index."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return str(device)


# transformers masks attention by values unless they are fake. So it is told that tensors are not,
# and may look at all values that are known (decision 9).


def show_fakes_to_transformers(patches: ThreadPatches, recorder: Recorder) -> None:
    """Tell transformers, if it is imported, that a tensor is fake only if its value is unknown."""
    module = sys.modules.get("transformers.utils.import_utils")
    if hasattr(module, "is_fake_tensor"):
        patches.replace(module, "is_fake_tensor", recorder.must_not_look)
