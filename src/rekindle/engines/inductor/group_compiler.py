"""Compiles groups of calls with Inductor: each kind of group once, however often it occurs.

All that is used of torch beyond its documented interface is imported here and in `halves`; it was
checked with torch 2.11.
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

from rekindle.engines.inductor.allocation_order import order_of_results
from rekindle.engines.inductor.decompositions import batch_statistics
from rekindle.torch_internals import (
    FakeTensorMode,
    TracingContext,
    compile_fx_inner,
    inductor_config,
    select_decomp_table,
    tracing,
)

log = logging.getLogger("rekindle")

Progress = Callable[[str], None]
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]

# Graphs are ours, and results must have the strides that the step was captured with.
_SETTINGS = {
    "triton.cudagraphs": False,
    "layout_optimization": False,
    "comprehensive_padding": False,
}
_LONGEST_NAME = 60
_WRITING = (batch_statistics, torch.ops.aten.copy_.default)


class Fused:
    """The code of one kind of group: a function of its inputs that returns a list of tensors.

    An input that it writes to may be None: it goes to memory that is thrown away.
    """

    def __init__(self, name: str, graph: fx.Graph, forms: Sequence[Form]) -> None:
        self.__name__ = name
        self.on_fakes = fx.GraphModule(torch.nn.Module(), graph)
        self._forms = forms
        self._writes = any(node.target in _WRITING for node in graph.nodes)
        self._code: Callable[..., Any] | None = None
        self.order: list[int] = []  # of results, as memory is asked for them; empty if not known

    def __call__(self, *args: torch.Tensor | None) -> Any:
        assert self._code is not None, f"{self.__name__} has not been compiled"
        given = [_fitting(arg, form) for arg, form in zip(args, self._forms, strict=True)]
        copied = [(a, b) for a, b in zip(args, given, strict=True) if a is not None and a is not b]
        found = self._code(given[:])
        for arg, copy in copied if self._writes else ():
            arg.copy_(copy)
        return found

    @property
    def is_compiled(self) -> bool:
        """Whether it can be called."""
        return self._code is not None

    def compile(self) -> None:
        """Have Inductor compile it, or find it in Inductor's cache."""
        mode = FakeTensorMode(shape_env=ShapeEnv())  # without one, nothing is kept on disk
        with torch.no_grad(), inductor_config.patch(_SETTINGS):
            with mode:
                inputs = [_empty(form) for form in self._forms]
                graph = make_fx(self.on_fakes, decomposition_table=select_decomp_table())(*inputs)
            with tracing(TracingContext(mode)):
                self._code = compile_fx_inner(graph, inputs)
        for device in {device for *_, device in self._forms if device.type == "cuda"}:
            self._try_out(device)

    def _try_out(self, device: torch.device) -> None:
        """Call it: on a GPU, kernels are tuned when they first run, which takes memory."""
        try:
            inputs = [_empty(form).zero_() for form in self._forms]
            self(*inputs)
            self.order = order_of_results(lambda: self(*inputs), device)
        except torch.OutOfMemoryError:
            log.debug("%s is tuned in the first step: there is no room now", self.__name__)


_compiled: dict[str, Fused] = {}  # in this process, by the text of the group


class Fusing:
    """All kinds of groups of a step, or of several.

    Within a process, steps share what is compiled: so they compute the same bits.
    """

    def __init__(self) -> None:
        self._known: dict[str, Fused] = {}
        self.n_calls = 0

    @property
    def functions(self) -> list[Fused]:
        """The kinds there are."""
        return list(self._known.values())

    def function(self, graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> Fused:
        """The function for a group: one that is known, or a new one, to be compiled."""
        self.n_calls += 1
        forms = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in inputs]
        key = _text(graph, forms)
        if key not in _compiled:
            digest = hashlib.sha256(key.encode()).hexdigest()[:8]
            _compiled[key] = Fused(f"{_name(graph)}_{digest}", graph, forms)
        return self._known.setdefault(key, _compiled[key])

    def compile(self, progress: Progress = lambda text: None) -> None:
        """Compile what is not compiled yet."""
        waiting = [function for function in self.functions if not function.is_compiled]
        start = time.perf_counter()
        for index, function in enumerate(waiting):
            progress(f"compiling {index + 1} of {len(waiting)}: {function.__name__}")
            function.compile()
        if waiting:
            seconds = time.perf_counter() - start
            log.info(
                "compiled %d kinds of kernels, for %d calls, in %.1f s",
                len(waiting),
                self.n_calls,
                seconds,
            )


def _empty(form: Form) -> torch.Tensor:
    shape, stride, dtype, device = form
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _fitting(tensor: torch.Tensor | None, form: Form) -> torch.Tensor:
    """A tensor in the form that code was compiled for.

    It is the tensor itself, unless an operator lays out its results in another way than torch says.
    """
    if tensor is None:
        return _empty(form)
    shape, stride, *_ = form
    if all(a == b or n == 1 for a, b, n in zip(tensor.stride(), stride, shape, strict=True)):
        return tensor
    return _empty(form).copy_(tensor)


def _text(graph: fx.Graph, forms: Sequence[Form]) -> str:
    """A graph as text, the same for all that compute the same from inputs of the same forms."""
    return "\n".join([*map(str, forms), str(graph)])


def _name(graph: fx.Graph) -> str:
    """What a group does, in a name."""
    names = [
        re.sub(r"\W", "_", getattr(node.target, "__name__", "").partition(".")[0]).strip("_")
        for node in graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]
    kinds = list(dict.fromkeys(name for name in names if name not in ("view", "expand")))
    return "fused_" + "_".join(kinds)[:_LONGEST_NAME].rstrip("_")
