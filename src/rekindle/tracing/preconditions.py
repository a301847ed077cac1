"""Checks whether a step can be captured; if not, errors say what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import fx, nn
from torch.nn.parameter import UninitializedParameter

from rekindle.core.identity import IdentitySet
from rekindle.errors import CaptureError
from rekindle.torch_internals import FakeTensor
from rekindle.tracing import batch_tree, forward_formulas
from rekindle.tracing.contents import Array, RandomState, nested_owners
from rekindle.tracing.python_state import PythonState, Write, WriteKind
from rekindle.tracing.step_state import EntryKind, Slot
from rekindle.tracing.tape import Tape
from rekindle.tracing.undo import Sandbox
from rekindle.tracing.user_line import Line

_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
# Problems and advice
SEEDS = (
    "the step seeds a random generator",
    "Call torch.manual_seed outside the step; each step continues the random stream.",
)
DRAWS = (
    "the step draws from Python's or numpy's random generator",
    "Draw with torch (torch.rand, torch.randint), which the capture can record.",
)


class Checks:
    """Each check raises a CaptureError that names the line on which the step is defined."""

    def __init__(self, step_line: Line) -> None:
        self._step_line = step_line

    def _refuse(self, problem: str, advice: str) -> NoReturn:
        filename, lineno = self._step_line
        raise CaptureError(problem, filename=filename, lineno=lineno, advice=advice)

    def refuse_at(self, line: Line, problem: str, advice: str) -> NoReturn:
        """Refuse the step because of a line, or of its definition where that is not known."""
        filename, lineno = line if line.filename else self._step_line
        raise CaptureError(problem, filename=filename, lineno=lineno, advice=advice)

    def devices(self, params: Iterable[torch.Tensor]) -> None:
        """The model is on one device."""
        devices = sorted({str(param.device) for param in params})
        if len(devices) > 1:
            self._refuse(
                f"the model is on {len(devices)} devices: {', '.join(devices)}",
                "Rekindle plans the memory of one device: move the model with "
                f'model.to("{devices[-1]}") before you create the optimizer.',
            )

    def modules(self, modules: dict[str, nn.Module]) -> None:
        """All parameters are initialised, and no RNN has dropout inside cuDNN."""
        for path, module in modules.items():
            if any(isinstance(p, UninitializedParameter) for p in module._parameters.values()):
                self._refuse(
                    f"{path or type(module).__name__} has parameters that are not initialised yet",
                    "Run the model once on a batch first: lazy modules take their shapes from it.",
                )
            if isinstance(module, nn.RNNBase) and _draws_inside_cudnn(module):
                self._refuse(
                    f"{path or type(module).__name__} has dropout between its layers, for which "
                    "cuDNN keeps a random state of its own",
                    "Use one module per layer with nn.Dropout between them, or switch cuDNN off: "
                    "torch.backends.cudnn.enabled = False.",
                )

    def batch(self, batch: batch_tree.Flat) -> None:
        """The batch consists of plain tensors and constants."""
        self._leaves(batch.structure, "the batch contains", "Pass tensors and plain numbers")
        for tensor in batch.tensors:
            if type(tensor) not in _TENSORS and not isinstance(tensor, FakeTensor):
                self._refuse(
                    f"the batch contains a {type(tensor).__name__}, a subclass of Tensor",
                    "Pass plain tensors: x.as_subclass(torch.Tensor), or x.full_tensor().",
                )
            if tensor.layout is torch.strided and (tensor.is_conj() or tensor.is_neg()):
                self._refuse(
                    "the batch contains a tensor that is conjugated or negated lazily",
                    "Pass x.resolve_conj() or x.resolve_neg().",
                )

    def result(self, structure: batch_tree.Structure, python: PythonState) -> None:
        """The result consists of tensors, constants and containers from before the step."""
        self._leaves(structure, "the step returns", "Return tensors", python.is_container)

    def _leaves(
        self,
        structure: batch_tree.Structure,
        problem: str,
        advice: str,
        is_allowed: Callable[[Any], bool] = lambda leaf: False,
    ) -> None:
        for leaf in batch_tree.opaque_leaves(structure):
            if is_allowed(leaf):
                continue
            self._refuse(
                f"{problem} a {type(leaf).__name__}, which Rekindle cannot look into",
                f"{advice}, in tuples, lists, dicts or dataclasses.",
            )

    def trains(self, tape: Tape) -> None:
        """The step calls `backward` and `optimizer.step`."""
        if not any(call.in_backward for call in tape.calls):
            self._refuse(
                "the step never calls backward()",
                "A training step computes a loss and calls loss.backward() and optimizer.step().",
            )
        if not tape.optimizer_calls:
            self._refuse(
                "the captured call of the step does not call optimizer.step()",
                "Call optimizer.step() in the step, on the optimizer that you pass to Rekindle. To "
                "accumulate gradients, loop over the micro-batches inside the step.",
            )

    def kernels_as_plain(self, tape: Tape, outputs: Iterable[fx.Node]) -> None:
        """No kernel is asked for results that a plain step may not ask for."""
        for call in forward_formulas.undecided(tape.calls, outputs):
            self.refuse_at(
                Line(call.source.filename, call.source.lineno),
                f"takes the values alone of {call.node.name.lstrip('_')}, which a plain step may "
                "compute by another algorithm",
                "Compute singular values, eigenvalues and norms made of them outside the step, or "
                "use the vectors, too.",
            )

    def no_outside_gradients(self, outside: Iterable[torch.Tensor]) -> None:
        """Only tensors of the model and the optimizer get a gradient."""
        if any(tensor.grad is not None for tensor in outside):
            self._refuse(
                "backward() reaches a tensor that is neither in the model nor in the optimizer",
                "Make it part of the model, or freeze it with requires_grad_(False); for a "
                "gradient of the batch, call torch.autograd.grad(...) and return its result. For "
                "torch.utils.checkpoint, write use_reentrant=False.",
            )

    def requires_grad_unchanged(
        self,
        before: Iterable[tuple[Slot, torch.Tensor, bool]],
        node_of: Callable[[torch.Tensor], fx.Node],
    ) -> None:
        """The step freezes and unfreezes no parameter.

        An attribute that the step sets, and does not read before, is one of its outputs.
        """
        for slot, tensor, requires_grad in before:
            is_output = slot.get() is not tensor and not node_of(tensor).users
            if is_output and slot.kind is not EntryKind.PARAM:
                continue
            if slot.get().requires_grad != requires_grad:
                self._refuse(
                    f"the step changes requires_grad of {slot.name}",
                    "Freeze and unfreeze parameters between steps, outside the step.",
                )

    def no_new_attributes(self, before: list[tuple[Slot, dict[str, Any]]]) -> None:
        """The step keeps nothing in attributes of parameters and buffers."""
        for slot, attributes in before:
            now = vars(slot.get())
            for name in now.keys() | attributes.keys():
                if now.get(name) is not attributes.get(name):
                    self._refuse(
                        f"the step sets the attribute {name} of {slot.name}",
                        "Keep it in an attribute of a module, a list or a dict.",
                    )

    def captures_are_reused(self, line: Line | None) -> None:
        """No number that the step reads is changed by the step itself."""
        if line is not None:
            raise CaptureError(
                "reads a number from a buffer that the step changes",
                filename=line.filename,
                lineno=line.lineno,
                advice="Each step would need a capture of its own. Compute with the tensor instead "
                "of its value, or count outside the step; for nn.BatchNorm, set momentum.",
            )

    def batch_memory_is_distinct(
        self, tensors: list[torch.Tensor], nodes: list[fx.Node], tape: Tape
    ) -> None:
        """The tensors of a batch that the step writes to do not share memory."""
        written = {tape.metas[node].storage for call in tape.calls for node in call.writes}
        if written.isdisjoint(tape.metas[node].storage for node in nodes):
            return
        pointers = [t.untyped_storage().data_ptr() for t in tensors if not t.is_meta]
        if len(set(pointers)) < len(pointers):
            self._refuse(
                "the step writes to a batch whose tensors share memory",
                "Write out of place (x = x + 1, not x += 1), or clone the tensors that share it.",
            )

    def settings_unchanged(self, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        """The step does not change the optimizer's settings."""
        if before != after:
            self._refuse(
                "the step changes the optimizer's settings",
                "Change learning rates and other settings between steps, outside the step.",
            )

    def kept_once(self, values: Iterable[Any], python: PythonState) -> None:
        """No new list or dict of the step is kept in two places, where it would become two."""
        seen = IdentitySet()
        for value in values:
            for each in nested_owners(value):
                if isinstance(each, tuple) or python.is_container(each):
                    continue
                if each in seen:
                    self._refuse(
                        f"the step keeps one new {type(each).__name__} in two places",
                        "Keep a copy in one of them.",
                    )
                seen.add(each)

    def write(self, write: Write, flat: batch_tree.Flat, python: PythonState) -> None:
        """A captured step can repeat a write to the user's objects."""
        line = python.line_of(write.content, write.key)
        if write.kind is WriteKind.REORDER:
            problem = f"the step changes the order of {write.content.path}"
            self.refuse_at(line, problem, "Keep an order in a tensor, or change it outside.")
        moved = [leaf for leaf in flat.structure.leaves if python.is_container(leaf)]
        if moved:
            self.refuse_at(
                line,
                f"the step puts a {type(moved[0]).__name__} from before the step into {write.name}",
                "Keep a copy there, or put it there outside the step.",
            )
        if isinstance(write.content, RandomState):
            problem = f"the step draws from the random generator {write.name}"
            self.refuse_at(line, problem, DRAWS[1])
        if isinstance(write.content, Array):
            problem = f"the step writes to the numpy array {write.name}"
            self.refuse_at(line, problem, "Use a tensor, which the capture can record.")
        for leaf in batch_tree.opaque_leaves(flat.structure):
            if not python.is_known(leaf):
                self.refuse_at(
                    line,
                    f"the step keeps a new {type(leaf).__name__} as {write.name}, which Rekindle "
                    "cannot look into",
                    "Keep tensors, numbers and text, in tuples, lists, dicts or dataclasses; make "
                    "modules and other objects outside the step. If only the first call makes it, "
                    "run the model once before.",
                )

    def no_iterator(self, python: PythonState) -> None:
        """The step takes nothing from an iterator that outlives it."""
        for line, path in python.iterators():
            self.refuse_at(
                line,
                f"the step uses {path}, an iterator, whose position cannot be seen",
                "Take the next element outside the step, and pass it in the batch.",
            )

    def no_shared_memory(self, python: PythonState, tensors: Iterable[torch.Tensor]) -> None:
        """No numpy array that the step can read shares memory with a tensor of its state."""
        arrays = [each for each in python.arrays() if isinstance(each.owner, np.ndarray)]
        if not arrays:
            return
        real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        storages = [tensor.untyped_storage() for tensor in real if tensor.device.type == "cpu"]
        spans = [(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages]
        for array in arrays:
            start = array.owner.__array_interface__["data"][0]
            if any(low <= start < high for low, high in spans):
                self._refuse(
                    f"the numpy array {array.path} shares memory with a tensor of the step",
                    "Keep a copy (tensor.numpy().copy()), or use the tensor itself.",
                )

    def randomness(self, sandbox: Sandbox, python: PythonState, *, drew: bool) -> None:
        """Only torch's operators draw random numbers, and no generator is seeded.

        The interception has refused what it saw. `drew` is True if Python's or numpy's generator
        has advanced, and it saw no other thread do that.
        """
        if sandbox.seeded_torch() or python.seeded():
            self._refuse(*SEEDS)
        if drew:
            self._refuse(*DRAWS)


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's settings by group."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _draws_inside_cudnn(rnn: nn.RNNBase) -> bool:
    on_cuda = any(param.is_cuda for param in rnn.parameters())
    return on_cuda and rnn.training and rnn.dropout > 0 and torch.backends.cudnn.enabled
