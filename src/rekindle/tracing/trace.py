"""Runs the user's training step once on fake tensors and returns what it does, as a `Recording`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from rekindle.errors import CaptureError
from rekindle.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from rekindle.tracing import batch_tree, cpu_as_gpu, intercept, transformers_compat, user_line
from rekindle.tracing.defer_sigint import uninterrupted
from rekindle.tracing.module_effects import find_effects, note_attributes
from rekindle.tracing.preconditions import Checks, settings
from rekindle.tracing.recorder import Recorder
from rekindle.tracing.step_state import StepState
from rekindle.tracing.tape import EntryKind, GradUse, OptimizerCall, Recording, run_optimizer
from rekindle.tracing.undo import Sandbox, remember, replaced

log = logging.getLogger("rekindle")

_BACKWARD = torch.autograd.backward


def record(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    as_on_gpu: bool = False,
) -> Recording:
    """Capture one call of `train_step(model, optimizer, batch)`; nothing real is changed.

    With `as_on_gpu`, a step on the CPU takes the operators a GPU would run: for forecasts only.
    """
    tricks = {"stand_ins": True, "nothing_is_fake": True, "as_on_gpu": as_on_gpu}
    others: list[nn.Module] = []
    while True:
        try:
            return _Capture(train_step, model, optimizer, batch, others, **tricks).run()
        except _TryAgain as again:
            tricks[again.trick] = False
        except _MetModule as met:
            others.append(met.module)


class _TryAgain(BaseException):
    """The capture has to start again with one of its tricks switched off."""

    def __init__(self, trick: str) -> None:
        self.trick = trick


class _MetModule(BaseException):
    """The step calls a module from outside the model, whose tensors are to be known beforehand."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class _Capture:
    def __init__(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        others: list[nn.Module],
        *,
        stand_ins: bool,
        nothing_is_fake: bool,
        as_on_gpu: bool,
    ) -> None:
        self.train_step = train_step
        self.model = model
        self.optimizer = optimizer
        self.batch = batch_tree.flatten(batch)
        self.step_line = user_line.definition(train_step)
        self.checks = Checks(self.step_line)
        self.state = StepState(model, optimizer, others)
        self.checks.modules(self.state.modules)
        self.attributes = note_attributes(self.state.modules)
        self.params = self.state.params()
        self.fake_mode = FakeTensorMode()
        self.recorder = Recorder(self.fake_mode, self.step_line, self._name_unknown)
        self.with_stand_ins = stand_ins
        self.nothing_is_fake = nothing_is_fake
        self.as_on_gpu = as_on_gpu
        if nothing_is_fake:
            self.recorder.on_value_asked = self._on_value_asked
        self.stand_ins: dict[int, torch.Tensor] = {}  # by the identity of the parameter
        self.old_grads_cleared: list[bool] | None = None
        self.outside_leaves: list[torch.Tensor] = []
        self.sandbox = Sandbox(
            list(self.state.modules.values()),
            [*self.state.tensors()],
            optimizer,
        )

    def run(self) -> Recording:
        """Trace the step, and restore the user's objects; only the step itself is interruptible."""
        with uninterrupted() as interruptible:
            try:
                recording = self._record(interruptible)
            finally:
                self.sandbox.restore()
                self.batch = batch_tree.Flat([], self.batch.structure)  # hold no memory of it
        recording.drop_dead_calls()
        return recording

    def _record(self, interruptible: Callable[[], AbstractContextManager[None]]) -> Recording:
        self.checks.devices(self.params.values())
        self.checks.batch(self.batch.structure)
        old_grads = [param.grad for param in self.params.values()]
        old_settings = settings(self.optimizer)
        requires_grad = [slot.get().requires_grad for slot in self.state.slots]
        for slot in self.state.slots:
            self.recorder.enter_tensor(slot.kind, slot.name, slot.get())
        batch = [self._enter_batch(i, t) for i, t in enumerate(self.batch.tensors)]
        batch_nodes = [self.recorder.node_of(tensor) for tensor in batch]
        with self._patches(), self.fake_mode:
            self._place_stand_ins()
            with self.recorder, interruptible():
                result = self._call_step(self.batch.structure.rebuild(batch))
        flat = batch_tree.flatten(result)
        self.checks.trains(self.recorder.tape)
        self.checks.gradients_stay_inside([*self.outside_leaves, *batch])
        self.checks.flags_stay(zip(self.state.slots, requires_grad, strict=True))
        self.checks.batch_is_not_shared(self.batch.tensors, batch_nodes, self.recorder.tape)
        self.checks.settings_stay(old_settings, settings(self.optimizer))
        self.checks.randomness(self.sandbox)
        self.checks.result(flat.structure)
        for _, state in self.state.optimizer_state():
            self.recorder.node_of(state)
        return Recording(
            tape=self.recorder.tape,
            state=self.state,
            batch_nodes=batch_nodes,
            result=flat.structure,
            result_nodes=[self.recorder.node_of(tensor) for tensor in flat.tensors],
            grads=self._grad_uses(old_grads),
            effects=find_effects(self.state.modules, self.attributes, self.recorder.node_of),
        )

    @contextmanager
    def _patches(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(replaced(self.optimizer, "step", self._optimizer_step))
            stack.enter_context(replaced(torch.autograd, "backward", self._backward))
            stack.enter_context(
                intercept.watched(
                    self.recorder,
                    self.state.modules,
                    on_unknown=self._meet_module,
                    on_optimizer=self._meet_optimizer,
                )
            )
            if self.nothing_is_fake:
                stack.enter_context(transformers_compat.nothing_is_fake())
            if self.as_on_gpu:
                stack.enter_context(cpu_as_gpu.as_on_gpu())
            yield

    def _enter_batch(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """A fake for a place in the batch. A meta tensor stands for one on the model's device.

        Each place gets its own, even if the first batch has one tensor twice: the next may not.
        """
        device = tensor.device
        if isinstance(tensor, FakeTensor) or device.type == "meta":
            device = next((param.device for param in self.params.values()), torch.device("cpu"))
        with self.fake_mode:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
        fake.requires_grad_(tensor.requires_grad)
        self.recorder.enter_tensor(EntryKind.BATCH, str(index), fake)
        return fake

    # Gradients from before the step

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

    def _remove_stand_ins(self) -> None:
        for param in self.params.values():
            if param.grad is not None and param.grad is self.stand_ins.get(id(param)):
                param.grad = None

    def _grad_uses(self, old_grads: list[torch.Tensor | None]) -> list[GradUse]:
        cleared = self.old_grads_cleared or [False] * len(self.params)
        uses = []
        for (slot, param), old, is_cleared in zip(
            self.params.items(), old_grads, cleared, strict=True
        ):
            new = param.grad
            if param.requires_grad or old is not None or new is not None:
                final = None if new is None else self.recorder.node_of(new)
                uses.append(GradUse(slot, not is_cleared, old is not None, final))
        return uses

    # What the step calls

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
            if "fake impl" in str(error):
                self._refuse_at(
                    error,
                    "uses an operator that does not run on fake tensors",
                    "Give the operator a fake implementation: torch.library.register_fake(...).",
                )
            if "data pointer" not in str(error) and ".numpy()" not in str(error):
                raise
            self._refuse_at(
                error,
                "reads a tensor's memory (.numpy(), .tolist(), .data_ptr()) during the step",
                "The step is captured once, without values: stay with torch operators, or do it "
                "outside the step.",
            )

    def _refuse_at(self, error: Exception, problem: str, advice: str) -> None:
        lines = user_line.traceback_lines(error.__traceback__)
        filename, lineno = user_line.user_line(lines, self.step_line)
        raise CaptureError(problem, filename=filename, lineno=lineno, advice=advice) from error

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        if self.old_grads_cleared is None:
            self.old_grads_cleared = [param.grad is None for param in self.params.values()]
            self._remove_stand_ins()
        self.recorder.in_backward = True
        try:
            _BACKWARD(*args, **kwargs)
        finally:
            self.recorder.in_backward = False

    def _optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Stand in for `optimizer.step`: note the call, and record its operators for analysis."""
        recorder, tape = self.recorder, self.recorder.tape
        if args or kwargs:
            recorder.refuse(
                "calls optimizer.step with an argument",
                "Rekindle captures optimizer.step() without a closure: compute the loss and call "
                "loss.backward() before it.",
            )
        self._remove_stand_ins()
        params = [slot for slot, param in self.params.items() if param.grad is not None]
        grads = [recorder.node_of(_grad(self.params[slot])) for slot in params]
        node = tape.graph.call_function(run_optimizer, tuple(grads))
        n_calls, is_opaque = len(tape.calls), False
        undo_settings = remember(self.optimizer.param_groups)  # its own business, each time
        recorder.in_optimizer = True
        try:
            if any(not self.optimizer.state.get(self.params[slot]) for slot in params):
                recorder.is_paused = True  # the optimizer creates its state: not part of a step
                self._plain_optimizer_step()
                recorder.is_paused = False
            self._plain_optimizer_step()
        except Exception as error:
            log.info("the optimizer's operators cannot be recorded (%s); it is one op", error)
            is_opaque = True
            del tape.calls[n_calls:]
            for later in [*_nodes_after(node)][::-1]:
                tape.graph.erase_node(later)
        finally:
            recorder.in_optimizer = recorder.is_paused = False
            undo_settings()
        call = OptimizerCall(node, params, grads, _autocast_state(), is_opaque)
        tape.optimizer_calls.append(call)

    def _plain_optimizer_step(self) -> None:
        """The optimizer's own `step`, without the hooks that users register on it."""
        step = type(self.optimizer).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]
        step(self.optimizer)

    def _meet_module(self, module: nn.Module) -> None:
        """A module from outside the model that the step calls: its mode and settings matter."""
        parts = [*module.modules()]
        if any(StepState.has_tensors(part) for part in parts):
            raise _MetModule(module)
        for part in parts:
            self.sandbox.add_module(part)
        names = self.state.add_module(module)
        self.attributes.update(note_attributes({n: self.state.modules[n] for n in names}))

    def _meet_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer inside the user's own is part of it; one beside it would not be replayed."""
        if optimizer is self.optimizer:
            return
        if not self.recorder.in_optimizer:
            self.recorder.refuse(
                "steps a second optimizer",
                "Rekindle takes one optimizer: give it all parameters, in several groups if need "
                "be, or capture one step for each optimizer.",
            )
        self.sandbox.add_optimizer(optimizer)

    # What the recorder asks

    def _on_value_asked(self, line: user_line.Line) -> None:
        if transformers_compat.asks_for_values(line):
            log.info(
                "%s:%d decides by a value of the batch; the captured step applies masks always",
                *line,
            )
            raise _TryAgain("nothing_is_fake")

    def _name_unknown(self, tensor: torch.Tensor) -> tuple[EntryKind, str]:
        if any(tensor is stand_in for stand_in in self.stand_ins.values()):
            raise _TryAgain("stand_ins")
        known = self.state.name_of(tensor)
        if known is not None:
            return known
        count = len(self.recorder.tape.entries)
        if not isinstance(tensor, FakeTensor):
            self.sandbox.add_tensor(tensor)
        if self.recorder.in_optimizer:  # state that it keeps in ways of its own
            return EntryKind.OPT_STATE, f"optimizer.{count}"
        if isinstance(tensor, FakeTensor):
            self.recorder.refuse(
                "uses a fake tensor that this capture did not make",
                "Tensors from inside a captured step must not be kept in globals or closures.",
            )
        if tensor.requires_grad:
            self.outside_leaves.append(tensor)
        return EntryKind.EXTERNAL, str(count)


def _grad(param: torch.Tensor) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


def _nodes_after(node: fx.Node) -> Iterator[fx.Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _autocast_state() -> dict[str, torch.dtype]:
    return {
        kind: torch.get_autocast_dtype(kind)
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    }


def _operator_name(error: Exception) -> str:
    return str(getattr(error, "func", None) or (error.args[0] if error.args else "an operator"))
