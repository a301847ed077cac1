"""Holds the result of an operator on fake tensors against the one of its kernel.

torch's fake results have other strides, dtypes or bytes than those of some kernels. Every operator
that a step uses is therefore run once for real, on made-up tensors with the layout of its
arguments, and its fake result gets the metadata that the kernel's result has (decision 39).

Verdicts are kept by operator and arguments, so that repeated layers are checked once. Operators on
large tensors run on smaller ones with the same order of strides. An operator that does not run on
made-up values, or is not torch's own, is checked in the first real step (`checked_in_step`).
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from rekindle.core.graph.graph import Source
from rekindle.errors import CaptureError
from rekindle.torch_internals import (
    AutoDispatchBelowAutograd,
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    OpOverload,
    UnsupportedOperatorException,
    disable_current_modes,
    pytree,
)
from rekindle.tracing import fake_overrides, operators

aten = torch.ops.aten

_OWN_NAMESPACES = frozenset({"aten", "prims", "torchvision", "rekindle"})  # without side effects
# Of other layouts for other values: gradients of products take another way where there are zeros.
_BY_VALUE = "rekindle"
# Kernels that take integers for addresses, without a check: not for made-up values.
_UNSAFE = frozenset(
    {
        "aten::_segment_reduce_backward",
        "aten::_embedding_bag_backward",
        "aten::_embedding_bag_dense_backward",
        "aten::_embedding_bag_sparse_backward",
        "aten::_embedding_bag_per_sample_weights_backward",
    }
)
_MAX_VERDICTS = 1 << 14
_DIRECT_BYTES = 4 << 20  # arguments and results up to here are checked at their own size
_DIRECT_FLOPS = 10**8
_LARGEST_BYTES = 512 << 20  # beyond, an operator is checked at a smaller size only
_LARGEST_FLOPS = 10**11
_SHRUNK_ELEMENTS = 1 << 18
_LEAST_SHRUNK_SIZE = 16  # smaller sizes stay: kernel sizes, groups, heads


class Layout(NamedTuple):
    """A tensor argument's metadata; `storage` numbers the distinct storages of all arguments.

    `offset_bytes` counts from the first byte on that storage that any argument uses.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_conj: bool
    is_neg: bool
    storage: int
    offset_bytes: int

    @property
    def end_bytes(self) -> int:
        """The first byte after this tensor's last one."""
        if 0 in self.shape:
            return self.offset_bytes
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return self.offset_bytes + (last + 1) * self.dtype.itemsize


class Form(NamedTuple):
    """A result's metadata. `layout.storage` is an argument's, or -1 - n for the n-th new one."""

    layout: Layout
    nbytes: int  # of a new storage


class Verdict(NamedTuple):
    """What a check found: `forms` are the kernel's where they differ from the fake's.

    `is_checked` is False if the operator has to be checked in the first real step.
    """

    forms: tuple[Form | None, ...] | None = None
    structure: Any = None
    is_checked: bool = True
    problem: str = ""


class KernelDiffers(Exception):
    """A kernel's result has metadata that no fake result can be given."""


_REFUSALS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
_SAME = Verdict()
_UNKNOWN = Verdict(is_checked=False)
_verdicts: OrderedDict[Hashable, Verdict] = OrderedDict()
_lock = threading.Lock()


def call(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """An operator's result on fake tensors, as its kernel makes it; False if that is unknown.

    Raises KernelDiffers if the kernel returns what a fake result cannot be.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if operators.is_in_place(op) or not all(map(_is_checkable, tensors)):
        return _fake(op, args, kwargs), True
    request = _Request(op, leaves, structure)
    try:
        result = _fake(op, args, kwargs)
    except _REFUSALS:
        raise
    except Exception:
        verdict = _verdict(("without fake", request.key()), request.without_fake)
        if verdict.forms is None:
            raise  # the kernel refuses these arguments, too
        return _rebuilt(verdict, None, tensors), True
    if not all(map(_is_checkable, operators.tensors(result))):
        return result, True
    if op.namespace not in _OWN_NAMESPACES or op._schema.name in _UNSAFE:
        return result, False
    verdict = _verdict(request.key(), lambda: request.compare(result))
    if verdict.problem:
        raise KernelDiffers(verdict.problem)
    if verdict.forms is not None:
        result = _rebuilt(verdict, result, tensors)
    return result, verdict.is_checked and op.namespace != _BY_VALUE


def _fake(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake result. Where torch has none, it runs the kernel, which may draw numbers."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return fake_overrides.call(op, args, kwargs)
    with _generators_kept(args, kwargs):
        return fake_overrides.call(op, args, kwargs)


def _is_checkable(tensor: torch.Tensor) -> bool:
    """True for a dense fake tensor on a device that this machine has."""
    return (
        isinstance(tensor, FakeTensor)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and (
            tensor.device.type == "cpu"
            or (tensor.device.type == "cuda" and torch.cuda.is_available())
        )
    )


def _verdict(key: Hashable, check: Callable[[], Verdict]) -> Verdict:
    with _lock:
        verdict = _verdicts.get(key)
        if verdict is not None:
            _verdicts.move_to_end(key)
            return verdict
    verdict = check()
    with _lock:
        _verdicts[key] = verdict
        while len(_verdicts) > _MAX_VERDICTS:
            _verdicts.popitem(last=False)
    return verdict


Forms = tuple[tuple[Form | None, ...], Any]  # of all results, and their structure


class _Request(NamedTuple):
    """An operator and its arguments, flat."""

    op: OpOverload
    leaves: list[Any]
    structure: Any

    def key(self) -> Hashable:
        """Everything that the metadata of the result may depend on."""
        layouts = iter(self.layouts())
        parts = tuple(
            next(layouts) if isinstance(leaf, torch.Tensor) else _plain_key(leaf)
            for leaf in self.leaves
        )
        return self.op, parts, self.structure, _settings()

    def layouts(self) -> list[Layout]:
        """The layouts of all tensors."""
        return layouts_of([leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)])

    def without_fake(self) -> Verdict:
        """The kernel's forms, where there is no fake result: the same for different values."""
        found = []
        layouts = self.layouts()
        if sum(layout.end_bytes for layout in layouts) > _LARGEST_BYTES:
            return _UNKNOWN
        for fill in _fills(self.op)[:2]:
            try:
                found.append(self._kernel_forms(layouts, self.leaves, fill))
            except Exception:
                return _UNKNOWN
        same = found[0] == found[1]
        return Verdict(*found[0]) if same else _UNKNOWN

    def compare(self, result: Any) -> Verdict:
        """Run the kernel, at the arguments' own size or a smaller one."""
        layouts = self.layouts()
        expected = forms_of(result, self._tensors(self.leaves))
        nbytes = sum(layout.end_bytes for layout in layouts)
        nbytes += sum(form.nbytes for form in expected[0] if form is not None)
        args, kwargs = pytree.tree_unflatten(self.leaves, self.structure)
        flops = operators.flops(self.op, args, kwargs, result)
        small: Verdict | None = None
        if nbytes > _DIRECT_BYTES or flops > _DIRECT_FLOPS:
            small = next(self._at_smaller_sizes(layouts, expected), None)
            if small is _SAME:
                return _SAME
        if nbytes > _LARGEST_BYTES or flops > _LARGEST_FLOPS:
            return small or _UNKNOWN
        real = self._kernel(layouts, self.leaves)
        if real is None:
            return small or _UNKNOWN
        return _SAME if real == expected else Verdict(*real)

    def _at_smaller_sizes(self, layouts: list[Layout], expected: Forms) -> Iterator[Verdict]:
        """The verdicts at smaller sizes, if any are possible, carried over to the real ones."""
        for mapping in _mappings(layouts, self.leaves):
            shrunk = [_shrunk(layout, mapping) for layout in layouts]
            shared = [layout.storage for layout in dict.fromkeys(layouts)]
            if None in shrunk or len(set(shared)) < len(shared):
                return
            small = [layout for layout in shrunk if layout is not None]
            leaves = [mapping(leaf) if _is_size(leaf) else leaf for leaf in self.leaves]
            try:
                fakes = iter(_empty(small))
                given = [next(fakes) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
                args, kwargs = pytree.tree_unflatten(given, self.structure)
                fake = forms_of(_fake(self.op, args, kwargs), self._tensors(given))
            except Exception:  # the sizes depend on each other: try others
                continue
            real = self._kernel(small, leaves)
            if real is not None:
                yield _SAME if real == fake else self._carried_over(real, fake, expected)

    def _carried_over(self, real: Forms, fake: Forms, expected: Forms) -> Verdict:
        """What a kernel does to small tensors, for the real sizes of its fake result."""
        unknown = f"{self.op} returns other tensors than torch's fake of it"
        if real[1] != fake[1] or len(expected[0]) != len(fake[0]):
            return Verdict(problem=unknown)
        forms: list[Form | None] = []
        for kernel, small, large in zip(real[0], fake[0], expected[0], strict=True):
            if kernel == small:
                forms.append(large)
                continue
            if kernel is None or small is None or large is None:
                return Verdict(problem=unknown)
            made, was = kernel.layout, small.layout
            dense = _dense_strides(made.shape, _order(made.stride))
            is_new = made.storage == was.storage < 0 and not made.offset_bytes
            if made.shape != was.shape or not is_new or dense != made.stride:
                return Verdict(problem=unknown)
            stride = _dense_strides(large.layout.shape, _order(made.stride))
            layout = made._replace(shape=large.layout.shape, stride=stride)
            forms.append(Form(layout, layout.end_bytes))
        return Verdict(tuple(forms), expected[1])

    def _kernel(self, layouts: list[Layout], leaves: list[Any]) -> Forms | None:
        """The forms of the kernel's result; None if it refuses all made-up values."""
        for fill in _fills(self.op):
            try:
                return self._kernel_forms(layouts, leaves, fill)
            except Exception:
                continue
        return None

    def _kernel_forms(self, layouts: list[Layout], leaves: list[Any], fill: _Fill) -> Forms:
        with _for_real():
            made = iter(_made(layouts, fill))
            given = [
                next(made)
                if isinstance(leaf, torch.Tensor)
                else torch.Generator(leaf.device)
                if isinstance(leaf, torch.Generator)
                else leaf
                for leaf in leaves
            ]
            args, kwargs = pytree.tree_unflatten(given, self.structure)
            return forms_of(self.op(*args, **kwargs), self._tensors(given))

    @staticmethod
    def _tensors(leaves: Iterable[Any]) -> list[torch.Tensor]:
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def layouts_of(tensors: Sequence[torch.Tensor]) -> list[Layout]:
    """The layouts of tensors, with the storages that they share."""
    index: dict[int, int] = {}
    start: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()._cdata
        index.setdefault(storage, len(index))
        offset = _offset_bytes(tensor)
        start[storage] = min(offset, start.get(storage, offset))
    return [
        _layout(
            tensor, index[tensor.untyped_storage()._cdata], start[tensor.untyped_storage()._cdata]
        )
        for tensor in tensors
    ]


def _layout(tensor: torch.Tensor, storage: int, start_bytes: int) -> Layout:
    return Layout(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
        storage,
        _offset_bytes(tensor) - start_bytes,
    )


def _offset_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


def forms_of(result: Any, tensors: Sequence[torch.Tensor]) -> Forms:
    """The forms of an operator's results, given its tensor arguments, and their structure."""
    owner: dict[int, tuple[int, int]] = {}
    for tensor, layout in zip(tensors, layouts_of(tensors), strict=True):
        offset = _offset_bytes(tensor) - layout.offset_bytes
        owner.setdefault(tensor.untyped_storage()._cdata, (layout.storage, offset))
    leaves, structure = pytree.tree_flatten(result)
    forms: list[Form | None] = []
    n_new = 0
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            forms.append(None)
            continue
        storage = leaf.untyped_storage()
        if storage._cdata not in owner:
            n_new += 1
            owner[storage._cdata] = (-n_new, 0)
        index, start = owner[storage._cdata]
        nbytes = storage.nbytes() if index < 0 else 0
        forms.append(Form(_layout(leaf, index, start), nbytes))
    return tuple(forms), (structure, tuple(leaf is None for leaf in leaves))


def _rebuilt(verdict: Verdict, result: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """A fake result with the metadata of the kernel's; tensors that have it already are kept."""
    assert verdict.forms is not None
    structure, is_none = verdict.structure
    old = pytree.tree_leaves(result)
    now, _ = forms_of(result, tensors)
    if len(old) != len(verdict.forms):
        old, now = [None] * len(verdict.forms), (None,) * len(verdict.forms)
    made: list[Any] = []
    bases: dict[int, tuple[torch.Tensor, int]] = {}
    for tensor, layout in zip(tensors, layouts_of(tensors), strict=True):
        offset = _offset_bytes(tensor) - layout.offset_bytes
        bases.setdefault(layout.storage, (tensor, offset))
    changed = {
        form.layout.storage
        for form, before in zip(verdict.forms, now, strict=True)
        if form is not None and form != before
    }
    for form, before, leaf, none in zip(verdict.forms, now, old, is_none, strict=True):
        if form is None:
            made.append(None if none else leaf)
        elif form == before and (form.layout.storage not in changed or form.layout.storage >= 0):
            made.append(leaf)
        else:
            made.append(_fake_of(form, bases))
    return pytree.tree_unflatten(made, structure)


def _fake_of(form: Form, bases: dict[int, tuple[torch.Tensor, int]]) -> torch.Tensor:
    """A fake tensor of this form, on the storage of an argument or a new one."""
    layout = form.layout
    is_plain = layout.end_bytes == form.nbytes and not layout.offset_bytes
    if layout.storage not in bases and is_plain:
        tensor = torch.empty_strided(
            layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
        )
        bases[layout.storage] = tensor, 0
    else:
        if layout.storage not in bases:
            memory = torch.empty(form.nbytes, dtype=torch.uint8, device=layout.device)
            bases[layout.storage] = memory, 0
        base, start = bases[layout.storage]
        tensor = _on_storage(base.untyped_storage(), layout, layout.offset_bytes + start)
    return _flagged(tensor, layout)


def _on_storage(storage: torch.UntypedStorage, layout: Layout, offset_bytes: int) -> torch.Tensor:
    tensor = torch.empty(0, dtype=layout.dtype, device=layout.device)
    offset = offset_bytes // layout.dtype.itemsize
    tensor.set_(storage, offset, layout.shape, layout.stride)  # type: ignore[call-overload]
    return tensor


def _flagged(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor with the flags of lazy conjugation and negation."""
    if layout.is_conj:
        tensor = aten._conj(tensor)
    return aten._neg_view(tensor) if layout.is_neg else tensor


def checked_in_step(op: OpOverload, expected: Forms, source: Source) -> Callable[..., Any]:
    """An operator that raises CaptureError if its result is not what its fake was."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        if forms_of(result, list(operators.tensors((args, kwargs)))) != expected:
            is_own = op.namespace in _OWN_NAMESPACES
            raise CaptureError(
                f"{op} returned a tensor of another shape, layout or dtype than on fake tensors",
                filename=source.filename,
                lineno=source.lineno,
                advice="Make the tensors that this line works on contiguous()."
                if is_own
                else "Give the operator a fake implementation that returns what its kernel "
                "does, strides included: torch.library.register_fake(...).",
            )
        return result

    return checked


# Made-up arguments

_Fill = Callable[[torch.Tensor], None]


def _zeros(tensor: torch.Tensor) -> None:
    tensor.zero_()


def _ones(tensor: torch.Tensor) -> None:
    tensor.fill_(1)


def _identity(tensor: torch.Tensor) -> None:
    """Matrices that can be inverted and factorized; ones for everything else."""
    tensor.fill_(1)
    if tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2]:
        tensor.copy_(torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device))


_FILLS: tuple[_Fill, ...] = (_zeros, _ones, _identity)


def _fills(op: OpOverload) -> tuple[_Fill, ...]:
    """The values to try. Pivots count from 1, and LAPACK does not check them."""
    has_pivots = any("pivots" in argument.name.lower() for argument in op._schema.arguments)
    return _FILLS[1:] if has_pivots or op.namespace == _BY_VALUE else _FILLS


def _empty(layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """Tensors with these layouts, which share storages as they say."""
    memories: dict[int, torch.Tensor] = {}
    for layout in layouts:
        nbytes = max(each.end_bytes for each in layouts if each.storage == layout.storage)
        if layout.storage not in memories:
            memories[layout.storage] = torch.zeros(nbytes, dtype=torch.uint8, device=layout.device)
    return [
        _flagged(
            _on_storage(memories[layout.storage].untyped_storage(), layout, layout.offset_bytes),
            layout,
        )
        for layout in layouts
    ]


def _made(layouts: Sequence[Layout], fill: _Fill) -> list[torch.Tensor]:
    """Real tensors with these layouts and values."""
    tensors = _empty(layouts)
    for tensor, layout in zip(tensors, layouts, strict=True):
        if fill is _zeros:
            break  # they are
        if all(step or n <= 1 for n, step in zip(layout.shape, layout.stride, strict=True)):
            fill(tensor)
        elif layout.end_bytes > layout.offset_bytes:  # expanded: write its memory
            n = (layout.end_bytes - layout.offset_bytes) // layout.dtype.itemsize
            fill(tensor.as_strided((n,), (1,)))
    return tensors


@contextmanager
def _generators_kept(args: tuple[Any, ...] = (), kwargs: Any = None) -> Iterator[None]:
    """Leave torch's default generators, and those among the arguments, unchanged.

    A capture records calls of `torch.get_rng_state`; these are calls of the generators' own.
    """
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators.extend(torch.cuda.default_generators)
    given = (*args, *(kwargs or {}).values())
    generators.extend(arg for arg in given if isinstance(arg, torch.Generator))
    with disable_current_modes():
        states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        with disable_current_modes():
            for generator, state in states:
                generator.set_state(state)


@contextmanager
def _for_real() -> Iterator[None]:
    """Run kernels as a captured step does, below autograd, and leave all generators unchanged."""
    with ExitStack() as stack:
        stack.enter_context(disable_current_modes())
        stack.enter_context(_generators_kept())
        stack.enter_context(DisableTorchFunction())
        stack.enter_context(AutoDispatchBelowAutograd())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _plain_key(leaf: Any) -> Hashable:
    """A plain argument with its type: 1, 1.0 and True are equal, but not to kernels."""
    if isinstance(leaf, torch.Generator):
        return torch.Generator, str(leaf.device)
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), repr(leaf)
    return type(leaf), leaf


def _settings() -> Hashable:
    """Settings by which kernels are chosen."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )


# Smaller sizes

_Mapping = Callable[[int], int]


def _is_size(leaf: Any) -> bool:
    return type(leaf) is int and _LEAST_SHRUNK_SIZE <= leaf < 1 << 40


def _mappings(layouts: Sequence[Layout], leaves: Sequence[Any]) -> Iterator[_Mapping]:
    """Maps from sizes to smaller ones: of all sizes, of all but pictures', of the first one."""
    everything = {size for layout in layouts for size in layout.shape}
    everything.update(leaf for leaf in leaves if _is_size(leaf))
    pictures = {n for layout in layouts if len(layout.shape) > 3 for n in layout.shape[2:]}
    first = {layout.shape[0] for layout in layouts[:1] if layout.shape}
    tried: set[frozenset[int]] = set()
    for sizes in (everything, everything - pictures, first):
        chosen = frozenset(size for size in sizes if size >= _LEAST_SHRUNK_SIZE)
        if not chosen or chosen in tried:
            continue
        tried.add(chosen)
        for shift in (3, 5, 8, 12, 16, 24, 32, 48):
            mapping = _mapping(chosen, shift)
            small = [_shrunk(layout, mapping) for layout in layouts]
            # Of an expanded tensor, what a kernel makes of it takes the bytes.
            elements = sum(math.prod(layout.shape) for layout in small if layout)
            if elements <= _SHRUNK_ELEMENTS:
                break
        yield mapping


def _mapping(sizes: frozenset[int], shift: int) -> _Mapping:
    return lambda size: max(8, size >> shift) if size in sizes else size


def _shrunk(layout: Layout, mapping: _Mapping) -> Layout | None:
    """A layout of smaller sizes with strides in the same order; None if dimensions overlap."""
    shape = tuple(mapping(size) for size in layout.shape)
    stride = [0] * len(shape)
    extent = small_extent = 1
    for dim in reversed(_order(layout.stride)):
        step, size = layout.stride[dim], layout.shape[dim]
        if not step:
            continue
        if size == 1:
            stride[dim] = small_extent if step == extent else step
            continue
        if step < extent:
            return None
        gap = min(-(-step // extent), 4)
        stride[dim] = small_extent * gap
        extent, small_extent = step * size, stride[dim] * shape[dim]
    return layout._replace(shape=shape, stride=tuple(stride), offset_bytes=0)


def _order(stride: Sequence[int]) -> list[int]:
    """Dimensions from the largest stride to the smallest; of equal ones, the first comes first."""
    return sorted(range(len(stride)), key=lambda dim: -stride[dim])


def _dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, in this order of dimensions."""
    stride, extent = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = extent
        extent *= max(shape[dim], 1)
    return tuple(stride)
