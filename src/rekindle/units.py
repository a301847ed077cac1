"""Parses and formats human-readable units; all other code uses bytes and microseconds."""

from __future__ import annotations

import re
from fractions import Fraction

from rekindle.errors import UnitError

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)", re.IGNORECASE)
_ACCEPTED = (
    "write a number of bytes (1024), or a number and a unit: "
    "KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (powers of 1000), "
    "as in '8GiB' or '1.5 GB'"
)
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%")
_BUDGETS = (
    "write a number and a unit ('8GiB', '500MB'), a share of the plain step's own peak ('60%'), "
    "or a number of bytes (8589934592)"
)


def format_bytes(nbytes: int) -> str:
    """Bytes in powers of 1024, with three significant digits; below 1 KiB, to the byte.

    >>> format_bytes(1023), format_bytes(1536), format_bytes(85_899_345_920)
    ('1023 B', '1.50 KiB', '80.0 GiB')
    """
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    return _scaled(nbytes / 1024, 1024, _BYTE_UNITS[1:])


def format_us(us: float) -> str:
    """Microseconds as µs, ms or s, with three significant digits."""
    return _scaled(us, 1000, ("µs", "ms", "s"))


def format_count(count: int) -> str:
    """A large count, for example of FLOPs, in powers of 1000, as in 400M."""
    if abs(count) < 1000:
        return str(count)
    return _scaled(count / 1000, 1000, ("k", "M", "G", "T"), between="")


def parse_bytes(text: str | int) -> int:
    """The number of bytes that a text such as "8GiB", "1.5 GB" or "1024" names, rounded down."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _QUANTITY.fullmatch(text.strip()) if isinstance(text, str) else None
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UnitError(f"{text!r} is not an amount of memory: {_ACCEPTED}")
    found = Fraction(match[1]) * factor
    if not match[2] and found.denominator != 1:  # who writes 9.5 means GiB
        raise UnitError(f"{text!r} has no unit, and a fraction: {_ACCEPTED}")
    return int(found)


def parse_budget(budget: str | int, plain_peak_bytes: int) -> int:
    """The bytes of a budget: an amount of memory, or a share of the plain step's peak.

    >>> parse_budget("8GiB", 1000), parse_budget("60%", 1000), parse_budget(4096, 1000)
    (8589934592, 600, 4096)
    """
    share = _SHARE.fullmatch(budget.strip()) if isinstance(budget, str) else None
    try:
        found = int(Fraction(share[1]) * plain_peak_bytes / 100) if share else parse_bytes(budget)
    except UnitError:
        found = 0
    if found <= 0:
        raise UnitError(f"{budget!r} is not a budget: {_BUDGETS}")
    return found


def format_budget(nbytes: int) -> str:
    """The amount in a few digits, rounded up, in a form that `parse_budget` reads.

    >>> format_budget(1000), format_budget(1 << 30), format_budget((1 << 30) + 1)
    ('1000B', '1GiB', '1.001GiB')
    """
    position = min((max(nbytes, 1).bit_length() - 1) // 10, len(_BYTE_UNITS) - 1)
    unit = 1024**position
    digits = 3 if position else 0
    thousandths = -(-nbytes * 10**digits // unit)
    whole, rest = divmod(thousandths, 10**digits)
    text = f"{whole}.{rest:03d}".rstrip("0").removesuffix(".") if rest else str(whole)
    return f"{text}{_BYTE_UNITS[position]}"


def _scaled(value: float, base: int, units: tuple[str, ...], *, between: str = " ") -> str:
    """The value in the first unit with at most three digits before the decimal point."""
    position = 0
    while abs(float(f"{value:.3g}")) >= 1000 and position < len(units) - 1:
        value /= base
        position += 1
    rounded = float(f"{value:.3g}")
    if rounded == 0 or abs(rounded) >= 1000:
        number = f"{value:.0f}"
    else:
        number = f"{rounded:#.3g}".removesuffix(".")
    return f"{number}{between}{units[position]}"
