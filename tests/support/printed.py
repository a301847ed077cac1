"""Prints to a terminal of a fixed width."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def text(what: RenderableType, width: int = 80) -> str:
    """What is printed, without colours; no line may be wider than the terminal."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    widest = max(lines, key=len)
    assert len(widest) <= width, widest
    return "\n".join(lines).strip("\n")
