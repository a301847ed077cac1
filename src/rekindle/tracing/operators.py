"""Properties of operators, from their schemas and tags."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from rekindle.torch_internals import DispatchKey, OpOverload, pytree

_UNDECLARED_WRITES = {  # the only wrong schemas
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}
_SAME_TENSOR = frozenset({"aten::detach", "aten::detach_", "aten::alias", "aten::lift_fresh"})

_INDEXING = frozenset(
    f"aten::{name}"
    for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
)

Place = tuple[int, str, Any]  # an argument's position, name and default


@cache
def _places(op: OpOverload, names: frozenset[str]) -> tuple[Place, ...]:
    return tuple(
        (position, argument.name, argument.default_value)
        for position, argument in enumerate(op._schema.arguments)
        if argument.name in names
    )


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Any:
    position, name, default = place
    return args[position] if position < len(args) else kwargs.get(name, default)


@cache
def _written_places(op: OpOverload) -> tuple[Place, ...]:
    declared = {
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    return _places(op, frozenset(declared.union(_UNDECLARED_WRITES.get(op._schema.name, ()))))


def written(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that this call writes to."""
    return [tensor for each in written_arguments(op, args, kwargs) for tensor in tensors(each)]


def written_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that this call writes to; they may be FX nodes in place of tensors."""
    if op._schema.name in _UNDECLARED_WRITES:  # these write in training mode only
        training = _places(op, frozenset({"training"}))
        if not all(_argument(args, kwargs, place) for place in training):
            return []
    return [_argument(args, kwargs, place) for place in _written_places(op)]


def writes_statistics(op: OpOverload) -> bool:
    """True for a batch norm that writes to its running statistics without declaring it."""
    return op._schema.name in _UNDECLARED_WRITES


def copy_op(op: OpOverload, device: torch.device, writes: bool) -> OpOverload | None:
    """The operator that recomputes a call's first result from its others, if any (decision 15)."""
    if op is torch.ops.aten.native_batch_norm.default and device.type == "cuda" and writes:
        return torch.ops.aten.batch_norm_elemt.default
    return None


def copy_arguments(args: tuple[Any, ...], results: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `copy_op`'s operator, from the call's arguments and results."""
    tensor, weight, bias, *_, eps = args
    _, mean, inverse_deviation = results
    return (tensor, weight, bias, mean, inverse_deviation, eps)


def is_random(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if this call draws from a random generator; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    switches = _places(op, frozenset({"dropout_p", "dropout", "train"}))
    values = (_argument(args, kwargs, place) for place in switches)
    return all(value is None or value for value in values)


@cache
def seedable(op: OpOverload) -> OpOverload | None:
    """The overload of a random operator that takes a generator, maybe itself; None without one."""

    def others(overload: OpOverload) -> list[tuple[str, str]]:
        arguments = overload._schema.arguments
        return [(each.name, str(each.type)) for each in arguments if each.name != "generator"]

    packet = op.overloadpacket
    for found in (op, *(getattr(packet, name) for name in packet.overloads())):
        if _places(found, frozenset({"generator"})) and others(found) == others(op):
            return found
    return None


def without_generator(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call without its generator; those after it are given by name."""
    ((position, _, _),) = _places(op, frozenset({"generator"}))
    names = [each.name for each in op._schema.arguments[position : len(args)]]
    named = dict(zip(names, args[position:], strict=True)) | kwargs
    return args[:position], {name: arg for name, arg in named.items() if name != "generator"}


@cache
def is_bookkeeping(op: OpOverload) -> bool:
    """True for calls that are not recorded: profiler marks and metadata queries."""
    if op.namespace in ("profiler", "prim"):
        return True
    returns_tensors = any("Tensor" in str(result.type) for result in op._schema.returns)
    return not returns_tensors and not _written_places(op) and "assert" not in op._schema.name


@cache
def is_same_tensor(op: OpOverload) -> bool:
    """True if the result is the argument, except to autograd: `detach` and similar operators."""
    return op._schema.name in _SAME_TENSOR


@cache
def is_in_place(op: OpOverload) -> bool:
    """True if the operator returns nothing but arguments that it wrote to."""
    returns = op._schema.returns
    return all(result.alias_info is not None and result.alias_info.is_write for result in returns)


def _overloads(packet: Any) -> Iterator[OpOverload]:
    return (getattr(packet, name) for name in packet.overloads())


def _arguments(op: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


@cache
def out_of_place(op: OpOverload) -> OpOverload | None:
    """The variant of an in-place operator that returns a new tensor or view."""
    name = op._schema.name.partition("::")[2]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return None
    types = [kind for _, kind in _arguments(op)]
    return next(
        (o for o in _overloads(packet) if [kind for _, kind in _arguments(o)] == types), None
    )


@cache
def overwriting(op: OpOverload) -> OpOverload | None:
    """The `out` variant of an element-wise operator.

    Its kernel reads an element before it writes it, so that `out` may be one of the inputs. None
    if the variant has no kernel of its own.
    """
    if torch.Tag.pointwise not in op.tags or is_in_place(op) or len(op._schema.returns) != 1:
        return None
    for other in _overloads(op._overloadpacket):
        *same, (last, _) = _arguments(other) or [("", "")]
        writes = [a.name for a in other._schema.arguments if a.alias_info and a.alias_info.is_write]
        if same == _arguments(op) and writes == [last]:
            has_kernel, keys = other.has_kernel_for_dispatch_key, DispatchKey
            is_own = has_kernel(keys.CUDA) and not has_kernel(keys.CompositeExplicitAutograd)
            return other if is_own else None
    return None


def last_argument(op: OpOverload) -> str:
    """The name of an operator's last argument: the `out` of an `overwriting` variant."""
    return str(op._schema.arguments[-1].name)


@cache
def in_place(op: OpOverload) -> OpOverload | None:
    """The in-place variant of an element-wise operator, if any."""
    if torch.Tag.pointwise not in op.tags or is_in_place(op):
        return None
    packet = getattr(torch.ops.aten, f"{op._schema.name.partition('::')[2]}_", None)
    if packet is None or op.namespace != "aten":
        return None
    return next((o for o in _overloads(packet) if _arguments(o) == _arguments(op)), None)


@cache
def is_composite(op: OpOverload) -> bool:
    """True if the operator is implemented by other operators, which are recorded in its place.

    False if it also has a kernel of its own for a device, as `silu_backward` does.
    """
    keys = DispatchKey
    has_own = any(op.has_kernel_for_dispatch_key(key) for key in (keys.CPU, keys.CUDA))
    return op.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd) and not has_own


def counts_elements(op: Any, dtypes: Iterable[torch.dtype]) -> bool:
    """True if a call counts elements on the device, and the host waits for the number.

    Indexing counts the elements of masks; `dtypes` are those of the indices.
    """
    if not isinstance(op, OpOverload):
        return False
    if op._schema.name in _INDEXING:
        return any(dtype in (torch.bool, torch.uint8) for dtype in dtypes)
    return torch.Tag.dynamic_output_shape in op.tags


def flops(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of this call: two per multiply-add, 0 for element-wise operators."""
    formula: Callable[..., int] | None = flop_registry.get(op._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a tree of arguments or results, in order."""
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A tree of operator arguments with each tensor replaced."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: map_tensors(item, function) for key, item in tree.items()}
    return tree
