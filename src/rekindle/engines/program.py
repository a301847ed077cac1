"""Runs a step as generated Python code, one operator a line; names are deleted after last use.

The optimizer's operators are not in the code: the user's own optimizer is called instead. A step
changes parameters and optimizer state completely or not at all (docs/decisions/028).
"""

from __future__ import annotations

import itertools
import linecache
import math
import operator
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import fx

from rekindle.core.cost.allocator import LARGE_BYTES, allocated_bytes
from rekindle.core.uncopyable import Uncopyable
from rekindle.engines.engine import EngineInfo
from rekindle.engines.process_settings import ExpandableSegments
from rekindle.rewriting.apply_schedule import RewrittenStep, as_recorded
from rekindle.torch_internals import (
    AutoDispatchBelowAutograd,
    ForceDispatchKeyGuard,
    OpOverload,
    excluded_dispatch_keys,
    included_dispatch_keys,
    set_grad_enabled,
)
from rekindle.tracing.kernel_check import checked_in_step
from rekindle.tracing.tape import EntryKind, OptimizerCall, Recording
from rekindle.tracing.undo import Interruptible, uninterrupted

Functions = Mapping[fx.Node, Callable[..., Any]]  # that nodes call in place of their targets
Tensors = list[torch.Tensor]


class Program(Uncopyable):
    """A step as generated code, as recorded or rewritten; also the engine without CUDA graphs."""

    peak_bytes = 0  # left to the allocator's own statistics
    is_steered = False

    def __init__(
        self,
        recording: Recording,
        rewritten: RewrittenStep | None = None,
        optimizer_bytes: Sequence[int] = (),
        expandable_segments: ExpandableSegments | None = None,
    ) -> None:
        """Generate the code.

        `optimizer_bytes` are the sizes of the allocations of the optimizer that are live at once,
        on CUDA. `expandable_segments` is given if the step takes nearly all of the GPU's memory.
        """
        self.recording, tape = recording, recording.tape
        self._expandable = expandable_segments
        self._optimizer_bytes = optimizer_bytes
        self.rewritten = rewritten or as_recorded(recording)
        self._optimizer = recording.state.optimizer
        self._device_types = sorted({s.device.type for s in tape.storages} - {"meta"})
        self._reset_grads = [use.slot for use in recording.grads if not use.reads_old]
        self._final_grads = [(use.slot, use.final) for use in recording.grads]
        self._grad_slots = [use.slot for use in recording.grads]
        self.outputs = [self.rewritten.node_map[node] for node in recording.outputs]
        self._state: list[torch.Tensor] = []
        self._interruptible: Interruptible | None = None
        self.is_early = len(self.rewritten.optimizer_calls) > len(tape.optimizer_calls)
        self._has_updated = False  # in this step
        self._state_pools: list[torch.cuda.MemPool] = []  # in the first step
        own = {tape.metas[e.node].storage for e in tape.entries if e.kind is EntryKind.OPT_STATE}
        self._state_bytes = [tape.storages[each].nbytes for each in sorted(own)]
        self.source, self._run = self.compile(self.rewritten.nodes, self.outputs)

    def __call__(self, batch: Tensors, state: Tensors) -> Any:
        """Run one step; `state` has one tensor for each slot of the step's state."""

        def run() -> list[torch.Tensor]:
            with self.uncaptured():
                outputs: list[torch.Tensor] = self._run(batch, state, ())
            return outputs

        return self.run_step(run, state)

    @property
    def program(self) -> Program:
        """The program itself."""
        return self

    @property
    def info(self) -> EngineInfo:
        """What runs the step."""
        return EngineInfo("python")

    def give_up(self, reason: str) -> None:
        """Do nothing: there is no other engine to fall back to."""

    def run_step(self, run: Callable[[], Iterable[torch.Tensor]], state: list[torch.Tensor]) -> Any:
        """Call a function that computes a step's outputs, and write them to gradients and modules.

        It runs below autograd and without autocast: casts are in the graph. Interrupts are handled
        at once until `commit`; then the step is completed first. Returns the user's result.
        """
        with uninterrupted() as interruptible:
            for index in self._reset_grads:
                state[index].grad = None
            self._state, self._has_updated = state, False
            was_enabled = torch.is_grad_enabled()
            try:
                with ExitStack() as stack:
                    self._user_keys = included_dispatch_keys(), excluded_dispatch_keys()
                    stack.enter_context(torch.enable_grad())  # the code switches it
                    for kind in self._device_types:
                        stack.enter_context(torch.autocast(kind, enabled=False))
                    stack.enter_context(AutoDispatchBelowAutograd())
                    with interruptible() as self._interruptible:
                        outputs = run()
            finally:
                set_grad_enabled(was_enabled)
                self._interruptible = None
                self._state = []
                self._state_pools = []
            return self._finish(outputs, state)

    def commit(self) -> None:
        """Defer interrupts until the step is complete: parameters are about to change."""
        if self._interruptible is not None:
            self._interruptible.end()

    def uncaptured(self) -> AbstractContextManager[None]:
        """The context of code that runs while no CUDA graph is captured."""
        return self._expandable() if self._expandable else nullcontext()

    def _finish(self, tensors: Iterable[torch.Tensor], state: list[torch.Tensor]) -> Any:
        """Write a step's outputs to gradients and modules; returns the user's result."""
        outputs = iter(tensors)
        result = self.recording.result.rebuild([next(outputs) for _ in self.recording.result_nodes])
        for index, node in self._final_grads:
            state[index].grad = None if node is None else next(outputs)
        for effect in self.recording.effects:
            effect.apply([next(outputs) for _ in effect.nodes])
        return result

    def compile(
        self,
        nodes: Sequence[fx.Node],
        returned: Sequence[fx.Node],
        entering: Sequence[fx.Node] = (),
        functions: Functions = MappingProxyType({}),
    ) -> tuple[str, Callable[..., Any]]:
        """The source and function `step(batch, state, entering) -> returned` that runs some nodes.

        `entering` are nodes that have run before, `functions` overrides the targets of nodes.
        """
        recording, rewritten = self.recording, self.rewritten
        code = _Code()
        used = {arg for node in nodes for arg in node.all_input_nodes}.union(returned)
        node_map = rewritten.node_map
        sources = {node_map[node]: f"batch[{i}]" for i, node in enumerate(recording.batch_nodes)}
        slots = {(slot.kind, slot.name): i for i, slot in enumerate(recording.state.slots)}
        for entry in recording.tape.entries:
            node = node_map[entry.node]
            if entry.kind is EntryKind.GRAD:
                sources[node] = f"state[{slots[EntryKind.PARAM, entry.name]}].grad"
            elif (entry.kind, entry.name) in slots:
                sources[node] = f"state[{slots[entry.kind, entry.name]}]"
            elif entry.kind is not EntryKind.BATCH:
                code.scope[node.name] = entry.tensor
        code.lines = [f"{node.name} = {text}" for node, text in sources.items() if node in used]
        if entering:
            code.lines.append(f"[{', '.join(node.name for node in entering)}] = entering")
        optimizer_calls = rewritten.optimizer_calls.items()
        steps = {node: self._optimizer_step(call) for node, call in optimizer_calls}
        checks = {
            node: checked_in_step(call.node.target, call.unchecked, call.source)
            for node, call in rewritten.calls.items()
            if call.unchecked is not None
            and node.target is call.node.target
            and isinstance(call.node.target, OpOverload)
        }
        code.add_calls(nodes, rewritten, {**checks, **steps, **functions})
        code.lines.append(f"return [{', '.join(node.name for node in returned)}]")
        return code.compile()

    def _optimizer_step(self, call: OptimizerCall) -> Callable[..., None]:
        """The function that steps the optimizer, with the user's autograd and autocast modes.

        Parameters that had no gradient when the call was recorded have none in the call: not even
        one from before the step, which the step has removed.
        """
        without = sorted(set(self._grad_slots).difference(call.params))

        def step_optimizer(*grads: torch.Tensor) -> None:
            owners = [self._state[index] for index in call.params]
            others = [(self._state[index], self._state[index].grad) for index in without]
            if not (self.is_early and self._has_updated):
                self._before_update(owners)
            with ExitStack() as stack:
                for pool in self._state_pools:
                    stack.enter_context(torch.cuda.use_mem_pool(pool, owners[0].device))
                stack.enter_context(ForceDispatchKeyGuard(*self._user_keys))
                stack.enter_context(torch.enable_grad())
                for kind, dtype in call.autocast.items():
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
                try:
                    for other, _ in others:
                        other.grad = None
                    for owner, grad in zip(owners, grads, strict=True):
                        owner.grad = grad
                    self._optimizer.step()
                finally:
                    for owner in owners:
                        owner.grad = None
                    for other, grad_before in others:
                        other.grad = grad_before

        return step_optimizer

    def _before_update(self, owners: list[torch.Tensor]) -> None:
        """Reserve memory and defer interrupts: the step must not fail once parameters change."""
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            for device in {owner.device for owner in owners if owner.is_cuda}:
                is_new = self._state_bytes and not any(self._optimizer.state.values())
                if is_new and not (self._expandable and self._expandable.is_on):
                    self._reserve_state(device)
                _reserve(self._optimizer_bytes, device)
        self.commit()
        self._has_updated = True

    def _reserve_state(self, device: torch.device) -> None:
        """Have the optimizer create its state in a pool of its own: see docs/decisions/026."""
        torch.cuda.empty_cache()
        sizes = np.array(self._state_bytes, dtype=np.int64)
        large = allocated_bytes(sizes[sizes > LARGE_BYTES], "cuda")
        with torch.cuda.device(device):
            pool = torch.cuda.MemPool()
        try:
            with torch.cuda.use_mem_pool(pool, device):
                _reserve([int(large.sum())], device)
        except torch.OutOfMemoryError:  # no contiguous room
            _reserve(self._state_bytes, device)
        else:
            self._state_pools = [pool]


def _reserve(sizes: Sequence[int], device: torch.device) -> None:
    """Allocate and free blocks of these sizes, so that the allocator has them cached."""
    blocks = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
    del blocks


_serial = itertools.count()


@dataclass
class _Code:
    """The function `step(batch, state, entering)` being written; `scope` has its globals."""

    lines: list[str] = field(default_factory=list)
    scope: dict[str, Any] = field(default_factory=dict)

    def compile(self) -> tuple[str, Callable[..., Any]]:
        """The source, registered for tracebacks while the function lives, and the function."""
        lines = ["def step(batch, state, entering):", *(f"    {line}" for line in self.lines)]
        source = "\n".join(lines) + "\n"
        filename = f"<rekindle step {next(_serial)}>"
        exec(compile(source, filename, "exec"), self.scope)
        function = self.scope.pop("step")
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        weakref.finalize(function, linecache.cache.pop, filename, None).atexit = False
        return source, function

    def add_calls(
        self, nodes: Sequence[fx.Node], rewritten: RewrittenStep, functions: Functions
    ) -> None:
        """Append the nodes' calls, and after each the deletion of the names it frees."""
        is_enabled = True  # the grad mode, which some kernels depend on
        for node in nodes:
            call = rewritten.calls.get(node)
            if call is not None and call.grad_enabled != is_enabled:
                is_enabled = not is_enabled
                self.lines.append(f"{self._name(set_grad_enabled)}({is_enabled})")
            text = self._call(node, functions.get(node, node.target))
            freed = rewritten.frees.get(node, ())
            dead = [other.name for other in freed if other is not node]
            self.lines.append(text if node in freed else f"{node.name} = {text}")
            if dead:
                self.lines.append(f"del {', '.join(dead)}")

    def _call(self, node: fx.Node, function: Any) -> str:
        if function is operator.getitem:
            source, index = node.args
            return f"{source}[{index}]"
        arguments = [self._literal(arg) for arg in node.args]
        arguments += [f"{key}={self._literal(arg)}" for key, arg in node.kwargs.items()]
        return f"{self._name(function)}({', '.join(arguments)})"

    def _literal(self, arg: Any) -> str:
        """An argument as source text; objects without a literal are bound to a name."""
        if isinstance(arg, fx.Node):
            return arg.name
        if isinstance(arg, (list, tuple)):
            items = [self._literal(item) for item in arg]
            if isinstance(arg, list):
                return f"[{', '.join(items)}]"
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if arg is None or isinstance(arg, (bool, int, str)):
            return repr(arg)
        if isinstance(arg, float) and math.isfinite(arg):
            return repr(arg)
        return self._name(arg)

    def _name(self, value: Any) -> str:
        """A global name for an object, unlike any local: "namespace_..." or "...__"."""
        if isinstance(value, OpOverload):
            stem, end, value = re.sub(r"\W", "_", str(value)), "", value._op
        else:
            label = re.sub(r"\W", "_", getattr(value, "__name__", str(value)))
            stem, end = (label if label.isidentifier() else f"constant_{label}"), "__"
        for serial in itertools.count():
            name = f"{stem}_{serial}{end}" if serial else f"{stem}{end}"
            if name.isidentifier() and self.scope.setdefault(name, value) is value:
                return name
        raise AssertionError("unreachable")
