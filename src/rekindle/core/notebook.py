"""How public objects show themselves: on one line, and as a small table in notebooks.

A class returns its main numbers from `_facts`, and takes the two functions as its methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Protocol

MOST_CHARACTERS = 200
_MOST_CELL_CHARACTERS = 120


class Shown(Protocol):
    """An object with a few main numbers."""

    def _facts(self) -> Mapping[str, object]: ...


def one_line(shown: Shown) -> str:
    """A `__repr__`: the facts on one line, which is cut off if it is too long."""
    name, facts = type(shown).__name__, shown._facts().items()
    text = " ".join("; ".join(f"{label} {fact}" for label, fact in facts).split())
    return f"<{name}: {_cut(text, MOST_CHARACTERS - len(name) - 4)}>"


def html_table(shown: Shown) -> str:
    """A `_repr_html_`: the facts as a table."""
    rows = "".join(
        f"<tr><th>{escape(label)}</th>"
        f"<td>{escape(_cut(' '.join(str(fact).split()), _MOST_CELL_CHARACTERS))}</td></tr>"
        for label, fact in shown._facts().items()
    )
    return f"<table><caption>{escape(type(shown).__name__)}</caption>{rows}</table>"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
