"""Facts about operators, read from their schemas and tags.

The one thing schemas do not tell is that the older batch-norm operators write to their running
statistics: `_UNDECLARED_WRITES` holds those, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from rekindle.torch_internals import DispatchKey, OpOverload, pytree

_UNDECLARED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}
_SAME_TENSOR = frozenset({"aten::detach", "aten::detach_", "aten::alias", "aten::lift_fresh"})

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
    """The tensors that this call changes.

    >>> running = torch.zeros(3)
    >>> call = (torch.ones(2, 3), None, None, running, None, True, 0.1, 1e-5)
    >>> op = torch.ops.aten.native_batch_norm.default
    >>> [tensor is running for tensor in written(op, call, {})]
    [True]
    """
    return [tensor for each in written_arguments(op, args, kwargs) for tensor in tensors(each)]


def written_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that this call changes, whatever stands for tensors in it."""
    if op._schema.name in _UNDECLARED_WRITES:  # these write in training mode only
        training = _places(op, frozenset({"training"}))
        if not all(_argument(args, kwargs, place) for place in training):
            return []
    return [_argument(args, kwargs, place) for place in _written_places(op)]


def writes_statistics(op: OpOverload) -> bool:
    """Whether this is a batch norm that writes to its running statistics without saying so."""
    return op._schema.name in _UNDECLARED_WRITES


def copy_op(op: OpOverload, device: torch.device, writes: bool) -> OpOverload | None:
    """The operator that computes a call's first result again from its other results, if any.

    On CUDA, `native_batch_norm` in training finds mean and variance and then runs this very kernel
    on them: the bits are the same, and the pass over the input that finds them is saved.
    """
    if op is torch.ops.aten.native_batch_norm.default and device.type == "cuda" and writes:
        return torch.ops.aten.batch_norm_elemt.default
    return None


def copy_arguments(args: tuple[Any, ...], results: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `copy_op`'s operator is called with, from the call's own arguments and results."""
    tensor, weight, bias, *_, eps = args
    _, mean, inverse_deviation = results
    return (tensor, weight, bias, mean, inverse_deviation, eps)


def is_random(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws from a random generator; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    switches = _places(op, frozenset({"dropout_p", "dropout", "train"}))
    values = (_argument(args, kwargs, place) for place in switches)
    return all(value is None or value for value in values)


@cache
def is_bookkeeping(op: OpOverload) -> bool:
    """Whether a call computes nothing worth recording: profiler marks and metadata queries."""
    if op.namespace in ("profiler", "prim"):
        return True
    returns_tensors = any("Tensor" in str(result.type) for result in op._schema.returns)
    return not returns_tensors and not _written_places(op) and "assert" not in op._schema.name


@cache
def is_same_tensor(op: OpOverload) -> bool:
    """Whether the result is the argument again, but for autograd: `detach` and its kin."""
    return op._schema.name in _SAME_TENSOR


@cache
def is_in_place(op: OpOverload) -> bool:
    """Whether all that the operator returns is arguments it has written to, or nothing."""
    returns = op._schema.returns
    return all(result.alias_info is not None and result.alias_info.is_write for result in returns)


@cache
def out_of_place(op: OpOverload) -> OpOverload | None:
    """The operator that does the same as an in-place one, but to a new tensor or view.

    >>> out_of_place(torch.ops.aten.unsqueeze_.default)
    <OpOverload(op='aten.unsqueeze', overload='default')>
    """
    name = op._schema.name.partition("::")[2]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return None
    types = [str(argument.type) for argument in op._schema.arguments]
    for overload in (getattr(packet, each) for each in packet.overloads()):
        if [str(argument.type) for argument in overload._schema.arguments] == types:
            return overload
    return None


@cache
def overwriting(op: OpOverload) -> OpOverload | None:
    """The operator that does the same but writes its result into a tensor it is given, `out`.

    For element-wise operators alone, whose kernels read an element before they write it, so that
    `out` may be one of the inputs. None where that variant is not a kernel of its own.

    >>> overwriting(torch.ops.aten.threshold_backward.default)
    <OpOverload(op='aten.threshold_backward', overload='grad_input')>
    >>> overwriting(torch.ops.aten.mm.default) is None
    True
    """
    if torch.Tag.pointwise not in op.tags or is_in_place(op) or len(op._schema.returns) != 1:
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = op._overloadpacket
    for other in (getattr(packet, name) for name in packet.overloads()):
        *same, out = [(a.name, str(a.type)) for a in other._schema.arguments] or [("", "")]
        writes = [a for a in other._schema.arguments if a.alias_info and a.alias_info.is_write]
        if same == wanted and len(writes) == 1 and writes[0].name == out[0]:
            has_kernel = other.has_kernel_for_dispatch_key
            keys = DispatchKey
            is_own = has_kernel(keys.CUDA) and not has_kernel(keys.CompositeExplicitAutograd)
            return other if is_own else None
    return None


def last_argument(op: OpOverload) -> str:
    """The name of an operator's last argument: where `overwriting` writes to."""
    return str(op._schema.arguments[-1].name)


@cache
def in_place(op: OpOverload) -> OpOverload | None:
    """The operator that writes an element-wise one's result over its first argument, if any.

    >>> in_place(torch.ops.aten.relu.default)
    <OpOverload(op='aten.relu_', overload='default')>
    """
    if torch.Tag.pointwise not in op.tags or is_in_place(op):
        return None
    packet = getattr(torch.ops.aten, f"{op._schema.name.partition('::')[2]}_", None)
    if packet is None or op.namespace != "aten":
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    for other in (getattr(packet, name) for name in packet.overloads()):
        if [(a.name, str(a.type)) for a in other._schema.arguments] == wanted:
            return other
    return None


@cache
def is_composite(op: OpOverload) -> bool:
    """Whether the operator is written in terms of others, which are what should be recorded.

    Some have a kernel of their own for a device as well, and that is what runs there:
    `silu_backward`.
    """
    keys = DispatchKey
    has_own = any(op.has_kernel_for_dispatch_key(key) for key in (keys.CPU, keys.CUDA))
    return op.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd) and not has_own


def flops(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of this call, two for each multiply-add; 0 for element-wise ops.

    >>> a, b = torch.ones(2, 3), torch.ones(3, 5)
    >>> flops(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    60
    """
    formula: Callable[..., int] | None = flop_registry.get(op._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a tree of arguments or results, in order."""
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same tree of operator arguments with each tensor replaced."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: map_tensors(item, function) for key, item in tree.items()}
    return tree
