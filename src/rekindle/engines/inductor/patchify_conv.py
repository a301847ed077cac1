"""A convolution whose windows tile a picture is a matrix product.

Vision transformers cut pictures of three channels into windows so. Fast kernels for convolutions
want channels in eights, and take several times as long with three; a matrix product of the windows,
copied into rows, has no such wish. Only half precision is changed: in full precision, products and
convolutions may be set to round differently.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
from torch import fx

from rekindle.engines.inductor.rewriter import Rewriting
from rekindle.tracing.tape import Call

aten = torch.ops.aten

_ALIGNED = 8  # channels


class Windows(Rewriting):
    """Convolutions of windows as matrix products, forward and backward."""

    def _is_tiling(self, call: Call) -> bool:
        """Whether a convolution reads each element of few channels once."""
        is_backward = call.node.target is aten.convolution_backward.default
        args: list[Any] = list(call.node.args[1 if is_backward else 0 :])
        picture, kernel, _, stride, padding, dilation, transposed, _, groups, *_ = args
        x, weight = self.old.metas[picture], self.old.metas[kernel]
        sides = weight.shape[2:]
        return (
            x.dtype.itemsize == 2
            and x.shape[1] % _ALIGNED > 0
            and math.prod(sides) > 1
            and groups == 1
            and not transposed
            and _for_all(stride, sides)
            and not any(padding)
            and all(each == 1 for each in dilation)
            and len(x.shape) == len(weight.shape)
            and all(size % side == 0 for size, side in zip(x.shape[2:], sides, strict=True))
        )

    def _windows_product(self, call: Call) -> None:
        """The convolution of a picture: rows of windows times a matrix."""
        picture, kernel, bias = call.node.args[:3]
        assert isinstance(picture, fx.Node)
        assert isinstance(kernel, fx.Node)
        rows = self._windows(picture, kernel, call)
        columns = self._view(aten.t.default, (self._matrix(kernel, call),), call)
        if isinstance(bias, fx.Node):
            made = self._emit(aten.addmm.default, (self.lead[bias], rows, columns), call)
        else:
            made = self._emit(aten.mm.default, (rows, columns), call)
        made.flops = call.flops
        (result,) = call.results
        number, channels, *sides = self.old.metas[result].shape
        last = self._view(aten.view.default, (*made.results, [number, *sides, channels]), call)
        order = [0, len(sides) + 1, *range(1, len(sides) + 1)]
        self.lead[result] = self._view(aten.permute.default, (last, order), call)

    def _windows_product_backward(self, call: Call) -> None:
        """The gradients of picture, kernel and bias, as far as they are wanted."""
        grad, picture, kernel = call.node.args[:3]
        assert isinstance(grad, fx.Node)
        assert isinstance(picture, fx.Node)
        assert isinstance(kernel, fx.Node)
        rows = self._rows(grad, call)
        makers = (
            lambda: self._picture_gradient(rows, picture, kernel, call),
            lambda: self._kernel_gradient(rows, picture, kernel, call),
            lambda: self._emit(aten.sum.dim_IntList, (rows, [0]), call).results[0],
        )
        for result in call.results:
            index = result.args[1]
            assert isinstance(index, int)
            self.lead[result] = makers[index]()

    def _picture_gradient(
        self, rows: fx.Node, picture: fx.Node, kernel: fx.Node, call: Call
    ) -> fx.Node:
        made = self._emit(aten.mm.default, (rows, self._matrix(kernel, call)), call)
        made.flops = call.flops // sum(_wanted(call)[:2])
        number, channels, *sizes = self.old.metas[picture].shape
        sides = self.old.metas[kernel].shape[2:]
        counts = [size // side for size, side in zip(sizes, sides, strict=True)]
        windows = (*made.results, [number, *counts, channels, *sides])
        cut = self._view(aten.view.default, windows, call)
        dims = len(sides)
        pairs = chain.from_iterable((1 + i, 2 + dims + i) for i in range(dims))
        order = [0, 1 + dims, *pairs]
        turned = self._view(aten.permute.default, (cut, order), call)
        whole = self._laid_out(turned, torch.contiguous_format, call)
        return self._view(aten.view.default, (whole, [number, channels, *sizes]), call)

    def _kernel_gradient(
        self, rows: fx.Node, picture: fx.Node, kernel: fx.Node, call: Call
    ) -> fx.Node:
        columns = self._view(aten.t.default, (rows,), call)
        windows = self._windows(picture, kernel, call)
        made = self._emit(aten.mm.default, (columns, windows), call)
        made.flops = call.flops // sum(_wanted(call)[:2])
        shape = list(self.old.metas[kernel].shape)
        return self._view(aten.view.default, (*made.results, shape), call)

    def _windows(self, picture: fx.Node, kernel: fx.Node, call: Call) -> fx.Node:
        """A matrix with a window in each row; the gradient reads the one that is there."""
        number, channels, *sizes = self.old.metas[picture].shape
        sides = self.old.metas[kernel].shape[2:]
        dims = len(sides)
        pairs = zip(sizes, sides, strict=True)
        cuts = list(chain.from_iterable((size // side, side) for size, side in pairs))
        lead = self.lead[picture]
        cut = self._view(aten.view.default, (lead, [number, channels, *cuts]), call)
        counts, within = range(2, 2 + 2 * dims, 2), range(3, 3 + 2 * dims, 2)
        turned = self._view(aten.permute.default, (cut, [0, *counts, 1, *within]), call)
        copied = self._laid_out(turned, torch.contiguous_format, call)
        shape = [number * math.prod(cuts[::2]), channels * math.prod(sides)]
        return self._view(aten.view.default, (copied, shape), call)

    def _matrix(self, kernel: fx.Node, call: Call) -> fx.Node:
        """A kernel with a row for each channel that it makes."""
        lead = self.lead[kernel]
        if not self.build.fake(lead).is_contiguous():
            lead = self._laid_out(lead, torch.contiguous_format, call)
        channels, *sides = self.old.metas[kernel].shape
        return self._view(aten.view.default, (lead, [channels, math.prod(sides)]), call)

    def _rows(self, grad: fx.Node, call: Call) -> fx.Node:
        """A gradient with a row for each window."""
        number, channels, *sides = self.old.metas[grad].shape
        order = [0, *range(2, len(sides) + 2), 1]
        last = self._view(aten.permute.default, (self.lead[grad], order), call)
        if not self.build.fake(last).is_contiguous():
            last = self._laid_out(last, torch.contiguous_format, call)
        shape = [number * math.prod(sides), channels]
        return self._view(aten.view.default, (last, shape), call)

    def _view(self, target: Any, args: tuple[Any, ...], call: Call) -> fx.Node:
        return self._once(target, args, {}, call)


def _for_all(given: Any, sides: tuple[int, ...]) -> bool:
    """Whether a convolution's numbers, one for all sides or one for each, are these."""
    return tuple(given) == sides or (len(given) == 1 and all(side == given[0] for side in sides))


def _wanted(call: Call) -> list[bool]:
    mask: Any = call.node.args[-1]
    return list(mask)
