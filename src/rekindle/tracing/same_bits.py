"""Which in-place, `out=` and foreach forms of operators compute the same bits.

A form is used only if a comparison has shown that it is bit-equal, for the operator, the dtypes and
the kinds of all its arguments. `aten.mul_.Scalar`, for one, is not `aten.mul.Scalar` in half
precision. The results are in `same_bits.json`, which `make same-bits` writes (`made_with` names the
versions of torch and the instruction sets). With another version or instruction set, a form that
the table has as equal is compared again before its first use.

The table is made on CPUs. CUDA kernels use every form that the table does not refute; other devices
use none.
"""

from __future__ import annotations

import itertools
import json
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import torch

from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "b8": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
OWN = "T"  # in a pattern: the dtype of the result
_SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "float": (0.0, -0.0, 1.0, -1.0, 0.5, 0.1, 1 / 3, 2.0, 3.0, -2.5, 1e-8, 1e8, 65504.0, 1e-40),
    "int": (0, 1, -1, 2, 3, 7, 100, 255, 1000),
    "bool": (False, True),
    "complex": (1j, 0.1 - 2j, 2.0 + 0j),
}
_EXTREMES = (float("inf"), float("-inf"), float("nan"))
_MAX_CHOICES = 18  # of values for the numbers of one pattern
_SINGLE_VALUES = tuple(range(0, 60000, 10007))  # of tensors without dimensions


class Form(NamedTuple):
    """An operator with the kinds of its arguments, and the dtype of its result.

    The pattern has a word for each argument: the dtype of a tensor (`T` for the result's, `f32()`
    for a tensor without dimensions), the type of a number, None, or a text's value.
    """

    name: str
    pattern: str
    dtype: str


Prove = Callable[[Form], bool | None]


def form_of(
    op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype
) -> Form | None:
    """The form of a call whose tensors are given by anything with `shape` and `dtype`.

    None if an argument is of a kind that no form has.
    """
    words = []
    for position, argument in enumerate(op._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        given = kwargs.get(argument.name, default)
        words.append(_word(args[position] if position < len(args) else given, dtype))
    if dtype not in NAMES or None in words:
        return None
    return Form(str(op), " ".join(map(str, words)), NAMES[dtype])


def _word(value: Any, own: torch.dtype) -> str | None:
    if value is None or isinstance(value, (bool, int, float, complex)):
        return "None" if value is None else type(value).__name__
    if isinstance(value, str):
        return repr(value)
    if not hasattr(value, "dtype") or value.dtype not in NAMES:
        return None
    name = OWN if value.dtype is own else NAMES[value.dtype]
    return name if len(value.shape) else f"{name}()"


def is_same(form: Form | None, device: torch.device, prove: Prove) -> bool:
    """True if a form is known to compute the same bits on a device.

    `prove` compares it, on the CPU; it is called where the table does not hold.
    """
    if device.type == "cuda":
        return form is None or not _TABLE.has("differs", form)
    if device.type != "cpu" or form is None or not _TABLE.has("equal", form):
        return False
    return environment() in _TABLE.made_with or _proven_here(form, prove)


@cache
def _proven_here(form: Form, prove: Prove) -> bool:
    return prove(form) is True


def environment() -> tuple[str, str]:
    """The version of torch, and the CPU's instruction set: what kernels' bits depend on."""
    release = torch.__version__.partition("+")[0]
    return release, torch.backends.cpu.get_cpu_capability()


class _Table:
    def __init__(self, data: dict[str, Any]) -> None:
        self.made_with = {tuple(each) for each in data["made_with"]}
        self._data = data

    def has(self, verdict: str, form: Form) -> bool:
        found = self._data[verdict].get(form.name, {}).get(form.pattern, "")
        return form.dtype in found.split()


_TABLE = _Table(json.loads((resources.files("rekindle.tracing") / "same_bits.json").read_text()))


def overwrites_exactly(form: Form) -> bool | None:
    """True if the in-place or `out=` variant of an operator computes the operator's bits.

    None if the operator takes no such arguments, or its result is of another dtype.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd dtypes, which nobody has asked for
        return _overwrites_exactly(form)


def _overwrites_exactly(form: Form) -> bool | None:
    op = _operator(form.name)
    variant, in_place = operators.overwriting(op), operators.in_place(op)
    n_tried = n_compared = 0
    for values, target in _samples(op, form):
        n_tried += 1
        if not n_compared and n_tried > 2 * len(values):
            return None  # which does not depend on values and layouts
        expected = _result(op, values)
        if expected is None or expected.dtype is not DTYPES[form.dtype]:
            continue
        given = [_copied(each) for each in values]
        place = given[target]
        if place.shape != expected.shape or place.stride() != expected.stride():
            continue
        args, kwargs = _as_call(op, given)
        if variant is not None:
            variant(*args, **kwargs, **{operators.last_argument(variant): place})
        elif target == 0 and in_place is not None:
            in_place(*args, **kwargs)
        else:
            continue
        if not equal_bits(place, expected):
            return False
        n_compared += 1
    return True if n_compared else None


def _as_call(op: OpOverload, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments, from the values of all arguments."""
    pairs = list(zip(op._schema.arguments, values, strict=True))
    args = [value for argument, value in pairs if not argument.kwarg_only]
    return args, {argument.name: value for argument, value in pairs if argument.kwarg_only}


def _operator(name: str) -> OpOverload:
    library, packet, overload = name.split(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, library), packet), overload)
    return found


def _result(op: OpOverload, values: list[Any]) -> torch.Tensor | None:
    """The operator's own result; None if it does not take these arguments."""
    args, kwargs = _as_call(op, values)
    try:
        result = op(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
        return None
    return result if isinstance(result, torch.Tensor) else None


def _copied(value: Any) -> Any:
    """A tensor of the same values and strides in other memory."""
    if not isinstance(value, torch.Tensor):
        return value
    bytes_ = value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype).set_(
        bytes_, value.storage_offset(), value.shape, value.stride()
    )


def equal_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if two tensors have the same bits; any two NaN are alike."""
    if found.dtype is not expected.dtype or found.shape != expected.shape:
        return False
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    bits = _SAME_SIZE_INTEGER[found.dtype.itemsize]
    is_equal = found.contiguous().view(bits) == expected.contiguous().view(bits)
    if found.is_floating_point():
        is_equal |= found.isnan().contiguous() & expected.isnan().contiguous()
    return bool(is_equal.all())


def _choices(op: OpOverload, words: list[str]) -> list[tuple[Any, ...]]:
    """Values for the numbers of a pattern; for a tensor, which of its values it starts with."""
    kinds: list[tuple[Any, ...]] = []
    for word, argument in zip(words, op._schema.arguments, strict=True):
        if word in _NUMBERS:
            extremes = _EXTREMES if word == "float" else ()
            is_count = str(argument.type) == "int"  # such as the order of a polygamma function
            kinds.append((1, 2, 0, 3) if is_count else (*_NUMBERS[word], *extremes))
        elif word.startswith("'"):
            kinds.append((word.strip("'"),))
        else:
            kinds.append(_SINGLE_VALUES if word.endswith("()") else (None,))
    every = list(itertools.product(*kinds))
    if len(every) <= _MAX_CHOICES:
        return every
    return [every[0], *random.Random(0).sample(every[1:], _MAX_CHOICES - 1)]


def _samples(op: OpOverload, form: Form) -> Iterator[tuple[list[Any], int]]:
    """Arguments of many values and layouts, and which of them is overwritten."""
    words, own = form.pattern.split(" "), DTYPES[form.dtype]
    dtypes = [_tensor_dtype(word, own) for word in words]
    targets = [i for i, word in enumerate(words) if word == OWN]
    is_single_dtype = all(word == OWN for word in words if _tensor_dtype(word, own) is not None)
    for number, choice in enumerate(_choices(op, words)):
        layouts_here = _LAYOUTS[:_N_SHORT] if number else _LAYOUTS
        if is_single_dtype and (not number or len(targets) == 1):
            layouts_here = (_WHOLE, *layouts_here)
        for layouts, target in itertools.product(layouts_here, targets):
            for keeps_zeros in (True, False):
                args: list[Any] = []
                for i, (word, dtype) in enumerate(zip(words, dtypes, strict=True)):
                    if dtype is None:
                        args.append(choice[i])
                        continue
                    values = _values(dtype, len(words) if i == target else i, keeps_zeros)
                    is_single = word.endswith("()")
                    args.append(values[choice[i]] if is_single else layouts[i != target](values))
                yield args, target
                if keeps_zeros and _result(op, args) is not None:
                    break  # of integers: they cannot be divided by zero


def _tensor_dtype(word: str, own: torch.dtype) -> torch.dtype | None:
    name = word.removesuffix("()")
    return own if name == OWN else DTYPES.get(name)


N_VALUES = 1 << 16


@cache
def _values(dtype: torch.dtype, seed: int, keeps_zeros: bool) -> torch.Tensor:
    """All values of a small dtype, or special and random ones; in another order for each seed."""
    make = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        half = torch.float32 if dtype is torch.complex64 else torch.float64
        parts = [_values(half, seed + 50 * part, keeps_zeros) for part in (1, 2)]
        return torch.complex(*parts)
    if dtype is torch.bool:
        found = torch.randint(2, (N_VALUES,), generator=make).bool()
    elif dtype.itemsize <= 2:
        bits = torch.arange(N_VALUES).to(_SAME_SIZE_INTEGER[dtype.itemsize]).view(dtype)
        found = bits[torch.randperm(N_VALUES, generator=make)] if seed else bits
    else:
        integer = _SAME_SIZE_INTEGER[dtype.itemsize]
        info = torch.iinfo(integer)
        patterns = torch.randint(info.min, info.max, (N_VALUES // 2,), generator=make)
        found = patterns.to(integer).view(dtype)
        usual = torch.randn(N_VALUES // 4, generator=make, dtype=torch.float64) * 3
        if dtype.is_floating_point:
            limits = torch.finfo(dtype)
            edge = [0.0, -0.0, 1.0, -1.0, limits.max, limits.min, limits.tiny, -limits.tiny]
            edge += [limits.smallest_normal / 8, limits.eps, 1 + limits.eps, *_EXTREMES]
        else:
            edge = [0, 1, -1, 2, 3, info.max, info.min, info.max - 1, 31, 63, 64]
        special = torch.tensor(edge, dtype=dtype)
        picks = torch.randint(len(edge), (N_VALUES // 4,), generator=make)
        found = torch.cat([special[picks], usual.to(dtype), found])
        found = found[torch.randperm(N_VALUES, generator=make)]
    if not dtype.is_floating_point and dtype.is_signed:  # dividing the least one by -1 is a trap
        found = found.clamp(min=torch.iinfo(dtype).min + 1)
    return found if keeps_zeros else torch.where(found == 0, torch.ones_like(found), found)


Layout = Callable[[torch.Tensor], torch.Tensor]


def _flat(n: int) -> Layout:
    return lambda values: values[:n].clone()


def _shaped(*shape: int) -> Layout:
    return lambda values: values[: torch.Size(shape).numel()].reshape(shape).clone()


def _transposed(*shape: int) -> Layout:
    return lambda values: _shaped(*shape)(values).t()


def _channels_last(values: torch.Tensor) -> torch.Tensor:
    return _shaped(3, 7, 5, 8)(values).contiguous(memory_format=torch.channels_last)


def _every_second(values: torch.Tensor) -> torch.Tensor:
    return _shaped(37, 82)(values)[:, ::2]


# Of the overwritten argument and of all others: whole vectors with a rest, transposed and
# broadcast tensors, single elements, memory with gaps.
_WHOLE = (_flat(N_VALUES), _flat(N_VALUES))
_N_SHORT = 3  # layouts for every choice of numbers
_LAYOUTS: tuple[tuple[Layout, Layout], ...] = (
    (_flat(2051), _flat(2051)),
    (_flat(1003), _flat(1)),
    (_transposed(41, 37), _shaped(37, 41)),
    (_transposed(41, 37), _transposed(41, 37)),
    (_shaped(37, 41), _shaped(41)),
    (_flat(1), _flat(1)),
    (_flat(7), _flat(7)),
    (_flat(67), _flat(67)),
    (_shaped(37, 41), _transposed(41, 37)),
    (_shaped(37, 41), _shaped(37, 1)),
    (_shaped(37, 41), _every_second),
    (_transposed(41, 37), _shaped(41)),
    (_transposed(41, 37), _shaped(37, 1)),
    (_channels_last, _channels_last),
    (_channels_last, _shaped(7, 1, 1)),
    (_channels_last, _shaped(3, 7, 5, 8)),
)


def tensors_of(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of many values in dense layouts, one of them without dimensions."""
    values = _values(dtype, 1, True)
    return [*(layout(values) for layout, _ in (_WHOLE, *_LAYOUTS)), values[7].clone()]
