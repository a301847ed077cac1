"""Gives calls the layouts and shapes that fast GPU kernels want.

- Convolutions get channels_last tensors. Those whose kernel tiles the image become matmuls, in half
  precision only: in single precision, the two may be set to round differently.
- Large matmuls in half precision are padded to aligned sizes, and an added bias becomes part of
  them (`addmm`).
- Attention reads queries, keys and values where a matmul has written them, without a copy.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
from torch import fx

from rekindle.engines.inductor.rewriter import RecordingBuilder, Rewriter, is_view
from rekindle.engines.strides import contiguous_stride
from rekindle.passes.fx_nodes import RESHAPES
from rekindle.passes.matmul_padding import PaddingOptions, is_large, missing
from rekindle.tracing.tape import Call

aten = torch.ops.aten

CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_MATMULS = (aten.mm.default, aten.addmm.default)

# The positions of queries, keys and values among an operator's arguments.
ATTENTION_INPUTS: dict[Any, slice] = {
    aten._scaled_dot_product_flash_attention.default: slice(0, 3),
    aten._scaled_dot_product_flash_attention_backward.default: slice(1, 4),
    aten._scaled_dot_product_cudnn_attention.default: slice(0, 3),
    aten._scaled_dot_product_cudnn_attention_backward.default: slice(1, 4),
    aten._scaled_dot_product_efficient_attention.default: slice(0, 3),
    aten._scaled_dot_product_efficient_attention_backward.default: slice(1, 4),
    aten._scaled_dot_product_flash_attention_for_cpu.default: slice(0, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: slice(1, 4),
}
_CHANNEL_MULTIPLE = 8  # what convolution kernels want of an image's channels
_ROW_MULTIPLE = 8  # elements: attention kernels want rows to start at multiples of this


class GpuLayouts:
    """Rewrites calls for a GPU, in a recording that a `Rewriter` rewrites."""

    def __init__(self, rewriter: Rewriter, padding: PaddingOptions) -> None:
        self.rewriter = rewriter
        self.padding = padding
        self.builder, self.old, self.node_map = rewriter.builder, rewriter.old, rewriter.node_map
        self.analysis = rewriter.analysis
        self.padded: dict[tuple[fx.Node, int, int], fx.Node] = {}  # by new node, rows and columns
        self.strided: set[fx.Node] = set()  # recorded nodes that attention reads uncopied

    def rewrite(self, call: Call) -> bool:
        """Rewrite a call if a GPU wants another form of it; True if so."""
        target, inputs = call.node.target, call.node.all_input_nodes
        if target in CONVOLUTIONS and _is_patchify(self.rewriter, call):
            _PatchifyConv(self.rewriter, call).rewrite()
        elif target in CONVOLUTIONS and len(self.old.metas[inputs[0]].shape) == 4:
            self._convolution(call)
        elif target in _MATMULS and self._is_misaligned(call):
            self._padded_matmul(call)
        elif target in ATTENTION_INPUTS:
            self._attention(call)
        elif target is aten.add.Tensor and self._is_bias(call):
            self._matmul_with_bias(call)
        else:
            return False
        return True

    def _convolution(self, call: Call) -> None:
        args: list[Any] = list(self.builder.arguments(call)[0])
        is_backward = call.node.target is aten.convolution_backward.default
        for index in range(3 if is_backward else 2):
            args[index] = self._channels_last(args[index], call)
        made = self.builder.emit(call.node.target, tuple(args), {}, call)
        self.builder.map_results(call, made)

    def _channels_last(self, node: fx.Node, template: Call) -> fx.Node:
        """The tensor in channels_last layout; copied only if it is not already."""
        if self.builder.fakes[node].is_contiguous(memory_format=torch.channels_last):
            return node
        return self.rewriter.copy_to_format(node, torch.channels_last, template)

    def _attention(self, call: Call) -> None:
        """Attention on uncopied queries, keys and values where their strides allow it."""
        for node in attention_inputs(call.node):
            args = uncopied_view(self.builder, self.node_map[node])
            if args is not None and not self.rewriter.is_pinned(args):
                self.node_map[node] = self.rewriter.emit_once(aten.as_strided.default, args, call)
                self.strided.add(node)
        for node in call.node.all_input_nodes:
            if node not in self.strided:
                self.rewriter.restore_layout(node, call)
        self.builder.keep(call)

    def _is_bias(self, call: Call) -> bool:
        """True if a call adds a bias to the columns of a matmul that nothing else reads."""
        node, bias = call.node.args[:2]
        if call.node.kwargs or not isinstance(node, fx.Node) or not isinstance(bias, fx.Node):
            return False
        matmul = self._matmul_behind(node)
        if matmul is None or self.rewriter.is_pinned(matmul.args):
            return False
        added, sums, columns = self.old.metas[bias], self.old.metas[node], matmul.args[1]
        assert isinstance(columns, fx.Node)
        width = self.builder.meta(columns).shape[1]
        return added.shape == sums.shape[-1:] == (width,) and added.dtype == sums.dtype

    def _matmul_behind(self, node: fx.Node) -> fx.Node | None:
        """The new matmul that a recorded node holds the result of, perhaps reshaped."""
        call = self.analysis.maker.get(node)
        while call is not None and call.node.target in RESHAPES and len(call.node.users) == 1:
            call = self.analysis.maker.get(call.node.all_input_nodes[0])
        if call is None or call.node.target is not aten.mm.default or len(call.node.users) > 1:
            return None
        new = self.node_map[call.node]
        return new if new.target is aten.mm.default else None

    def _matmul_with_bias(self, call: Call) -> None:
        node, bias = call.node.all_input_nodes
        matmul = self._matmul_behind(node)
        assert matmul is not None
        args = (self.node_map[bias], *matmul.args)
        made = self.rewriter.emit(aten.addmm.default, args, call)
        made.flops = next(each.flops for each in self.builder.tape.calls if each.node is matmul)
        shape = list(self.old.metas[call.node].shape)
        view = self.rewriter.emit(aten.view.default, (*made.results, shape), call)
        self.node_map[call.node] = view.results[0]

    def _is_misaligned(self, call: Call) -> bool:
        """True if padding would speed up a large matmul in half precision."""
        *bias, a, b = (self.old.metas[node] for node in _tensors(call))
        return (
            a.dtype.itemsize == 2
            and is_large(a.shape, b.shape, self.padding)
            and any(self._missing(call))
            and not call.node.kwargs
            and all(each.shape == b.shape[1:] for each in bias)
        )

    def _missing(self, call: Call) -> tuple[int, int, int]:
        """The padding of a matmul's rows, inner dimension and columns."""
        a, b = (self.old.metas[node] for node in _tensors(call)[-2:])
        return missing(a.shape, a.stride, b.shape, b.stride, a.dtype.itemsize)

    def _padded_matmul(self, call: Call) -> None:
        *bias, a, b = _tensors(call)
        rows, inner, columns = self._missing(call)
        pad, wide = aten.constant_pad_nd.default, [0, columns]
        args = [self.rewriter.emit_once(pad, (self.node_map[each], wide), call) for each in bias]
        args += [self._padded(a, rows, inner, call), self._padded(b, inner, columns, call)]
        (result,) = self.builder.emit(call.node.target, tuple(args), {}, call, writes=()).results
        shape = self.old.metas[a].shape[0], self.old.metas[b].shape[1]
        self.node_map[call.node] = self._unpadded(result, shape, call)

    def _unpadded(self, node: fx.Node, shape: tuple[int, int], template: Call) -> fx.Node:
        """The part of a padded matrix without its padding."""
        for dim, (size, whole) in enumerate(zip(shape, self.builder.meta(node).shape, strict=True)):
            if size != whole:
                args = (node, dim, 0, size)
                (node,) = self.rewriter.emit(aten.slice.Tensor, args, template).results
        return node

    def _padded(self, node: fx.Node, rows: int, columns: int, template: Call) -> fx.Node:
        """A matrix with rows and columns of zeros added, of which it becomes a slice itself."""
        emit_once, analysis = self.rewriter.emit_once, self.analysis
        call = analysis.maker.get(node)
        is_transposed = call is not None and call.node.target is aten.t.default
        if is_transposed and node not in self.rewriter.functionalized:
            assert call is not None
            whole = self._padded(call.node.all_input_nodes[0], columns, rows, template)
            return emit_once(aten.t.default, (whole,), template)
        new = self.node_map[node]
        if not rows and not columns:
            return new
        if (new, rows, columns) not in self.padded:
            padding = [0, columns, 0, rows]
            whole = emit_once(aten.constant_pad_nd.default, (new, padding), template)
            if self.rewriter.is_pinned([new]):
                return whole
            self.padded[new, rows, columns] = whole
            if self.old.metas[node].storage not in analysis.entered | analysis.unshareable:
                (height, width), *_ = self.builder.meta(new)
                self.node_map[node] = self._unpadded(whole, (height, width), template)
                self.padded[self.node_map[node], rows, columns] = whole
        return self.padded[new, rows, columns]


def _tensors(call: Call) -> list[fx.Node]:
    """The tensor arguments of a matmul; one may occur twice."""
    return [node for node in call.node.args if isinstance(node, fx.Node)]


def attention_inputs(node: fx.Node) -> list[fx.Node]:
    """The queries, keys and values of an attention call."""
    return [arg for arg in node.args[ATTENTION_INPUTS[node.target]] if isinstance(arg, fx.Node)]


def uncopied_view(
    builder: RecordingBuilder, node: fx.Node
) -> tuple[fx.Node, list[int], list[int], int] | None:
    """For a view of a copy: the `as_strided` arguments of the same view of the copied tensor.

    None if that is no view of a copy, or if attention kernels would not accept the strides: rows
    must be contiguous and aligned.
    """
    maker = {made: call for call in builder.tape.calls for made in call.results}
    copied = node
    while copied in maker and is_view(maker[copied], builder.tape):
        copied = maker[copied].node.all_input_nodes[0]
    if copied not in maker or maker[copied].node.target is not aten.clone.default:
        return None
    source = maker[copied].node.all_input_nodes[0]
    view, copy, original = builder.fakes[node], builder.fakes[copied], builder.fakes[source]
    if copy.stride() != contiguous_stride(tuple(copy.shape)):
        return None
    # The view's strides in terms of the copy's dimensions, and from there of the original's.
    dims = list(zip(copy.stride(), copy.shape, original.stride(), strict=True))
    start = [view.storage_offset() // step % size for step, size, _ in dims]
    last = start[:]
    stride: list[int] = []
    for size, step in zip(view.shape, view.stride(), strict=True):
        if size == 1 or step == 0:
            stride.append(0 if step == 0 else 1)
            continue
        dim = next(i for i, (low, many, _) in enumerate(dims) if low <= step < low * many)
        low, _, original_step = dims[dim]
        if step % low:
            return None
        last[dim] += (size - 1) * (step // low)
        stride.append(step // low * original_step)
    if any(index >= size for index, (_, size, _) in zip(last, dims, strict=True)):
        return None  # it crosses the end of a dimension
    steps = zip(start, dims, strict=True)
    offset = int(original.storage_offset()) + sum(index * step for index, (_, _, step) in steps)
    rows = [step for step, size in zip(stride, view.shape, strict=True) if size != 1]
    if not rows or rows[-1] != 1 or any(each % _ROW_MULTIPLE for each in (offset, *rows[:-1])):
        return None
    return source, list(view.shape), stride, offset


def _is_patchify(rewriter: Rewriter, call: Call) -> bool:
    """True if a convolution reads every element once and its channels are misaligned."""
    is_backward = call.node.target is aten.convolution_backward.default
    args: list[Any] = list(call.node.args[1 if is_backward else 0 :])
    image, weight, _, stride, padding, dilation, transposed, _, groups, *_ = args
    x, kernel = rewriter.old.metas[image], rewriter.old.metas[weight]
    kernel_size = kernel.shape[2:]
    is_tiled = tuple(stride) == kernel_size or (len(stride) == 1 and {*stride} == {*kernel_size})
    return (
        x.dtype.itemsize == 2
        and x.shape[1] % _CHANNEL_MULTIPLE > 0
        and math.prod(kernel_size) > 1
        and groups == 1
        and not transposed
        and is_tiled
        and not any(padding)
        and all(each == 1 for each in dilation)
        and len(x.shape) == len(kernel.shape)
        and all(size % length == 0 for size, length in zip(x.shape[2:], kernel_size, strict=True))
    )


class _PatchifyConv:
    """A convolution whose kernel tiles the image, as a matmul of the flattened patches."""

    def __init__(self, rewriter: Rewriter, call: Call) -> None:
        self.is_forward = call.node.target is aten.convolution.default
        tensors: Any = call.node.args[:2] if self.is_forward else call.node.args[1:3]
        image, weight = tensors
        self.rewriter, self.call, self.image, self.weight = rewriter, call, image, weight
        self.n_images, self.n_channels, *self.image_size = rewriter.old.metas[image].shape
        self.kernel_size = rewriter.old.metas[weight].shape[2:]
        pairs = zip(self.image_size, self.kernel_size, strict=True)
        self.grid = [size // length for size, length in pairs]  # patches along each dimension

    def rewrite(self) -> None:
        (self._forward if self.is_forward else self._backward)()

    def _forward(self) -> None:
        """The convolution: rows of patches times the weight's matrix, plus the bias."""
        emit, node_map, bias = self.rewriter.emit, self.rewriter.node_map, self.call.node.args[2]
        rows, columns = self._patch_rows(), self._view(aten.t.default, self._weight_matrix())
        if isinstance(bias, fx.Node):
            made = emit(aten.addmm.default, (node_map[bias], rows, columns), self.call)
        else:
            made = emit(aten.mm.default, (rows, columns), self.call)
        made.flops = self.call.flops
        (result,) = self.call.results
        n_outputs = self.rewriter.old.metas[result].shape[1]
        last = self._view(aten.view.default, *made.results, [self.n_images, *self.grid, n_outputs])
        order = [0, len(self.grid) + 1, *range(1, len(self.grid) + 1)]
        node_map[result] = self._view(aten.permute.default, last, order)

    def _backward(self) -> None:
        """The gradients of image, weight and bias that the step uses."""
        rows, emit = self._gradient_rows(), self.rewriter.emit
        gradients = (
            lambda: self._image_gradient(rows),
            lambda: self._weight_gradient(rows),
            lambda: emit(aten.sum.dim_IntList, (rows, [0]), self.call).results[0],
        )
        for result in self.call.results:
            index = result.args[1]
            assert isinstance(index, int)
            self.rewriter.node_map[result] = gradients[index]()

    def _image_gradient(self, rows: fx.Node) -> fx.Node:
        made = self._backward_matmul(rows, self._weight_matrix())
        shape = [self.n_images, *self.grid, self.n_channels, *self.kernel_size]
        patches = self._view(aten.view.default, made, shape)
        dims = len(self.grid)
        pairs = chain.from_iterable((1 + i, 2 + dims + i) for i in range(dims))
        ordered = self._view(aten.permute.default, patches, [0, 1 + dims, *pairs])
        image = self._contiguous(ordered)
        shape = [self.n_images, self.n_channels, *self.image_size]
        return self._view(aten.view.default, image, shape)

    def _weight_gradient(self, rows: fx.Node) -> fx.Node:
        columns = self._view(aten.t.default, rows)
        made = self._backward_matmul(columns, self._patch_rows())
        return self._view(aten.view.default, made, list(self.rewriter.old.metas[self.weight].shape))

    def _backward_matmul(self, a: fx.Node, b: fx.Node) -> fx.Node:
        made = self.rewriter.emit(aten.mm.default, (a, b), self.call)
        output_mask: Any = self.call.node.args[-1]
        made.flops = self.call.flops // sum(output_mask[:2])
        return made.results[0]

    def _patch_rows(self) -> fx.Node:
        """A matrix with a patch in each row, which forward and backward share."""
        cuts = list(chain.from_iterable(zip(self.grid, self.kernel_size, strict=True)))
        image, dims = self.rewriter.node_map[self.image], len(self.grid)
        shape = [self.n_images, self.n_channels, *cuts]
        patches = self._view(aten.view.default, image, shape)
        order = [0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
        copied = self._contiguous(self._view(aten.permute.default, patches, order))
        n_patches, patch_size = self.n_images * math.prod(self.grid), math.prod(self.kernel_size)
        return self._view(aten.view.default, copied, [n_patches, self.n_channels * patch_size])

    def _weight_matrix(self) -> fx.Node:
        """The weight as a matrix with a row for each output channel."""
        weight = self.rewriter.node_map[self.weight]
        if not self.rewriter.builder.fakes[weight].is_contiguous():
            weight = self._contiguous(weight)
        n_outputs, *sizes = self.rewriter.old.metas[self.weight].shape
        return self._view(aten.view.default, weight, [n_outputs, math.prod(sizes)])

    def _gradient_rows(self) -> fx.Node:
        """The output's gradient as a matrix with a row for each patch."""
        grad: Any = self.call.node.args[0]
        n_images, n_outputs, *sizes = self.rewriter.old.metas[grad].shape
        order = [0, *range(2, len(sizes) + 2), 1]
        last = self._view(aten.permute.default, self.rewriter.node_map[grad], order)
        if not self.rewriter.builder.fakes[last].is_contiguous():
            last = self._contiguous(last)
        return self._view(aten.view.default, last, [n_images * math.prod(sizes), n_outputs])

    def _contiguous(self, node: fx.Node) -> fx.Node:
        return self.rewriter.copy_to_format(node, torch.contiguous_format, self.call)

    def _view(self, target: Any, *args: Any) -> fx.Node:
        return self.rewriter.emit_once(target, args, self.call)
