"""Checks of values from files; each raises ValueError with one line that says what is wrong.

Types are checked exactly: in JSON, a list or true may stand where a number should.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MAX_BYTES = 1 << 50
MAX_COUNT = 1 << 62  # of FLOPs, of elements, and of the bytes of all storages
MAX_REAL = 1e15
MAX_TEXT = 10_000


def require(holds: bool, problem: str) -> None:
    """Raise unless something holds."""
    if not holds:
        raise ValueError(problem)


def number(value: Any, least: int, most: int, what: str) -> None:
    """Raise unless a value is a whole number in a range."""
    require(type(value) is int, f"{what} is no whole number")
    require(least <= value <= most, f"{what} is out of range")


def numbers(values: Iterable[Any], least: int, most: int, what: str) -> None:
    """Raise unless all values are whole numbers in a range."""
    for value in values:
        number(value, least, most, what)


def real(value: Any, what: str) -> None:
    """Raise unless a value is a finite number of at least 0."""
    require(type(value) in (int, float), f"{what} is no number")
    require(0 <= value <= MAX_REAL, f"{what} is out of range")  # and no NaN


def text(value: Any, what: str) -> None:
    """Raise unless a value is text that can be written."""
    require(type(value) is str, f"{what} is no text")
    require(len(value) <= MAX_TEXT, f"{what} is too long")
    require(not any("\ud800" <= c <= "\udfff" for c in value), f"{what} is no valid text")
