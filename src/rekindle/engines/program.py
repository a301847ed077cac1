"""Runs a recorded step on the real tensors.

The optimizer's operators are not run: the user's own optimizer object is called in their place, so
that learning rates, step counts, hooks and state live where they always live.

A step is whole or not at all, as far as parameters and optimizer state go: they change in that call
alone, or in several where parameters are updated as their gradients come. An error before the first
leaves them as they were. Once it has begun, an interrupt waits for the end of the last; and the
memory that is needed until then is asked for beforehand, so that it does not run out on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import fx

from rekindle.core.cost.allocator import LARGE_BYTES, allocated_bytes
from rekindle.engines.engine import EngineInfo
from rekindle.engines.expandable_segments import Growing
from rekindle.rewriting.apply_schedule import RewrittenStep, as_recorded
from rekindle.rewriting.codegen import Code
from rekindle.torch_internals import (
    AutoDispatchBelowAutograd,
    ForceDispatchKeyGuard,
    excluded_dispatch_keys,
    included_dispatch_keys,
    set_grad_enabled,
)
from rekindle.tracing.defer_sigint import uninterrupted
from rekindle.tracing.tape import EntryKind, Recording

# The user's optimizer runs with autograd and autocast as they were when the step was called.


class Program:
    """A recorded step as generated code: as it was recorded, or as a plan has rewritten it.

    It is an `Engine` itself, the one without CUDA graphs.
    """

    peak_bytes = 0  # not known: the allocator counts it
    is_steered = False

    def __init__(
        self,
        recording: Recording,
        listing: RewrittenStep | None = None,
        optimizer_bytes: Sequence[int] = (),
        growing: Growing | None = None,
    ) -> None:
        """`optimizer_bytes` are what the optimizer allocates at once, on CUDA.

        `growing` is for a step that takes nearly all the memory there is.
        """
        self._growing = growing
        self.recording = recording
        self._optimizer_bytes = optimizer_bytes
        self.listing = listing or as_recorded(recording)
        self._optimizer = recording.state.optimizer
        self._device_types = sorted({s.device.type for s in recording.tape.storages} - {"meta"})
        self._stale_grads = [use.slot for use in recording.grads if not use.reads_old]
        self._final_grads = [(use.slot, use.final) for use in recording.grads]
        self.outputs = [self.listing.renamed[node] for node in recording.outputs]
        self._state: list[torch.Tensor] = []
        self._stack = ExitStack()
        recorded = len(recording.tape.optimizer_calls)
        self.is_early = len(self.listing.optimizer_calls) > recorded
        self._has_begun = False  # to change parameters
        self._new_state: list[torch.cuda.MemPool] = []  # where it goes, in the first step
        tape = recording.tape
        own = {tape.metas[e.node].storage for e in tape.entries if e.kind is EntryKind.OPT_STATE}
        self._state_bytes = [tape.storages[each].nbytes for each in sorted(own)]
        self.source, self._run = self.compile(self.listing.nodes, returned=self.outputs)

    def __call__(self, batch: list[torch.Tensor], state: list[torch.Tensor]) -> Any:
        """Run one step on a batch's tensors; returns what the user's function returns.

        `state` has the tensor of each of the surroundings' slots.
        """
        with self.running(state), self.as_code():
            outputs = self._run(batch, state, ())
        return self.finish(outputs, state)

    @property
    def program(self) -> Program:
        """The generated code that an engine runs, or falls back to."""
        return self

    @property
    def info(self) -> EngineInfo:
        """What runs the step."""
        return EngineInfo("python")

    def give_up(self, reason: str) -> None:
        """Nothing to do: generated code has nothing to fall back to."""

    @contextmanager
    def running(self, state: list[torch.Tensor]) -> Iterator[None]:
        """What is set while the step's code runs: it is below autograd, and casts for itself."""
        for index in self._stale_grads:
            state[index].grad = None
        self._state = state
        was_enabled = torch.is_grad_enabled()
        try:
            with ExitStack() as stack:
                self._stack, self._has_begun = stack, False
                self._user_keys = included_dispatch_keys(), excluded_dispatch_keys()
                stack.enter_context(torch.enable_grad())  # the code switches it as it goes
                for kind in self._device_types:  # casts are part of the graph already
                    stack.enter_context(torch.autocast(kind, enabled=False))
                stack.enter_context(AutoDispatchBelowAutograd())
                yield
        finally:
            set_grad_enabled(was_enabled)  # first, and at once: interrupts may come
            self._state = []
            self._stack = ExitStack()
            self._new_state = []

    def as_code(self) -> AbstractContextManager[None]:
        """What is set while the code runs and nothing is captured from it."""
        return self._growing() if self._growing else nullcontext()

    def finish(self, tensors: Iterable[torch.Tensor], state: list[torch.Tensor]) -> Any:
        """Put a step's outputs where they belong; returns what the user's function returns."""
        outputs = iter(tensors)
        result = self.recording.result.rebuild([next(outputs) for _ in self.recording.result_nodes])
        for index, node in self._final_grads:
            state[index].grad = None if node is None else next(outputs)
        for effect in self.recording.effects:
            value = effect.structure.rebuild([next(outputs) for _ in effect.nodes])
            effect.container[effect.key] = value
        return result

    def compile(
        self,
        nodes: Sequence[fx.Node],
        *,
        entering: Sequence[fx.Node] = (),
        returned: Sequence[fx.Node],
        functions: Mapping[fx.Node, Callable[..., Any]] = MappingProxyType({}),
    ) -> tuple[str, Callable[..., Any]]:
        """The function `step(batch, state, entering) -> returned` that runs some of the nodes.

        `entering` are results of nodes that have run before; `functions` has what to call for
        nodes in place of their targets.
        """
        recording, listing = self.recording, self.listing
        code = Code("batch, state, entering")
        used = {arg for node in nodes for arg in node.all_input_nodes}.union(returned)
        places = {node: f"batch[{index}]" for index, node in enumerate(recording.batch_nodes)}
        slots = {(slot.kind, slot.name): i for i, slot in enumerate(recording.state.slots)}
        for entry in recording.tape.entries:
            if entry.kind is EntryKind.GRAD:
                places[entry.node] = f"state[{slots[EntryKind.PARAM, entry.name]}].grad"
            elif (entry.kind, entry.name) in slots:
                places[entry.node] = f"state[{slots[entry.kind, entry.name]}]"
            elif entry.kind is not EntryKind.BATCH:
                code.scope[listing.renamed[entry.node].name] = entry.tensor
        code.lines = [
            f"{listing.renamed[node].name} = {place}"
            for node, place in places.items()
            if listing.renamed[node] in used
        ]
        if entering:
            code.lines.append(f"[{', '.join(node.name for node in entering)}] = entering")
        code.add_calls(
            nodes,
            frees=listing.frees,
            grad_enabled={node: call.grad_enabled for node, call in listing.calls.items()},
            functions={
                **{
                    node: self._optimizer_caller(call.params, call.autocast)
                    for node, call in listing.optimizer_calls.items()
                },
                **functions,
            },
        )
        code.lines.append(f"return [{', '.join(node.name for node in returned)}]")
        return code.compile()

    def _optimizer_caller(
        self, params: list[int], autocast: dict[str, torch.dtype]
    ) -> Callable[..., None]:
        """The function that hands gradients to the user's optimizer and steps it."""

        def step_optimizer(*grads: torch.Tensor) -> None:
            owners = [self._state[index] for index in params]
            if not (self.is_early and self._has_begun):
                self._begin(owners)
            with ExitStack() as stack:
                for pool in self._new_state:
                    stack.enter_context(torch.cuda.use_mem_pool(pool, owners[0].device))
                stack.enter_context(uninterrupted())
                stack.enter_context(ForceDispatchKeyGuard(*self._user_keys))
                stack.enter_context(torch.enable_grad())
                for kind, dtype in autocast.items():
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
                try:
                    for owner, grad in zip(owners, grads, strict=True):
                        owner.grad = grad
                    self._optimizer.step()
                finally:
                    for owner in owners:
                        owner.grad = None

        return step_optimizer

    def _begin(self, owners: list[torch.Tensor]) -> None:
        """Parameters are about to change: what is left of the step must not fail on the way."""
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            for device in {owner.device for owner in owners if owner.is_cuda}:
                is_new = self._state_bytes and not any(self._optimizer.state.values())
                if is_new and not (self._growing and self._growing.is_on):
                    self._make_room_for_state(device)
                _reserve(self._optimizer_bytes, device)
        if self.is_early:
            self._stack.enter_context(uninterrupted())
        self._has_begun = True

    def _make_room_for_state(self, device: torch.device) -> None:
        """Have the optimizer make its state in memory of its own, all in one piece.

        It comes to stay: between gradients, it would hold the memory around it, too.
        """
        torch.cuda.empty_cache()
        sizes = np.array(self._state_bytes, dtype=np.int64)
        large = allocated_bytes(sizes[sizes > LARGE_BYTES], "cuda")
        with torch.cuda.device(device):
            pool = torch.cuda.MemPool()
        try:
            with torch.cuda.use_mem_pool(pool, device):
                _reserve([int(large.sum())], device)
        except torch.OutOfMemoryError:  # not in one piece
            _reserve(self._state_bytes, device)
        else:
            self._new_state = [pool]


def _reserve(sizes: Sequence[int], device: torch.device) -> None:
    """Allocate so many bytes in pieces, and let go of them: the allocator keeps them at hand."""
    pieces = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
    del pieces
