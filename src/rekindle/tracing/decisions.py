"""Values that a step reads during its capture, and the guards that keep them true.

A value is known if it can be computed before the step: from constants, from the batch, and from
tensors that no gradient changes, such as buffers. It is computed by the recorded calls it depends
on, with the real tensors. Unless it follows from constants alone it is a decision: before each
step, the same calls are made for the new batch, and another value means another capture
(decision 9). A value that depends on parameters or on random numbers is not known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from rekindle.torch_internals import (
    AutoDispatchBelowAutograd,
    FakeTensor,
    OpOverload,
    disable_current_modes,
)
from rekindle.tracing.step_state import EntryKind, Slot
from rekindle.tracing.user_line import Line

aten = torch.ops.aten

_READABLE = (EntryKind.BUFFER, EntryKind.ATTRIBUTE, EntryKind.EXTERNAL)
_OVERWRITES = ("aten::fill_", "aten::zero_", "aten::copy_")  # every element, reading none

# Random numbers whose range is certain: (lowest, highest, is the highest excluded).
_Range = tuple[float, float, bool]
_UNIFORM = ("aten::rand", "aten::rand_like")
_SAME_ELEMENTS = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "reshape", "expand", "squeeze", "unsqueeze", "select", "slice"),
        *("permute", "transpose", "t", "clone", "detach", "alias"),
    )
)


class ReadValue(NamedTuple):
    """The value of a known tensor, or the result of a function of known tensors."""

    value: Any
    is_constant: bool


@dataclass(frozen=True, slots=True)
class _Slice:
    """The calls that a value depends on, in order, and the tensors that enter them."""

    entries: list[fx.Node]
    nodes: list[fx.Node]
    constants: dict[fx.Node, Any]  # values that are certain without their arguments
    written: set[fx.Node]  # entries whose memory the calls write to
    is_pure: bool  # no call writes to memory


@dataclass(frozen=True, slots=True)
class _Decision:
    """A function of known tensors, and its value at capture; None stands for the tensor itself."""

    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    part: _Slice
    outcome: Any
    line: Line


class KnownValues:
    """Computes the values that a step reads while it is recorded on a tape."""

    def __init__(self, tape: Any) -> None:
        self.batch: dict[fx.Node, torch.Tensor] = {}  # real tensors, by placeholder
        self.constants: set[fx.Node] = set()  # placeholders of `torch.tensor(...)`
        self.decisions: list[_Decision] = []
        self.lacks_values = False  # True if a tensor of the batch is fake
        self.reason = ""  # why the last value asked for is not known: it depends on this
        self.is_forecast = False  # True if a library was told so, and took another path
        self._tape = tape
        self._n_seen = self._n_entries = 0
        self._real: dict[fx.Node, torch.Tensor] = {}  # the entries that may be read
        self._call_of: dict[fx.Node, Any] = {}
        self._writers: dict[int, list[Any]] = {}  # calls, by the storage that they write to

    def read(
        self,
        line: Line,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> ReadValue | None:
        """A function's result for known tensors, given as nodes; None if they are not known.

        Without a function, it is the value of the first argument.
        """
        kwargs = kwargs or {}
        part = self._slice([*_nodes((args, kwargs))])
        if part is None:
            return None
        is_constant = self.constants.issuperset(part.entries)
        device = _host_if_exact(part, self._tape.metas) if is_constant else None
        if device is _NOWHERE:
            self.reason = "a device that is not there"
            return None
        tensors = [self._real[node] for node in part.entries]
        with _plain_kernels():
            values = _run(part.nodes, _entering(part, tensors), part.constants, device)
            value = _apply(function, args, kwargs, values)
            if not is_constant:
                (outcome,) = _observe([value])
                self.decisions.append(_Decision(function, args, kwargs, part, outcome, line))
        return ReadValue(value, is_constant)

    @property
    def entries(self) -> list[Any]:
        """The tensors that have entered the step."""
        return list(self._tape.entries)

    def must_not_look(self, node: fx.Node | None) -> bool:
        """True if a library that avoids values of fake tensors must avoid this one's.

        It must not if the batch is real: a plain step would look.
        """
        if not self.lacks_values or (node is not None and self._slice([node]) is not None):
            return False
        self.is_forecast = True
        return True

    def ever_new(self) -> Line | None:
        """A line that reads a number that the step itself changes: no capture is used twice."""
        written = {self._tape.metas[n].storage for c in self._tape.calls for n in c.writes}
        for decision in self.decisions:
            is_number = not isinstance(decision.outcome, bytes) or len(decision.outcome) > 1
            state = [node for node in decision.part.entries if node not in self.batch]
            if is_number and any(self._tape.metas[node].storage in written for node in state):
                return decision.line
        return None

    def forget(self) -> None:
        """Hold no memory of the batch."""
        self.batch.clear()
        self._real.clear()

    def _update(self) -> None:
        """Take note of the entries and calls that were recorded since."""
        for entry in self._tape.entries[self._n_entries :]:
            tensor = self.batch.get(entry.node, entry.tensor)
            is_real = not isinstance(tensor, FakeTensor) and not tensor.is_meta
            if is_real and (entry.node in self.batch or entry.kind in _READABLE):
                self._real[entry.node] = tensor
        self._n_entries = len(self._tape.entries)
        for call in self._tape.calls[self._n_seen :]:
            self._call_of[call.node] = call
            for node in call.writes:
                self._writers.setdefault(self._tape.metas[node].storage, []).append(call)
        self._n_seen = len(self._tape.calls)

    def _slice(self, wanted: list[fx.Node]) -> _Slice | None:
        """The part of the tape that some nodes depend on; None if it is not known."""
        self._update()
        entries, calls, constants = set[fx.Node](), dict[fx.Node, Any](), dict[fx.Node, Any]()
        seen, storages, stack = set[fx.Node](), set[int](), list(wanted)
        is_pure, written = True, set[int]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if (certain := self._certain(node)) is not None:
                constants[node] = certain
                continue
            meta = self._tape.metas.get(node)
            if meta is not None and meta.storage not in storages:
                storages.add(meta.storage)
                for call in self._writers.get(meta.storage, ()):
                    stack.append(call.node)
                    is_pure = False
                    written.add(meta.storage)
            if node.op == "placeholder":
                if node not in self._real:
                    self.reason = self._name(node)
                    return None
                entries.add(node)
                continue
            stack.extend(node.all_input_nodes)
            if node.target is operator.getitem:
                continue
            call = self._call_of.get(node)
            if call is None or not isinstance(node.target, OpOverload) or call.is_random:
                self.reason = "random numbers" if call and call.is_random else "the optimizer"
                return None
            if "empty" in node.target._schema.name and not self._is_overwritten(node):
                writers = self._writers.get(self._tape.metas[node].storage, ())
                is_drawn = any(call.is_random for call in writers)  # by dropout, or uniform_()
                self.reason = "random numbers" if is_drawn else "memory that was not written to"
                return None
            calls[node] = call
        ordered = sorted(calls, key=lambda node: calls[node].serial)
        order = [n for node in ordered for n in (node, *_parts(node, seen))]
        changed = {node for node in entries if self._tape.metas[node].storage in written}
        if not all(_can_copy(self._real[node]) for node in changed):
            self.reason = "a batch whose elements share memory"
            return None
        entering = [entry.node for entry in self._tape.entries if entry.node in entries]
        return _Slice(entering, order, constants, changed, is_pure)

    def _name(self, node: fx.Node) -> str:
        """An entry that an unknown value depends on."""
        entry = next(entry for entry in self._tape.entries if entry.node is node)
        kinds = {EntryKind.BATCH: "a batch without values", EntryKind.OPT_STATE: "the optimizer"}
        return kinds.get(entry.kind, f"the {entry.kind.value} {entry.name}")

    def _is_overwritten(self, node: fx.Node) -> bool:
        """True if the first call that writes to an empty tensor sets all of its elements."""
        first = next(iter(self._writers.get(self._tape.metas[node].storage, ())), None)
        if first is None or not isinstance(first.node.target, OpOverload):
            return False
        is_whole = first.node.args[0] is node
        return is_whole and first.node.target._schema.name in _OVERWRITES

    # Random numbers: only their range is known

    def _certain(self, node: fx.Node) -> torch.Tensor | None:
        """The value of a comparison that holds for all, or for none, of a range of numbers."""
        compare = _COMPARISONS.get(node.target)
        if compare is None or not isinstance(node.args[1], (bool, int, float)):
            return None
        found = self._range(node.args[0])
        outcome = compare(found, node.args[1]) if found else None
        if outcome is None:
            return None
        meta = self._tape.metas[node]
        with disable_current_modes():
            device = self._tape.storages[meta.storage].device
            if device.type == "cuda" and not torch.cuda.is_available():
                device = torch.device("cpu")
            return torch.full(meta.shape, outcome, dtype=torch.bool, device=device)

    def _range(self, node: Any) -> _Range | None:
        """The range of a tensor of random numbers."""
        while isinstance(node, fx.Node) and isinstance(node.target, OpOverload):
            meta = self._tape.metas.get(node)
            if meta is None or meta.storage in self._writers:
                return None
            name = node.target._schema.name
            if name in _UNIFORM:
                # In half precision, a number close to 1 may be rounded to 1.
                exact = meta.dtype in (torch.float32, torch.float64)
                return (0.0, 1.0, True) if exact else (0.0, 1.0, False)
            if name not in _SAME_ELEMENTS:
                return None
            node = node.args[0]
        return None


def _below(found: _Range, limit: float) -> bool | None:
    """Whether all numbers of a range are less than a limit; None if only some are."""
    lowest, highest, excluded = found
    if highest < limit or (excluded and highest <= limit):
        return True
    return False if lowest >= limit else None


def _at_most(found: _Range, limit: float) -> bool | None:
    lowest, highest, _ = found
    if highest <= limit:
        return True
    return False if lowest > limit else None


def _not(outcome: bool | None) -> bool | None:
    return None if outcome is None else not outcome


_COMPARISONS: dict[Any, Callable[[_Range, float], bool | None]] = {
    aten.lt.Scalar: _below,
    aten.le.Scalar: _at_most,
    aten.ge.Scalar: lambda found, limit: _not(_below(found, limit)),
    aten.gt.Scalar: lambda found, limit: _not(_at_most(found, limit)),
}


# Calls on real tensors

_NOWHERE = object()


def _host_if_exact(part: _Slice, metas: dict[fx.Node, Any]) -> Any:
    """The CPU for constants that no device rounds: the step's device need not exist."""
    is_exact = not any(
        metas[node].dtype.is_floating_point or metas[node].dtype.is_complex
        for node in part.nodes
        if node in metas
    )
    if is_exact:
        return torch.device("cpu")
    on_cuda = any("cuda" in str(node.kwargs.get("device")) for node in part.nodes)
    return _NOWHERE if on_cuda and not torch.cuda.is_available() else None


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Real kernels, without autograd and autocast: the recorded calls contain the casts."""
    with ExitStack() as stack:
        stack.enter_context(disable_current_modes())
        stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(AutoDispatchBelowAutograd())
        yield


def _entering(part: _Slice, tensors: Sequence[torch.Tensor]) -> dict[fx.Node, Any]:
    """The tensors that enter a slice; a copy of those that it writes to."""
    return {
        node: _copy(tensor) if node in part.written else tensor
        for node, tensor in zip(part.entries, tensors, strict=True)
    }


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


def _can_copy(tensor: torch.Tensor) -> bool:
    """True if no two elements share memory."""
    with disable_current_modes():
        return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _run(
    nodes: Iterable[fx.Node],
    values: dict[fx.Node, Any],
    constants: dict[fx.Node, Any],
    device: torch.device | None = None,
) -> dict[fx.Node, Any]:
    """Make some calls in order; `device` replaces the one that tensors are created on."""
    values.update(constants)
    get = values.__getitem__
    for node in nodes:
        if node in constants:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), get)
        if device is not None:
            on_device: dict[str, Any] = {"device": device, "pin_memory": False}
            kwargs = {key: on_device.get(key, value) for key, value in kwargs.items()}
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values


def _apply(
    function: Callable[..., Any] | None, args: Any, kwargs: Any, values: dict[fx.Node, Any]
) -> Any:
    args, kwargs = fx.map_arg((args, kwargs), values.__getitem__)
    return args[0] if function is None else function(*args, **kwargs)


def _nodes(tree: Any) -> Iterator[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(tree, found.append)
    return iter(found)


def _parts(node: fx.Node, wanted: set[fx.Node]) -> Iterator[fx.Node]:
    """The `getitem` nodes of a call that are wanted."""
    return (user for user in node.users if user.target is operator.getitem and user in wanted)


def _observe(values: Sequence[Any]) -> list[Hashable]:
    """Something to compare for each value: bytes of tensors, read from each device at once."""
    on_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    found: list[Hashable] = [None] * len(values)
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            flat = value.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
            on_device.setdefault(value.device, []).append((index, flat))
        else:
            found[index] = (type(value), value)
    for parts in on_device.values():
        read = torch.cat([flat for _, flat in parts]).cpu().numpy().tobytes()
        start = 0
        for index, flat in parts:
            found[index] = read[start : start + len(flat)]
            start += len(flat)
    return found


# Functions of known tensors


def count(mask: torch.Tensor, shape: Sequence[int] | None = None) -> int:
    """The number of elements that a mask selects, of a tensor of another shape if one is given."""
    mask = mask if shape is None else mask.expand(shape)
    return int(torch.count_nonzero(mask))


def largest(lengths: torch.Tensor) -> int:
    """The largest of some lengths."""
    return int(lengths.max())


def layouts(op: OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Shape, strides, dtype and device of each of an operator's results."""
    results = op(*args, **kwargs)
    results = (results,) if isinstance(results, torch.Tensor) else results
    return tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in results)


# The guard

_Source = int | Slot | torch.Tensor  # a tensor's index in the batch, its place, or itself


@dataclass
class _Program:
    """Calls that compute decisions from the tensors that enter a step, in a graph of their own."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    sources: dict[fx.Node, _Source] = field(default_factory=dict)
    written: set[fx.Node] = field(default_factory=set)
    constants: dict[fx.Node, Any] = field(default_factory=dict)
    functions: list[tuple[Callable[..., Any] | None, Any, Any]] = field(default_factory=list)
    _calls: list[fx.Node] = field(default_factory=list)
    _copies: dict[Hashable, fx.Node] = field(default_factory=dict)

    def add(self, decision: _Decision, source_of: Callable[[fx.Node], _Source]) -> None:
        """Add a decision; calls that are made already are made once, if none of them writes."""
        part, node_of = decision.part, dict[fx.Node, fx.Node]()
        for node in (*part.entries, *part.constants):
            if (copy := self._copies.get(node)) is None:
                copy = self._copies[node] = self.graph.placeholder(node.name)
            node_of[node] = copy
            if node in part.constants:
                self.constants[copy] = part.constants[node]
            else:
                self.sources[copy] = source_of(node)
            if node in part.written:
                self.written.add(copy)
        for node in part.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), node_of.__getitem__)
            key = (node.target, repr(args), repr(kwargs)) if part.is_pure else node
            if (copy := self._copies.get(key)) is None:
                copy = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
                self._copies[key] = copy
                self._calls.append(copy)
            node_of[node] = copy
        args, kwargs = fx.map_arg((decision.args, decision.kwargs), node_of.__getitem__)
        self.functions.append((decision.function, args, kwargs))

    def values(self, batch: Sequence[torch.Tensor]) -> list[Any]:
        """The values of the decisions for a batch."""
        values: dict[fx.Node, Any] = {}
        for node, source in self.sources.items():
            tensor = batch[source] if isinstance(source, int) else source
            tensor = tensor.get() if isinstance(tensor, Slot) else tensor
            values[node] = _copy(tensor) if node in self.written else tensor
        _run(self._calls, values, self.constants)
        return [_apply(*function, values) for function in self.functions]


class Decisions:
    """What a step decided by values of its batch and of tensors that it does not train."""

    def __init__(self, known: KnownValues, batch_nodes: list[fx.Node], slots: list[Slot]) -> None:
        """Of the values that were read, in the order of the programs that compute them."""
        places = {(slot.kind, slot.name): slot for slot in slots}
        sources: dict[fx.Node, _Source] = {}
        for entry in known.entries:
            sources[entry.node] = places.get((entry.kind, entry.name), entry.tensor)
        sources.update((node, index) for index, node in enumerate(batch_nodes))
        pure = [decision for decision in known.decisions if decision.part.is_pure]
        others = [decision for decision in known.decisions if not decision.part.is_pure]
        programs = [_Program() for _ in (*pure[:1], *others)]
        for decision in pure:
            programs[0].add(decision, sources.__getitem__)
        for program, decision in zip(programs[len(pure[:1]) :], others, strict=True):
            program.add(decision, sources.__getitem__)
        self._programs = programs
        self._outcomes = [decision.outcome for decision in (*pure, *others)]
        self._is_forecast = known.is_forecast
        self._lines = [decision.line for decision in (*pure, *others)]

    def __len__(self) -> int:
        return len(self._outcomes)

    def change(self, batch: Sequence[torch.Tensor]) -> str:
        """A description of the first decision that is another one for this batch; "" if none is."""
        if self._is_forecast and not any(isinstance(tensor, FakeTensor) for tensor in batch):
            return "it was captured without the values of a batch"
        if not self._programs:
            return ""
        with _plain_kernels():
            outcomes = _observe([v for program in self._programs for v in program.values(batch)])
        if outcomes == self._outcomes:
            return ""
        changed = map(operator.ne, outcomes, self._outcomes)
        lines = zip(self._lines, changed, strict=True)
        filename, lineno = next(line for line, is_new in lines if is_new)
        return f"the value that {filename}:{lineno} reads is another one for this batch"
