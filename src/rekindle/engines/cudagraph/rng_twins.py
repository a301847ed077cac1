"""Random numbers in CUDA graphs: copies of random ops draw what the ops themselves drew.

Outside of a graph, a generator's state is read and set (`rng`). In a graph it is not known: a
kernel there adds a fixed number to the offset that the generator has when the graph is replayed. So
copies draw from generator states of their own, which are set before every replay, to so many
numbers after the step's start as an earlier step has shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from rekindle.engines.cudagraph.graph_parts import Part
from rekindle.engines.program import Program
from rekindle.tracing import rng

Source = torch.Generator | str


@dataclass(frozen=True, eq=False)
class Run:
    """Copies that draw one after the other what their ops drew one after the other.

    They share a generator state, `twin`; `first` is the node that read where the first one starts.
    """

    source: Source
    twin: torch.Generator
    first: fx.Node


class Randomness:
    """What the random ops of a step's parts call in place of `rng.read` and `rng.replay`."""

    def __init__(self, program: Program, parts: list[Part]) -> None:
        self.functions: dict[fx.Node, Callable[..., Any]] = {}
        self._sources: list[Source] = []
        self._starts: dict[Source, tuple[int, int]] = {}  # seed and offset when the step begins
        self._offsets: dict[fx.Node, int] = {}  # by the node that reads: how many numbers later
        self._runs: dict[Part, list[Run]] = {part: [] for part in parts}
        self._run_of: dict[fx.Node, Run] = {}
        self._is_capturing = False
        for part in parts:
            for node in part.nodes:
                if node.target is rng.read:
                    self.functions[node] = partial(self._read, node)
                    self._note_source(node.args[0])
                elif node.target is rng.replay:
                    self.functions[node] = partial(self._replay, node)
            if part.is_graph:
                self._find_runs(program, part)

    def start(self) -> None:
        """Note where generators are: the step begins."""
        for source in self._sources:
            self._starts[source] = _seed_and_offset(source)

    def set_twins(self, part: Part) -> None:
        """Set the states that a part's copies draw from: it is about to be replayed."""
        for run in self._runs[part]:
            seed, offset = self._starts[run.source]
            run.twin.manual_seed(seed)
            run.twin.set_offset(offset + self._offsets[run.first])

    def generators(self, part: Part) -> list[torch.Generator]:
        """What a part draws from, beside the default generator."""
        given: list[Any] = [a for node in part.nodes for a in (*node.args, *node.kwargs.values())]
        own = {id(arg): arg for arg in given if isinstance(arg, torch.Generator)}
        return [*own.values(), *(run.twin for run in self._runs[part])]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """What is called inside goes into a graph."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def _note_source(self, source: Any) -> None:
        if rng.generator_of(source).device.type == "cuda" and source not in self._sources:
            self._sources.append(source)

    def _find_runs(self, program: Program, part: Part) -> None:
        listing = program.listing
        captured = [n for n in listing.nodes if n in listing.origin and not listing.origin[n][1]]
        drawn = [listing.origin[n][0] for n in captured if listing.calls[n].is_random]
        place = {op: index for index, op in enumerate(drawn)}
        runs, last = self._runs[part], -1
        for node in part.nodes:
            if node.target is rng.replay:
                source: Any = node.args[0]
                first: Any = node.args[1]
                here = place[listing.origin[node][0]]
                if not runs or runs[-1].source != source or here != last + 1:
                    runs.append(Run(source, rng.generator_of(source).clone_state(), first))
                self._run_of[node] = runs[-1]
                last = here

    def _read(self, node: fx.Node, source: Source) -> Any:
        if self._is_capturing:
            return None
        if source in self._starts:
            self._offsets[node] = _seed_and_offset(source)[1] - self._starts[source][1]
        return rng.read(source)

    def _replay(
        self, node: fx.Node, source: Source, state: Any, function: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._is_capturing:
            if state is None:  # the op itself ran in a graph
                seed, offset = self._starts[source]
                numbers = [seed, offset + self._offsets[node.all_input_nodes[0]]]
                state = torch.tensor(numbers).view(torch.uint8)
            return rng.replay(source, state, function, *args, **kwargs)
        generator = rng.generator_of(source)
        now = generator.graphsafe_get_state()
        generator.graphsafe_set_state(self._run_of[node].twin)
        try:
            return function(*args, **kwargs)
        finally:
            generator.graphsafe_set_state(now)


def revive(generator: torch.Generator) -> None:
    """Make a generator usable again that a failed capture has left in the middle of one."""
    generator.graphsafe_set_state(generator.clone_state())


def _seed_and_offset(source: Source) -> tuple[int, int]:
    """A CUDA generator's seed, and how many numbers it has drawn."""
    seed, offset = rng.generator_of(source).get_state().view(torch.int64).tolist()
    return seed, offset
