"""Bytes moved: what each op reads from memory and writes to it, if every tensor moves once."""

from __future__ import annotations

import math
import re
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rekindle.core.ir import StepGraph

_BITS = re.compile(r"\d+")


def op_bytes(graph: StepGraph) -> NDArray[np.int64]:
    """For each op, the bytes of its distinct inputs and of what it makes or changes; views move 0.

    What an op changes in place counts twice, read and written. A tensor never counts for more than
    its storage, so an expanded view counts for what is really there.
    """
    sizes = [
        min(math.prod(value.shape) * itemsize(value.dtype), graph.storages[value.storage].nbytes)
        for value in graph.values
    ]
    return np.array(
        [
            0
            if op.is_view
            else sum(sizes[value] for value in set(op.inputs))
            + sum(sizes[value] for value in {*op.outputs, *op.mutates})
            for op in graph.ops
        ],
        dtype=np.int64,
    )


@cache
def itemsize(dtype: str) -> int:
    """The bytes of one element, read off the type's name.

    >>> itemsize("float32"), itemsize("bfloat16"), itemsize("float8_e4m3fn"), itemsize("bool")
    (4, 2, 1, 1)
    """
    bits = _BITS.search(dtype)
    return max(1, int(bits[0]) // 8) if bits else 1
