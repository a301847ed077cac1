"""AOTAutograd, Inductor and Dynamo as the planner calls them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import is_symbolic
from torch.types import py_sym_types

from rekindle import torch_internals
from rekindle.torch_internals import (
    AllocateLine,
    CompileContext,
    CustomGraphPass,
    CustomPartitionerFn,
    OptimizedModule,
    TracingContext,
    aot_autograd,
    boxed_nop,
    compile_context,
    compile_fx,
    compile_fx_inner,
    compiled_autograd,
    extract_fwd_bwd_modules,
    foreach_map,
    functorch_config,
    fx_graph_cse,
    inductor_config,
    is_traceable_wrapper_subclass,
    list_mode_options,
    min_cut_rematerialization_partition,
    pytree,
    raise_getitems,
    tracing,
)

__all__ = [
    "LARGE_BYTES",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "Modules",
    "OptimizedModule",
    "adopt",
    "call_on_each",
    "compile_eagerly",
    "compile_with_inductor",
    "cut",
    "hint",
    "identity",
    "in_this_context",
    "is_backward_input",
    "is_sym",
    "is_tagged_backward",
    "is_unsupported",
    "leave_away_zeros",
    "leaves",
    "mode_options",
    "must_be_in_backward",
    "must_be_in_forward",
    "stay_in_backward",
    "stay_in_forward",
    "torch_partition",
    "wants_channels_last",
    "without_repeats",
    "write_to_memory",
]

Modules = tuple[fx.GraphModule, fx.GraphModule]
PartitionFn = Callable[..., Modules]
Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]
CompileBackward = Callable[[fx.GraphModule, Sequence[Any], Compile], Callable[[list[Any]], Any]]
LARGE_BYTES = 1 << 20  # of a tensor for which memory is worth some time
_UNKNOWN = 4096  # the size of a dimension that depends on values
_UNSUPPORTED = ("seed", "offset", "rng_state")  # parts of names of random state handed in


def compile_with_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partitioner: CustomPartitionerFn,
    last_pass: CustomGraphPass,
    backward: CompileBackward,
    options: dict[str, Any],
) -> Callable[..., Any]:
    """Have Inductor compile a graph that Dynamo captured, cut in two by a partitioner of ours.

    `last_pass` then changes both parts, unless the options have another one, and `backward` gets
    the second one, with what compiles it. Sides of matrix products are not padded, and convolutions
    that want it get their channels last. What is kept on disk is the code of each part. The whole,
    which would skip the partitioner, is not.
    """
    passes = {"post_grad_custom_post_pass": last_pass, "custom_partitioner_fn": partitioner}
    patches = {**passes, "shape_padding": False, **options}

    def compile_part(part: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        layout = {"force_layout_optimization": True} if wants_channels_last(part.graph) else {}

        def compile_now(part: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            with inductor_config.patch({**layout, **patches}), _holding_little():
                return compile_fx_inner(part, inputs, **kwargs)

        is_backward = kwargs.get("is_backward", False)
        return (backward if is_backward else _compile_at_once)(part, inputs, compile_now)

    with functorch_config.patch(enable_autograd_cache=False):
        found: Any = compile_fx.compile_fx(module, inputs, compile_part, patches)
    assert callable(found)
    return found  # type: ignore[no-any-return]


def compile_eagerly(
    module: fx.GraphModule, inputs: Sequence[Any], partition: PartitionFn, backward: CompileBackward
) -> Callable[..., Any]:
    """Cut a graph that Dynamo captured in two, and run both as they are, operator by operator."""

    with functorch_config.patch(enable_autograd_cache=False):
        compiler = aot_autograd(
            fw_compiler=boxed_nop,
            bw_compiler=lambda part, inputs: backward(part, inputs, _as_it_is),
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )
        found: Callable[..., Any] = compiler(module, inputs)
    return found


@contextmanager
def _holding_little() -> Iterator[None]:
    """Have Inductor give large buffers back at once.

    It holds a buffer from its last use on for the next one of its size, if that does not raise the
    peak by its own estimate, which is too high for some graphs.
    """
    decide = AllocateLine.should_reuse_buffer

    def reuses(line: Any, freed: Any, size: int) -> bool:
        is_next = freed.scheduler_node_index + 1 == line.scheduler_node_index
        return (size < LARGE_BYTES or is_next) and decide(line, freed, size)

    AllocateLine.should_reuse_buffer = reuses  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        AllocateLine.should_reuse_buffer = decide  # type: ignore[method-assign]


def _as_it_is(part: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return boxed_nop(part, list(inputs))


def _compile_at_once(part: fx.GraphModule, inputs: Sequence[Any], compile: Compile) -> Any:
    return compile(part, inputs)


def in_this_context(compile: Compile) -> Compile:
    """What compiles as if it were called now, whenever it is."""
    ours, ours_to_compile = TracingContext.try_get(), CompileContext.try_get()

    def compile_in_context(part: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        is_there = TracingContext.try_get() is ours
        with nullcontext() if is_there else tracing(ours), compile_context(ours_to_compile):
            return compile(part, inputs)

    return compile_in_context


def leave_away_zeros(outputs: Any) -> None:
    """Have a compiled backward pass get None for gradients that are not given, and no zeros."""
    tensors = [each for each in leaves(outputs) if isinstance(each, torch.Tensor)]
    is_plain = not any(map(is_traceable_wrapper_subclass, tensors))
    if is_plain and not compiled_autograd.compiled_autograd_enabled:
        for made_by in {each.grad_fn for each in tensors}:
            if type(made_by).__name__ == "CompiledFunctionBackward":
                made_by.set_materialize_grads(False)  # type: ignore[union-attr]


def wants_channels_last(graph: fx.Graph) -> bool:
    """Whether all convolutions of a graph are such that libraries turn their tensors anyway.

    On a GPU, in half precision, that is so, and what they turn takes memory of its own. Inductor
    leaves convolutions alone where all have few channels.
    """
    target = torch.ops.aten.convolution.default
    calls = graph.find_nodes(op="call_function", target=target)
    return bool(calls) and all(
        isinstance(val := call.args[0].meta.get("val"), torch.Tensor)
        and (val.device.type, val.dtype.itemsize, val.dim()) == ("cuda", 2, 4)
        and call.args[8] == 1  # groups
        for call in calls
        if isinstance(call.args[0], fx.Node)
    )


def call_on_each(graph: fx.Graph, function: fx.Graph, tensors: Sequence[fx.Node]) -> fx.Node:
    """A call of a function that does the same to each of some tensors, in one kernel."""
    owner = graph.owning_module
    assert owner is not None
    name = next(name for i in count() if not hasattr(owner, name := f"on_each_{i}"))
    setattr(owner, name, fx.GraphModule({}, function))
    return graph.call_function(foreach_map, (graph.get_attr(name), *tensors))


def write_to_memory(node: fx.Node) -> None:
    """Have Inductor write a node's result to memory, whoever reads it."""
    node.meta["inductor_realize_to_strides"] = True


def adopt(module: OptimizedModule, other: OptimizedModule) -> None:
    """Have a compiled module run as another one of the same model would."""
    for name in ("dynamo_ctx", "_torchdynamo_orig_callable", "get_compiler_config"):
        if name in vars(other):
            setattr(module, name, vars(other)[name])
    module._initialize()


def cut(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    saved_syms: list[fx.Node],
    n_outputs: int,
) -> Modules:
    """The forward module, which also returns what is saved, and the backward module."""
    forward, backward = extract_fwd_bwd_modules(
        joint, saved, saved_sym_nodes=saved_syms, num_fwd_outputs=n_outputs
    )
    return raise_getitems(forward), raise_getitems(backward)


def torch_partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Modules:
    """The cut that plain `torch.compile` makes."""
    return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def without_repeats(joint: fx.GraphModule) -> None:
    """Drop from a joint graph what nobody reads, and what is computed twice."""
    joint.graph.eliminate_dead_code()
    joint.graph = fx_graph_cse(joint.graph)


def must_be_in_forward(node: fx.Node) -> bool:
    """Whether a node changes something and does so in the forward pass."""
    return bool(torch_internals.must_be_in_forward(node))


def must_be_in_backward(node: fx.Node) -> bool:
    """Whether a node changes something and does so in the backward pass."""
    return bool(torch_internals.must_be_in_backward(node))


def is_tagged_backward(node: fx.Node) -> bool:
    """Whether a node was recorded while gradients were computed."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def stay_in_forward(node: fx.Node) -> None:
    """Have a node in the forward module only, whatever the backward module could compute."""
    node.meta = {**node.meta, "partitioner_tag": "must_be_in_forward"}


def stay_in_backward(node: fx.Node) -> None:
    """Have a node in the backward module only."""
    node.meta = {**node.meta, "partitioner_tag": "must_be_in_backward"}


def is_backward_input(node: fx.Node) -> bool:
    """Whether a placeholder is there in the backward pass only: the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_unsupported(node: fx.Node) -> bool:
    """Whether a node hands random state or side effects around, which is left to torch's cut."""
    if node.op == "placeholder":
        val = node.meta.get("val")
        odd = val is not None and not isinstance(val, (torch.Tensor, *py_sym_types, int, float))
        return odd or any(part in str(node.target) for part in _UNSUPPORTED)
    return "with_effects" in str(node.target) or "run_and_save_rng" in str(node.target)


def is_sym(node: fx.Node) -> bool:
    """Whether a node is a number, a size for one, and not a tensor."""
    return isinstance(node.meta.get("val"), py_sym_types)


def hint(size: Any) -> int:
    """A size as a number: that of the batch at hand where the graph holds for many sizes."""
    if not is_symbolic(size):
        return int(size)
    found = size.node.hint
    return _UNKNOWN if found is None else int(found)


def identity(module: fx.GraphModule) -> tuple[object, ...]:
    """What tells a graph that Dynamo captured from others, and is the same if it is captured anew.

    That is the frame it belongs to, and the names of what it reads: DDP cuts a frame's graph up.
    """
    compile_id = CompileContext.current_compile_id()
    names = (node.name for node in module.graph.find_nodes(op="placeholder"))
    tensors = sorted(name for name in names if not re.fullmatch(r"s\d+", name))
    return (getattr(compile_id, "frame_id", None), *tensors)


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's options for a mode of `torch.compile`."""
    return dict(list_mode_options(mode)) if mode else {}


def leaves(tree: Any) -> list[Any]:
    """What is in a tree of arguments or results, in order."""
    return pytree.tree_leaves(tree)
