"""Building blocks of the tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rekindle.report.names import shorten
from rekindle.units import format_bytes

WIDE_COLUMNS = 100
"""The terminal width from which tables stand side by side and show every column."""
ABSENT = "–"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class PlainTable(Table):
    """A table whose cells are text, and not rich's markup: names may hold brackets."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row."""
        super().add_row(*(Text(c) if isinstance(c, str) else c for c in cells), **options)


class PlainConsole(Console):
    """A console that prints text as it is, without markup, and control characters as a sign.

    Names of modules and files may hold anything, escape codes of terminals included.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of something to print."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def printable(text: str) -> str:
    """The text with a sign in place of each character that may control a terminal.

    >>> printable("conv\\x1b[2J 1")
    'conv�[2J 1'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


class Shortened:
    """Text that never wraps: where its column is narrow, its middle is cut out."""

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


class ForWidth:
    """Content that is made for the available width."""

    def __init__(self, make: Callable[[int], RenderableType]) -> None:
        self.make = make

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        yield self.make(options.max_width)


def known_bytes(nbytes: int | None) -> str:
    """A number of bytes, or the sign for one that is not known."""
    return ABSENT if nbytes is None else format_bytes(nbytes)


def bar(share: float, width: int) -> str:
    """A bar in eighths of a character, and at least one of them."""
    eighths = max(1, round(share * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def new_table(*numbers: str, label: str | None = None) -> Table:
    """A table with a rule under its head: a column of labels, if any, and columns of numbers."""
    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    if label is not None:
        table.add_column(label, no_wrap=True)
    add_numbers(table, *numbers)
    return table


def add_numbers(table: Table, *columns: str) -> None:
    """Add right-aligned columns that do not wrap."""
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)


def new_grid() -> Table:
    """A grid of labels and what they label."""
    grid = PlainTable.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    return grid


def indented(content: RenderableType) -> Padding:
    """The content, two columns further in."""
    return Padding(content, (0, 0, 0, 2))
