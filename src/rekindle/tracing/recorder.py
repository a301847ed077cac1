"""Records every operator of a training step as it runs on fake tensors.

Every real tensor that an operator is called with is replaced by its fake twin. Autograd sees the
real leaves, to which `loss.backward()` assigns fake gradients (decision 1).
"""

from __future__ import annotations

import gc
import operator
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch import fx

from rekindle.core.graph.graph import Source
from rekindle.core.identity import IdentityDict, IdentitySet
from rekindle.errors import CaptureError
from rekindle.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    current_autograd_node,
    disable_current_modes,
    get_sequence_nr,
)
from rekindle.tracing import (
    backward_formulas,
    decisions,
    fake_overrides,
    forward_formulas,
    kernel_check,
    operators,
    rng,
    user_line,
)
from rekindle.tracing.tape import Call, Entry, EntryKind, Meta, StorageMeta, Tape

aten = torch.ops.aten
_nbytes = operator.attrgetter("nbytes")


_dispatching = threading.local()


def is_dispatching() -> bool:
    """True while a capture in this thread calls an operator, where its dispatch mode is off."""
    return bool(getattr(_dispatching, "depth", 0))


class Recorder(TorchDispatchMode):
    """The dispatch mode that writes the tape; enter it above its `FakeTensorMode`.

    `name_unknown` names a real tensor that an operator is called with and that is no entry yet.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        step_line: user_line.Line,
        name_unknown: Callable[[torch.Tensor], tuple[EntryKind, str]],
    ) -> None:
        super().__init__()
        self.tape = Tape()
        self.module_path: list[str] = []
        self.in_backward = False
        self.in_optimizer = False
        self.is_paused = False
        self.checks_kernels = True  # False for forecasts, which do not run
        self.refusal: CaptureError | None = None
        self.before_op: Callable[[], None] = lambda: None
        self.on_frame: Callable[[CodeType, dict[str, Any]], None] | None = None
        self._thread = threading.get_ident()
        self.known = decisions.KnownValues(self.tape)
        self._fake_mode = fake_mode
        self._step_line = step_line
        self._name_unknown = name_unknown
        self._twin_of_real: IdentityDict[torch.Tensor] = IdentityDict()
        self._views: dict[Hashable, fx.Node] = {}
        self._node_of_storage: dict[int, fx.Node] = {}
        self._storage_index: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept alive, so that no address is reused
        self._tensors_on: Counter[int] = Counter()  # by storage
        self._deaths: list[weakref.ref[torch.Tensor]] = []
        self._n_calls = 0
        self._last_placeholder: fx.Node | None = None
        self._source_of_seq: dict[int, Source] = {}

    def enter_tensor(self, kind: EntryKind, name: str, tensor: torch.Tensor) -> fx.Node:
        """Make a tensor an input of the graph."""
        graph = self.tape.graph
        with graph.inserting_after(self._last_placeholder or graph._root):
            node = graph.placeholder(f"{kind.value}_{name}")
        self._last_placeholder = node
        self.tape.entries.append(Entry(kind, name, node, tensor))
        if isinstance(tensor, FakeTensor):
            self._hold(node, tensor)
            return node
        self._twin_of_real[tensor] = twin = self._fake_mode.from_tensor(tensor)
        self._hold(node, twin)
        if tensor.layout is torch.strided:  # part of a storage takes all of it; its twin does not
            index = self._storage_of(twin)
            held = StorageMeta(tensor.untyped_storage().nbytes(), tensor.device)
            self.tape.storages[index] = max(self.tape.storages[index], held, key=_nbytes)
        return node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor; an unknown tensor becomes an input of the graph."""
        fake = self._twin_of_real.get(tensor, tensor)
        node: fx.Node | None = getattr(fake, "_rekindle_node", None)
        return node or self.enter_tensor(*self._name_unknown(tensor), tensor)

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor in place of a real one."""
        if isinstance(tensor, FakeTensor):
            if tensor.fake_mode is not self._fake_mode:
                self.refuse(
                    "uses a tensor kept from an earlier capture, in a global or a closure",
                    "Return values that outlive the step, such as a running loss, and keep them "
                    "outside, or keep them as attributes of a module.",
                )
            return tensor
        self.node_of(tensor)
        return self._twin_of_real[tensor]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # such as a fake's device: no reason to fail, see below
        self.before_op()
        profile = sys.getprofile()  # notes the user's functions, of which none runs in here
        sys.setprofile(None)
        depth = getattr(_dispatching, "depth", 0)
        _dispatching.depth = depth + 1
        try:
            return self._dispatch(func, args, kwargs)
        finally:
            _dispatching.depth = depth
            sys.setprofile(profile)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten._local_scalar_dense.default:
            return self._read_value(args[0])
        if func is aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return self._constant(args[0])
        if func in (aten.set_.source_Storage, aten.set_.source_Storage_storage_offset):
            return self._set_storage(func, *args, **kwargs)
        args = operators.map_tensors(args, self._twin)
        kwargs = operators.map_tensors(kwargs, self._twin)
        if operators.is_bookkeeping(func):
            return func(*args, **kwargs) if self.is_paused else self._query(func, args, kwargs)
        if self.is_paused:
            return self._call(func, args, kwargs)[0]
        if operators.is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        node = current_autograd_node()
        if node is not None and backward_formulas.is_left_to_torch(node):
            self.refuse(
                "differentiates an operator whose gradient has another formula on fake tensors "
                f"({node.name()})",
                "Use loss.backward() or torch.autograd.grad.",
            )
        if (problem := forward_formulas.problem(func)) is not None:
            self.refuse(*problem)
        before = _layout(args[0]) if operators.is_in_place(func) and args else None
        is_checked = True
        try:
            result, is_checked = self._call(func, args, kwargs)
        except DynamicOutputShapeException:
            result = self._of_known_shape(func, args, kwargs)
            if result is None:
                raise
        if operators.is_same_tensor(func):
            self._hold(self.node_of(args[0]), result)
        elif operators.is_in_place(func) and _layout(args[0]) != before:
            self._reshape_in_place(func, args, kwargs)
        elif operators.is_in_place(func):
            self._record(func, args, kwargs, None)  # the result is the argument
        elif (twin := self._same_view(result)) is not None:
            self._hold(twin, result)
        else:
            self._record(func, args, kwargs, result)
            self.tape.calls[-1].may_need_less = forward_formulas.may_need_less(func, args)
            if not is_checked:
                tensors = list(operators.tensors((args, kwargs)))
                self.tape.calls[-1].unchecked = kernel_check.forms_of(result, tensors)
        return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, bool]:
        """The result as the kernel makes it; False if that is left to the first real step."""
        if not self.checks_kernels:
            return fake_overrides.call(func, args, kwargs), True
        try:
            return kernel_check.call(func, args, kwargs)
        except kernel_check.KernelDiffers as error:
            self.refuse(
                f"uses an operator whose result cannot be foreseen: {error}",
                "Use another operator here, or do it outside the step.",
            )

    def _same_view(self, result: Any) -> fx.Node | None:
        """An earlier node with the same storage and layout as a new view, if any (decision 4)."""
        if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
            return None
        if result.untyped_storage()._cdata not in self._storage_index:
            return None  # new memory
        return self._views.get(self._view_key(result))

    def _view_key(self, tensor: torch.Tensor) -> Hashable:
        flags = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
        return self._storage_of(tensor), _layout(tensor), flags

    def _reshape_in_place(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """Record `x.unsqueeze_(0)` and the like as a view that replaces the tensor.

        Other tensors of the same node, such as those from `detach`, keep their shape.
        """
        tensor, node = args[0], self.node_of(args[0])
        view = operators.out_of_place(func)
        if view is None or any(tensor is twin for twin in self._twin_of_real.values()):
            self.refuse(
                f"changes a tensor's shape in place ({func._schema.name})",
                "Write it out of place: x = x.unsqueeze(0), not x.unsqueeze_(0).",
            )
        tensor._rekindle_node = None
        self._record(view, (node, *args[1:]), kwargs, tensor)

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record `torch.tensor(...)` as a copy of the constant."""
        fake = aten.lift_fresh.default(tensor)
        if not self.is_paused:
            self.enter_tensor(EntryKind.EXTERNAL, f"constant{len(self.tape.entries)}", tensor)
            self._record(aten.clone.default, (tensor,), {}, fake)
            self.known.constants.add(self.node_of(tensor))
        return fake

    def _set_storage(
        self, func: Any, tensor: Any, storage: torch.UntypedStorage, *rest: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Record `tensor.set_(storage)`, which cuDNN's RNNs call, as a view of its owner."""
        if storage.device.type != "meta":
            pointer = storage.data_ptr()
            twins = (
                self._twin_of_real[e.tensor]
                for e in self.tape.entries
                if e.tensor in self._twin_of_real
                and e.tensor.untyped_storage().data_ptr() == pointer
            )
            storage = next((twin.untyped_storage() for twin in twins), storage)
        owner = self._node_of_storage.get(self._storage_index.get(storage._cdata, -1))
        if owner is None:
            self.refuse(
                "sets a tensor's storage by hand",
                "Make a view of the tensor that owns the memory instead: tensor.view(...).",
            )
        func(tensor, storage, *rest, **kwargs)
        tensor._rekindle_node = None
        layout = (list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        self._record(aten.as_strided.default, (owner, *layout), {}, tensor)
        return tensor

    def _hold(self, node: fx.Node, tensor: Any) -> None:
        """Tie a fake tensor to its node.

        The tape keeps a description, not the tensor: autograd passes a gradient on without a copy
        only if there are no other references to it.
        """
        tensor._rekindle_node = node
        storage = self._storage_of(tensor)
        self._watch(tensor, storage)
        if node not in self.tape.metas:
            self.tape.metas[node] = Meta(
                tuple(tensor.shape), tensor.stride(), tensor.dtype, storage
            )
            self._views.setdefault(self._view_key(tensor), node)
            self._node_of_storage.setdefault(storage, node)

    def _watch(self, tensor: torch.Tensor, storage: int) -> None:
        """Note when the last tensor on a storage is deleted, which ends its lifetime.

        That may be after its last use: a local variable of the step lives until it returns.
        """

        def on_death(_: Any) -> None:
            self._tensors_on[storage] -= 1
            if not self._tensors_on[storage]:
                self.tape.held_until[storage] = self._n_calls

        self._tensors_on[storage] += 1
        self._deaths.append(weakref.ref(tensor, on_death))

    def survivors(self) -> list[tuple[torch.Tensor, Source]]:
        """Fake tensors of the step that somebody still holds, and where they were made."""
        own = IdentitySet(self._twin_of_real.values())
        own |= IdentitySet(entry.tensor for entry in self.tape.entries)

        def alive() -> list[torch.Tensor]:
            tensors = (reference() for reference in self._deaths)
            return [tensor for tensor in tensors if tensor is not None and tensor not in own]

        if not alive():
            return []
        gc.collect()
        sources = {n: call.source for call in self.tape.calls for n in (call.node, *call.results)}
        unknown = Source("", "", 0)
        return [
            (tensor, sources.get(tensor._rekindle_node, unknown))  # type: ignore[attr-defined]
            for tensor in alive()
        ]

    def _storage_of(self, tensor: torch.Tensor) -> int:
        """The index of a fake tensor's storage, which its views share."""
        storage = tensor.untyped_storage()
        index = self._storage_index.setdefault(storage._cdata, len(self._storages))
        if index == len(self._storages):
            self._storages.append(storage)
            self.tape.storages.append(StorageMeta(storage.nbytes(), tensor.device))
        return index

    def get_random_state(self, device: str, state: torch.Tensor) -> torch.Tensor:
        """Record that the step reads a generator's state; returns a fake of that state."""
        self.is_paused = True
        fake = torch.empty(state.shape, dtype=state.dtype, device="cpu")
        self.is_paused = False
        self._record(rng.get_state, (device,), {}, fake)
        return fake

    def set_random_state(self, device: str, state: torch.Tensor) -> None:
        """Record that the step sets a generator's state."""
        self._record(rng.set_state, (device, state), {}, None)

    def _record(self, target: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        node = self.tape.graph.create_node(
            "call_function",
            target,
            operators.map_tensors(args, self.node_of),
            operators.map_tensors(kwargs, self.node_of),
            name=target.__name__.partition(".")[0],
        )
        results = self._bind(node, result)
        if self.on_frame is not None and threading.get_ident() != self._thread:
            for frame in user_line.frames():  # of autograd's own thread, which nobody watches
                self.on_frame(frame.f_code, frame.f_globals)
        line, in_loss = user_line.call_site()
        autograd_node = current_autograd_node()
        source = Source(self.module_path[-1] if self.module_path else "", *line)
        if autograd_node is None:
            # Autograd has just numbered this op if it tracks it, and its backward op will have the
            # same number. An op that autograd does not track leaves the number unchanged.
            self._source_of_seq.setdefault(get_sequence_nr() - 1, source)
        else:
            source = self._source_of_seq.get(autograd_node._sequence_nr(), source)
        is_op = isinstance(target, OpOverload)
        writes = operators.written(target, args, kwargs) if is_op else []
        self._n_calls += 1
        self.tape.calls.append(
            Call(
                serial=self._n_calls,
                node=node,
                results=results,
                writes=[self.node_of(tensor) for tensor in writes],
                source=source,
                in_backward=autograd_node is not None or self.in_backward,
                in_optimizer=self.in_optimizer,
                in_loss=in_loss,
                in_model=bool(self.module_path),
                grad_enabled=torch.is_grad_enabled(),
                is_random=is_op and operators.is_random(target, args, kwargs),
                flops=operators.flops(target, args, kwargs, result) if is_op else 0,
            )
        )

    def _bind(self, node: fx.Node, result: Any) -> list[fx.Node]:
        """Tie the new tensors of a result to nodes: the call's, or one `getitem` for each."""
        if isinstance(result, torch.Tensor):
            if result.layout is not torch.strided:
                self.refuse(
                    f"makes a {str(result.layout).removeprefix('torch.')} tensor",
                    "Use dense tensors; for nn.Embedding, write sparse=False.",
                )
            if getattr(result, "_rekindle_node", None) is not None:
                return []  # the op returned an argument
            self._hold(node, result)
            return [node]
        nodes: list[fx.Node] = []
        if isinstance(result, (tuple, list)):
            for index, item in enumerate(result):
                if item is not None:
                    part = self.tape.graph.create_node(
                        "call_function",
                        operator.getitem,
                        (node, index),
                        name=f"{node.name}_out{index}",
                    )
                    bound = self._bind(part, item)
                    if not bound:
                        self.tape.graph.erase_node(part)
                    nodes.extend(bound)
        return nodes

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor's value, if it follows from constants, the batch or buffers; see `decisions`."""
        self.known.reason = ""
        fake = tensor if self.is_paused else self._twin(tensor)
        node: fx.Node | None = getattr(fake, "_rekindle_node", None)
        if node is None:
            return None
        found = self.known.read(user_line.call_site()[0], None, (node,))
        return None if found is None else found.value

    def must_not_look(self, tensor: Any) -> bool:
        """True if a library must treat a tensor as fake, since its value cannot be known."""
        if not isinstance(tensor, FakeTensor):
            return False
        return self.known.must_not_look(getattr(tensor, "_rekindle_node", None))

    def _read_value(self, tensor: torch.Tensor) -> Any:
        """The value that `.item()` returns, if it is known."""
        if getattr(tensor, "constant", None) is not None:
            return aten._local_scalar_dense.default(tensor)
        n_decisions = len(self.known.decisions)
        value = self.known_value(tensor)
        if self.in_optimizer:  # the user's own one reads for itself in each step
            del self.known.decisions[n_decisions:]
        if value is not None:
            with disable_current_modes():
                return value.item()
        if self.in_optimizer:
            # Optimizers read their step count. The recorded optimizer is only analysed, since the
            # user's own will run; a count of 2 avoids the special cases of 0 and 1.
            return 2.0 if tensor.is_floating_point() else tensor.dtype is torch.bool or 2
        reason = self.known.reason
        problem = "reads the value of a tensor (.item(), float(), bool(), if) during the step"
        advice = (
            "The step is captured once, on tensors without values. Return the tensor and read it "
            "outside: loss = step(batch); loss.item(). Instead of an if, write torch.where(...)."
        )
        if reason == "random numbers":
            advice += " If this is LayerDrop, set layerdrop to 0.0 in the model's configuration."
        self.refuse(f"{problem}; it depends on {reason}" if reason else problem, advice)

    def _query(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator that returns no tensor, such as `equal`, if it is known."""
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            nodes = operators.map_tensors((args, kwargs), self.node_of)
            found = self.known.read(user_line.call_site()[0], func, *nodes)
            if found is None:
                raise
            return found.value

    def _of_known_shape(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """The fake result of an operator whose shape depends on known values; None if it does not.

        The number of rows that a mask selects is known if the mask is, for any tensor of rows.
        """
        line = user_line.call_site()[0]
        if func is aten.index.Tensor:
            indices: list[Any] = []
            for index in args[1]:
                if index is None or index.dtype not in (torch.bool, torch.uint8):
                    indices.append(index)
                    continue
                rows = self.known.read(line, decisions.count, (self.node_of(index),))
                if rows is None:
                    return None
                indices += [
                    torch.empty(rows.value, dtype=torch.int64, device=index.device)
                    for _ in index.shape
                ]
            return func(args[0], indices)
        if func is aten.masked_select.default:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            mask = self.node_of(args[1])
            rows = self.known.read(line, decisions.count, (mask, shape))
            return None if rows is None else args[0].new_empty(rows.value)
        if func is aten._ctc_loss.Tensor:
            longest = self.known.read(line, decisions.largest, (self.node_of(args[3]),))
            if longest is None:
                return None
            frames, n_rows, _ = args[0].shape
            alpha = args[0].new_empty(n_rows, frames, 2 * longest.value + 1)
            return args[0].new_empty(n_rows), alpha
        nodes = operators.map_tensors((args, kwargs), self.node_of)
        found = self.known.read(line, partial(decisions.layouts, func), *nodes)
        if found is None:
            return None
        results = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in found.value
        ]
        return tuple(results) if len(func._schema.returns) > 1 else results[0]

    def refuse(self, problem: str, advice: str) -> NoReturn:
        """Raise a CaptureError that names the user's current line."""
        line, within, known = user_line.place(user_line.current_lines(), self._step_line)
        self.refusal = CaptureError(
            problem + within, filename=line.filename, lineno=line.lineno, advice=known or advice
        )
        raise self.refusal


def in_bookkeeping(frame: FrameType | None) -> bool:
    """True if this frame answers torch's own question about a fake tensor, such as its device.

    Autograd asks from C++ code that ends the process if the answer is an exception.
    """
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            func = frame.f_locals.get("func")
            if getattr(func, "namespace", "") == "prim":
                return True
        frame = frame.f_back
    return False


def _layout(arg: Any) -> Hashable:
    """A tensor's shape, strides and offset; None for a list of tensors, whose layouts stay."""
    if not isinstance(arg, torch.Tensor):
        return None
    return tuple(arg.shape), arg.stride(), arg.storage_offset()
