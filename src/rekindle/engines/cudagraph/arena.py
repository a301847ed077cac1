"""One arena for all that a step makes while it is captured in CUDA graphs.

A pool of graphs keeps what the allocator has reserved for it, and the allocator has no foresight:
it may reserve half as much again as is ever in use. Here the pool starts with one segment, as large
as the plan says, and the ops are wrapped while they are captured: before each, memory is arranged
(`core.steering`) so that its results go where they were planned to lie; after it, it is noted where
they have gone. Nothing that is computed depends on that. If the allocator does not do as expected,
its state is read anew, and if that happens too often, the capture goes on without steering.

Where no profile tells what ops need beside their results, the step before the capture is watched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from rekindle.core.memory.allocator_steering import (
    REST_BYTES,
    Arena,
    Mismatch,
    PlannedAddresses,
    Steering,
    plan_arena,
)
from rekindle.engines.cudagraph.allocation_requests import AllocationRequests
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

_LEAST_BYTES = 10 << 20  # the allocator makes no smaller segment of the size it is asked for
_MOST_MISMATCHES = 100


class Counts(NamedTuple):
    """What the allocator says: bytes in use now, those in large blocks, and the most in use.

    The most is counted since a reset.
    """

    allocated_bytes: int
    large_bytes: int
    peak_bytes: int


class Memory(Protocol):
    """An allocator's counters."""

    def counts(self) -> Counts:
        """What the allocator has counted."""

    def reset_peak(self) -> None:
        """Have the allocator count the most bytes from now on."""


class Pool(Memory, Protocol):
    """The memory that graphs are captured in. As an allocator, it deals out plugs."""

    @property
    def id(self) -> tuple[int, int]:
        """Which pool it is."""

    def allocate(self, nbytes: int) -> int | None:
        """The address of a new plug; None if there is no room."""

    def free(self, address: int) -> None:
        """Let go of a plug."""

    def free_all(self) -> None:
        """Let go of all plugs."""

    def reserve(self, nbytes: int) -> int:
        """Have one free segment of so many bytes; returns its address."""

    def blocks(self) -> tuple[dict[int, int], dict[int, int]]:
        """The bytes of all large segments, and of all blocks in them that are in use."""

    def library_bytes(self) -> int:
        """What the library for matrix products takes for a stream, and keeps."""

    def take_library(self) -> None:
        """Have it take that now."""

    def address_of(self, tensor: torch.Tensor) -> int:
        """Where a tensor's storage lies; 0 if it is on another device."""


class CudaMemory:
    """The counters of a GPU's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def counts(self) -> Counts:
        allocated = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]
        everywhere = allocated["all"]
        return Counts(everywhere["current"], allocated["large_pool"]["current"], everywhere["peak"])

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class CudaPool(CudaMemory):
    """A pool on a GPU; it lives as long as this object, or a graph that was captured in it."""

    def __init__(self, device: torch.device) -> None:
        """The device and the stream of the capture must be the current ones, here and later."""
        super().__init__(device)
        self._pool = torch.cuda.MemPool()
        self._plugs: dict[int, torch.UntypedStorage] = {}
        self.id = PoolHandle(self._pool.id)

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture what is done on this stream in a graph, in this memory."""
        n_users = self._pool.use_count()
        # Other threads, a data loader's for one, may go on using CUDA meanwhile.
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
        """Let go of what torch holds on to where a capture fails: this pool, and the stream's use.

        Otherwise the memory is never given back, and pools that are deleted later on end the
        process.
        """
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with suppress(RuntimeError):  # nothing to end: it has been done
            end_allocate_to_pool(index, self.id)
        while self._pool.use_count() > n_users:
            release_pool(index, self.id)

    def allocate(self, nbytes: int) -> int | None:
        try:  # a bare storage: `torch.empty` fills it, where algorithms are to be deterministic
            storage = torch.UntypedStorage(nbytes, device=self._device)
        except torch.OutOfMemoryError:
            return None
        address = storage.data_ptr()
        self._plugs[address] = storage
        return address

    def free(self, address: int) -> None:
        del self._plugs[address]

    def free_all(self) -> None:
        self._plugs.clear()

    def reserve(self, nbytes: int) -> int:
        with torch.cuda.use_mem_pool(self._pool, self._device):
            return torch.UntypedStorage(nbytes, device=self._device).data_ptr()

    def blocks(self) -> tuple[dict[int, int], dict[int, int]]:
        segments: dict[int, int] = {}
        taken: dict[int, int] = {}
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for segment in torch.cuda.memory_snapshot(self.id, include_traces=False):
            if segment["segment_type"] != "large" or segment["stream"] != stream:
                continue
            if segment.get("is_expandable"):  # such a one has other rules
                continue
            segments[segment["address"]] = segment["total_size"]
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    taken[block["address"]] = block["size"]
        return segments, taken

    def library_bytes(self) -> int:
        before = self.counts().large_bytes
        self.take_library()
        taken = self.counts().large_bytes - before
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
        return taken

    def take_library(self) -> None:
        torch.cuda.current_blas_handle()

    def address_of(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr() if tensor.device == self._device else 0


class SteeredCapture:
    """The functions of a step's nodes, wrapped so that captures are steered.

    They call what they wrap and nothing else, unless a capture is under way in a pool that this
    has started, or a step is watched. `peak_bytes` is the most bytes that were in use in captures,
    plugs not counted, or in the step that was watched. `has_arena` is false once it has turned out
    that there is none, or that it is of no use.
    """

    def __init__(self, needs: AllocationRequests) -> None:
        self.peak_bytes = 0
        self.has_arena = True
        self._needs = needs
        self._home: tuple[int, int] | None = None  # the pool that has the arena
        self._wishes: PlannedAddresses | None = None
        self._library: list[int] = []  # its piece, if there is one
        self._pool: Pool | None = None  # while a capture is under way
        self._steering: Steering | None = None
        self._elsewhere_bytes = 0  # in large blocks outside of the pool
        self._watched: dict[int, StorageWeakRef] = {}
        self._n_mismatches = 0
        self._memory: Memory | None = None  # while a step is watched
        self._workspaces: dict[fx.Node, int] = {}

    def functions(
        self, inner: Mapping[fx.Node, Callable[..., Any]]
    ) -> dict[fx.Node, Callable[..., Any]]:
        """What to call for nodes; `inner` has what else to call in place of their targets."""
        needs = self._needs
        nodes = needs.pieces_of.keys() if needs.has_workspaces else needs.nodes
        nodes |= needs.last_before_unknown
        return {**inner, **{node: self._wrapped(node, inner.get(node)) for node in nodes}}

    @contextmanager
    def watching(self, memory: Memory | None) -> Iterator[None]:
        """Note what nodes need beside their results, in a step that is not captured.

        Nothing is watched without a memory to ask, nor where that is known already.
        """
        if memory is None or self._needs.has_workspaces or self._workspaces:
            yield
            return
        self.peak_bytes, self._memory = 0, memory
        memory.reset_peak()
        try:
            yield
            self.peak_bytes = max(self.peak_bytes, memory.counts().peak_bytes)
        except BaseException:
            self._workspaces.clear()  # not the whole step was seen
            raise
        finally:
            self._memory = None

    def start(self, pool: Pool) -> None:
        """Give a new pool its arena."""
        if self._workspaces:
            self._needs.add_workspaces(self._workspaces)
            self._workspaces.clear()
        self._watched.clear()
        self._n_mismatches = 0
        self._home = None
        try:
            self._reserve(pool)
        except torch.OutOfMemoryError:
            log.info("CUDA graphs are captured without an arena: there is no room in one piece")
        finally:
            self.has_arena = self._home is not None
            pool.reset_peak()

    @contextmanager
    def steering(self, pool: Pool) -> Iterator[None]:
        """Steer what is captured in a pool, if it is the one that was started."""
        self.peak_bytes = 0
        if pool.id != self._home:
            yield
            return
        self._pool = pool
        try:
            self._read()
            if self._arrange(self._library):
                pool.take_library()
                self._note_peak()
                self._read()  # nothing that is known has been made, but that has its block
            yield
        finally:
            self._note_peak()
            self._pool = self._steering = None
            pool.free_all()
            pool.reset_peak()

    def _reserve(self, pool: Pool) -> None:
        """Plan the arena and have it in the pool, if it is worth it and looks as it should."""
        needs = self._needs
        pieces = needs.pieces(pool.library_bytes() if needs.has_products else 0)
        try:
            plan = plan_arena(pieces)
        except Mismatch as mismatch:
            log.info("no arena was planned: %s", mismatch)
            return
        if plan.arena_bytes < _LEAST_BYTES:
            return
        base = pool.reserve(plan.arena_bytes)
        if pool.blocks() != ({base: plan.arena_bytes}, {}):
            log.info("CUDA graphs are captured without steering: the allocator is another one")
            return
        self._wishes = PlannedAddresses(pieces, plan.offsets, base)
        self._library = list(range(needs.n_pieces, len(plan.offsets)))
        self._home = pool.id
        log.debug("an arena of %s for CUDA graphs", format_bytes(plan.arena_bytes))

    def _wrapped(self, node: fx.Node, inner: Callable[..., Any] | None) -> Callable[..., Any]:
        target: Any = node.target._op if isinstance(node.target, OpOverload) else node.target
        function = inner or target
        is_before_unknown = node in self._needs.last_before_unknown

        def steered(*args: Any, **kwargs: Any) -> Any:
            if self._memory is not None:
                return self._watch(self._memory, node, partial(function, *args, **kwargs))
            pieces = self._needs.pieces_of.get(node, [])
            if self._steering is None or not (pieces or is_before_unknown):
                return function(*args, **kwargs)
            self._arrange(pieces)
            result = function(*args, **kwargs)
            self._book(result)
            if is_before_unknown:
                self._open_all()
            return result

        steered.__name__ = f"steered_{node.name}"
        return steered

    def _watch(self, memory: Memory, node: fx.Node, call: Callable[[], Any]) -> Any:
        """Make a node's call, and note how much more was in use than before and after it."""
        before = memory.counts()
        memory.reset_peak()
        result = call()
        after = memory.counts()
        self.peak_bytes = max(self.peak_bytes, before.peak_bytes, after.peak_bytes)
        beside = after.peak_bytes - max(before.allocated_bytes, after.allocated_bytes)
        self._workspaces[node] = max(0, beside)
        return result

    def _arrange(self, pieces: list[int]) -> bool:
        """Make room for some pieces where they should lie; whether that has succeeded."""
        self._settle()
        if self._steering is None or self._pool is None or not pieces:
            return False
        try:
            self._steering.arrange(pieces)
        except Mismatch as mismatch:
            self._start_anew(str(mismatch))
            return False
        finally:
            self._pool.reset_peak()
        return True

    def _book(self, result: Any) -> None:
        """Note where an op's results lie."""
        if self._steering is None or self._pool is None:
            return
        for tensor in tensors(result):
            address = self._pool.address_of(tensor)
            storage = tensor.untyped_storage()
            known = self._watched.get(address)
            is_new = known is None or known.expired()
            if storage.nbytes() > REST_BYTES and is_new and self._steering.model.has(address):
                if known is not None:
                    self._give_back(address)
                self._watched[address] = StorageWeakRef(storage)
                try:
                    self._steering.record_allocation(address, storage.nbytes())
                except Mismatch as mismatch:
                    self._note_peak()
                    self._start_anew(str(mismatch))
                    return

    def _settle(self) -> None:
        """Book what is gone since the last op, and see whether the book is right."""
        steering = self._steering
        if steering is None or self._pool is None:
            return
        large_bytes = self._note_peak()
        for address in [a for a, watched in self._watched.items() if watched.expired()]:
            self._give_back(address)
        if large_bytes != self._elsewhere_bytes + steering.model.taken_bytes:
            self._start_anew("there are blocks that are not known")

    def _give_back(self, address: int) -> None:
        del self._watched[address]
        if self._steering is not None and address in self._steering.model.taken:
            self._steering.record_free(address)

    def _open_all(self) -> None:
        """Let go of all plugs: what comes is not known."""
        self._settle()
        if self._steering is not None and self._pool is not None:
            self._steering.open_all()
            self._pool.reset_peak()

    def _note_peak(self) -> int:
        """Note the most bytes since plugs last changed; returns those in large blocks now."""
        assert self._pool is not None
        counts = self._pool.counts()
        plugged_bytes = self._steering.plugged_bytes if self._steering else 0
        self.peak_bytes = max(self.peak_bytes, counts.peak_bytes - plugged_bytes)
        return counts.large_bytes

    def _start_anew(self, reason: str) -> None:
        """Read from the allocator what is where; or do without it, if that has been too often."""
        self._n_mismatches += 1
        log.debug("reading the arena anew: %s", reason)
        self._read()
        if self._n_mismatches > _MOST_MISMATCHES:
            log.info("memory is not steered any more: %s", reason)
            self._steering, self.has_arena = None, False

    def _read(self) -> None:
        """Let go of all plugs, and read from the allocator what is where."""
        assert self._pool is not None
        assert self._wishes is not None
        self._pool.free_all()
        self._pool.reset_peak()
        self._steering = Steering(Arena(*self._pool.blocks()), self._pool, self._wishes)
        taken_bytes = self._steering.model.taken_bytes
        self._elsewhere_bytes = self._pool.counts().large_bytes - taken_bytes
