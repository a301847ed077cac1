"""What a recorded step takes on for a GPU: calls in the forms that its fast kernels want.

- Convolutions get their tensors with channels last, or are matrix products (`windows`).
- Large matrix products in half precision get sides that are multiples of eight, and what is added
  to their columns is part of them.
- Attention reads its tensors where a matrix product has left them (`attention`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rekindle.engines.inductor import attention_strides
from rekindle.engines.inductor.patchify_conv import Windows
from rekindle.passes.fx_nodes import RESHAPES
from rekindle.passes.matmul_padding import MATMULS, PaddingOptions, is_large, missing
from rekindle.tracing.recording import Recording
from rekindle.tracing.tape import Call

aten = torch.ops.aten

CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


class ForGpu(Windows):
    """Calls in the forms that a GPU wants."""

    padding = PaddingOptions()

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.padded: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.with_gaps: set[fx.Node] = set()  # recorded nodes that attention reads where they are
        self.replaced: set[fx.Node] = set()  # recorded nodes that were written to, and are not

    def rewrite_for_gpu(self, call: Call) -> bool:
        """Make a call in another form, if a GPU wants one; whether it does."""
        target = call.node.target
        if target in CONVOLUTIONS and self._is_tiling(call):
            if target is aten.convolution.default:
                self._windows_product(call)
            else:
                self._windows_product_backward(call)
        elif target in CONVOLUTIONS and self._has_channels(call):
            self._convolution(call)
        elif target in MATMULS and self._is_misaligned(call):
            self._product(call)
        elif target in attention_strides.ARGUMENTS:
            self._attention(call)
        elif target is aten.add.Tensor and self._is_bias(call):
            self._biased_product(call)
        else:
            return False
        return True

    def _has_channels(self, call: Call) -> bool:
        return len(self.old.metas[call.node.all_input_nodes[0]].shape) == 4

    def _convolution(self, call: Call) -> None:
        args: list[Any] = list(fx.map_arg(call.node.args, self.lead.__getitem__))
        is_backward = call.node.target is aten.convolution_backward.default
        for index in range(3 if is_backward else 2):
            args[index] = self._channels_last(args[index], call)
        made = self.build.emit(call.node.target, tuple(args), {}, call)
        self.build.follow(call, made)

    def _channels_last(self, node: fx.Node, like: Call) -> fx.Node:
        """A tensor with its channels last, as it is or as it is made so."""
        if self.build.fake(node).is_contiguous(memory_format=torch.channels_last):
            return node
        return self._laid_out(node, torch.channels_last, like)

    def _attention(self, call: Call) -> None:
        """With queries, keys and values where they were before they were copied, if they were."""
        for node in attention_strides.tensors(call.node):
            place = attention_strides.before_copy(self.build, self.lead[node])
            if place is not None and not self._is_in_place([place.tensor]):
                args = (place.tensor, list(place.shape), list(place.stride), place.offset)
                self.lead[node] = self._once(aten.as_strided.default, args, {}, call)
                self.with_gaps.add(node)
        for node in call.node.all_input_nodes:
            if node not in self.with_gaps:
                self._as_recorded(node, call)
        self.build.keep(call)

    def _is_bias(self, call: Call) -> bool:
        """Whether a call adds one number a column to a product, which nobody else reads."""
        node, bias = call.node.args[:2]
        if call.node.kwargs or not isinstance(node, fx.Node) or not isinstance(bias, fx.Node):
            return False
        product = self._product_behind(node)
        if product is None or self._is_in_place(product.args):
            return False
        added, sums, columns = self.old.metas[bias], self.old.metas[node], product.args[1]
        assert isinstance(columns, fx.Node)
        width = self.build.meta(columns).shape[1]
        return added.shape == sums.shape[-1:] == (width,) and added.dtype == sums.dtype

    def _product_behind(self, node: fx.Node) -> fx.Node | None:
        """The product that takes the place of a node, or of what it shows in another shape."""
        call = self.known.maker.get(node)
        while call is not None and call.node.target in RESHAPES and len(call.node.users) == 1:
            call = self.known.maker.get(call.node.all_input_nodes[0])
        if call is None or call.node.target is not aten.mm.default or len(call.node.users) > 1:
            return None
        lead = self.lead[call.node]
        return lead if lead.target is aten.mm.default else None

    def _biased_product(self, call: Call) -> None:
        """One call for a product and what is added to its columns."""
        node, bias = call.node.all_input_nodes
        product = self._product_behind(node)
        assert product is not None
        made = self._emit(aten.addmm.default, (self.lead[bias], *product.args), call)
        made.flops = next(each.flops for each in self.build.tape.calls if each.node is product)
        shape = list(self.old.metas[call.node].shape)
        view = self._emit(aten.view.default, (*made.results, shape), call)
        self.lead[call.node] = view.results[0]

    def _is_misaligned(self, call: Call) -> bool:
        """Whether a large product of short numbers has a side that slows it down."""
        *bias, a, b = (self.old.metas[node] for node in _tensors(call))
        return (
            a.dtype.itemsize == 2
            and is_large(a.shape, b.shape, self.padding)
            and any(self._missing(call))
            and not call.node.kwargs
            and all(each.shape == b.shape[1:] for each in bias)
        )

    def _missing(self, call: Call) -> tuple[int, int, int]:
        """How much is missing to rows, the side that is summed over, and columns of a product."""
        a, b = (self.old.metas[node] for node in _tensors(call)[-2:])
        return missing(a.shape, a.stride, b.shape, b.stride, a.dtype.itemsize)

    def _product(self, call: Call) -> None:
        """A product of tensors with zeros added to their sides; a part of it is the result."""
        *bias, a, b = _tensors(call)
        rows, inner, columns = self._missing(call)
        pad = aten.constant_pad_nd.default
        args = [self._once(pad, (self.lead[each], [0, columns]), {}, call) for each in bias]
        args += [self._padded(a, rows, inner, call), self._padded(b, inner, columns, call)]
        (result,) = self.build.emit(call.node.target, tuple(args), {}, call, writes=()).results
        shape = self.old.metas[a].shape[0], self.old.metas[b].shape[1]
        self.lead[call.node] = self._corner(result, shape, call)

    def _corner(self, node: fx.Node, shape: tuple[int, int], like: Call) -> fx.Node:
        """The part of a matrix that was there before zeros were added."""
        for dim, (side, whole) in enumerate(zip(shape, self.build.meta(node).shape, strict=True)):
            if side != whole:
                (node,) = self._emit(aten.slice.Tensor, (node, dim, 0, side), like).results
        return node

    def _padded(self, node: fx.Node, rows: int, columns: int, like: Call) -> fx.Node:
        """A matrix with rows and columns of zeros added, which others look at from then on, too."""
        call = self.known.maker.get(node)
        is_turned = call is not None and call.node.target is aten.t.default
        if is_turned and node not in self.replaced:
            assert call is not None
            (base,) = call.node.all_input_nodes
            turned = self._padded(base, columns, rows, like)
            return self._once(aten.t.default, (turned,), {}, like)
        lead = self.lead[node]
        if not rows and not columns:
            return lead
        if (lead, rows, columns) not in self.padded:
            sides = [0, columns, 0, rows]
            whole = self._once(aten.constant_pad_nd.default, (lead, sides), {}, like)
            if self._is_in_place([lead]):
                return whole
            self.padded[lead, rows, columns] = whole
            if self.old.metas[node].storage not in self.known.entered | self.known.own:
                (height, width), *_ = self.build.meta(lead)
                self.lead[node] = self._corner(whole, (height, width), like)
                self.padded[self.lead[node], rows, columns] = whole
        return self.padded[lead, rows, columns]


def _tensors(call: Call) -> list[fx.Node]:
    """A matrix product's arguments; a tensor may be there twice."""
    return [node for node in call.node.args if isinstance(node, fx.Node)]
