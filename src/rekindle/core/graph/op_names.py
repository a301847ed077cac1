"""Operator names and tensor sizes."""

from __future__ import annotations

import math

from rekindle.core.graph.graph import Op, Value

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}


def op_name(op: Op) -> str:
    """An operator's name without its library and overload.

    >>> from rekindle.core.graph.graph import Phase
    >>> op_name(Op(0, "mm_3", "aten.mm.default", Phase.FORWARD, (), ()))
    'mm'
    """
    parts = op.target.split(".")
    return parts[1] if len(parts) > 1 else op.target


def nbytes_of(value: Value) -> int:
    """The bytes of a tensor's elements."""
    return math.prod(value.shape) * ITEM_BYTES.get(value.dtype, 4)
