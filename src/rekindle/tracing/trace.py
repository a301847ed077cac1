"""Runs the user's training step once on fake tensors and records it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from rekindle.errors import CaptureError
from rekindle.torch_internals import (
    RUN_BACKWARD,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    engine_run_backward,
)
from rekindle.tracing import backward_formulas, batch_tree, intercept, user_line
from rekindle.tracing.cpu_as_gpu import gpu_operators
from rekindle.tracing.preconditions import Checks, settings
from rekindle.tracing.recorder import Recorder
from rekindle.tracing.step_state import EntryKind, StepState, find_effects, note_attributes
from rekindle.tracing.tape import GradUse, OptimizerCall, Recording, run_optimizer
from rekindle.tracing.undo import Sandbox, remember, replaced, uninterrupted

log = logging.getLogger("rekindle")

_BACKWARD = torch.autograd.backward
_NO_VALUES = "The step is captured once, on tensors without values: "
_REGISTER_FAKE = "Give the operator a fake implementation: torch.library.register_fake(...)."


def record(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    as_on_gpu: bool = False,
) -> Recording:
    """Trace one call of `train_step(model, optimizer, batch)`, and leave all objects unchanged.

    With `as_on_gpu`, a step on the CPU uses the operators that a GPU would run: for forecasts only.
    """
    options = {"placeholder_grads", "hides_fakes"}
    if as_on_gpu:
        options.add("as_on_gpu")
    others: list[nn.Module] = []
    while True:
        try:
            return _Capture(train_step, model, optimizer, batch, others, options).run()
        except _Restart as restart:
            if isinstance(restart.change, str):
                options.discard(restart.change)
            else:
                others.append(restart.change)


class _Restart(BaseException):
    """Trace again: without an option, or with one more module whose tensors the step uses."""

    def __init__(self, change: str | nn.Module) -> None:
        self.change = change


class _Capture:
    def __init__(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        others: list[nn.Module],
        options: set[str],
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
        self.recorder.checks_kernels = "as_on_gpu" not in options
        self.options = options
        if "hides_fakes" in options:
            self.recorder.on_value_read = self._on_value_read
        self.placeholder_grads: dict[int, torch.Tensor] = {}  # by identity of the parameter
        self.old_grads_cleared: list[bool] | None = None
        self.outside_leaves: list[torch.Tensor] = []
        modules = list(self.state.modules.values())
        self.sandbox = Sandbox(modules, [*self.state.tensors()], optimizer)

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
            self._place_grads()
            with self.recorder, interruptible():
                result = self._call_step(self.batch.structure.rebuild(batch))
        flat = batch_tree.flatten(result)
        self.checks.trains(self.recorder.tape)
        self.checks.no_outside_gradients([*self.outside_leaves, *batch])
        self.checks.requires_grad_unchanged(zip(self.state.slots, requires_grad, strict=True))
        self.checks.batch_memory_is_distinct(self.batch.tensors, batch_nodes, self.recorder.tape)
        self.checks.settings_unchanged(old_settings, settings(self.optimizer))
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
            stack.enter_context(replaced(torch.autograd, RUN_BACKWARD, self._run_backward))
            stack.enter_context(
                intercept.intercepted(
                    self.recorder,
                    self.state.modules,
                    on_unknown=self._add_module,
                    on_optimizer=self._add_optimizer,
                )
            )
            if "hides_fakes" in self.options:
                stack.enter_context(intercept.transformers_sees_no_fakes())
            if "as_on_gpu" in self.options:
                stack.enter_context(gpu_operators())
            yield

    def _enter_batch(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """A fake of a batch tensor; a meta tensor becomes a fake on the model's device.

        A tensor that occurs twice gets two fakes: in the next batch they may be two tensors.
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

    def _place_grads(self) -> None:
        """Give parameters without a gradient a placeholder: is it cleared unread? (decision 3)"""
        if "placeholder_grads" not in self.options:
            return
        for param in self.params.values():
            if param.requires_grad and param.grad is None:
                param.grad = torch.empty_strided(
                    param.shape, param.stride(), dtype=param.dtype, device=param.device
                )
                self.placeholder_grads[id(param)] = param.grad

    def _remove_placeholder_grads(self) -> None:
        for param in self.params.values():
            if param.grad is not None and param.grad is self.placeholder_grads.get(id(param)):
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

    # Calls that the step makes

    def _call_step(self, batch: Any) -> Any:
        try:
            return self.train_step(self.model, self.optimizer, batch)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            self._refuse_at(
                error,
                f"uses {_operator_name(error)}, whose result's shape or value depends on data",
                f"{_NO_VALUES}write torch.where(...) or a mask of fixed shape instead, or do it "
                "outside the step.",
            )
        except UnsupportedOperatorException as error:
            problem = f"uses {_operator_name(error)}, which does not run on fake tensors"
            self._refuse_at(error, problem, _REGISTER_FAKE)
        except RuntimeError as error:
            if "fake impl" in str(error):
                problem = "uses an operator that does not run on fake tensors"
                self._refuse_at(error, problem, _REGISTER_FAKE)
            if "data pointer" not in str(error) and ".numpy()" not in str(error):
                raise
            self._refuse_at(
                error,
                "reads a tensor's memory (.numpy(), .tolist(), .data_ptr()) during the step",
                f"{_NO_VALUES}stay with torch operators, or do it outside the step.",
            )

    def _refuse_at(self, error: Exception, problem: str, advice: str) -> None:
        lines = user_line.traceback_lines(error.__traceback__)
        filename, lineno = user_line.user_line(lines, self.step_line)
        raise CaptureError(problem, filename=filename, lineno=lineno, advice=advice) from error

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        if self.old_grads_cleared is None:
            self.old_grads_cleared = [param.grad is None for param in self.params.values()]
            self._remove_placeholder_grads()
        self.recorder.in_backward = True
        try:
            _BACKWARD(*args, **kwargs)
        finally:
            self.recorder.in_backward = False

    def _run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces autograd's engine, for `backward` and `grad`, to keep its plain formulas."""
        backward_formulas.use_plain_formulas(tensors, self.recorder.refuse)
        return engine_run_backward(tensors, *args, **kwargs)

    def _optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Replaces `optimizer.step`: notes the call, and records its operators for analysis."""
        recorder, tape = self.recorder, self.recorder.tape
        if args or kwargs:
            recorder.refuse(
                "calls optimizer.step with an argument",
                "Rekindle captures optimizer.step() without a closure: compute the loss and call "
                "loss.backward() before it.",
            )
        self._remove_placeholder_grads()
        grad_of = {slot: param.grad for slot, param in self.params.items()}
        params = [slot for slot, grad in grad_of.items() if grad is not None]
        grads = [recorder.node_of(grad) for grad in grad_of.values() if grad is not None]
        node = tape.graph.call_function(run_optimizer, tuple(grads))
        n_calls, is_opaque = len(tape.calls), False
        undo_settings = remember(self.optimizer.param_groups)  # which step() itself may change
        recorder.in_optimizer = True
        try:
            if any(not self.optimizer.state.get(self.params[slot]) for slot in params):
                recorder.is_paused = True  # creating the state is not part of a step
                self._plain_optimizer_step()
                recorder.is_paused = False
            self._plain_optimizer_step()
        except Exception as error:
            log.info("the optimizer's operators cannot be recorded (%s); it is one op", error)
            is_opaque = True
            del tape.calls[n_calls:]
            while (last := next(iter(reversed(tape.graph.nodes)))) is not node:
                tape.graph.erase_node(last)
        finally:
            recorder.in_optimizer = recorder.is_paused = False
            undo_settings()
        autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        }
        tape.optimizer_calls.append(OptimizerCall(node, params, grads, autocast, is_opaque))

    def _plain_optimizer_step(self) -> None:
        """Call the optimizer's own `step`, without the hooks that users register on it."""
        step = type(self.optimizer).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]
        step(self.optimizer)

    def _add_module(self, module: nn.Module) -> None:
        """Note a module from outside the model that the step calls."""
        parts = [*module.modules()]
        if any(StepState.has_tensors(part) for part in parts):
            raise _Restart(module)
        for part in parts:
            self.sandbox.add_module(part)
        names = self.state.add_module(module)
        self.attributes.update(note_attributes({n: self.state.modules[n] for n in names}))

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that the user's own one wraps; any other would not be replayed."""
        if optimizer is self.optimizer:
            return
        if not self.recorder.in_optimizer:
            self.recorder.refuse(
                "steps a second optimizer",
                "Rekindle supports one optimizer per step: give it all parameters, in several "
                "groups if necessary, or capture one step for each optimizer.",
            )
        self.sandbox.add_optimizer(optimizer)

    # Calls that the recorder makes

    def _on_value_read(self, line: user_line.Line) -> None:
        if intercept.is_in_transformers(line.filename):
            log.info(
                "%s:%d branches on a value of the batch; the captured step always applies masks",
                *line,
            )
            raise _Restart("hides_fakes")

    def _name_unknown(self, tensor: torch.Tensor) -> tuple[EntryKind, str]:
        if any(tensor is placeholder for placeholder in self.placeholder_grads.values()):
            raise _Restart("placeholder_grads")
        known = self.state.name_of(tensor)
        if known is not None:
            return known
        count = len(self.recorder.tape.entries)
        if not isinstance(tensor, FakeTensor):
            self.sandbox.add_tensor(tensor)
        if self.recorder.in_optimizer:  # state that it keeps outside `optimizer.state`
            return EntryKind.OPT_STATE, f"optimizer.{count}"
        if isinstance(tensor, FakeTensor):
            self.recorder.refuse(
                "uses a fake tensor that this capture did not make",
                "Do not keep tensors from inside a captured step in globals or closures.",
            )
        if tensor.requires_grad:
            self.outside_leaves.append(tensor)
        return EntryKind.EXTERNAL, str(count)


def _operator_name(error: Exception) -> str:
    return str(getattr(error, "func", None) or (error.args[0] if error.args else "an operator"))
