"""From the joint graph of AOTAutograd to a `StepGraph`: the planners' view of a compiled step.

A value is what memory holds: the result of a kernel. What the compiler computes inside the kernels
that read it (`fusion`) is no value, and neither is a view: an op of the step is a node together
with all such nodes before it. So a cast or an activation function that the backward pass reads is
computed there from what it was made of, and only the latter can be kept or dropped.

The forward pass is what the graph's forward outputs need; all else is of the backward pass.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from rekindle.core.graph.graph import (
    Op,
    OpKind,
    Phase,
    Role,
    Source,
    StepGraph,
    Storage,
    Value,
)
from rekindle.core.graph.roles import assign_roles
from rekindle.dynamo import aot
from rekindle.dynamo.fusion import (
    CASTS,
    Kind,
    kind_of,
    name_of,
    never_again,
    viewed,
    without_statistics,
)
from rekindle.dynamo.unused_tangents import ungiven
from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators

TANGENTS = "rekindle.tangents"
"""The target of the ops that stand for the start and the end of the backward pass.

The gradients that it starts from are there until it ends: who calls it holds them.
"""

_BIG = 4  # what has at least this part of a result's bytes counts as one of its big inputs
_MANY = 3  # big inputs, which in the backward pass would wait for all that reads their result
_MOST_NAMES = 4  # of the ops in a fused one, these many name it
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ATTRIBUTE = re.compile(r"\[['\"]?(\w+)['\"]?\]|\.(\w+)")
_SKIPPED = frozenset({"self", "_modules", "_orig_mod"})


@dataclass(frozen=True)
class Joint:
    """A joint graph and its step: `nodes` has each value's node, `main` that of each op.

    What an op changes that is no tensor, a random generator for one, is a value without a node.
    `is_fused` says of each op whether it is compiled into one kernel with its neighbours. `forward`
    are the nodes that the forward pass computes, and what is there before it; `n_outputs` how many
    of the graph's outputs are the forward pass's.
    """

    module: fx.GraphModule
    n_outputs: int
    step: StepGraph
    nodes: tuple[fx.Node | None, ...]
    main: tuple[fx.Node | None, ...]
    is_fused: tuple[bool, ...]
    forward: frozenset[fx.Node]

    @property
    def param_bytes(self) -> int:
        """The bytes of the parameters that the graph reads."""
        return self.step.bytes_by_role()[Role.PARAM]


def lift(
    module: fx.GraphModule,
    n_outputs: int,
    static: Collection[int],
    *,
    fuses: bool,
    holds_outputs: bool = True,
) -> Joint:
    """The step of a joint graph; `static` are the inputs that stay: parameters and buffers.

    What the forward pass returns is there until the step ends; if the caller does not hold it, only
    numbers are.
    """
    return _Lift(module, n_outputs, static, fuses, holds_outputs).run()


def outputs_of(graph: fx.Graph) -> list[fx.Node | None]:
    """What a graph returns, in order."""
    (output,) = graph.find_nodes(op="output")
    return [each if isinstance(each, fx.Node) else None for each in aot.leaves(output.args)]


def nbytes_of(node: fx.Node) -> int:
    """The bytes of a node's tensor; 0 if it has none."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return 0
    count = 1
    for size in val.shape:
        count *= aot.hint(size)
    return count * val.dtype.itemsize


class _Lift:
    def __init__(
        self,
        module: fx.GraphModule,
        n_outputs: int,
        static: Collection[int],
        fuses: bool,
        holds_outputs: bool,
    ) -> None:
        self.module, self.n_outputs, self.static = module, n_outputs, set(static)
        self.holds_outputs = holds_outputs
        self.all = list(module.graph.nodes)
        self.place = {node: place for place, node in enumerate(self.all)}
        self.kinds = {node: kind_of(node, fuses=fuses) for node in self.all}
        self.sizes = {node: nbytes_of(node) for node in self.all}
        outputs = outputs_of(module.graph)
        self.results = [node for node in outputs[:n_outputs] if node is not None]
        self.gradients = outputs[n_outputs:]
        self.late = self._after(filter(aot.is_backward_input, self.all))
        self.forward = self._forward()
        self.made: set[fx.Node] = set()
        self.roots: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.values: list[Value] = []
        self.nodes: list[fx.Node | None] = []  # by value
        self.value_of: dict[fx.Node, int] = {}
        self.storages: list[tuple[int, str]] = []  # bytes and device
        self.known: dict[int, Role] = {}
        self.state: dict[str, int] = {}
        self.ops: list[Op] = []
        self.main: list[fx.Node | None] = []

    def run(self) -> Joint:
        self._find_made()
        self._enter()
        units = [node for node in self.all if self._is_unit(node)]
        writes = [node for node in units if node in self.forward and self._writes(node)]
        for node in units:
            if node in self.forward and not self._writes(node):
                self._add_op(node, Phase.FORWARD)
        self._add_writes(writes)
        tangents = self._start_backward()
        for node in units:
            if node not in self.forward:
                self._add_op(node, Phase.BACKWARD)
        self._end_backward(tangents)
        return Joint(
            self.module,
            self.n_outputs,
            self._step(),
            tuple(self.nodes),
            tuple(self.main),
            tuple(n is not None and self._is_fused(n) for n in self.main),
            frozenset(self.forward),
        )

    def _after(self, starts: Iterable[fx.Node]) -> set[fx.Node]:
        """These nodes, and all that is computed from them."""
        found = set(starts)
        for node in self.all:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _forward(self) -> set[fx.Node]:
        """What the forward pass computes, and what is there before it."""
        needed = {node for node in self.results if node not in self.late}
        for node in self.all:
            runs_once = never_again(node) and not aot.is_tagged_backward(node)
            writes = self.kinds[node] is Kind.WRITE and aot.must_be_in_forward(node)
            if (runs_once or writes) and node not in self.late:
                needed.add(node)
        for node in reversed(self.all):
            if node in needed:
                needed.update(node.all_input_nodes)
        there = ("placeholder", "get_attr")
        for node in self.all:
            is_item = node.target is operator.getitem and node.args[0] in needed
            if is_item or (node not in self.late and (node.op in there or aot.is_sym(node))):
                needed.add(node)
        return needed

    def _find_made(self) -> None:
        """Decide what is written to memory, and for all else find what it is computed from."""
        wanted = [*self.results, *(node for node in self.gradients if node is not None)]
        for node in self.all:
            if self.kinds[node] is Kind.OPAQUE:
                wanted += [] if node.target is operator.getitem else node.all_input_nodes
        self.made.update(base for node in wanted if self._holds(base := self._base(node)))
        for node in self.all:
            kind = self.kinds[node]
            if node.op in ("placeholder", "get_attr"):
                self.roots[node] = (node,) if isinstance(self._val(node), torch.Tensor) else ()
                continue
            if node in self.forward and aot.is_sym(node):
                self.roots[node] = ()
                continue
            if kind is Kind.WRITE:
                self.roots[node] = self.roots[viewed(node)]
                continue
            roots = dict.fromkeys(r for each in node.all_input_nodes for r in self.roots[each])
            is_simple = kind is Kind.SIMPLE
            if self._is_join(node, roots) if is_simple else self._holds(node):
                self.made.add(node)
            self.roots[node] = (node,) if node in self.made else tuple(roots)

    def _val(self, node: fx.Node) -> object:
        return node.meta.get("val")

    def _holds(self, node: fx.Node) -> bool:
        """Whether a node that computes is a tensor, and not a tuple of them."""
        computes = self.kinds[node] in (Kind.OPAQUE, Kind.GATHERED, Kind.SIMPLE)
        return computes and isinstance(self._val(node), torch.Tensor)

    def _is_number(self, node: fx.Node) -> bool:
        val = self._val(node)
        return not isinstance(val, torch.Tensor) or val.dim() == 0

    def _base(self, node: fx.Node) -> fx.Node:
        """What a node looks at, through all views; itself if it is none."""
        while self.kinds[node] in (Kind.VIEW, Kind.WRITE):
            node = viewed(node)
        return node

    def _is_join(self, node: fx.Node, roots: Iterable[fx.Node]) -> bool:
        """Whether something is computed from several tensors of its own size that the step makes.

        Keeping it instead of them can save memory; and where it is not kept, chains would grow. In
        the backward pass it is written to memory only if that frees several: whatever reads it
        computes it as well.
        """
        least = self.sizes[node] / _BIG
        big = [r for r in roots if r.op == "call_function" and self.sizes[r] >= least]
        if node in self.forward:
            return self.sizes[node] > 0 and len(big) > 1
        return self.sizes[node] > 0 and len(big) >= _MANY and self._n_readers(node) > 1

    def _n_readers(self, node: fx.Node) -> int:
        """How many nodes read a result, or what it is cast to if that is all that becomes of it."""
        users = list(node.users)
        is_turned = len(users) == 1 and self.kinds[users[0]] is Kind.VIEW
        is_cast = len(users) == 1 and users[0].target in CASTS
        return self._n_readers(users[0]) if is_turned or is_cast else len(users)

    def _is_unit(self, node: fx.Node) -> bool:
        """Whether a node is an op of the step."""
        kind = self.kinds[node]
        if node.op != "call_function" or node.target is operator.getitem:
            return False
        if kind in (Kind.OPAQUE, Kind.GATHERED, Kind.WRITE):
            return True
        return node in self.made or (kind is not Kind.NUMBER and never_again(node) is not None)

    def _is_fused(self, node: fx.Node) -> bool:
        return self.kinds[node] in (Kind.SIMPLE, Kind.GATHERED)

    def _add_value(self, node: fx.Node, producer: int | None, role: Role | None = None) -> int:
        val = self._val(node)
        assert isinstance(val, torch.Tensor)
        shape = tuple(aot.hint(size) for size in val.shape)
        dtype = str(val.dtype).removeprefix("torch.")
        index = self.value_of[node] = len(self.values)
        self.values.append(Value(index, node.name, len(self.storages), shape, dtype, producer))
        self.nodes.append(node)
        if role is not None:
            self.known[len(self.storages)] = role
        self.storages.append((self.sizes[node], str(val.device)))
        return index

    def _enter(self) -> None:
        """What is there before the step: parameters, buffers, the batch, constants."""
        inputs = [node for node in self.all if node.op == "placeholder"]
        inputs = [node for node in inputs if not aot.is_backward_input(node)]
        for position, node in enumerate(inputs):
            gradient = self.gradients[position] if position < len(self.gradients) else None
            if isinstance(self._val(node), torch.Tensor):
                role = Role.INPUT
                if position in self.static:
                    role = Role.BUFFER if gradient is None else Role.PARAM
                self._add_value(node, None, role)
        for node in self.all:
            if node.op == "get_attr" and isinstance(self._val(node), torch.Tensor):
                self._add_value(node, None, Role.BUFFER)

    def _start_backward(self) -> tuple[int, ...]:
        tangents = [node for node in self.all if aot.is_backward_input(node)]
        tangents = [node for node in tangents if isinstance(self._val(node), torch.Tensor)]
        self.sizes |= dict.fromkeys(ungiven(self.module.graph), 0)
        index = len(self.ops)
        outputs = tuple(self._add_value(node, index) for node in tangents)
        self.ops.append(Op(index, "tangents", TANGENTS, Phase.BACKWARD, (), outputs))
        self.main.append(None)
        return outputs

    def _end_backward(self, tangents: tuple[int, ...]) -> None:
        index = len(self.ops)
        self.ops.append(Op(index, "tangents_end", TANGENTS, Phase.BACKWARD, tangents, ()))
        self.main.append(None)

    def _state(self, name: str) -> int:
        """The value that stands for something an op changes that is no tensor."""
        if name not in self.state:
            index = self.state[name] = len(self.values)
            self.values.append(Value(index, name, len(self.storages), (), "uint8"))
            self.nodes.append(None)
            self.known[len(self.storages)] = Role.BUFFER
            self.storages.append((0, self._device()))
        return self.state[name]

    def _device(self) -> str:
        return self.storages[0][1] if self.storages else "cpu"

    def _add_op(self, node: fx.Node, phase: Phase) -> None:
        index = len(self.ops)
        inside = self._inside(node)
        read = node.all_input_nodes
        if (simpler := without_statistics(node)) is not None:
            read = [each for each in read if each in simpler[1]]
        inputs = dict.fromkeys(self.value_of[root] for each in read for root in self.roots[each])
        changed = [] if (state := never_again(node)) is None else [self._state(state)]
        if self.kinds[node] is Kind.WRITE:
            changed += [self.value_of[root] for root in self.roots[viewed(node)]]
        elif phase is Phase.BACKWARD:
            changed = []  # runs once in any case
        made = [node, *node.users] if node in self.made else list(node.users)
        outputs = [each for each in made if each in self.made and self._maker(each) is node]
        is_random = state == "random_generator" and phase is Phase.FORWARD
        self.ops.append(
            Op(
                index=index,
                name=node.name,
                target=self._target(node, inside),
                phase=phase,
                inputs=tuple(inputs),
                outputs=tuple(self._add_value(each, index) for each in outputs),
                mutates=tuple(dict.fromkeys(changed)),
                is_random=is_random,
                flops=_flops(node),
                source=_source(node),
                members=tuple(each.name for each in (*inside, node)) if inside else (),
            )
        )
        self.main.append(node)

    def _writes(self, node: fx.Node) -> bool:
        return self.kinds[node] is Kind.WRITE

    def _add_writes(self, nodes: Sequence[fx.Node]) -> None:
        """One op for all that the forward pass changes at its end: buffers, statistics."""
        if nodes:
            index = len(self.ops)
            read = {
                self.value_of[r] for n in nodes for e in n.all_input_nodes for r in self.roots[e]
            }
            changed = {self.value_of[root] for n in nodes for root in self.roots[viewed(n)]}
            order = tuple(sorted(read)), (), tuple(sorted(changed))
            target = str(nodes[0].target)
            self.ops.append(Op(index, nodes[0].name, target, Phase.FORWARD, *order))
            self.main.append(nodes[0])

    def _maker(self, node: fx.Node) -> fx.Node:
        while node.target is operator.getitem:
            node = viewed(node)
        return node

    def _inside(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that are computed with a fused one, in order: those that are no values."""
        if not self._is_fused(node):
            return []
        found: set[fx.Node] = set()
        todo = list(node.all_input_nodes)
        while todo:
            each = todo.pop()
            if each not in self.made and each not in found and each.op == "call_function":
                found.add(each)
                todo += each.all_input_nodes
        order = [each for each in found if self.kinds[each] is Kind.SIMPLE]
        return sorted(order, key=self.place.__getitem__)

    def _target(self, node: fx.Node, inside: Sequence[fx.Node]) -> str:
        if not inside:
            target = node.target
            return str(target) if isinstance(target, OpOverload) else f"hop.{name_of(target)}"
        last = dict.fromkeys(name_of(each.target) for each in (node, *reversed(inside)))
        return OpKind.FUSED.value + "_".join(reversed(list(last)[:_MOST_NAMES]))

    def _step(self) -> StepGraph:
        held = [node for node in self.results if self.holds_outputs or self._is_number(node)]
        ends = [*held, *(node for node in self.gradients if node is not None)]
        bases = [base for node in ends if (base := self._base(node)) in self.value_of]
        outputs = dict.fromkeys(self.value_of[b] for b in bases if b.op == "call_function")
        of_params = {
            self.values[self.value_of[self._base(gradient)]].storage
            for position, gradient in enumerate(self.gradients)
            if gradient is not None
            and position in self.static
            and self.value_of.get(self._base(gradient)) in outputs
        }
        roles = assign_roles(
            len(self.storages),
            self.ops,
            self.values,
            known=self.known,
            grads=of_params,
            outputs={self.values[value].storage for value in outputs},
        )
        storages = tuple(
            Storage(index, nbytes, role, device)
            for index, ((nbytes, device), role) in enumerate(zip(self.storages, roles, strict=True))
        )
        return StepGraph(tuple(self.ops), tuple(self.values), storages, tuple(outputs))


def _flops(node: fx.Node) -> int:
    """Floating-point operations of a node, for the sizes at hand."""
    target = node.target
    if not isinstance(target, OpOverload) or target._overloadpacket not in flop_registry:
        return 0

    def plain(val: Any) -> Any:
        if isinstance(val, torch.Tensor):
            shape = [aot.hint(size) for size in val.shape]
            return torch.empty(shape, dtype=val.dtype, device="meta")
        return aot.hint(val) if isinstance(val, torch.SymInt) else val

    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: plain(n.meta["val"]))
    val = node.meta["val"]
    out = tuple(map(plain, val)) if isinstance(val, (tuple, list)) else plain(val)
    return operators.flops(target, args, kwargs, out)


def _source(node: fx.Node) -> Source:
    """The module that a node belongs to, and the user's line."""
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    paths = [path for path, _ in stack.values()] or [""]
    found = ("".join(each) for each in _ATTRIBUTE.findall(paths[-1]))
    module = ".".join(name for name in found if name not in _SKIPPED)
    frames = _FRAME.findall(meta.get("stack_trace") or "")
    filename, lineno = frames[-1] if frames else ("", 0)
    return Source(module, filename, int(lineno))
