"""Steps of any depth, written down without a model: to see how planning grows.

`deep_chain(n)` is a chain of equal ops; `deep_resnet(blocks)` has the ops of a ResNet's bottleneck
blocks, in-place ones and batch-norm state included. Sizes and times are those of a GPU's order.
"""

from __future__ import annotations

from rekindle.core.cost.profile import OpCost, Profile
from rekindle.core.graph.graph import Op, Phase, Role, StepGraph, Storage, Value

_MIB = 1 << 20


class _Writer:
    """Writes a graph op by op."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.times: list[float] = []

    def value(self, nbytes: int, role: Role, producer: int | None = None) -> int:
        storage, index = len(self.storages), len(self.values)
        self.storages.append(Storage(storage, nbytes, role, "cuda:0"))
        self.values.append(Value(index, f"v{index}", storage, (nbytes,), "uint8", producer))
        return index

    def op(
        self,
        name: str,
        phase: Phase,
        inputs: tuple[int, ...],
        makes: tuple[tuple[int, Role], ...] = (),
        *,
        us: float,
        mutates: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        index = len(self.ops)
        outputs = tuple(self.value(nbytes, role, index) for nbytes, role in makes)
        target = f"aten.{name}.default"
        self.ops.append(Op(index, f"{name}_{index}", target, phase, inputs, outputs, mutates))
        self.times.append(us)
        return outputs

    def finish(self, outputs: tuple[int, ...]) -> tuple[StepGraph, Profile]:
        graph = StepGraph(tuple(self.ops), tuple(self.values), tuple(self.storages), outputs)
        costs = tuple(OpCost(us) for us in self.times)
        return graph, Profile("synthetic", graph.fingerprint, costs, allocator="cuda")


def deep_chain(n_ops: int) -> tuple[StepGraph, Profile]:
    """A chain of about n_ops ops: half forward, half backward, each reading its twin's input."""
    w = _Writer()
    depth = n_ops // 2
    chain = [w.value(_MIB, Role.INPUT)]
    for _ in range(depth):
        chain += w.op("tanh", Phase.FORWARD, (chain[-1],), ((_MIB, Role.ACTIVATION),), us=5.0)
    (loss,) = w.op("mean", Phase.LOSS, (chain[-1],), ((512, Role.OUTPUT),), us=5.0)
    (grad,) = w.op("ones_like", Phase.BACKWARD, (loss,), ((_MIB, Role.GRAD_MAP),), us=2.0)
    for value in reversed(chain[1:]):
        made = ((_MIB, Role.GRAD_MAP),)
        (grad,) = w.op("tanh_backward", Phase.BACKWARD, (grad, value), made, us=6.0)
    return w.finish((loss,))


def deep_resnet(n_blocks: int, stages: int = 4) -> tuple[StepGraph, Profile]:
    """A ResNet of so many bottleneck blocks: about 27 ops a block."""
    w = _Writer()
    parameters: list[tuple[int, int]] = []
    x = w.value(196 * _MIB, Role.INPUT)
    tape: list[tuple[str, tuple[int, ...], int]] = []

    def normalized_conv(x: int, nbytes: int) -> int:
        weight = w.value(_MIB, Role.PARAM)
        gamma, mean = w.value(4096, Role.PARAM), w.value(4096, Role.BUFFER)
        us = nbytes / _MIB
        (y,) = w.op(
            "convolution", Phase.FORWARD, (x, weight), ((nbytes, Role.ACTIVATION),), us=0.4 * us
        )
        made = ((nbytes, Role.ACTIVATION), (4096, Role.ACTIVATION), (4096, Role.ACTIVATION))
        z, *stats = w.op(
            "native_batch_norm", Phase.FORWARD, (y, gamma, mean), made, us=3 * us, mutates=(mean,)
        )
        tape.append(("norm", (y, gamma, *stats), nbytes))
        tape.append(("conv", (x, weight), nbytes))
        parameters.extend([(weight, _MIB), (gamma, 4096)])
        return z

    for block in range(n_blocks):
        size = 196 * _MIB >> (block * stages // n_blocks)
        first = normalized_conv(x, size // 4)
        w.op("relu_", Phase.FORWARD, (first,), us=0.1 * size / _MIB, mutates=(first,))
        tape.append(("relu", (first,), size // 4))
        second = normalized_conv(first, size // 4)
        w.op("relu_", Phase.FORWARD, (second,), us=0.1 * size / _MIB, mutates=(second,))
        tape.append(("relu", (second,), size // 4))
        third = normalized_conv(second, size)
        w.op("add_", Phase.FORWARD, (third, x), us=0.7 * size / _MIB, mutates=(third,))
        w.op("relu_", Phase.FORWARD, (third,), us=0.5 * size / _MIB, mutates=(third,))
        tape.append(("relu", (third,), size))
        x = third
    (loss,) = w.op("mean", Phase.LOSS, (x,), ((512, Role.OUTPUT),), us=5.0)
    (grad,) = w.op("ones_like", Phase.BACKWARD, (loss,), ((size, Role.GRAD_MAP),), us=2.0)
    grads = []
    for kind, reads, nbytes in reversed(tape):
        made: tuple[tuple[int, Role], ...] = ((nbytes, Role.GRAD_MAP),)
        if kind != "relu":
            made += ((_MIB if kind == "conv" else 4096, Role.GRAD),)
        us = {"relu": 0.7, "norm": 4.0, "conv": 1.0}[kind] * nbytes / _MIB
        grad, *own = w.op(f"{kind}_backward", Phase.BACKWARD, (grad, *reads), made, us=us)
        grads += own
    state = tuple(value for value, _ in parameters)
    w.op("_fused_sgd_", Phase.OPTIMIZER, (*state, *grads), us=500.0, mutates=state)
    return w.finish((loss,))
