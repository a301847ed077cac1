"""Values that are the same in every step: integers and truth values made from constants alone.

Libraries look at such values to choose their way: transformers asks whether position numbers,
counted up with `arange`, have a gap, and masks attention accordingly. The answer is known while
capturing.
"""

from __future__ import annotations

from typing import Any

import torch

from rekindle.torch_internals import OpOverload, disable_current_modes
from rekindle.tracing import operators

_MOST_ELEMENTS = 1 << 21


class KnownValues:
    """The values of fake tensors that do not depend on data, on the CPU."""

    def __init__(self) -> None:
        self._overwritten: set[int] = set()  # addresses of storages

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A fake tensor's value, if it is known."""
        value: torch.Tensor | None = getattr(tensor, "_rekindle_value", None)
        if value is None or tensor.untyped_storage()._cdata in self._overwritten:
            return None
        return value

    def learn(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Compute an operator's value beside its fake result, if its arguments' are known."""
        written = operators.written(op, args, kwargs)
        self._overwritten.update(tensor.untyped_storage()._cdata for tensor in written)
        if (
            not isinstance(result, torch.Tensor)
            or result.is_floating_point()
            or result.is_complex()
            or result.numel() > _MOST_ELEMENTS
            or written
            or "empty" in op._schema.name
            or operators.is_random(op, args, kwargs)
            or any(self.get(tensor) is None for tensor in operators.tensors((args, kwargs)))
        ):
            return
        on_cpu = {"device": torch.device("cpu"), "pin_memory": False}
        overrides = {key: value for key, value in on_cpu.items() if key in kwargs}
        with disable_current_modes():
            value = op(
                *operators.map_tensors(args, self.get),
                **{**operators.map_tensors(kwargs, self.get), **overrides},
            )
        result._rekindle_value = value  # type: ignore[attr-defined]

    def copy(self, source: torch.Tensor, target: Any) -> None:
        """The target is the source under another name."""
        if self.get(source) is not None:
            target._rekindle_value = self.get(source)
