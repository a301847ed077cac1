"""Random training steps: small, valid, and with everything that makes planning hard.

A step is built as eager torch would run it: forward ops, a loss, a backward pass that reads some of
the forward's values in reverse order, and an update. As under autograd, the backward pass never
reads a value that was overwritten after the forward op it differentiates had read it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.graph.graph import Op, Phase, Role, StepGraph, Storage, Value, assign_roles

BATCH_NORM = "aten.native_batch_norm.default"
BATCH_NORM_COPY = "aten.batch_norm_elemt.default"

# How often each kind of forward op is drawn; a plain step has only the first.
KINDS = {
    "simple": 10,
    "view": 3,
    "in_place": 4,
    "several": 3,
    "random": 2,
    "changes_state": 1,
    "batch_norm": 2,
}


def random_step(
    rng: random.Random,
    n_forward: int,
    *,
    plain: bool = False,
    micro_batches: int = 1,
    kinds: Sequence[str] = tuple(KINDS),
) -> tuple[StepGraph, Profile]:
    """A step with `n_forward` forward ops in all, and what its ops cost.

    `plain` leaves only ops with one new result each, and no workspace; `kinds` names the kinds of
    forward op to draw from. With several micro-batches, forward and backward passes take turns, and
    a later forward pass may read what an earlier one made.
    """
    return _Builder(rng, ("simple",) if plain else kinds, plain).run(n_forward, micro_batches)


@st.composite
def steps(
    draw: st.DrawFn,
    min_forward: int = 1,
    max_forward: int = 12,
    *,
    plain: bool = False,
    max_micro_batches: int = 2,
) -> tuple[StepGraph, Profile]:
    """Random steps for hypothesis: the number of ops and the seed are what it varies."""
    n_forward = draw(st.integers(min_forward, max_forward))
    micro_batches = draw(st.integers(1, max_micro_batches))
    seed = draw(st.integers(0, 2**32 - 1))
    made = _Step(
        random_step(random.Random(seed), n_forward, plain=plain, micro_batches=micro_batches)
    )
    made.call = f"random_step(random.Random({seed}), {n_forward}, {plain=}, {micro_batches=})"
    return made


class _Step(tuple[StepGraph, Profile]):
    """A graph and its profile, shown as the call that makes them again."""

    call: str

    def __repr__(self) -> str:
        return self.call


class _Builder:
    def __init__(self, rng: random.Random, kinds: Sequence[str], plain: bool) -> None:
        self.rng = rng
        self.kinds = kinds
        self.plain = plain
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.sizes: list[int] = []
        self.devices: list[str] = []
        self.known: dict[int, Role] = {}
        self.grads: list[int] = []  # values
        self.outputs: list[int] = []
        self.hidden: list[int] = []  # values of the forward pass
        self.version: dict[int, int] = {}  # of a storage: how often it was changed in place
        self.saved: dict[int, list[tuple[int, int]]] = {}  # by forward op: what it read and made

    def run(self, n_forward: int, micro_batches: int) -> tuple[StepGraph, Profile]:
        rng = self.rng
        self.weights = [self.entering("w", Role.PARAM) for _ in range(rng.randint(1, 2))]
        self.buffers = [self.entering("b", Role.BUFFER) for _ in range(3)]
        self.momentum = self.entering("m", Role.OPT_STATE)
        for number in range(micro_batches):
            share = (n_forward + number) // micro_batches
            self.micro_batch(share)
        grads = [value for value in self.grads if value not in self.outputs]
        touched = (*grads, *self.weights, self.momentum)
        self.op("update", Phase.OPTIMIZER, touched, mutates=(*self.weights, self.momentum))
        return self.finished()

    def micro_batch(self, n_forward: int) -> None:
        x = self.entering("x", Role.INPUT)
        self.inputs = [x]
        self.current = x
        first = len(self.ops)
        for _ in range(n_forward):
            self.forward()
        forward = list(range(first, len(self.ops)))
        gradient = self.loss()
        for index in reversed(forward):
            if self.rng.random() < 0.85:
                gradient = self.backward(index, gradient)

    # The forward pass

    def forward(self) -> None:
        rng, before = self.rng, len(self.ops)
        kind = rng.choices(self.kinds, [KINDS[k] for k in self.kinds])[0]
        reads = self.some_reads()
        match kind:
            case "view":
                self.view(reads[0], Phase.FORWARD)
            case "in_place":
                self.in_place()
            case "batch_norm":
                touched = (reads[0], self.weights[0], *self.buffers[:2])
                self.op(
                    "norm",
                    Phase.FORWARD,
                    touched,
                    makes=3,
                    mutates=self.buffers[:2],
                    target=BATCH_NORM,
                    copy_target=rng.choice(("", BATCH_NORM_COPY)),
                )
            case "changes_state":
                n_makes = rng.choice((0, 1, 1))
                mutates = (self.buffers[2],)
                self.op("count", Phase.FORWARD, (*reads, *mutates), makes=n_makes, mutates=mutates)
            case _:
                n_makes = rng.randint(2, 3) if kind == "several" else 1
                is_random = kind == "random"
                self.op(kind, Phase.FORWARD, reads, makes=n_makes, is_random=is_random)
        for op in self.ops[before:]:
            self.hidden += op.outputs
            self.current = op.outputs[0] if op.outputs else self.current
            self.save(op)

    def some_reads(self) -> list[int]:
        """Mostly the newest values; sometimes an older value or a weight in addition or instead."""
        rng = self.rng
        reads = [self.current]
        if rng.random() < 0.2:
            reads = [self.any_hidden()]
        if rng.random() < 0.35:
            reads.append(self.any_hidden())
        if rng.random() < 0.3:
            reads.append(rng.choice(self.weights))
        return list(dict.fromkeys(reads))

    def any_hidden(self) -> int:
        return self.rng.choice([*self.inputs, *self.hidden])

    def in_place(self) -> None:
        """Change an intermediate; where there is none yet, make one."""
        rng = self.rng
        if not self.hidden:
            self.op("simple", Phase.FORWARD, (self.current,), makes=1)
            return
        target = self.current if self.current in self.hidden else rng.choice(self.hidden)
        if rng.random() < 0.4:
            target = rng.choice(self.hidden)
        others = self.some_reads()[1:]
        self.op(
            "change",
            Phase.FORWARD,
            tuple(dict.fromkeys((target, *others))),
            makes=rng.choice((0, 0, 0, 1)),
            mutates=(target,),
            is_random=rng.random() < 0.2,
        )

    def save(self, op: Op) -> None:
        """The values that the backward pass may read for this op, with their current versions."""
        touched = dict.fromkeys((*op.inputs, *op.outputs))
        before = {self.values[v].storage for v in op.mutates}  # read before it changed them
        seen = []
        for value in touched:
            storage = self.values[value].storage
            late = storage in before and value not in op.outputs and self.rng.random() < 0.5
            seen.append((value, self.version.get(storage, 0) - late))
        self.saved[op.index] = seen

    # The loss and the backward pass

    def loss(self) -> int:
        reads = list(dict.fromkeys((self.current, *self.some_reads())))
        n_makes = 1 if self.plain else self.rng.choice((1, 1, 2))
        op = self.op("loss", Phase.LOSS, reads, makes=n_makes)
        self.outputs.append(op.outputs[0])
        self.hidden += op.outputs[1:]
        self.save(op)
        if not self.plain and self.hidden and self.rng.random() < 0.15:
            self.outputs.append(self.rng.choice(self.hidden))  # the step returns it, too
        return self.backward(op.index, None)

    def backward(self, index: int, gradient: int | None) -> int:
        """One or two ops that differentiate a forward op; returns the new gradient."""
        rng = self.rng
        intact = [
            value
            for value, version in self.saved[index]
            if self.version.get(self.values[value].storage, 0) == version
            and value not in self.weights
            and value not in self.buffers
        ]
        reads = [value for value in intact if rng.random() < 0.6]
        if reads and not self.plain and rng.random() < 0.2:
            reads[0] = self.view(reads[0], Phase.BACKWARD)
        if gradient is not None:
            reads.append(gradient)
        if rng.random() < 0.3 or not reads:
            reads.append(rng.choice(self.weights))
        if gradient is not None and not self.plain and rng.random() < 0.1:
            self.op("back", Phase.BACKWARD, reads, mutates=(gradient,))
        else:
            gradient = self.op("back", Phase.BACKWARD, reads, makes=1).outputs[0]
        if rng.random() < 0.3:
            again = [v for v in intact if rng.random() < 0.4]
            weight = self.op("weight_grad", Phase.BACKWARD, (*again, gradient), makes=1).outputs[0]
            self.grads.append(weight)
            if not self.plain and rng.random() < 0.1:
                self.outputs.append(weight)  # a gradient that is not cleared
        return gradient

    # Ops, values and storages

    def entering(self, name: str, role: Role) -> int:
        self.known[len(self.sizes)] = role
        return self.value(name, self.storage(), None)

    def storage(self) -> int:
        rng = self.rng
        self.sizes.append(rng.randint(1, 12) * rng.choice((1, 1, 4)))
        elsewhere = not self.plain and len(self.sizes) > 4 and rng.random() < 0.03
        self.devices.append("elsewhere" if elsewhere else "cpu")
        return len(self.sizes) - 1

    def value(self, name: str, storage: int, producer: int | None) -> int:
        index = len(self.values)
        self.values.append(Value(index, f"{name}{index}", storage, (1,), "float32", producer))
        return index

    def view(self, value: int, phase: Phase) -> int:
        storage = self.values[value].storage
        index = len(self.ops)
        made = self.value("view", storage, index)
        self.ops.append(
            Op(index, f"view_{index}", "aten.view.default", phase, (value,), (made,), is_view=True)
        )
        return made

    def op(
        self,
        name: str,
        phase: Phase,
        inputs: Sequence[int],
        *,
        makes: int = 0,
        mutates: Sequence[int] = (),
        is_random: bool = False,
        target: str = "",
        copy_target: str = "",
    ) -> Op:
        index = len(self.ops)
        outputs = tuple(self.value(name, self.storage(), index) for _ in range(makes))
        for storage in {self.values[v].storage for v in mutates}:
            self.version[storage] = self.version.get(storage, 0) + 1
        self.ops.append(
            Op(
                index,
                f"{name}_{index}",
                target or f"aten.{name}.default",
                phase,
                tuple(inputs),
                outputs,
                tuple(mutates),
                is_random=is_random,
                copy_target=copy_target,
            )
        )
        return self.ops[-1]

    def finished(self) -> tuple[StepGraph, Profile]:
        rng = self.rng
        outputs = tuple(dict.fromkeys(self.outputs))
        roles = assign_roles(
            len(self.sizes),
            self.ops,
            self.values,
            known=self.known,
            grads={self.values[v].storage for v in self.grads},
            outputs={self.values[v].storage for v in outputs},
        )
        storages = tuple(
            Storage(index, nbytes, role, device)
            for index, (nbytes, role, device) in enumerate(
                zip(self.sizes, roles, self.devices, strict=True)
            )
        )
        graph = StepGraph(tuple(self.ops), tuple(self.values), storages, outputs)
        costs = tuple(self.cost(op) for op in graph.ops)
        overhead = 0 if self.plain else rng.choice((0, 3))
        return graph, Profile("toy", graph.fingerprint, costs, overhead_bytes=overhead)

    def cost(self, op: Op) -> OpCost:
        rng = self.rng
        if op.is_view:
            return OpCost(0.0)
        us = rng.randint(1, 10)
        workspace = 0 if self.plain or rng.random() < 0.7 else rng.randint(1, 10)
        return OpCost(float(us), workspace, copy_us=us / 2 if op.copy_target else None)
