"""One arena for everything that a step allocates while it is captured in CUDA graphs.

The graphs' memory pool starts with a single segment of the size that the plan needs. Before each
captured call, plugs (dummy blocks) are allocated so that the only holes are those where its results
are planned to lie (docs/decisions/025, `core/memory/allocator_steering.py`).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import Phase, StepGraph
from rekindle.core.graph.schedule import Compute, Plan, schedule_of
from rekindle.core.graph.simulate import main_device
from rekindle.core.memory.allocator_steering import (
    REST_BYTES,
    Arena,
    Blocks,
    Mismatch,
    PlannedAddresses,
    Steering,
    plan_arena,
    rounded,
)
from rekindle.core.memory.layout import layout
from rekindle.engines.cudagraph.graph_parts import StepPart
from rekindle.engines.program import Functions, Program
from rekindle.passes.fx_nodes import item_path
from rekindle.torch_internals import (
    OpOverload,
    PoolHandle,
    clear_cublas_workspaces,
    end_allocate_to_pool,
    release_pool,
)
from rekindle.tracing.operators import tensors
from rekindle.units import format_bytes

log = logging.getLogger("rekindle")

_MIN_ARENA_BYTES = 10 << 20  # smaller segments do not get the requested size
# cuBLAS allocates a workspace when it is first used on a stream, and keeps it.
_MATMULS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_addmm_activation")
)


class BlockRequest(NamedTuple):
    """A large block: its lifetime in positions of the schedule, and its size."""

    start: int
    end: int
    nbytes: int
    is_steered: bool  # False in the optimizer's calls, which cannot be steered


class AllocationRequests:
    """The large blocks that the captured nodes of a step request: results, and workspaces.

    `blocks_of` has the indices of each node's blocks in `requests`. The optimizer is called after
    each node of `before_optimizer`. Without a profile, workspaces are added once measured.
    """

    def __init__(
        self,
        program: Program,
        parts: list[StepPart],
        graph: StepGraph,
        plan: Plan | None,
        profile: Profile | None,
        preallocated: AbstractSet[fx.Node] = frozenset(),
    ) -> None:
        """The results of `preallocated` nodes exist before the CUDA graph runs."""
        self.requests: list[BlockRequest] = []
        self.blocks_of: defaultdict[fx.Node, list[int]] = defaultdict(list)
        self._graph = graph
        rewritten = program.rewritten
        captured = {node for part in parts if part.is_graph for node in part.nodes} - preallocated
        optimizer_calls = captured & rewritten.optimizer_calls.keys()
        self._has_optimizer = bool(optimizer_calls)
        self.before_optimizer = {
            node
            for part in parts
            for node, following in pairwise(part.nodes)
            if following in optimizer_calls
        }
        origin = {node: place for node, place in rewritten.origin.items() if node in captured}
        if not rewritten.origin:  # a step as recorded: nodes are named as their ops
            ops = {op.name: op.index for op in graph.ops}
            origin = {node: (ops[node.name], 0) for node in captured if node.name in ops}
        node_of = {place: node for node, place in origin.items()}
        steps = [step for step in schedule_of(graph, plan) if isinstance(step, Compute)]
        self._ops = [step.op for step in steps]  # by position
        self._nodes = [node_of.get((step.op, step.copy)) for step in steps]
        self._position_of = {node: i for i, node in enumerate(self._nodes) if node is not None}
        self.has_matmuls = any(
            _operator(graph.ops[self._ops[position]].target) in _MATMULS
            for position in self._position_of.values()
        )
        self._add_results(program, parts, plan)
        self.has_workspaces = profile is not None
        if profile is not None:
            workspaces = profile.workspaces_bytes.tolist()
            for position, op in enumerate(self._ops):
                self._add(position, position, workspaces[op])

    @property
    def nodes(self) -> set[fx.Node]:
        """The captured nodes that stand for ops."""
        return set(self._position_of)

    def blocks(self, cublas_workspace_bytes: int) -> Blocks:
        """All blocks, and last cuBLAS's workspace, which is allocated first and kept throughout."""
        requests = self.requests[:]
        if cublas_workspace_bytes > REST_BYTES:
            requests.append(BlockRequest(-1, len(self._ops) - 1, cublas_workspace_bytes, True))
        return Blocks(
            np.array([each.start + 1 for each in requests], dtype=np.int64),
            np.array([each.end + 1 for each in requests], dtype=np.int64),
            np.array([rounded(each.nbytes) for each in requests], dtype=np.int64),
            np.array([each.is_steered for each in requests], dtype=bool),
        )

    def add_workspaces(self, nbytes_of: Mapping[fx.Node, int]) -> None:
        """Add the workspaces that nodes were measured to need."""
        for node, nbytes in nbytes_of.items():
            position = self._position_of[node]
            self._add(position, position, nbytes)
        self.has_workspaces = True

    def _add_results(self, program: Program, parts: list[StepPart], plan: Plan | None) -> None:
        """Add the results of ops. Those handed on to later parts live as long as the graph."""
        graph, device = self._graph, main_device(self._graph)
        storage_of = {value.name: value.storage for value in graph.values}
        handed_on = self._handed_on(program, parts, storage_of)
        request_order = self._request_order(program, storage_of)
        found = layout(graph, plan, in_place=False, sharing=False)
        columns = (found.storage.tolist(), found.start.tolist(), found.end.tolist())
        lifetimes = sorted(
            zip(*columns, strict=True),
            key=lambda each: (each[1], request_order.get((self._ops[each[1]], each[0]), 0)),
        )
        for storage, start, end in lifetimes:
            if graph.storages[storage].device == device:
                last = len(self._ops) - 1 if storage in handed_on else end
                self._add(start, last, graph.storages[storage].nbytes)

    def _add(self, start: int, end: int, nbytes: int) -> None:
        """Add a block if it is large and allocated in a CUDA graph."""
        node, op = self._nodes[start], self._graph.ops[self._ops[start]]
        in_optimizer = self._has_optimizer and op.phase is Phase.OPTIMIZER
        if nbytes <= REST_BYTES or (node is None and not in_optimizer):
            return
        if node is not None:
            self.blocks_of[node].append(len(self.requests))
        self.requests.append(BlockRequest(start, end, nbytes, is_steered=node is not None))

    def _request_order(self, program: Program, storage_of: dict[str, int]) -> dict[Any, int]:
        """By op and storage: the position of the storage among the op's requests."""
        found: dict[tuple[int, int], int] = {}
        for node, position in self._position_of.items():
            call = program.rewritten.calls.get(node)
            order: list[int] = getattr(node.target, "order", [])
            for result in call.results if call else ():
                index = item_path(result)[1]
                if len(index) == 1 and index[0] in order:
                    key = self._ops[position], storage_of.get(result.name, -1)
                    found[key] = order.index(index[0])
        return found

    def _handed_on(
        self, program: Program, parts: list[StepPart], storage_of: Mapping[str, int]
    ) -> set[int]:
        """The storages that CUDA graphs hand on to later parts."""
        found: set[int] = set()
        for node in [node for part in parts if part.is_graph for node in part.leaving]:
            call, indices = program.rewritten.calls.get(node), item_path(node)[1]
            for result in call.results if call else ():
                if not indices or item_path(result)[1] in ((), indices):
                    found.add(storage_of.get(result.name, -1))
        return found


class MemoryStats(NamedTuple):
    """Statistics of an allocator; the peak is counted since the last reset."""

    allocated_bytes: int
    large_bytes: int
    peak_bytes: int


class MemoryMeter:
    """The statistics of a GPU's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stats(self) -> MemoryStats:
        """The current statistics."""
        allocated = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]
        everywhere = allocated["all"]
        return MemoryStats(
            everywhere["current"], allocated["large_pool"]["current"], everywhere["peak"]
        )

    def reset_peak(self) -> None:
        """Count the peak from now on."""
        torch.cuda.reset_peak_memory_stats(self._device)


class CudaPool(MemoryMeter):
    """The memory pool that graphs are captured in, and the allocator of plugs."""

    def __init__(self, device: torch.device) -> None:
        """The capture's device and stream must be current, here and in every later call."""
        super().__init__(device)
        self._pool = torch.cuda.MemPool()
        self._plugs: dict[int, torch.UntypedStorage] = {}
        self.id = PoolHandle(self._pool.id)

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the work of the current stream in a graph, in this pool."""
        n_users = self._pool.use_count()
        # Other threads, such as a data loader's, may use CUDA meanwhile.
        graph.capture_begin(pool=self.id, capture_error_mode="thread_local")
        try:
            yield
        finally:
            try:
                graph.capture_end()
            except RuntimeError:
                self._recover(n_users)
                raise

    def _recover(self, n_users: int) -> None:
        """Undo what a failed capture leaves behind: allocation into the pool, and uses of it.

        Otherwise its memory is never freed, and deleting another pool later aborts the process.
        """
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with suppress(RuntimeError):  # it has ended already
            end_allocate_to_pool(index, self.id)
        while self._pool.use_count() > n_users:
            release_pool(index, self.id)

    def allocate(self, nbytes: int) -> int | None:
        """The address of a new plug; None if there is no room."""
        try:  # not `torch.empty`, which fills memory under deterministic algorithms
            storage = torch.UntypedStorage(nbytes, device=self._device)
        except torch.OutOfMemoryError:
            return None
        address = storage.data_ptr()
        self._plugs[address] = storage
        return address

    def free(self, address: int) -> None:
        """Free a plug."""
        del self._plugs[address]

    def free_all(self) -> None:
        """Free all plugs."""
        self._plugs.clear()

    def reserve(self, nbytes: int) -> int:
        """Reserve one free segment of this size; returns its address."""
        with torch.cuda.use_mem_pool(self._pool, self._device):
            return torch.UntypedStorage(nbytes, device=self._device).data_ptr()

    def blocks(self) -> tuple[dict[int, int], dict[int, int]]:
        """The sizes of all large segments, and of all allocated blocks in them, by address."""
        segments: dict[int, int] = {}
        taken: dict[int, int] = {}
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for segment in torch.cuda.memory_snapshot(self.id, include_traces=False):
            if segment["segment_type"] != "large" or segment["stream"] != stream:
                continue
            if segment.get("is_expandable"):  # allocated by other rules
                continue
            segments[segment["address"]] = segment["total_size"]
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    taken[block["address"]] = block["size"]
        return segments, taken

    def cublas_workspace_bytes(self) -> int:
        """The size of the workspace that cuBLAS allocates for a stream, and keeps."""
        before = self.stats().large_bytes
        self.allocate_cublas_workspace()
        taken = self.stats().large_bytes - before
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
        return taken

    def allocate_cublas_workspace(self) -> None:
        """Have cuBLAS allocate its workspace now."""
        torch.cuda.current_blas_handle()

    def address_of(self, tensor: torch.Tensor) -> int:
        """The address of a tensor's storage; 0 if it is on another device."""
        return tensor.untyped_storage().data_ptr() if tensor.device == self._device else 0


class SteeredCapture:
    """Wraps the functions of a step's nodes so that their allocations are steered.

    `peak_bytes` is the peak of the captures without plugs, or of the step in which workspaces were
    measured. `has_arena` is False once it turns out that there is none, or that it does not help.
    """

    def __init__(self, requests: AllocationRequests, max_mismatches: int) -> None:
        self.peak_bytes = 0
        self.has_arena = True
        self.requests = requests
        self._max_mismatches = max_mismatches
        self._arena_pool_id: tuple[int, int] | None = None  # the pool with the arena
        self._planned: PlannedAddresses | None = None
        self._cublas_blocks: list[int] = []  # the index of its workspace, if it has one
        self._pool: CudaPool | None = None  # while a capture is under way
        self._steering: Steering | None = None
        self._outside_bytes = 0  # in large blocks outside of the pool
        self._storages: dict[int, StorageWeakRef] = {}
        self._n_mismatches = 0
        self._meter: MemoryMeter | None = None  # while workspaces are measured
        self._workspaces: dict[fx.Node, int] = {}

    def functions(self, inner: Functions) -> Functions:
        """The functions of nodes; `inner` has those that replace their targets already."""
        requests = self.requests
        nodes = requests.blocks_of.keys() if requests.has_workspaces else requests.nodes
        nodes |= requests.before_optimizer
        return {**inner, **{node: self._wrapped(node, inner.get(node)) for node in nodes}}

    @contextmanager
    def measuring_workspaces(self, meter: MemoryMeter | None) -> Iterator[None]:
        """Measure the workspaces of nodes in a step that is not captured, if they are unknown."""
        if meter is None or self.requests.has_workspaces or self._workspaces:
            yield
            return
        self.peak_bytes, self._meter = 0, meter
        meter.reset_peak()
        try:
            yield
            self.peak_bytes = max(self.peak_bytes, meter.stats().peak_bytes)
        except BaseException:
            self._workspaces.clear()  # incomplete
            raise
        finally:
            self._meter = None

    def prepare(self, pool: CudaPool) -> None:
        """Reserve the arena in a new pool."""
        if self._workspaces:
            self.requests.add_workspaces(self._workspaces)
            self._workspaces.clear()
        self._storages.clear()
        self._n_mismatches = 0
        self._arena_pool_id = None
        try:
            self._reserve_arena(pool)
        except torch.OutOfMemoryError:
            log.info("CUDA graphs are captured without an arena: there is no contiguous room")
        finally:
            self.has_arena = self._arena_pool_id is not None
            pool.reset_peak()

    @contextmanager
    def steering(self, pool: CudaPool) -> Iterator[None]:
        """Steer what is captured in a pool, if it is the one with the arena."""
        self.peak_bytes = 0
        if pool.id != self._arena_pool_id:
            yield
            return
        self._pool = pool
        try:
            self._resync()
            if self._make_holes(self._cublas_blocks):
                pool.allocate_cublas_workspace()
                self._update_peak()
                self._resync()  # find cuBLAS's workspace, which is no node's result
            yield
        finally:
            self._update_peak()
            self._pool = self._steering = None
            pool.free_all()
            pool.reset_peak()

    def _reserve_arena(self, pool: CudaPool) -> None:
        """Plan the arena and reserve it, if it is large enough and the pool is as expected."""
        requests = self.requests
        blocks = requests.blocks(pool.cublas_workspace_bytes() if requests.has_matmuls else 0)
        try:
            plan = plan_arena(blocks)
        except Mismatch as mismatch:
            log.info("no arena was planned: %s", mismatch)
            return
        if plan.arena_bytes < _MIN_ARENA_BYTES:
            return
        base = pool.reserve(plan.arena_bytes)
        if pool.blocks() != ({base: plan.arena_bytes}, {}):
            log.info("CUDA graphs are captured without steering: the allocator behaves differently")
            return
        self._planned = PlannedAddresses(blocks, plan.offsets, base)
        self._cublas_blocks = list(range(len(requests.requests), len(plan.offsets)))
        self._arena_pool_id = pool.id
        log.debug("an arena of %s for CUDA graphs", format_bytes(plan.arena_bytes))

    def _wrapped(self, node: fx.Node, inner: Callable[..., Any] | None) -> Callable[..., Any]:
        target: Any = node.target._op if isinstance(node.target, OpOverload) else node.target
        function = inner or target
        is_before_optimizer = node in self.requests.before_optimizer

        def steered(*args: Any, **kwargs: Any) -> Any:
            if self._meter is not None:
                return self._measure(self._meter, node, partial(function, *args, **kwargs))
            blocks = self.requests.blocks_of.get(node, [])
            if self._steering is None or not (blocks or is_before_optimizer):
                return function(*args, **kwargs)
            self._make_holes(blocks)
            result = function(*args, **kwargs)
            self._track(result)
            if is_before_optimizer:
                self._free_plugs()
            return result

        steered.__name__ = f"steered_{node.name}"
        return steered

    def _measure(self, meter: MemoryMeter, node: fx.Node, call: Callable[[], Any]) -> Any:
        """Call a node's function and measure its workspace: the peak above what stays allocated."""
        before = meter.stats()
        meter.reset_peak()
        result = call()
        after = meter.stats()
        self.peak_bytes = max(self.peak_bytes, before.peak_bytes, after.peak_bytes)
        workspace_bytes = after.peak_bytes - max(before.allocated_bytes, after.allocated_bytes)
        self._workspaces[node] = max(0, workspace_bytes)
        return result

    def _make_holes(self, blocks: list[int]) -> bool:
        """Open holes where some blocks are planned to lie; True if that succeeded."""
        self._reconcile()
        if self._steering is None or self._pool is None or not blocks:
            return False
        try:
            self._steering.arrange(blocks)
        except Mismatch as mismatch:
            self._on_mismatch(str(mismatch))
            return False
        finally:
            self._pool.reset_peak()
        return True

    def _track(self, result: Any) -> None:
        """Record the addresses of a node's results."""
        if self._steering is None or self._pool is None:
            return
        for tensor in tensors(result):
            address = self._pool.address_of(tensor)
            storage = tensor.untyped_storage()
            known = self._storages.get(address)
            is_new = known is None or known.expired()
            if storage.nbytes() > REST_BYTES and is_new and self._steering.model.has(address):
                if known is not None:
                    self._release(address)
                self._storages[address] = StorageWeakRef(storage)
                try:
                    self._steering.record_allocation(address, storage.nbytes())
                except Mismatch as mismatch:
                    self._update_peak()
                    self._on_mismatch(str(mismatch))
                    return

    def _reconcile(self) -> None:
        """Record the blocks freed since the last node, and compare the model with the allocator."""
        steering = self._steering
        if steering is None or self._pool is None:
            return
        large_bytes = self._update_peak()
        for address in [a for a, storage in self._storages.items() if storage.expired()]:
            self._release(address)
        if large_bytes != self._outside_bytes + steering.model.taken_bytes:
            self._on_mismatch("there are unknown blocks")

    def _release(self, address: int) -> None:
        del self._storages[address]
        if self._steering is not None and address in self._steering.model.taken:
            self._steering.record_free(address)

    def _free_plugs(self) -> None:
        """Free all plugs, since the optimizer's requests are unknown."""
        self._reconcile()
        if self._steering is not None and self._pool is not None:
            self._steering.open_all()
            self._pool.reset_peak()

    def _update_peak(self) -> int:
        """Update the peak before plugs change; returns the bytes in large blocks now."""
        assert self._pool is not None
        stats = self._pool.stats()
        plugged_bytes = self._steering.plugged_bytes if self._steering else 0
        self.peak_bytes = max(self.peak_bytes, stats.peak_bytes - plugged_bytes)
        return stats.large_bytes

    def _on_mismatch(self, reason: str) -> None:
        """Read the allocator's state again, or stop steering after too many mismatches."""
        self._n_mismatches += 1
        log.debug("reading the allocator's state again: %s", reason)
        self._resync()
        if self._n_mismatches > self._max_mismatches:
            log.info("allocations are no longer steered: %s", reason)
            self._steering, self.has_arena = None, False

    def _resync(self) -> None:
        """Free all plugs, and read the allocator's state."""
        assert self._pool is not None
        assert self._planned is not None
        self._pool.free_all()
        self._pool.reset_peak()
        self._steering = Steering(Arena(*self._pool.blocks()), self._pool, self._planned)
        taken_bytes = self._steering.model.taken_bytes
        self._outside_bytes = self._pool.stats().large_bytes - taken_bytes


def _operator(target: str) -> str:
    """The name of an operator without namespace and overload."""
    names = target.split(".")
    return names[1] if len(names) > 1 else target
