"""Runs a recorded step on the real tensors.

The optimizer's operators are not run: the user's own optimizer object is called in their place, so
that learning rates, step counts, hooks and state live where they always live.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from rekindle.fx.codegen import Code
from rekindle.fx.recording import Recording
from rekindle.fx.rewrite import Listing, as_recorded
from rekindle.fx.tape import Kind

# The user's optimizer runs with autograd and autocast as they were when the step was called.
_included_keys = torch._C._dispatch_tls_local_include_set
_excluded_keys = torch._C._dispatch_tls_local_exclude_set
_ForceDispatchKeyGuard = torch._C._ForceDispatchKeyGuard


class Program:
    """A recorded step, ready to run: as it was recorded, or as a plan has rewritten it."""

    def __init__(self, recording: Recording, listing: Listing | None = None) -> None:
        self.recording = recording
        self.listing = listing or as_recorded(recording)
        self._optimizer = recording.around.optimizer
        self._device_types = sorted({s.device.type for s in recording.tape.storages} - {"meta"})
        self._stale_grads = [use.slot for use in recording.grads if not use.reads_old]
        self._final_grads = [(use.slot, use.final) for use in recording.grads]
        self._outputs = [self.listing.renamed[node] for node in recording.outputs]
        self._state: list[torch.Tensor] = []
        self.source, self._run = self._generate().compile()

    def __call__(self, batch: list[torch.Tensor], state: list[torch.Tensor]) -> Any:
        """Run one step on a batch's tensors; returns what the user's function returns.

        `state` has the tensor of each of the surroundings' slots.
        """
        for index in self._stale_grads:
            state[index].grad = None
        self._state = state
        try:
            with ExitStack() as stack:
                self._user_keys = _included_keys(), _excluded_keys()
                stack.enter_context(torch.enable_grad())  # the code switches it as it goes
                for kind in self._device_types:  # casts are part of the graph already
                    stack.enter_context(torch.autocast(kind, enabled=False))
                stack.enter_context(torch._C._AutoDispatchBelowAutograd())
                outputs = iter(self._run(batch, state))
        finally:
            self._state = []
        result = self.recording.result.rebuild([next(outputs) for _ in self.recording.result_nodes])
        for index, node in self._final_grads:
            state[index].grad = None if node is None else next(outputs)
        for effect in self.recording.effects:
            value = effect.structure.rebuild([next(outputs) for _ in effect.nodes])
            effect.container[effect.key] = value
        return result

    def _generate(self) -> Code:
        """The function `step(batch, state) -> outputs`."""
        recording, listing = self.recording, self.listing
        code = Code("batch, state")
        used = {arg for node in listing.nodes for arg in node.all_input_nodes}.union(self._outputs)
        places = {node: f"batch[{index}]" for index, node in enumerate(recording.batch_nodes)}
        slots = {(slot.kind, slot.name): i for i, slot in enumerate(recording.around.slots)}
        for entry in recording.tape.entries:
            if entry.kind is Kind.GRAD:
                places[entry.node] = f"state[{slots[Kind.PARAM, entry.name]}].grad"
            elif (entry.kind, entry.name) in slots:
                places[entry.node] = f"state[{slots[entry.kind, entry.name]}]"
            elif entry.kind is not Kind.BATCH:
                code.scope[listing.renamed[entry.node].name] = entry.tensor
        code.lines = [
            f"{listing.renamed[node].name} = {place}"
            for node, place in places.items()
            if listing.renamed[node] in used
        ]
        code.add_calls(
            listing.nodes,
            frees=listing.frees,
            grad_enabled={node: call.grad_enabled for node, call in listing.calls.items()},
            functions={
                node: self._optimizer_caller(call.params, call.autocast)
                for node, call in listing.optimizer_calls.items()
            },
        )
        code.lines.append(f"return [{', '.join(node.name for node in self._outputs)}]")
        return code

    def _optimizer_caller(
        self, params: list[int], autocast: dict[str, torch.dtype]
    ) -> Callable[..., None]:
        """The function that hands gradients to the user's optimizer and steps it."""

        def step_optimizer(*grads: torch.Tensor) -> None:
            owners = [self._state[index] for index in params]
            for owner, grad in zip(owners, grads, strict=True):
                owner.grad = grad
            with ExitStack() as stack:
                stack.enter_context(_ForceDispatchKeyGuard(*self._user_keys))
                stack.enter_context(torch.enable_grad())
                for kind, dtype in autocast.items():
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
                self._optimizer.step()
            for owner in owners:
                owner.grad = None

        return step_optimizer
