"""Compiles groups of calls with Inductor, each kind of group once.

Within a process, steps share compiled groups, so that they compute the same bits.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from rekindle.engines.inductor.decompositions import batch_statistics
from rekindle.torch_internals import (
    FakeTensorMode,
    TracingContext,
    compile_fx_inner,
    compile_lock,
    inductor_config,
    is_memory_history_enabled,
    memory_snapshot,
    record_memory_history,
    select_decomp_table,
    tracing,
)

log = logging.getLogger("rekindle")

Progress = Callable[[str], None]
TensorSpec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]

# CUDA graphs are captured elsewhere, and results must have the recorded strides.
_CONFIG = {"triton.cudagraphs": False, "layout_optimization": False, "comprehensive_padding": False}
_MAX_NAME_LENGTH = 60
WRITES = (batch_statistics, torch.ops.aten.copy_.default)


class CompiledGroup:
    """The compiled code of one kind of group: a function from its inputs to a list of tensors.

    An input that it only writes to may be None: the result is discarded.
    """

    def __init__(self, name: str, graph: fx.Graph, specs: Sequence[TensorSpec]) -> None:
        self.__name__ = name
        self.on_fakes = fx.GraphModule(torch.nn.Module(), graph)
        self.specs = specs
        self._writes = any(node.target in WRITES for node in graph.nodes)
        self.code: Callable[..., Any] | None = None
        self.order: list[int] = []  # of its results' allocation, if known

    def __call__(self, *args: torch.Tensor | None) -> Any:
        assert self.code is not None, f"{self.__name__} has not been compiled"
        given = [_with_spec(arg, spec) for arg, spec in zip(args, self.specs, strict=True)]
        copied = [(a, b) for a, b in zip(args, given, strict=True) if a is not None and a is not b]
        found = self.code(given[:])
        for arg, copy in copied if self._writes else ():
            arg.copy_(copy)
        return found

    def compile(self) -> None:
        """Compile the group with Inductor, or load it from Inductor's cache."""
        mode = FakeTensorMode(shape_env=ShapeEnv())  # Inductor's disk cache needs a ShapeEnv
        with compile_lock, torch.no_grad(), inductor_config.patch(_CONFIG):
            with mode:
                inputs = [empty_tensor(spec) for spec in self.specs]
                graph = make_fx(self.on_fakes, decomposition_table=select_decomp_table())(*inputs)
            with tracing(TracingContext(mode)):
                self.code = compile_fx_inner(graph, inputs)
        for device in {device for *_, device in self.specs if device.type == "cuda"}:
            self._warm_up(device)

    def _warm_up(self, device: torch.device) -> None:
        """Run it once: on a GPU, kernels are tuned in their first run, which takes memory."""
        try:
            inputs = [empty_tensor(spec).zero_() for spec in self.specs]
            self(*inputs)
            self.order = result_order(lambda: self(*inputs), device)
        except torch.OutOfMemoryError:
            log.debug("%s is tuned in the first step: out of memory now", self.__name__)


compiled_groups: dict[str, CompiledGroup] = {}  # in this process, by the group's text


class GroupCompiler:
    """The kinds of groups of one or several steps."""

    def __init__(self) -> None:
        self._groups: dict[str, CompiledGroup] = {}
        self.n_calls = 0

    @property
    def functions(self) -> list[CompiledGroup]:
        """One function for each kind of group."""
        return list(self._groups.values())

    def function(self, graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> CompiledGroup:
        """The function of a group: a known one, or a new one to be compiled."""
        self.n_calls += 1
        specs = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in inputs]
        key = "\n".join([*map(str, specs), str(graph)])  # the same for all groups of one kind
        if key not in compiled_groups:
            digest = hashlib.sha256(key.encode()).hexdigest()[:8]
            compiled_groups[key] = CompiledGroup(f"{_name(graph)}_{digest}", graph, specs)
        return self._groups.setdefault(key, compiled_groups[key])

    def compile(self, progress: Progress = lambda text: None) -> None:
        """Compile all groups that are not compiled yet."""
        waiting = [function for function in self.functions if function.code is None]
        start = time.perf_counter()
        for index, function in enumerate(waiting):
            progress(f"compiling {index + 1} of {len(waiting)}: {function.__name__}")
            function.compile()
        if waiting:
            counts = (len(waiting), self.n_calls, time.perf_counter() - start)
            log.info("compiled %d kinds of kernels, for %d calls, in %.1f s", *counts)


def empty_tensor(spec: TensorSpec) -> torch.Tensor:
    """An uninitialized tensor of this shape, strides, dtype and device."""
    shape, stride, dtype, device = spec
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _with_spec(tensor: torch.Tensor | None, spec: TensorSpec) -> torch.Tensor:
    """A tensor with the strides that code was compiled for; usually it has them already."""
    if tensor is None:
        return empty_tensor(spec)
    shape, stride, *_ = spec
    if all(a == b or n == 1 for a, b, n in zip(tensor.stride(), stride, shape, strict=True)):
        return tensor
    return empty_tensor(spec).copy_(tensor)


def _name(graph: fx.Graph) -> str:
    names = [
        re.sub(r"\W", "_", getattr(node.target, "__name__", "").partition(".")[0]).strip("_")
        for node in graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]
    kinds = list(dict.fromkeys(name for name in names if name not in ("view", "expand")))
    return "fused_" + "_".join(kinds)[:_MAX_NAME_LENGTH].rstrip("_")


def result_order(function: Callable[[], Sequence[Any]], device: torch.device) -> list[int]:
    """Call a function; returns the indices of its results in the order of their allocation."""
    if is_memory_history_enabled():  # someone else is recording
        return []
    index = torch.cuda.current_device() if device.index is None else device.index
    record_memory_history("all", context=None, clear_history=True)
    try:
        results = function()
        entries = memory_snapshot(device)["device_traces"][index]
    finally:
        record_memory_history(None)
    allocated = [entry["addr"] for entry in entries if entry["action"] == "alloc"]
    addresses = [
        each.untyped_storage().data_ptr() if isinstance(each, torch.Tensor) else None
        for each in results
    ]
    return allocation_order(allocated, addresses)


def allocation_order(allocated: Sequence[int], addresses: Sequence[int | None]) -> list[int]:
    """The indices of allocated addresses in the order of their last allocation.

    >>> allocation_order([512, 0, 1024, 512], [1024, None, 512, 7])
    [0, 2]
    """
    when = {address: time for time, address in enumerate(allocated)}
    known = [(when[a], index) for index, a in enumerate(addresses) if a in when]
    return [index for _, index in sorted(known)]
