"""The role of every storage, from the ops that make and read it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rekindle.core.graph.graph import Op, Phase, Role, Value


def assign_roles(
    n_storages: int,
    ops: Sequence[Op],
    values: Sequence[Value],
    *,
    known: Mapping[int, Role],
    grads: Collection[int],
    outputs: Collection[int],
) -> list[Role]:
    """The role of each storage; `known`, `grads` and `outputs` are storages the capture can name.

    An *activation* is made in the forward pass and read in the backward pass: Rekindle may drop it.
    The backward pass makes weight gradients and the activation gradients that lead to them.
    """
    made_in: dict[int, Phase] = {}
    read_in_backward: set[int] = set()
    for op in ops:
        for value in (*op.outputs, *op.mutates):
            made_in.setdefault(values[value].storage, op.phase)
        if op.phase is Phase.BACKWARD:
            read_in_backward.update(values[v].storage for v in op.inputs)

    def role(storage: int) -> Role:
        if storage in known:
            return known[storage]
        if storage in grads:
            return Role.GRAD
        if storage in outputs:
            return Role.OUTPUT
        phase = made_in.get(storage)
        if phase and phase.is_forward and storage in read_in_backward:
            return Role.ACTIVATION
        return Role.GRAD_MAP if phase is Phase.BACKWARD else Role.TEMP

    return [role(storage) for storage in range(n_storages)]
