"""Pieces that tables on the terminal are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rekindle.report.names import shorten

WIDE = 100
"""The columns from which tables stand side by side and show everything."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class Middle:
    """Text that gives up its middle, and never wraps, where its column is narrow."""

    def __init__(
        self, text: str, least: int = 12, cut: Callable[[str, int], str] = shorten
    ) -> None:
        self.text = text
        self.cut = cut
        self.least = min(least, len(text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Text]:
        yield Text(self.cut(self.text, options.max_width), no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.least, max(len(self.text), 1)).with_maximum(options.max_width)


class Fitted:
    """Something that is made for the width there is."""

    def __init__(self, make: Callable[[int], RenderableType]) -> None:
        self.make = make

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        yield self.make(options.max_width)


def bar(share: float, width: int) -> str:
    """A bar in eighths of a character; what is there has at least the thinnest."""
    eighths = max(1, round(share * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def new_table() -> Table:
    """A table with a rule under its head."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")


def indented(content: RenderableType) -> Padding:
    """Two columns further in."""
    return Padding(content, (0, 0, 0, 2))
