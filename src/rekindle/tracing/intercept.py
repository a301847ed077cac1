"""Replaces parts of torch and transformers while a step is traced.

The dispatcher does not see calls of modules, optimizers and schedulers, nor reads of memory and of
random state. They are recorded or refused here.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from rekindle.torch_internals import FAKE_TENSOR_LOGGER, disable_current_modes
from rekindle.tracing.recorder import Recorder
from rekindle.tracing.undo import replaced


@contextmanager
def intercepted(
    recorder: Recorder,
    modules: dict[str, nn.Module],
    *,
    on_unknown: Callable[[nn.Module], None],
    on_optimizer: Callable[[torch.optim.Optimizer], None],
) -> Iterator[None]:
    """Intercept while the step runs.

    `on_unknown` is called with modules that are not in `modules`, `on_optimizer` with each
    optimizer before it steps.
    """
    with ExitStack() as stack:
        _track_modules(stack, recorder, modules, on_unknown)
        _refuse_schedulers(stack, recorder)
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: on_optimizer(optimizer))
        stack.callback(hook.remove)
        _record_random_state(stack, recorder)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_MemoryReadsRefused(recorder))
        logger = logging.getLogger(FAKE_TENSOR_LOGGER)  # logs the user's errors, which are raised
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        stack.enter_context(warnings.catch_warnings())
        # Recurrent layers only compare the addresses of their weights.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        torch.clear_autocast_cache()
        yield


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
    stack: ExitStack,
    recorder: Recorder,
    modules: dict[str, nn.Module],
    on_unknown: Callable[[nn.Module], None],
) -> None:
    paths = {id(module): path for path, module in modules.items()}
    made_here: set[int] = set()  # modules that the step itself creates
    init = nn.Module.__init__

    def note_and_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        made_here.add(id(module))
        init(module, *args, **kwargs)

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) not in paths:
            paths[id(module)] = type(module).__name__
            if id(module) not in made_here:
                on_unknown(module)
        recorder.module_path.append(paths[id(module)])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        recorder.module_path.pop()

    stack.callback(module_hooks.register_module_forward_pre_hook(enter).remove)
    stack.callback(module_hooks.register_module_forward_hook(leave, always_call=True).remove)
    stack.enter_context(replaced(nn.Module, "__init__", note_and_init))


def _refuse_schedulers(stack: ExitStack, recorder: Recorder) -> None:
    def step(*args: Any, **kwargs: Any) -> None:
        recorder.refuse(
            "steps a learning-rate scheduler inside the training step",
            "Call scheduler.step() after step(batch), outside: the next step uses the new rate.",
        )

    for scheduler in (LRScheduler, *_subclasses(LRScheduler)):
        if "step" in vars(scheduler):
            stack.enter_context(replaced(scheduler, "step", step))


def _subclasses(cls: type) -> Iterator[type]:
    subclass: type
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _record_random_state(stack: ExitStack, recorder: Recorder) -> None:
    """Record reads and writes of random state, as `torch.utils.checkpoint` makes them."""

    def patch(module: Any, kind: str) -> None:
        read_state = module.get_rng_state

        def get(device: Any = kind) -> torch.Tensor:
            with disable_current_modes():
                state = read_state() if kind == "cpu" else read_state(device)
            return recorder.get_random_state(_generator_name(device), state)

        def set_(new_state: torch.Tensor, device: Any = kind) -> None:
            recorder.set_random_state(_generator_name(device), new_state)

        stack.enter_context(replaced(module, "get_rng_state", get))
        stack.enter_context(replaced(module, "set_rng_state", set_))

    for module in (torch, torch.random):
        patch(module, "cpu")
    for module in (torch.cuda, torch.cuda.random):
        patch(module, "cuda")


def _generator_name(device: Any) -> str:
    """The device of a generator, with its index."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return str(device)


# transformers masks attention by values unless they are fake. So it is told that tensors are not,
# and may look at all values that are known (decision 9).


def transformers_sees_fakes(recorder: Recorder) -> AbstractContextManager[None]:
    """Tell transformers, if it is imported, that a tensor is fake only if its value is unknown."""
    module = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_fake_tensor"):
        return nullcontext()
    return replaced(module, "is_fake_tensor", recorder.must_not_look)
