"""Chains written by hand: each forward op reads the cell before it, backward the same way back.

Forward op i reads cell i - 1 (the batch, for the first) and makes cell i; the loss reads the last
cell. Then the loss's backward op reads the last cell and makes the first gradient, and the backward
op of forward op i reads cell i - 1 and the gradient of cell i. So every cell is read once in the
backward pass, and cell i is the i-th cell of the problem. Import it with `from plan.chains import
chain`.
"""

from __future__ import annotations

from collections.abc import Sequence

from support.hand_made import BACKWARD, FORWARD, LOSS, Call, profile_of, step, storages

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Role, StepGraph


def chain(
    n: int,
    nbytes: int | Sequence[int] = 1,
    times_us: float | Sequence[float] = 1.0,
    *,
    gradient_bytes: int | Sequence[int] | None = None,
    reads_output: bool = False,
) -> tuple[StepGraph, Profile]:
    """A chain of n forward ops whose cells take these bytes and these times to compute.

    The loss and backward ops take 1 µs each. A gradient has the bytes of its cell, or
    `gradient_bytes`. With `reads_output`, a backward op reads the forward op's result as well.
    """
    sizes = _each(nbytes, n)
    gradients = sizes if gradient_bytes is None else _each(gradient_bytes, n)
    times = _each(times_us, n)
    memory = storages(
        (0, Role.INPUT),
        *((size, Role.ACTIVATION) for size in sizes),
        (0, Role.OUTPUT),
        *((size, Role.GRAD_MAP) for size in reversed(gradients)),
    )
    # Values are numbered as their storages: the batch is 0, cell i is 1 + i, the loss is n + 1, and
    # the gradient of cell i is 2n + 1 - i.
    calls = [Call(FORWARD, [i], [1 + i]) for i in range(n)]
    calls.append(Call(LOSS, [n], [n + 1]))
    calls.append(Call(BACKWARD, [n], [n + 2]))
    for i in reversed(range(n)):
        reads = [i, *([1 + i] if reads_output else []), 2 * n + 1 - i]
        calls.append(Call(BACKWARD, reads, [2 * n + 2 - i] if i else []))
    graph = step(memory, [0], calls, outputs=[n + 1])
    return graph, profile_of(graph, times_us=[*times, *[1.0] * (n + 2)])


def _each(given: float | Sequence[float], n: int) -> list[float]:
    return list(given) if isinstance(given, Sequence) else [given] * n
