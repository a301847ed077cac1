"""Units: what people write is read exactly, and what they read has three digits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import RekindleError, UnitError
from rekindle.units import (
    format_budget,
    format_bytes,
    format_count,
    format_us,
    parse_budget,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10_239, "10.0 KiB"),  # 9.999: the rounding makes it a shorter number
        (312_168, "305 KiB"),
        (1_023_487, "999 KiB"),
        (1_023_488, "0.976 MiB"),  # 999.5 KiB would be 1000
        (1 << 20, "1.00 MiB"),
        (3 << 30, "3.00 GiB"),
        (141 << 30, "141 GiB"),
        (5 << 40, "5.00 TiB"),
        (5000 << 40, "5000 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0.0, "0 µs"),
        (0.04, "0.0400 µs"),
        (12.34, "12.3 µs"),
        (999.4, "999 µs"),
        (999.6, "1.00 ms"),
        (25_430.0, "25.4 ms"),
        (1e6, "1.00 s"),
        (3.6e9, "3600 s"),
    ],
)
def test_format_us(us: float, text: str) -> None:
    assert format_us(us) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00k"), (1_174_405_120, "1.17G"), (10**16, "10000T")],
)
def test_format_count(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1024", 1024),
        (" 7 B ", 7),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("500MB", 500_000_000),
        ("500 mib", 500 << 20),
        ("1.5 GB", 1_500_000_000),
        (".5GiB", 1 << 29),
        ("2.TB", 2 * 10**12),
        ("0.1 GB", 100_000_000),  # exactly, although 0.1 is no binary fraction
        ("1.9B", 1),
        (12, 12),
    ],
)
def test_parse_bytes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "8 potatoes",
        "8G",
        "-1GB",
        -1,
        "1e9",
        "1,5GB",
        "8 GiB 2",
        True,
        None,
        1.5,
        "9.5",
        ".5",
    ],
)
def test_what_is_no_amount_is_refused_with_the_accepted_forms(text: Any) -> None:
    with pytest.raises(UnitError, match=r"'8GiB' or '1.5 GB'") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)
    assert isinstance(caught.value, RekindleError)
    assert isinstance(caught.value, ValueError)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_what_is_printed_reads_back_within_half_a_percent(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.0051, abs=1)


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        (" 1.5 gb ", 1_500_000_000),
        ("60%", 600_000_000),
        ("12.5 %", 125_000_000),
        ("100%", 1_000_000_000),
        ("140%", 1_400_000_000),
        ("33.3333333333%", 333_333_333),
    ],
)
def test_parse_budget(budget: str | int, nbytes: int) -> None:
    assert parse_budget(budget, 1_000_000_000) == nbytes


@pytest.mark.parametrize(
    "budget",
    [
        *("", " ", "lots", "8 potatoes", "-1GiB", "-60%", "%", "60%%", "60% of it", "1e9", "1/2"),
        *("nan", "nan%", "inf", "0", "0GiB", "0%", "0.0 %", "0.5B", 0, -1, 0.6, True, None, "٣%"),
    ],
)
def test_what_is_not_a_budget(budget: Any) -> None:
    with pytest.raises(UnitError) as caught:
        parse_budget(budget, 1 << 40)
    message = str(caught.value)
    assert message.startswith(f"{budget!r} is not a budget: ")
    for form in ("'8GiB'", "'60%'", "8589934592"):
        assert form in message


@given(st.integers(1, 1 << 55))
def test_a_budget_that_is_shown_is_enough(nbytes: int) -> None:
    """And no more than a thousandth too much."""
    read = parse_budget(format_budget(nbytes), plain_peak_bytes=1)
    assert nbytes <= read <= nbytes * 1.001
    assert len(format_budget(nbytes)) <= 12
