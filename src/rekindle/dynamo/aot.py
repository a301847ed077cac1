"""AOTAutograd, Inductor and Dynamo, as `rekindle.compile` calls them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import is_symbolic
from torch.types import py_sym_types

from rekindle.torch_internals import (
    AllocateLine,
    CompileContext,
    CustomPartitionerFn,
    OptimizedModule,
    TracingContext,
    aot_autograd,
    boxed_nop,
    compile_context,
    compile_fx,
    compile_fx_inner,
    compile_lock,
    compiled_autograd,
    extract_fwd_bwd_modules,
    foreach_map,
    functorch_config,
    fx_graph_cse,
    inductor_config,
    is_traceable_wrapper_subclass,
    pytree,
    raise_getitems,
    tracing,
)

Modules = tuple[fx.GraphModule, fx.GraphModule]
PartitionFn = Callable[..., Modules]
Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]
CompileBackward = Callable[[fx.GraphModule, Sequence[Any], Compile], Callable[[list[Any]], Any]]
LARGE_BYTES = 1 << 20  # tensors of at least this size are worth some time to save their memory
_UNKNOWN_SIZE = 4096  # taken for a dimension that depends on data
_UNSUPPORTED_INPUTS = ("seed", "offset", "rng_state")  # in names: random state as an argument


class Partitioner(CustomPartitionerFn):
    """A partition function for Inductor, known to its disk cache by what it depends on."""

    def __init__(self, partition: PartitionFn, cache_key: str) -> None:
        self._partition, self._cache_key = partition, cache_key

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> Modules:
        """The forward and the backward module of a joint graph."""
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """The key in Inductor's disk cache."""
        return self._cache_key

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle as the key: Inductor pickles its settings to look them up on disk."""
        return str, (self._cache_key,)


def compile_with_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partitioner: Partitioner,
    post_grad_pass: Any,
    compile_backward: CompileBackward,
    options: dict[str, Any],
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured with Inductor, partitioned by `partitioner`.

    `post_grad_pass` changes both modules, unless the options name another one;
    `compile_backward` gets the backward module and Inductor's function that compiles it. Inductor
    does not pad matmuls here, and uses channels_last where all convolutions do. The code of each
    module is cached on disk; the whole is not, since that would skip the partitioner.
    """
    passes = {"post_grad_custom_post_pass": post_grad_pass, "custom_partitioner_fn": partitioner}
    patches = {**passes, "shape_padding": False, **options}

    def compile_module(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        layout = {"force_layout_optimization": True} if wants_channels_last(module.graph) else {}

        def compile_now(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            with inductor_config.patch({**layout, **patches}), freeing_large_buffers():
                return compile_fx_inner(module, inputs, **kwargs)

        if kwargs.get("is_backward", False):
            return compile_backward(module, inputs, compile_now)
        return compile_now(module, inputs)

    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(module, inputs, compile_module, patches)
    assert callable(compiled)
    return compiled  # type: ignore[no-any-return]


def compile_eagerly(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: PartitionFn,
    compile_backward: CompileBackward,
) -> Callable[..., Any]:
    """Partition a graph that Dynamo captured, and run both modules operator by operator."""

    def run_backward(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_backward(module, inputs, lambda part, given: boxed_nop(part, list(given)))

    with functorch_config.patch(enable_autograd_cache=False):
        compiler = aot_autograd(
            fw_compiler=boxed_nop,
            bw_compiler=run_backward,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )
        compiled: Callable[..., Any] = compiler(module, inputs)
    return compiled


@contextmanager
def freeing_large_buffers() -> Iterator[None]:
    """Have Inductor free large buffers after their last use.

    It keeps a dead buffer for the next one of its size if its estimate of the peak allows that; for
    some graphs the estimate is too high. Other threads that compile meanwhile wait.
    """
    with compile_lock:
        decide = AllocateLine.should_reuse_buffer

        def reuses(line: Any, freed: Any, size: int) -> bool:
            is_next = freed.scheduler_node_index + 1 == line.scheduler_node_index
            return (size < LARGE_BYTES or is_next) and decide(line, freed, size)

        AllocateLine.should_reuse_buffer = reuses  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            AllocateLine.should_reuse_buffer = decide  # type: ignore[method-assign]


def in_current_context(compile: Compile) -> Compile:
    """A function that compiles in the tracing and compile contexts of now, when called later."""
    tracing_context, compiling = TracingContext.try_get(), CompileContext.try_get()

    def compile_in_context(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        is_current = TracingContext.try_get() is tracing_context
        with nullcontext() if is_current else tracing(tracing_context), compile_context(compiling):
            return compile(module, inputs)

    return compile_in_context


def skip_zero_tangents(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Have a compiled backward pass receive None for missing tangents in place of zeros."""

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        tensors = [each for each in pytree.tree_leaves(outputs) if isinstance(each, torch.Tensor)]
        is_plain = not any(map(is_traceable_wrapper_subclass, tensors))
        if is_plain and not compiled_autograd.compiled_autograd_enabled:
            for grad_fn in {each.grad_fn for each in tensors}:
                if type(grad_fn).__name__ == "CompiledFunctionBackward":
                    grad_fn.set_materialize_grads(False)  # type: ignore[union-attr]
        return outputs

    return run


def wants_channels_last(graph: fx.Graph) -> bool:
    """True if cuDNN would convert the tensors of all convolutions to channels_last.

    It does so on a GPU in half precision, and the converted tensors take memory. Inductor leaves
    convolutions alone if all have few channels.
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


def foreach_call(graph: fx.Graph, function: fx.Graph, tensors: Sequence[fx.Node]) -> fx.Node:
    """A call that applies one function to each of some tensors, in one kernel."""
    owner = graph.owning_module
    assert owner is not None
    name = next(name for i in count() if not hasattr(owner, name := f"on_each_{i}"))
    setattr(owner, name, fx.GraphModule({}, function))
    return graph.call_function(foreach_map, (graph.get_attr(name), *tensors))


def realize(node: fx.Node) -> None:
    """Have Inductor write a node's result to memory, even if only fused kernels read it."""
    node.meta["inductor_realize_to_strides"] = True


def adopt(module: OptimizedModule, other: OptimizedModule) -> None:
    """Have a compiled module run the code of another one of the same model."""
    for name in ("dynamo_ctx", "_torchdynamo_orig_callable", "get_compiler_config"):
        if name in vars(other):
            setattr(module, name, vars(other)[name])
    module._initialize()


def extract_modules(joint: fx.GraphModule, saved: Sequence[fx.Node], n_outputs: int) -> Modules:
    """The forward module, which also returns the saved tensors and sizes, and the backward one."""
    forward, backward = extract_fwd_bwd_modules(
        joint,
        [node for node in saved if not is_sym(node)],
        saved_sym_nodes=[node for node in saved if is_sym(node)],
        num_fwd_outputs=n_outputs,
    )
    return raise_getitems(forward), raise_getitems(backward)


def eliminate_common_subexpressions(joint: fx.GraphModule) -> None:
    """Drop nodes of a joint graph that are unused or computed twice."""
    joint.graph.eliminate_dead_code()
    joint.graph = fx_graph_cse(joint.graph)


def is_tagged_backward(node: fx.Node) -> bool:
    """True if a node was traced while gradients were computed."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def pin(node: fx.Node, module: Literal["forward", "backward"]) -> None:
    """Keep a node in this module, even if the other one could compute it."""
    node.meta = {**node.meta, "partitioner_tag": f"must_be_in_{module}"}


def is_tangent(node: fx.Node) -> bool:
    """True for the gradient of an output, which only the backward pass reads."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_unsupported(node: fx.Node) -> bool:
    """True if a node passes random state or side-effect tokens as values."""
    if node.op == "placeholder":
        val = node.meta.get("val")
        odd = val is not None and not isinstance(val, (torch.Tensor, *py_sym_types, int, float))
        return odd or any(part in str(node.target) for part in _UNSUPPORTED_INPUTS)
    return "with_effects" in str(node.target) or "run_and_save_rng" in str(node.target)


def is_sym(node: fx.Node) -> bool:
    """True if a node is a symbolic number, such as a size."""
    return isinstance(node.meta.get("val"), py_sym_types)


def size_hint(size: Any) -> int:
    """A size as a number; for a symbolic one, that of the current batch."""
    if not is_symbolic(size):
        return int(size)
    hint = size.node.hint
    return _UNKNOWN_SIZE if hint is None else int(hint)


def graph_identity(module: fx.GraphModule) -> tuple[object, ...]:
    """The key of a graph that Dynamo captured; the same if it is recompiled.

    It is the graph's frame and the names of its inputs, since DDP cuts a frame's graph up.
    """
    compile_id = CompileContext.current_compile_id()
    names = (node.name for node in module.graph.find_nodes(op="placeholder"))
    tensors = sorted(name for name in names if not re.fullmatch(r"s\d+", name))
    return (getattr(compile_id, "frame_id", None), *tensors)
