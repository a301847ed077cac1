"""The peak memory of the code that Inductor generates for a GPU, on a machine without one.

A program of its own, since it makes torch believe in an H200. A model of the zoo is compiled under
budgets. Its joint graph is moved from the CPU to the GPU before it is planned; attention, another
operator there, is replaced by a stub. The generated code of both passes is then run on tensors
without data, whose bytes are counted. Prints one line of JSON per budget.

With `--kernels`, Triton compiles the generated kernels for that GPU.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.utils  # imported first: `pretend` patches all users of Triton
import torch.utils._triton
from torch import fx
from torch._dynamo import device_interface
from torch._dynamo.backends.debugging import boxed_nop
from torch._guards import TracingContext
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch.utils import _pytree as pytree

import rekindle
from rekindle import models
from rekindle.dynamo import aot, compile_pipeline
from rekindle.dynamo.budget_shares import entry_bytes
from rekindle.dynamo.joint_graph import JointInputs

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
H200 = SimpleNamespace(
    name="NVIDIA H200",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    gcnArchName="",
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=139 << 30,
    L2_cache_size=60 << 20,
    shared_memory_per_block_optin=232448,
)


class Nowhere:
    """Stands in for `torch.cuda.device`."""

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def pretend() -> None:
    """Make torch and Inductor generate code for a GPU that does not exist."""
    known = {
        "get_device_properties": lambda *_: H200,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: H200.name,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_bf16_supported": lambda *_, **__: True,
    }
    told = {
        **known,
        "is_available": lambda: True,
        "is_triton_capable": lambda *_: True,
        "raise_if_triton_unavailable": lambda *_: None,
        "get_compute_capability": lambda *_: 90,
    }
    interface = device_interface.CudaInterface
    for name, answer in known.items():
        setattr(torch.cuda, name, answer)
    for name, answer in told.items():
        setattr(interface, name, staticmethod(answer))
    worker = {"get_device_properties": lambda *_: H200, "current_device": lambda: 0}
    for name, answer in worker.items():
        setattr(interface.Worker, name, staticmethod(answer))
    interface.device = torch.cuda.device = Nowhere  # type: ignore[assignment, misc]
    for module in list(sys.modules.values()):
        is_torchs = module.__name__.startswith(("torch._inductor", "torch.utils._triton"))
        if is_torchs and hasattr(module, "has_triton"):
            module.has_triton = lambda *_: True  # type: ignore[attr-defined]
    torch.utils._triton.triton_hash_with_backend = lambda: "nowhere"
    torch._C._conv_determine_backend_memory_format = _layout_of  # type: ignore[assignment]
    torch._functorch.config.force_non_lazy_backward_lowering = True


def _layout_of(x: torch.Tensor, weight: torch.Tensor, _: Any) -> torch.memory_format:
    """The memory format of cuDNN's results: that of their inputs."""
    turned = [t for t in (x, weight) if t.dim() == 4 and not t.is_contiguous()]
    is_last = any(t.is_contiguous(memory_format=torch.channels_last) for t in turned)
    return torch.channels_last if is_last else torch.contiguous_format


Found = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("nowhere::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Found:
    """A stub with the signature of the CPU's fused attention."""
    raise NotImplementedError


@torch.library.custom_op("nowhere::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Gradients:
    """A stub for its gradients."""
    raise NotImplementedError


def _by_heads(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor.transpose(1, 2).contiguous()).transpose(1, 2)


@attention.register_fake
def _(q: torch.Tensor, *_: Any, **__: Any) -> Found:
    return _by_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@attention_backward.register_fake
def _(grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
    return tuple(map(_by_heads, (q, k, v)))


STAND_INS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention._opoverload,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        attention_backward._opoverload
    ),
}


def on_gpu(val: Any) -> Any:
    """A fake tensor like this one, on the GPU."""
    if not isinstance(val, torch.Tensor) or val.device.type == "cuda":
        return val
    with val.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=GPU)


def move(graph: fx.Graph) -> None:
    """Move a graph from the CPU to the GPU."""
    for node in graph.nodes:
        node.target = STAND_INS.get(node.target, node.target)
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(on_gpu, node.meta["val"])
        args, kwargs = pytree.tree_map(
            lambda arg: GPU if isinstance(arg, torch.device) else arg,
            (node.args, dict(node.kwargs)),
        )
        node.args, node.kwargs = args, kwargs


class Written(BaseException):
    """Raised once the code of a pass is generated: it is not to be run."""


class Writer:
    """Runs Inductor up to the generated code."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.strides: list[Any] = []
        self.n_outputs = 0
        GraphLowering._compile_to_module_lines = self._note  # type: ignore[assignment, method-assign]
        aot.compile_fx_inner = self._compile  # type: ignore[assignment]
        partition = compile_pipeline.partition_joint_graph

        def moved(given: JointInputs, session: rekindle.dynamo.Session) -> Any:
            move(given.module.graph)
            self.n_outputs = given.n_outputs
            return partition(given, session)

        compile_pipeline.partition_joint_graph = moved

    def _note(self, code: Any) -> Any:
        self.codes.append(code.value)
        raise Written

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        run = GraphLowering.run

        def noted(lowering: GraphLowering, *args: Any) -> Any:
            found = run(lowering, *args)
            self.strides = [_strides(out) for out in lowering.graph_outputs]
            return found

        GraphLowering.run = noted  # type: ignore[method-assign]
        try:
            compile_fx_inner(module, [on_gpu(each) for each in inputs], **kwargs)
        except Written:
            pass
        finally:
            GraphLowering.run = run  # type: ignore[method-assign]
        if kwargs.get("is_backward"):
            raise Written
        context = TracingContext.get()
        assert context.output_strides is not None
        context.output_strides.extend(self.strides)  # for the backward pass, which reads them
        return boxed_nop(module, list(inputs))


def _strides(out: Any) -> tuple[int, ...] | None:
    found = out.maybe_get_stride()
    return None if found is None else tuple(map(int, found))


class Memory:
    """Bytes allocated now, and their peak."""

    now = peak = 0


class Block:
    """An allocation, counted while anything refers to it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // 512) * 512
        Memory.now += self.nbytes
        Memory.peak = max(Memory.peak, Memory.now)

    def __del__(self) -> None:
        Memory.now -= self.nbytes


class Counted:
    """A tensor without data: `meta` has its layout, `block` its memory."""

    def __init__(self, meta: torch.Tensor, block: Block | None = None) -> None:
        self.meta = meta
        last = sum(
            (size - 1) * stride for size, stride in zip(meta.shape, meta.stride(), strict=True)
        )
        count = last + 1 if meta.numel() else 0
        self.block = block or Block(count * meta.dtype.itemsize)

    def __getitem__(self, index: Any) -> Counted:
        return Counted(self.meta[index], self.block)

    def view(self, *shape: int) -> Counted:
        """A view of the same memory."""
        return Counted(self.meta.view(*shape), self.block)

    def sum(self, dim: int) -> Counted:
        """A new tensor."""
        return Counted(self.meta.sum(dim=dim))


def strided(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


class Called:
    """An operator that generated code calls, run on meta tensors."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __getattr__(self, name: str) -> Called:
        return Called(getattr(self.op, name))

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is not None:
            return out
        args, kwargs = pytree.tree_map(
            lambda each: each.meta if isinstance(each, Counted) else each, (args, kwargs)
        )
        op = self.op if callable(self.op) else self.op.default
        found = op(*args, **kwargs)
        return pytree.tree_map(
            lambda each: Counted(each) if isinstance(each, torch.Tensor) else each, found
        )


def callable_of(code: str) -> tuple[Any, list[str], int]:
    """A pass as a function, the names of its arguments, and the number of its kernel launches."""
    start = code.index("    def call(self, args):")
    body = code[start : code.index("\nrunner = Runner", start)]
    kernels = re.findall(r"(\w+)\.run\(", body)
    dtypes = {str(d).removeprefix("torch."): d for d in vars(torch).values() if _is_dtype(d)}
    quiet = SimpleNamespace(run=lambda *_, **__: None)
    names: dict[str, Any] = dict.fromkeys(kernels, quiet) | {
        "torch": SimpleNamespace(
            **dtypes,
            ops=Called(torch.ops),
            cuda=SimpleNamespace(_DeviceGuard=Nowhere, set_device=lambda _: None),
        ),
        "aten": Called(aten),
        "extern_kernels": Called(aten),
        "assert_size_stride": lambda *_: None,
        "assert_alignment": lambda *_: None,
        "get_raw_stream": lambda _: 0,
        "empty_strided_cuda": lambda *how: Counted(strided(*how)),
        "reinterpret_tensor": lambda t, shape, stride, _=0: Counted(
            strided(shape, stride, t.meta.dtype), t.block
        ),
    }
    exec(f"class Runner:\n    partitions = []\n{body}", names)
    (line,) = re.findall(r"\n        ([\w, ]+?),? = args\n", body)
    n_calls = len(re.findall(r"extern_kernels\.\w+\(|= torch\.ops\.", body))
    return names["Runner"]().call, line.split(", "), len(kernels) + n_calls


def _is_dtype(value: object) -> bool:
    return isinstance(value, torch.dtype)


def tensors_of(code: str, names: Sequence[str]) -> list[Any]:
    """The arguments of a pass, from the benchmark code that Inductor generates with it."""
    pattern = (
        r"^    (\w+) = rand_strided\((\(.*?\)), (\(.*?\)), device='[^']*', dtype=torch\.(\w+)\)"
    )
    found = {
        name: strided(eval(shape), eval(stride), getattr(torch, dtype))
        for name, shape, stride, dtype in re.findall(pattern, code, re.M)
    }
    return [found.get(name) for name in names]


def run(codes: Sequence[str], n_outputs: int) -> dict[str, int]:
    """The peak of both passes over what was allocated before, and their kernel launches.

    The outputs of the forward pass are released before the backward pass.
    """
    (forward, names, n_forward), (backward, late_names, n_backward) = map(callable_of, codes)
    nothing = Block(0)
    Memory.now = Memory.peak = 0
    there = tensors_of(codes[0], names)
    found = forward([each if each is None else Counted(each, nothing) for each in there])
    handed = list(found[n_outputs:])
    del found  # a pass frees its arguments after their last use
    tangents = tensors_of(codes[1], late_names)[len(handed) :]
    handed += [each if each is None else Counted(each) for each in tangents]
    backward(handed)
    return {"peak_bytes": Memory.peak, "launches": n_forward + n_backward}


def compile_kernels(codes: Sequence[str]) -> int:
    """Compile all kernels of the code with Triton; returns their number."""
    triton_helpers.set_driver_to_gpu = lambda: None
    written = r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)\n'''"
    kernels = [each for code in codes for each in re.findall(written, code, re.S | re.M)]
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, text) in enumerate(kernels):
            path = Path(folder) / f"kernel{number}.py"
            path.write_text(text, encoding="utf-8")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            getattr(module, name).precompile(warm_cache_only=True)
    return len(kernels)


def without_dropout_in_attention(model: torch.nn.Module) -> None:
    """Disable dropout in attention, with which the CPU has no fused operator."""
    for module in model.modules():
        names = ("attn_dropout", "dropout") if "Attention" in type(module).__name__ else ()
        for name in names:
            if isinstance(each := getattr(module, name, None), torch.nn.Dropout):
                each.p = 0.0


def main(name: str, batch: str, *shares: str, compiles: bool) -> None:
    """Compile a model under each budget; print the forecast and the peak of the code."""
    pretend()
    writer = Writer()
    work = models.build(name, batch=int(batch), precision="bf16", device="cpu")
    without_dropout_in_attention(work.model)
    for share in shares:
        torch.compiler.reset()
        writer.codes.clear()
        options = {"force_disable_caches": True, "compile_threads": 1}
        model = rekindle.compile(
            work.model, budget=share, optimizer=work.optimizer, options=options
        )
        model.session.holds_outputs = False
        try:
            work.train_step(model, work.optimizer, work.batch)
        except Written:
            (planned,) = model.plans
        there = planned.profile.overhead_bytes + entry_bytes(planned.graph)
        row = {"share": share, "forecast_bytes": planned.plan.peak_bytes - there}
        row |= run(writer.codes, writer.n_outputs)
        if compiles:
            row["kernels"] = compile_kernels(writer.codes)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    given = [each for each in sys.argv[1:] if each != "--kernels"]
    main(*given, compiles="--kernels" in sys.argv)
