"""Runs the user's training step once on fake tensors and records it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx, nn

from rekindle.core.identity import IdentityDict, IdentitySet
from rekindle.errors import CaptureError, RekindleError
from rekindle.torch_internals import (
    RUN_BACKWARD,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    engine_run_backward,
    global_optimizer_post_hooks,
    global_optimizer_pre_hooks,
)
from rekindle.tracing import backward_formulas, batch_tree, intercept, user_line
from rekindle.tracing.capture_thread import ThreadPatches, capture_lock
from rekindle.tracing.contents import Content
from rekindle.tracing.cpu_as_gpu import gpu_operators
from rekindle.tracing.decisions import Decisions
from rekindle.tracing.preconditions import Checks, settings
from rekindle.tracing.python_state import PythonState, Write, WriteKind, holder_of
from rekindle.tracing.recorder import Recorder, in_bookkeeping
from rekindle.tracing.second_trace import first_difference
from rekindle.tracing.step_state import Effect, EntryKind, StepState
from rekindle.tracing.tape import GradUse, OptimizerCall, Recording, run_optimizer
from rekindle.tracing.undo import Interruptible, Sandbox, remember, uninterrupted

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
    twice: bool = False,
) -> Recording:
    """Trace one call of `train_step(model, optimizer, batch)`, and leave all objects unchanged.

    With `as_on_gpu`, a step on the CPU uses the operators that a GPU would run: for forecasts only.
    With `twice`, the step is traced once more and refused if the second trace differs: it depends
    on something that is neither a tensor nor part of its Python state, such as an iterator.
    """
    options = {"placeholder_grads"}
    if as_on_gpu:
        options.add("as_on_gpu")
    others: list[nn.Module] = []

    def trace() -> tuple[_Capture, Recording]:
        while True:
            try:
                with capture_lock:
                    capture = _Capture(train_step, model, optimizer, batch, others, options)
                    return capture, capture.run()
            except _Restart as restart:
                if isinstance(restart.change, str):
                    options.discard(restart.change)
                else:
                    others.append(restart.change)

    capture, recording = trace()
    constants = [effect for effect in recording.effects if effect.is_constant]
    if constants:
        # Steps to come will start with these values: they must leave them as they are.
        with capture.python.applied(capture.stand_ins(recording)):
            _, after = trace()
        for effect in constants:
            if any(effect.contradicts(other) for other in after.effects):
                capture.refuse_counter(effect)
    if twice:
        capture.refuse_difference(recording, trace()[1])
    return recording


def python_snapshot(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
) -> Callable[[], None]:
    """A function that gives the step's Python state its present content, as often as it is called.

    It covers the values of the tensors in it, too, but for those of the model and the optimizer.
    """
    with capture_lock:
        capture = _Capture(train_step, model, optimizer, batch, [], {"placeholder_grads"})
        with suppress(_Restart, RekindleError):  # what a refused step reads is known, too
            capture.run()
    inside = IdentitySet(capture.state.tensors())
    tensors = [tensor for tensor in capture.python.tensors() if tensor not in inside]
    values = [tensor.detach().clone() for tensor in tensors]

    def restore() -> None:
        capture.python.restore()
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)

    return restore


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """The hooks that users have put around an optimizer's step."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    every = (*own, global_optimizer_pre_hooks, global_optimizer_post_hooks)
    return [hook for hooks in every for hook in hooks.values() if not intercept.is_own_hook(hook)]


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
        self.python = PythonState(self.state.modules, train_step, optimizer)
        for slot in self.state.slots:
            self.python.add_hooks(slot.name, slot.get())
        self.of_optimizer: list[Write] = []  # what the optimizer's own code has written
        self.shared: tuple[Content, Any] | None = None  # what it reads, and the step wrote before
        self.params = self.state.params()
        self.fake_mode = FakeTensorMode()
        self.recorder = Recorder(self.fake_mode, self.step_line, self._name_unknown)
        self.recorder.checks_kernels = "as_on_gpu" not in options
        self.options = options
        self.placeholder_grads: IdentityDict[torch.Tensor] = IdentityDict()  # by parameter
        self.old_grads_cleared: list[bool] | None = None
        self.outside_leaves: list[torch.Tensor] = []
        self.recorder.on_frame = self.python.enter
        self.sandbox = Sandbox([*self.state.tensors()], optimizer)

    def run(self) -> Recording:
        """Trace the step, and restore the user's objects; only the step itself is interruptible."""
        with uninterrupted() as interruptible:
            try:
                recording = self._record(interruptible)
            finally:
                self.sandbox.restore()
                self.batch = batch_tree.Flat([], self.batch.structure)  # hold no memory of it
                self.recorder.known.forget()
        self.sandbox.forget()
        self._refuse_survivors()
        recording.drop_dead_calls()
        return recording

    def _record(self, interruptible: Callable[[], Interruptible]) -> Recording:
        self.checks.devices(self.params.values())
        self.checks.batch(self.batch)
        old_grads = [param.grad for param in self.params.values()]
        old_settings = settings(self.optimizer)
        before = [(slot, slot.get(), slot.get().requires_grad) for slot in self.state.slots]
        attributes = [(slot, dict(vars(slot.get()))) for slot in self.state.slots]
        for slot in self.state.slots:
            self.recorder.enter_tensor(slot.kind, slot.name, slot.get())
        batch = [self._enter_batch(i, t) for i, t in enumerate(self.batch.tensors)]
        batch_nodes = [self.recorder.node_of(tensor) for tensor in batch]
        with self._patches() as others_drew, self.fake_mode:
            try:
                self.sandbox.note_python_random()  # from now on, draws of others are seen
                self._place_grads()
                with self.recorder, interruptible().unless(in_bookkeeping) as part:
                    self.recorder.before_op = part.handle_waiting
                    with self.python.watching():
                        result = self._call_step(self.batch.structure.rebuild(batch))
                drew = self.sandbox.used_python_random(), others_drew()
                self.sandbox.is_only_drawer = not drew[1]
                if self.recorder.refusal is not None:  # the step caught it, and went on
                    raise self.recorder.refusal
                self.checks.settings_unchanged(old_settings, settings(self.optimizer))
                self.checks.no_iterator(self.python)
                effects = self._effects(result)
                flat = self._flattened(result)
                self._refuse_shared(self.shared or self.python.noted(self.of_optimizer))
                self._warn_of_outside()
            finally:
                self.python.restore()  # while what it has noted of the patches is in force
        self.checks.trains(self.recorder.tape)
        self.checks.no_outside_gradients([*self.outside_leaves, *batch])
        self.checks.requires_grad_unchanged(before, self.recorder.node_of)
        self.checks.no_new_attributes(attributes)
        self.checks.captures_are_reused(self.recorder.known.ever_new())
        self.checks.batch_memory_is_distinct(self.batch.tensors, batch_nodes, self.recorder.tape)
        self.checks.randomness(self.sandbox, self.python, drew=drew[0] and not drew[1])
        self.checks.no_shared_memory(self.python, self.state.tensors())
        self.checks.result(flat.structure, self.python)
        for _, state in self.state.optimizer_state():
            self.recorder.node_of(state)
        recording = Recording(
            tape=self.recorder.tape,
            state=self.state,
            batch_nodes=batch_nodes,
            result=flat.structure,
            result_nodes=[self.recorder.node_of(tensor) for tensor in flat.tensors],
            grads=self._grad_uses(old_grads),
            effects=effects,
            decisions=Decisions(self.recorder.known, batch_nodes, self.state.slots),
        )
        self.checks.kernels_as_plain(recording.tape, recording.outputs)
        return recording

    def _effects(self, result: Any) -> list[Effect]:
        """The writes to the user's objects, as effects that a captured step repeats."""
        effects = []
        writes = self.python.writes()
        self.checks.kept_once([*(write.value for write in writes), result], self.python)
        for write in writes:
            value = None if write.kind is WriteKind.REMOVE else write.value
            flat = self._flattened(value)
            self.checks.write(write, flat, self.python)
            nodes = [self.recorder.node_of(tensor) for tensor in flat.tensors]
            effects.append(Effect(write.content, write.key, write.kind, flat.structure, nodes))
        self.state.contents = self.python.all_contents()
        self.state.functions = self.python.functions()
        return effects

    def _flattened(self, value: Any) -> batch_tree.Flat:
        """A value that the step returns or keeps; containers from before the step stay whole.

        `param.detach()` is the parameter's node, and must be another tensor for the user.
        """
        flat = batch_tree.flatten(value, is_leaf=self.python.is_container)
        for leaf in flat.structure.leaves:
            if self.python.is_container(leaf):
                self.python.fix(leaf)
        nodes = map(self.recorder.node_of, flat.tensors)
        entered = IdentitySet(entry.tensor for entry in self.recorder.tape.entries)
        is_detached = [
            node.op == "placeholder" and isinstance(tensor, FakeTensor) and tensor not in entered
            for tensor, node in zip(flat.tensors, nodes, strict=True)
        ]
        return flat._replace(structure=flat.structure.detaching(iter(is_detached)))

    def stand_ins(self, recording: Recording) -> list[Callable[[], None]]:
        """Functions that apply a step's effects, with tensors of the right form."""
        entries = {entry.node: entry.tensor for entry in recording.tape.entries}

        def tensor(node: fx.Node) -> torch.Tensor:
            known = entries.get(node)
            if known is not None and not isinstance(known, FakeTensor):
                return known
            meta = recording.tape.metas[node]
            device = recording.tape.storages[meta.storage].device
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)

        return [
            partial(effect.apply, [tensor(node) for node in effect.nodes])
            for effect in recording.effects
        ]

    def _refuse_survivors(self) -> None:
        """Refuse a step that leaves a fake tensor somewhere, where later code would find it."""
        for tensor, source in self.recorder.survivors():
            holder = holder_of(tensor)
            self.python.clear_caches()
            self.checks.refuse_at(
                user_line.Line(source.filename, source.lineno),
                f"leaves a tensor behind{f' in {holder}' if holder else ''}, where Rekindle cannot "
                "carry it over to captured steps",
                "Return the tensor, or keep it in an attribute, a list or a dict.",
            )

    def refuse_counter(self, effect: Effect) -> NoReturn:
        """Refuse a Python value that the step computes from its own earlier value."""
        self.checks.refuse_at(
            self.python.line_of(effect.content, effect.key),
            f"{effect.name} depends on its own value in the step before, and the step reads it",
            "Count outside the step, and pass what depends on the count in the batch, as a tensor "
            "or, where it takes few values, as a number or bool.",
        )

    def refuse_difference(self, first: Recording, second: Recording) -> None:
        """Refuse a step whose second trace differs from the first."""
        found = first_difference(first, second)
        if found is None:
            return
        what, source = found
        self.checks.refuse_at(
            user_line.Line(source.filename, source.lineno),
            f"the step differs when it is traced a second time: {what}",
            "It depends on something that changes by itself, such as an iterator, a file or the "
            "time. Do that outside the step, and pass the result in the batch. If only the first "
            "call differs, because it installs hooks or fills a cache, run the model once before.",
        )

    @contextmanager
    def _patches(self) -> Iterator[Callable[[], bool]]:
        with ExitStack() as stack:
            patches = stack.enter_context(ThreadPatches(self.recorder))
            patches.replace(self.optimizer, "step", self._optimizer_step)
            patches.replace(torch.autograd, "backward", self._backward)
            patches.replace(torch.autograd, RUN_BACKWARD, self._run_backward)
            others_drew = stack.enter_context(
                intercept.intercepted(
                    self.recorder,
                    patches,
                    self.state.modules,
                    on_unknown=self._add_module,
                    on_optimizer=self._add_optimizer,
                )
            )
            intercept.show_fakes_to_transformers(patches, self.recorder)
            if "as_on_gpu" in self.options:
                stack.enter_context(gpu_operators(patches))
            yield others_drew

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
        node = self.recorder.enter_tensor(EntryKind.BATCH, str(index), fake)
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            self.recorder.known.lacks_values = True
        else:
            self.recorder.known.batch[node] = tensor
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
                self.placeholder_grads[param] = param.grad

    def _remove_placeholder_grads(self) -> None:
        for param in self.params.values():
            if param.grad is not None and param.grad is self.placeholder_grads.get(param):
                param.grad = None

    def _grad_uses(self, old_grads: list[torch.Tensor | None]) -> list[GradUse]:
        cleared = self.old_grads_cleared or [False] * len(self.params)
        if "placeholder_grads" not in self.options:  # the step has read one, before it cleared it
            cleared = [False] * len(self.params)
        entries = self.recorder.tape.entries
        read = {entry.name for entry in entries if entry.kind is EntryKind.GRAD}
        uses = []
        for (slot, param), old, is_cleared in zip(
            self.params.items(), old_grads, cleared, strict=True
        ):
            new = param.grad
            final = None if new is None else self.recorder.node_of(new)
            # A frozen parameter has no placeholder: would the step clear a gradient of it?
            is_unknown = old is None and not param.requires_grad
            reads_old = is_unknown or not is_cleared or self.state.slots[slot].name in read
            uses.append(GradUse(slot, reads_old, old is not None, final))
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
            if "fork-based multiprocessing" in str(error):
                self._refuse_at(
                    error,
                    "calls backward() in a process that was forked after its parent had, which "
                    "torch does not support",
                    'Start it with the method "spawn", or capture the step before forking.',
                )
            if "data pointer" not in str(error) and ".numpy()" not in str(error):
                raise
            self._refuse_at(
                error,
                "reads a tensor's memory (.numpy(), .tolist(), .data_ptr()) during the step",
                f"{_NO_VALUES}stay with torch operators, or do it outside the step.",
            )

        except (AssertionError, AttributeError, KeyError, ArithmeticError) as error:
            lines = user_line.traceback_lines(error.__traceback__)
            if user_line.is_in_fakes(lines[0]):  # kernels raise RuntimeError, and its relatives
                problem = f"uses an operator whose fake fails ({type(error).__name__}: {error})"
                self._refuse_at(error, problem, "Call it outside the step, or use another one.")
            raise

    def _refuse_at(self, error: Exception, problem: str, advice: str) -> None:
        lines = user_line.traceback_lines(error.__traceback__)
        line, within, known = user_line.place(lines, self.step_line)
        raise CaptureError(
            problem + within, filename=line.filename, lineno=line.lineno, advice=known or advice
        ) from error

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
            with self._of_optimizer():
                if any(not self.optimizer.state.get(self.params[slot]) for slot in params):
                    recorder.is_paused = True  # creating the state is not part of a step
                    self._plain_optimizer_step()
                    recorder.is_paused = False
                self._plain_optimizer_step()
        except Exception as error:
            recorder.refusal = None
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

    @contextmanager
    def _of_optimizer(self) -> Iterator[None]:
        """Note the state of the optimizer's own code, to undo what it does.

        It runs in captured steps, too, between the other operators and the step's effects: it must
        not read what the step has written, nor write what the step reads.
        """
        with self.python.paused():
            own = PythonState({}, type(self.optimizer).step, None)
            own.add_optimizer(self.optimizer)
            own.add_step_hooks(step_hooks(self.optimizer))
            written = self.python.writes()
            try:
                with own.watching():
                    yield
            finally:
                self.of_optimizer += [*own.writes(), *own.stores_of_hooks()]
                own.restore()
            self.shared = self.shared or own.noted(written)

    def _refuse_shared(self, shared: tuple[Content, Any] | None) -> None:
        if shared is not None:
            self.checks.refuse_at(
                self.python.line_of(*shared),
                "the step and the optimizer's own code use the same Python value, "
                f"{shared[0].label(shared[1])}",
                "Captured steps call the optimizer before they repeat what the step writes: "
                "set the value outside the step, or keep it in one of the two.",
            )

    def _warn_of_outside(self) -> None:
        for line, function in self.python.reads_outside().items():
            log.warning(
                "%s:%d calls %s: captured steps go on with what it returned in the capture",
                *line,
                function,
            )

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
        for name in self.state.add_module(module):
            self.python.add_module(name, self.state.modules[name])

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
        places = self.python.places_of(tensor)
        if places:
            slot = self.state.add_places(places, tensor)
            return slot.kind, slot.name
        return EntryKind.EXTERNAL, str(count)


def _operator_name(error: Exception) -> str:
    return str(getattr(error, "func", None) or (error.args[0] if error.args else "an operator"))
