"""The largest batches of compiled steps under a cap: planned, and with `torch.compile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from experiments.config import Compiled
from experiments.page import ABSENT, Page, not_measured, paragraphs, table, times, title_of
from experiments.pieces import compiled_name
from experiments.tasks import DONE
from rekindle.report.sweep_report import COMPILE, INFEASIBLE, PLANNED
from rekindle.units import format_bytes

_NAMES = {COMPILE: "`torch.compile`", PLANNED: "planned, compiled"}

Found = dict[str, Any]


class Sides(NamedTuple):
    """The runs of a model by increasing batch: with `torch.compile`, and planned."""

    asked: Compiled
    peer: tuple[Found, ...]
    planned: tuple[Found, ...]

    @property
    def largest(self) -> int | None:
        """The largest batch that fits with `torch.compile`; None if none does."""
        return max((found["case"]["batch"] for found in _fitting(self.peer)), default=None)

    @property
    def best(self) -> float | None:
        """The best samples per second of `torch.compile`."""
        return max((found["samples_per_s"] for found in _fitting(self.peer)), default=None)

    @property
    def reached(self) -> Found | None:
        """The largest planned batch that meets both targets, for size and for speed."""
        if self.largest is None or self.best is None:
            return None
        wanted, speed = self.asked.times * self.largest, self.asked.at_least * self.best
        for found in reversed(_fitting(self.planned)):
            if found["case"]["batch"] >= wanted and found["samples_per_s"] >= speed:
                return found
        return None


def _fitting(every: Sequence[Found]) -> list[Found]:
    return [found for found in every if found["status"] == DONE]


def sides_of(page: Page) -> Iterator[Sides]:
    """The runs of each model."""
    every = page.results.found(compiled_name(page.config))
    every = sorted(every, key=lambda found: int(found["case"]["batch"]))
    for asked in page.config.compiled:
        own = [found for found in every if found["case"]["model"] == asked.model]
        by_way = (
            tuple(found for found in own if found["case"]["way"] == way)
            for way in (COMPILE, PLANNED)
        )
        yield Sides(asked, *by_way)


def section(page: Page) -> str:
    """A table of all runs, whether the targets were met, and what is missing."""
    every = list(sides_of(page))
    shown = [sides for sides in every if sides.peer or sides.planned]
    is_whole = all(sides.peer and sides.planned for sides in every)
    missing = "" if is_whole else not_measured(compiled_name(page.config))
    if not shown:
        return missing
    verdicts = [_verdict(sides) for sides in shown if sides.peer and sides.planned]
    return paragraphs(_table(page, shown), "\n".join(verdicts), missing)


def _table(page: Page, every: Sequence[Sides]) -> str:
    rows = []
    for sides in every:
        before = ("", "")
        for found in (*sides.peer, *sides.planned):
            names = (title_of(sides.asked.model), _NAMES[found["case"]["way"]])
            new = ("" if name == last else name for name, last in zip(names, before, strict=True))
            rows.append((*new, *_cells(found, sides)))
            before = names
    columns = ("", "", "batch", f"under {page.config.compiled_cap}", "peak", "samples/s")
    of_peer = ("batch, of `torch.compile`'s largest", "samples/s, of `torch.compile`'s best")
    return table((*columns, *of_peer), rows)


def _cells(found: Found, sides: Sides) -> Iterator[str]:
    batch = found["case"]["batch"]
    yield f"{batch:,}"
    if found["status"] != DONE:
        yield "no plan fits" if found["kind"] == INFEASIBLE else found["status"]
        yield from [ABSENT] * 4
        return
    speed = found["samples_per_s"]
    yield "fits"
    yield format_bytes(found["peak_bytes"])
    yield f"{speed:,.4g}"
    yield times(batch / sides.largest) if sides.largest else ABSENT
    yield times(speed / sides.best) if sides.best else ABSENT


def _verdict(sides: Sides) -> str:
    """A sentence on whether a batch meets both targets."""
    asked, reached = sides.asked, sides.reached
    name = f"- **{title_of(asked.model)}**: the aim is"
    wanted = f"{name} {asked.times:g} times the batch at {asked.at_least:.0%} of the speed;"
    if not sides.largest or not sides.best:
        return f"{wanted} no batch ran with `torch.compile`, so there is nothing to compare with."
    if reached is None:
        return f"{wanted} no planned batch met both."
    batch, speed = reached["case"]["batch"], reached["samples_per_s"] / sides.best
    return f"{wanted} ×{batch:,} is {times(batch / sides.largest)} at {speed:.0%}."
