"""torch's own samples of its operators, run forward and backward while every kernel is watched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.tracing import kernel_check, operators

OPERATORS = list(op_db)
REFUSED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    kernel_check.KernelDiffers,
)


class Watch(TorchDispatchMode):
    """Compares every kernel's result with its fake result as corrected; notes what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.differing: list[str] = []
        self.refused: set[str] = set()
        self.unchecked: set[str] = set()
        self.checked: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operators.is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        tensors = list(operators.tensors((args, kwargs)))
        if not _is_dense(tensors) or operators.is_in_place(func) or operators.is_bookkeeping(func):
            return func(*args, **kwargs)
        foreseen = self._foreseen(func, args, kwargs)
        result = func(*args, **kwargs)
        if _is_dense(operators.tensors(result)) and foreseen is not None:
            self.checked.add(str(func))
            real = kernel_check.forms_of(result, tensors)
            if foreseen != real:
                self.differing.append(f"{func}: {foreseen} is {real}")
        return result

    def _foreseen(self, func: Any, args: Any, kwargs: Any) -> Any:
        with FakeTensorMode() as mode:
            given = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
            tensors = list(operators.tensors(given))
            try:
                result, is_checked = kernel_check.call(func, *given)
            except REFUSED:
                self.refused.add(str(func))
                return None
            if not is_checked:
                self.unchecked.add(str(func))
                return None
            return kernel_check.forms_of(result, tensors)


def _is_dense(tensors: Any) -> bool:
    return all(t.layout is torch.strided and not t.is_quantized for t in tensors)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with memory in the opposite order of dimensions."""
    dims = list(range(tensor.dim()))[::-1]
    return tensor.permute(dims).clone(memory_format=torch.contiguous_format).permute(dims)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, as a slice of a larger tensor."""
    if not tensor.dim():
        return tensor
    wide = torch.cat([tensor, tensor], dim=-1)
    return wide.narrow(-1, 0, tensor.shape[-1])


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    """The first row, once for each row."""
    if not tensor.dim() or not tensor.shape[0]:
        return tensor
    return tensor[:1].clone().expand(tensor.shape)


def _rotated(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with the second dimension last in memory, as for channels_last."""
    if tensor.dim() < 3:
        return tensor
    dims = [0, *range(2, tensor.dim()), 1]
    back = [0, tensor.dim() - 1, *range(1, tensor.dim() - 1)]
    return tensor.permute(dims).clone(memory_format=torch.contiguous_format).permute(back)


VARIANTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda tensor: tensor,
    "transposed": _transposed,
    "rotated": _rotated,
    "padded": _padded,
    "expanded": _expanded,
}


def variant(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Arguments with each dense tensor in another layout, as leaves of autograd."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor
        return change(tensor.detach()).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, changed, tree)


def run(op: Any, sample: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Watch:
    """Run one sample of an OpInfo, with its backward pass, and watch all kernels."""
    watch = Watch()
    values = (sample.input, sample.args, sample.kwargs)
    given, args, kwargs = variant(values, change)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with watch:
                results = op(given, *args, **kwargs)
                floats = [
                    t
                    for t in pytree.tree_leaves(results)
                    if isinstance(t, torch.Tensor) and t.requires_grad
                ]
                leaves = [t for t in operators.tensors((given, args, kwargs)) if t.requires_grad]
                if floats and leaves:
                    ones = [torch.ones_like(t) for t in floats]
                    torch.autograd.grad(floats, leaves, ones, allow_unused=True)
        except Exception:  # torch itself refuses this layout or dtype
            if watch.differing:
                raise
    return watch


def samples(op: Any, dtype: torch.dtype, most: int | None) -> Iterator[Any]:
    """Samples of an OpInfo, with gradients where there are any."""
    if dtype not in op.supported_dtypes("cpu"):
        return
    needs_grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = op.sample_inputs("cpu", dtype, requires_grad=needs_grad)
        for index, sample in enumerate(found):
            if most is not None and index >= most:
                return
            yield sample
