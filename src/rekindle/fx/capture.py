"""Runs the user's training step once on fake tensors and returns what it does, as a `Recording`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.modules import module as module_hooks
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import _disable_current_modes

from rekindle.errors import CaptureError
from rekindle.fx import libraries, tree, where
from rekindle.fx.effects import Effect, find_effects, note_attributes
from rekindle.fx.record import Kind, OptimizerCall, Recorder, Tape, run_optimizer
from rekindle.fx.sandbox import Sandbox, replaced
from rekindle.fx.state import Surroundings

log = logging.getLogger("rekindle")


@dataclass(frozen=True)
class GradUse:
    """What the step does to one parameter's `.grad`."""

    slot: int  # into Recording.around.slots
    reads_old: bool  # the gradient from before the step matters (else it is cleared unread)
    was_there: bool
    final: fx.Node | None  # what is there after the step; None if nothing


@dataclass(frozen=True)
class Recording:
    """A captured step: the tape, and how it is tied to the user's objects."""

    tape: Tape
    around: Surroundings
    batch_nodes: list[fx.Node]
    result: tree.Structure
    result_nodes: list[fx.Node]
    grads: list[GradUse]
    effects: list[Effect]

    def drop_dead_calls(self) -> None:
        """Take calls off the tape whose results nobody uses: they change nothing."""
        alive = {*self.result_nodes, *(use.final for use in self.grads)}
        alive.update(node for effect in self.effects for node in effect.nodes)
        alive.update(arg for call in self.tape.optimizer_calls for arg in call.grads)
        calls = self.tape.calls
        kept = []
        for call in reversed(calls):
            acts = call.writes or call.is_random or not call.results
            if acts or not alive.isdisjoint(call.results):
                alive.update(call.node.all_input_nodes)
                kept.append(call)
                continue
            for node in (*call.results, call.node):
                if not node._erased:
                    self.tape.graph.erase_node(node)
        calls[:] = kept[::-1]


class _TryAgain(BaseException):
    """The capture has to start again with one of its tricks switched off."""

    def __init__(self, trick: str) -> None:
        self.trick = trick


def record(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
) -> Recording:
    """Capture one call of `train_step(model, optimizer, batch)`; nothing real is changed."""
    tricks = {"stand_ins": True, "nothing_is_fake": True}
    while True:
        try:
            return _Capture(train_step, model, optimizer, batch, **tricks).run()
        except _TryAgain as again:
            tricks[again.trick] = False


class _Capture:
    def __init__(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        *,
        stand_ins: bool,
        nothing_is_fake: bool,
    ) -> None:
        self.train_step = train_step
        self.model = model
        self.optimizer = optimizer
        self.batch = tree.flatten(batch)
        self.step_line = where.definition(train_step)
        self.around = Surroundings(train_step, model, optimizer)
        self.params = self.around.params()
        self._check_input()
        self.fake_mode = FakeTensorMode()
        self.recorder = Recorder(self.fake_mode, self.step_line, self._name_unknown)
        self.with_stand_ins = stand_ins
        self.nothing_is_fake = nothing_is_fake
        if nothing_is_fake:
            self.recorder.on_value_asked = self._on_value_asked
        self.stand_ins: dict[int, torch.Tensor] = {}  # by the identity of the parameter
        self.old_grads_cleared: list[bool] | None = None
        self.external_leaves: list[torch.Tensor] = []
        self.sandbox = Sandbox(
            list(self.around.modules.values()),
            [slot.get() for slot in self.around.slots],
            optimizer,
        )

    def run(self) -> Recording:
        """Record the step and put everything back."""
        attributes = note_attributes(self.around.modules)
        grads_before = [param.grad for param in self.params.values()]
        hyperparameters = _hyperparameters(self.optimizer)
        try:
            for slot in self.around.slots:
                self.recorder.enter_tensor(slot.kind, slot.name, slot.get())
            batch = [self._enter_batch(i, t) for i, t in enumerate(self.batch.tensors)]
            batch_nodes = [self.recorder.node_of(tensor) for tensor in batch]
            with self._patches(), self.fake_mode:
                self._place_stand_ins()
                with self.recorder:
                    result = self._call_step(self.batch.structure.rebuild(batch))
            self._check_outcome(hyperparameters)
            flat = tree.flatten(result)
            self._check_result(flat.structure)
            for _, state in self.around.optimizer_state():
                self.recorder.node_of(state)
            recording = Recording(
                tape=self.recorder.tape,
                around=self.around,
                batch_nodes=batch_nodes,
                result=flat.structure,
                result_nodes=[self.recorder.node_of(tensor) for tensor in flat.tensors],
                grads=self._grad_uses(grads_before),
                effects=find_effects(self.around.modules, attributes, self.recorder.node_of),
            )
            recording.drop_dead_calls()
            return recording
        finally:
            self.sandbox.restore()

    # Before

    def _check_input(self) -> None:
        devices = sorted({str(param.device) for param in self.params.values()})
        if len(devices) > 1:
            self._refuse(
                f"the model lies on {len(devices)} devices: {', '.join(devices)}",
                "Rekindle plans the memory of one device: move the model with "
                f'model.to("{devices[-1]}") before building the optimizer.',
            )
        for path, module in self.around.modules.items():
            if isinstance(module, nn.RNNBase) and _draws_inside_cudnn(module):
                self._refuse(
                    f"{path or type(module).__name__} has dropout between its layers, for which "
                    "cuDNN keeps a random state of its own",
                    "Write one layer a module with nn.Dropout between them, or switch cuDNN off "
                    "with torch.backends.cudnn.enabled = False.",
                )
        for leaf in tree.opaque_leaves(self.batch.structure):
            self._refuse(
                f"the batch holds a {type(leaf).__name__}, which Rekindle cannot look into",
                "Pass tensors and plain numbers, in tuples, lists, dicts or dataclasses.",
            )

    def _enter_batch(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """A batch tensor's fake twin. A meta tensor stands for one on the model's device."""
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            device = next(iter(self.params.values())).device if self.params else torch.device("cpu")
            with self.fake_mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
        else:
            fake = self.fake_mode.from_tensor(tensor)
        self.recorder.enter_tensor(Kind.BATCH, str(index), fake)
        return fake

    def _place_stand_ins(self) -> None:
        """Give parameters without a gradient a stand-in, to see whether the step clears it unread.

        If it does (`zero_grad()` before `backward()`), the captured graph serves whether or not
        gradients are left over from before; else their presence is part of what was captured.
        """
        if not self.with_stand_ins:
            return
        for param in self.params.values():
            if param.requires_grad and param.grad is None:
                param.grad = torch.empty_strided(
                    param.shape, param.stride(), dtype=param.dtype, device=param.device
                )
                self.stand_ins[id(param)] = param.grad

    # During

    @contextmanager
    def _patches(self) -> Iterator[None]:
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(replaced(self.optimizer, "step", self._optimizer_step))
            enter(replaced(torch.autograd, "backward", self._backward))
            for scheduler in (LRScheduler, *_subclasses(LRScheduler)):
                if "step" in vars(scheduler):
                    enter(replaced(scheduler, "step", self._scheduler_step))
            for module, kind in _GENERATOR_MODULES:
                get, set_ = self._random_state_functions(module.get_rng_state, kind)
                enter(replaced(module, "get_rng_state", get))
                enter(replaced(module, "set_rng_state", set_))
            if self.nothing_is_fake:
                enter(libraries.nothing_is_fake())
            enter(self._module_paths())
            enter(torch.compiler.set_stance("force_eager"))
            enter(warnings.catch_warnings())  # recurrent layers compare addresses; nothing is read
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            enter(torch.enable_grad())
            torch.clear_autocast_cache()
            yield

    @contextmanager
    def _module_paths(self) -> Iterator[None]:
        paths = {id(module): path for path, module in self.around.modules.items()}
        stack = self.recorder.module_path

        def enter(module: nn.Module, args: Any) -> None:
            stack.append(paths.get(id(module), type(module).__name__))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            stack.pop()

        hooks = (
            module_hooks.register_module_forward_pre_hook(enter),
            module_hooks.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _call_step(self, batch: Any) -> Any:
        try:
            return self.train_step(self.model, self.optimizer, batch)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            self._refuse_at(
                error,
                f"uses {_operator_name(error)}, whose result's shape or value depends on data",
                "The step is captured once, for all values: write torch.where(...) or a mask of "
                "fixed shape instead, or do it outside the step.",
            )
        except UnsupportedOperatorException as error:
            self._refuse_at(
                error,
                f"uses {_operator_name(error)}, which does not run on fake tensors",
                "Give the operator a fake implementation: torch.library.register_fake(...).",
            )
        except RuntimeError as error:
            if "data pointer" not in str(error) and ".numpy()" not in str(error):
                raise
            self._refuse_at(
                error,
                "reads a tensor's memory (.numpy(), .tolist(), .data_ptr()) during the step",
                "The step is captured once, without values: stay with torch operators, or do it "
                "outside the step.",
            )

    def _on_value_asked(self, line: where.Line) -> None:
        if libraries.asks_for_values(line):
            log.info(
                "%s:%d decides by a value of the batch; the captured step applies masks always",
                *line,
            )
            raise _TryAgain("nothing_is_fake")

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        if self.old_grads_cleared is None:
            self.old_grads_cleared = [param.grad is None for param in self.params.values()]
            self._remove_stand_ins()
        self.recorder.in_backward = True
        try:
            _BACKWARD(*args, **kwargs)
        finally:
            self.recorder.in_backward = False

    def _remove_stand_ins(self) -> None:
        for param in self.params.values():
            if param.grad is not None and param.grad is self.stand_ins.get(id(param)):
                param.grad = None

    def _optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        recorder = self.recorder
        if args or kwargs:
            recorder.refuse(
                "calls optimizer.step with an argument",
                "Rekindle captures optimizer.step() without a closure: compute the loss and call "
                "loss.backward() before it.",
            )
        self._remove_stand_ins()
        with_grad = [slot for slot, param in self.params.items() if param.grad is not None]
        grads = [recorder.node_of(_grad(self.params[slot])) for slot in with_grad]
        tape = recorder.tape
        node = tape.graph.call_function(run_optimizer, tuple(grads))
        n_calls = len(tape.calls)
        is_opaque = False
        recorder.in_optimizer = True
        try:
            if any(not self.optimizer.state.get(self.params[slot]) for slot in with_grad):
                recorder.is_paused = True  # let the optimizer create its state: not part of a step
                self._plain_optimizer_step()
                recorder.is_paused = False
            self._plain_optimizer_step()
        except Exception:
            is_opaque = True
            del tape.calls[n_calls:]
            for later in [*_nodes_after(node)][::-1]:
                tape.graph.erase_node(later)
        finally:
            recorder.in_optimizer = recorder.is_paused = False
        tape.optimizer_calls.append(
            OptimizerCall(node, with_grad, grads, _autocast_state(), is_opaque)
        )

    def _plain_optimizer_step(self) -> None:
        """The optimizer's own `step`, without the hooks that users register on it."""
        step = type(self.optimizer).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]
        step(self.optimizer)

    def _scheduler_step(self, *args: Any, **kwargs: Any) -> None:
        self.recorder.refuse(
            "steps a learning-rate scheduler inside the training step",
            "Call scheduler.step() after step(batch), outside: the new rate is used as it is.",
        )

    def _random_state_functions(
        self, real_get: Callable[..., torch.Tensor], kind: str
    ) -> tuple[Callable[..., torch.Tensor], Callable[..., None]]:
        """Stand-ins for torch's two functions that put the access to a generator on the tape."""

        def get(device: Any = kind) -> torch.Tensor:
            with _disable_current_modes():
                state = real_get() if kind == "cpu" else real_get(device)
            return self.recorder.get_random_state(_generator_name(device), state)

        def set_(state: torch.Tensor, device: Any = kind) -> None:
            self.recorder.set_random_state(_generator_name(device), state)

        return get, set_

    def _name_unknown(self, tensor: torch.Tensor) -> tuple[Kind, str]:
        if any(tensor is stand_in for stand_in in self.stand_ins.values()):
            raise _TryAgain("stand_ins")
        known = self.around.name_of(tensor)
        if known is not None:
            return known
        count = len(self.recorder.tape.entries)
        if self.recorder.in_optimizer and isinstance(tensor, FakeTensor):
            return Kind.OPT_STATE, f"optimizer.{count}"
        if isinstance(tensor, FakeTensor):
            self.recorder.refuse(
                "uses a fake tensor that this capture did not make",
                "Tensors from inside a captured step must not be kept in globals or closures.",
            )
        self.sandbox.add(tensor)
        if tensor.requires_grad:
            self.external_leaves.append(tensor)
        return Kind.EXTERNAL, str(count)

    # After

    def _check_outcome(self, hyperparameters: list[dict[str, Any]]) -> None:
        tape = self.recorder.tape
        if not any(call.in_backward for call in tape.calls):
            self._refuse(
                "the step never calls backward()",
                "A training step computes a loss and calls loss.backward() and optimizer.step().",
            )
        if not tape.optimizer_calls:
            self._refuse(
                "the step never calls optimizer.step()",
                "Call optimizer.step() of the optimizer that you hand to Rekindle, in the step.",
            )
        if any(tensor.grad is not None for tensor in self.external_leaves):
            self._refuse(
                "backward() reaches a tensor that is neither in the model nor in the optimizer",
                "Make it part of the model, or freeze it with requires_grad_(False).",
            )
        if _hyperparameters(self.optimizer) != hyperparameters:
            self._refuse(
                "the step changes the optimizer's settings",
                "Change learning rates and the like between steps, outside: they are used as is.",
            )
        if self.sandbox.drew_random_numbers():
            self._refuse(
                "the step seeds a random generator",
                "Call torch.manual_seed outside the step: every step continues the stream.",
            )
        if not self.sandbox.python_random.is_unchanged():
            self._refuse(
                "the step draws from Python's or numpy's random generator",
                "Draw with torch (torch.rand, torch.randint), which becomes part of the graph.",
            )

    def _check_result(self, structure: tree.Structure) -> None:
        for leaf in tree.opaque_leaves(structure):
            self._refuse(
                f"the step returns a {type(leaf).__name__}, which Rekindle cannot look into",
                "Return tensors, in tuples, lists, dicts or dataclasses.",
            )

    def _grad_uses(self, before: list[torch.Tensor | None]) -> list[GradUse]:
        cleared = self.old_grads_cleared or [False] * len(self.params)
        uses = []
        for (slot, param), old, is_cleared in zip(
            self.params.items(), before, cleared, strict=True
        ):
            new = param.grad
            if param.requires_grad or old is not None or new is not None:
                final = None if new is None else self.recorder.node_of(new)
                uses.append(GradUse(slot, not is_cleared, old is not None, final))
        return uses

    def _refuse(self, problem: str, advice: str) -> None:
        filename, lineno = self.step_line
        raise CaptureError(problem, filename=filename, lineno=lineno, advice=advice)

    def _refuse_at(self, error: Exception, problem: str, advice: str) -> None:
        lines = where.traceback_lines(error.__traceback__)
        filename, lineno = where.user_line(lines, self.step_line)
        raise CaptureError(problem, filename=filename, lineno=lineno, advice=advice) from error


_BACKWARD = torch.autograd.backward
_GENERATOR_MODULES = (
    (torch, "cpu"),
    (torch.random, "cpu"),
    (torch.cuda, "cuda"),
    (torch.cuda.random, "cuda"),
)


def _generator_name(device: Any) -> str:
    """A generator's device with its number: "cuda" means the current one."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return str(device)


def _grad(param: torch.Tensor) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


def _draws_inside_cudnn(rnn: nn.RNNBase) -> bool:
    on_cuda = any(param.is_cuda for param in rnn.parameters())
    return on_cuda and rnn.training and rnn.dropout > 0 and torch.backends.cudnn.enabled


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _nodes_after(node: fx.Node) -> Iterator[fx.Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _autocast_state() -> dict[str, torch.dtype]:
    return {
        kind: torch.get_autocast_dtype(kind)
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    }


def _operator_name(error: Exception) -> str:
    return str(getattr(error, "func", None) or (error.args[0] if error.args else "an operator"))
