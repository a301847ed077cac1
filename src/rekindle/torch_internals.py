"""Every private name of torch that Rekindle uses, with the reason.

All of them were checked on the versions in `CHECKED_ON`, by the whole test suite. Where a later
torch moves or changes one, this is the file to change; `tests/test_torch_internals.py` forbids
private names of torch elsewhere. Names of torch's compiler are imported on first use, since that
takes seconds.

Marks are as private as names. `dynamo/aot.py` reads `inductor_realize_to_strides` and
`partitioner_tag` in `node.meta`, the names of a joint graph's placeholders (`tangents_1`), and the
`grad_fn` of AOTAutograd's outputs (`CompiledFunctionBackward`) with its `set_materialize_grads`.
"""

# The names are for other modules, and imported after the version is checked.
# ruff: noqa: E402, F401

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.autograd import ProfilerConfig, ProfilerState, profiler

CHECKED_ON = ("2.11", "2.15")


def check_version(version: str) -> None:
    """Refuse a torch that is too old, and warn of one that was not checked."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if release < (2, 11):
        raise ImportError(f"Rekindle needs torch 2.11 or newer, and this is torch {version}.")
    if ".".join(map(str, release)) not in CHECKED_ON:
        warnings.warn(
            f"Rekindle was not checked with torch {version}, only with "
            f"{' and '.join(CHECKED_ON)}. It uses private functions of torch, which may have "
            "changed; rekindle.verify compares a step with the plain one, bit for bit.",
            stacklevel=2,
        )


check_version(torch.__version__)

# The type of operators (`torch.ops.aten.add.Tensor`), which has no public name.
from torch._ops import OpOverload

# Tensors without data, on which a step is traced, and what they raise.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

# Hooks on all optimizers: where there is one, the optimizer is called as the plain step calls it.
from torch.optim.optimizer import (
    _global_optimizer_post_hooks as global_optimizer_post_hooks,
)
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks as global_optimizer_pre_hooks,
)

# Modes and hooks that a user has switched on around a step, which change what it runs.
from torch.overrides import _get_current_function_mode_stack as function_modes

# Nested batches and arguments as flat lists; the public equivalent, `optree`, is a dependency more.
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

# Tracing sees every operator in a dispatch mode, and leaves it for real computation.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import (
    _disable_current_modes as disable_current_modes,
)
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack as dispatch_modes,
)


def default_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The functions of the innermost `saved_tensors_hooks` block, if any."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"  # warns about ops that tracing handles itself

# Grad mode as a plain call, for generated code: `torch.set_grad_enabled` is a class, and slower.
set_grad_enabled = torch._C._set_grad_enabled
# Generated code runs below autograd, and the user's optimizer with the keys of the caller.
AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
# Kernels are checked without the modes of the user's code.
DisableTorchFunction = torch._C.DisableTorchFunction
ForceDispatchKeyGuard = torch._C._ForceDispatchKeyGuard
included_dispatch_keys = torch._C._dispatch_tls_local_include_set
excluded_dispatch_keys = torch._C._dispatch_tls_local_exclude_set
# In a dispatch mode, the state outside of it: whether the user's autocast is on.
restored_tls = torch._C._RestorePythonTLSSnapshot  # type: ignore[attr-defined]
# Whether an operator has a kernel of its own for a device, or is composed of others.
DispatchKey = torch._C.DispatchKey
# What is excluded below autograd.
AUTOGRAD_KEYS = (
    DispatchKey.AutogradCPU,
    DispatchKey.AutogradCUDA,
    DispatchKey.AutogradOther,
    DispatchKey.AutogradFunctionality,
)
# The autograd node that is running, and the number that ties it to the forward op that made it.
current_autograd_node = torch._C._current_autograd_node
get_sequence_nr = torch.autograd._get_sequence_nr
# What `torch.autograd.backward` and `grad` both call: its name there, and the function.
RUN_BACKWARD = "_engine_run_backward"
engine_run_backward = torch.autograd.graph._engine_run_backward
# Tracing writes to tensors in place; autograd must not notice once the values are put back.
set_version_counter = torch._C._autograd._unsafe_set_version_counter
# The profiler's memory events, which the public `key_averages` sums up.
EventType = torch._C._profiler._EventType
# Whether a profiler runs: a second one would end it.
profiler_enabled = torch._C._autograd._profiler_enabled
# Multi-tensor kernels, which have no public form.
foreach_copy_ = torch._foreach_copy_
foreach_add_ = torch._foreach_add_


def is_profiler_enabled() -> bool:
    """True if a profiler runs, in any thread: a second one would crash."""
    return profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()


def recorded_allocations(run: Callable[[], None]) -> list[tuple[str, str, int]]:
    """The marks and the CPU allocator's events of a function, in order: kind, name, bytes.

    The kinds are "push" and "pop" of a mark or operator, and "memory_alloc". It records with the
    old profiler of torch in a thread of its own, which does not disturb one that is running.
    """
    autograd = torch.autograd
    found: list[tuple[str, str, int]] = []
    errors: list[BaseException] = []

    def record() -> None:
        try:
            none = torch._C._profiler._ExperimentalConfig()
            memory_only = (False, True, False, False, False)
            config: Any = ProfilerConfig(ProfilerState.CPU, *memory_only, none)
            autograd._enable_profiler_legacy(config)
            try:
                run()
            finally:
                events = autograd._disable_profiler_legacy()
            names: dict[int, str] = {}
            own: Any = next(each for each in events if any(e.kind() == "push" for e in each))
            for event in own:
                if event.kind() == "push":
                    names[event.handle()] = event.name()
                name = names.get(event.handle(), "") if event.kind() == "pop" else event.name()
                found.append((event.kind(), name, event.cpu_memory_usage()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=record)
    thread.start()
    interrupted: BaseException | None = None
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as error:  # the function uses the caller's tensors: it must end
            interrupted = error
    for raised in (interrupted, *errors):
        if raised is not None:
            raise raised
    return found


class _Stance(threading.local):
    """Dynamo's stance, by thread. Reading it runs no Python code, which Dynamo might compile."""

    stance: str
    skip_guard_eval_unsafe: bool
    backend: Any


@contextmanager
def compiling_nothing() -> Iterator[None]:
    """Run compiled functions as plain ones in this thread: `set_stance` does so in all threads."""
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    old = eval_frame._stance
    names = ("stance", "skip_guard_eval_unsafe", "backend")
    new = type("Stance", (_Stance,), {name: getattr(old, name) for name in names})()
    new.stance = "force_eager"
    eval_frame._stance = new
    try:
        yield
    finally:
        new.stance = old.stance
        if eval_frame._stance is new:  # else someone has set another one since
            eval_frame._stance = old


PoolHandle = torch.cuda._POOL_HANDLE  # the type of a memory pool's id

# CUDA's caching allocator. These exist in builds with CUDA only, so they are looked up when called.


def clear_cublas_workspaces() -> None:
    """Free what cuBLAS holds, so that it is not counted as the step's memory."""
    torch._C._cuda_clearCublasWorkspaces()


def end_allocate_to_pool(device: int, pool: tuple[int, int]) -> None:
    """Stop directing allocations into a memory pool after a CUDA graph capture failed."""
    torch._C._cuda_endAllocateToPool(device, pool)


def release_pool(device: int, pool: tuple[int, int]) -> None:
    """Drop one use of a memory pool after a CUDA graph capture failed."""
    torch._C._cuda_releasePool(device, pool)


def set_allocator_settings(settings: str) -> None:
    """Switch expandable segments on and off in a running process."""
    torch._C._accelerator_setAllocatorSettings(settings)


def is_memory_history_enabled() -> bool:
    """True if someone records the allocator's history."""
    return bool(torch._C._cuda_isHistoryEnabled())


def record_memory_history(enabled: Literal["state", "all"] | None, **kwargs: Any) -> None:
    """Start or stop recording the allocator's history."""
    torch.cuda.memory._record_memory_history(enabled, **kwargs)


def memory_snapshot(device: torch.device | None = None) -> dict[str, Any]:
    """The allocator's segments, settings and recorded history."""
    return dict(torch.cuda.memory._snapshot(device))


_COMPILER = {
    # Compiles a graph that Dynamo captured, and one part of it.
    "compile_fx": "torch._inductor.compile_fx:compile_fx",
    "compile_fx_inner": "torch._inductor.compile_fx:compile_fx_inner",
    # Inductor's decompositions, options, options of a mode, and the ops it adds to torch's.
    "select_decomp_table": "torch._inductor.decomposition:select_decomp_table",
    "inductor_config": "torch._inductor.config",
    "list_mode_options": "torch._inductor:list_mode_options",
    "inductor_prims": "torch._inductor.inductor_prims",
    # The documented hooks for custom partitioners and passes.
    "CustomGraphPass": "torch._inductor.custom_graph_pass:CustomGraphPass",
    "CustomPartitionerFn": "torch._inductor.custom_graph_pass:CustomPartitionerFn",
    # Decides whether a freed buffer is held for a later one; replaced while graphs are compiled.
    "AllocateLine": "torch._inductor.codegen.wrapper:AllocateLine",
    # One kernel for the same computation on many tensors.
    "foreach_map": "torch._higher_order_ops:_foreach_map",
    # AOTAutograd with a partitioner of our own, and a compiler that runs a graph as it is.
    "aot_autograd": "torch._dynamo.backends.common:aot_autograd",
    "boxed_nop": "torch._dynamo.backends.debugging:boxed_nop",
    "functorch_config": "torch._functorch.config",
    # The cut of a joint graph into forward and backward module, ours and torch's.
    "extract_fwd_bwd_modules": "torch._functorch.partitioners:_extract_fwd_bwd_modules",
    "must_be_in_forward": "torch._functorch.partitioners:_must_be_in_forward",
    "must_be_in_backward": "torch._functorch.partitioners:_must_be_in_backward",
    "min_cut_partition": "torch._functorch.partitioners:min_cut_rematerialization_partition",
    "fx_graph_cse": "torch._functorch.compile_utils:fx_graph_cse",
    "raise_getitems": "torch._functorch.compile_utils:raise_getitems",
    # Held while Dynamo traces; code that it must not trace.
    "compile_lock": "torch._dynamo.convert_frame:compile_lock",
    "skip_code": "torch._dynamo.eval_frame:skip_code",
    # What torch.compile returns, and whether compiled autograd runs.
    "OptimizedModule": "torch._dynamo.eval_frame:OptimizedModule",
    "compiled_autograd": "torch._dynamo.compiled_autograd",
    # The contexts in which Dynamo compiles, entered again when a backward pass is compiled later.
    "CompileContext": "torch._guards:CompileContext",
    "TracingContext": "torch._guards:TracingContext",
    "compile_context": "torch._guards:compile_context",
    "tracing": "torch._guards:tracing",
}


def __getattr__(name: str) -> Any:
    """Import a name of torch's compiler when it is first asked for."""
    if name not in _COMPILER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _COMPILER[name].partition(":")
    found = importlib.import_module(module)
    if attribute:
        found = getattr(found, attribute)
    globals()[name] = found
    return found
