"""Random numbers in CUDA graphs: recomputed ops draw what the original ops drew.

Recomputed ops draw from generators of their own, the twins, whose seed and offset are set before
every replay: see docs/decisions/020. The offsets are measured in an earlier step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from rekindle.core.identity import IdentitySet
from rekindle.engines.cudagraph.graph_parts import StepPart
from rekindle.engines.program import Program
from rekindle.tracing import rng

Source = torch.Generator | str


@dataclass(frozen=True, eq=False)
class _Twin:
    """A generator for recomputed ops whose originals drew one after the other."""

    source: Source
    generator: torch.Generator
    first: fx.Node  # reads the state before the first of the originals


class RngTwins:
    """The functions that a step's random nodes call in place of `rng.read` and `rng.replay`."""

    def __init__(self, program: Program, parts: list[StepPart]) -> None:
        self.functions: dict[fx.Node, Callable[..., Any]] = {}
        self._sources: list[Source] = []
        self._starts: dict[Source, tuple[int, int]] = {}  # seed and offset at the step's start
        self._offsets: dict[fx.Node, int] = {}  # by reading node, from the start
        self._twins: dict[StepPart, list[_Twin]] = {part: [] for part in parts}
        self._twin_of: dict[fx.Node, _Twin] = {}
        self._is_capturing = False
        for part in parts:
            for node in part.nodes:
                if node.target is rng.read:
                    self.functions[node] = partial(self._read, node)
                    source: Any = node.args[0]
                    is_cuda = rng.generator_of(source).device.type == "cuda"
                    if is_cuda and source not in self._sources:
                        self._sources.append(source)
                elif node.target is rng.replay:
                    self.functions[node] = partial(self._replay, node)
            if part.is_graph:
                self._find_twins(program, part)

    def start(self) -> None:
        """Save the seed and offset of every generator at the start of a step."""
        for source in self._sources:
            self._starts[source] = _seed_and_offset(source)

    def seed_twins(self, part: StepPart) -> None:
        """Set the twins of a part before it is replayed."""
        for twin in self._twins[part]:
            seed, offset = self._starts[twin.source]
            twin.generator.manual_seed(seed)
            twin.generator.set_offset(offset + self._offsets[twin.first])

    def generators(self, part: StepPart) -> list[torch.Generator]:
        """The generators that a part draws from, besides the default one."""
        given: list[Any] = [a for node in part.nodes for a in (*node.args, *node.kwargs.values())]
        own = IdentitySet(arg for arg in given if isinstance(arg, torch.Generator))
        return [*own, *(twin.generator for twin in self._twins[part])]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """The context in which calls are captured."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def _find_twins(self, program: Program, part: StepPart) -> None:
        rewritten = program.rewritten
        captured = [
            n for n in rewritten.nodes if n in rewritten.origin and not rewritten.origin[n][1]
        ]
        drawn = [rewritten.origin[n][0] for n in captured if rewritten.calls[n].is_random]
        position = {op: index for index, op in enumerate(drawn)}
        twins, last = self._twins[part], -1
        for node in part.nodes:
            if node.target is rng.replay:
                source: Any = node.args[0]
                first: Any = node.args[1]
                current = position[rewritten.origin[node][0]]
                if not twins or twins[-1].source != source or current != last + 1:
                    twins.append(_Twin(source, rng.generator_of(source).clone_state(), first))
                self._twin_of[node] = twins[-1]
                last = current

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
            if state is None:  # the original ran in a graph
                seed, offset = self._starts[source]
                numbers = [seed, offset + self._offsets[node.all_input_nodes[0]]]
                state = torch.tensor(numbers).view(torch.uint8)
            return rng.replay(source, state, function, *args, **kwargs)
        generator = rng.generator_of(source)
        saved = generator.graphsafe_get_state()
        generator.graphsafe_set_state(self._twin_of[node].generator)
        try:
            return function(*args, **kwargs)
        finally:
            generator.graphsafe_set_state(saved)


def reset_after_failed_capture(generator: torch.Generator) -> None:
    """Make a generator usable again that a failed capture has left in capture mode."""
    generator.graphsafe_set_state(generator.clone_state())


def _seed_and_offset(source: Source) -> tuple[int, int]:
    """The seed and Philox offset of a CUDA generator."""
    seed, offset = rng.generator_of(source).get_state().view(torch.int64).tolist()
    return seed, offset
