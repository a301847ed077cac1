"""The table of a sweep, from numbers made up."""

from __future__ import annotations

from typing import Any

import pytest
from support.made_up_sweep import failure, made_up
from support.printed import text

from rekindle.report.sweep_report import (
    failed_cases,
    over_budget,
    series_of,
    sweep_data,
    sweep_table,
    sweep_title,
)


def row_of(shown: str, batch: str, label: str) -> list[str]:
    """The cells of a row, of which the first of each batch size has its number."""
    lines = iter(shown.splitlines())
    for line in lines:
        if line.split()[:1] == [batch]:
            rest = [line, *lines]
            (found, *_) = [each for each in rest if f" {label}  " in each]
            return found[found.index(label) + len(label) :].split()
    raise AssertionError(batch)


def test_the_table() -> None:
    shown = text(sweep_table(made_up()), 130)
    assert shown.splitlines()[0] == "resnet152: bf16, on NVIDIA H200, capped at 40.0 GiB"
    assert row_of(shown, "32", "plain") == [
        *("6.58", "GiB", "–", "6.71", "GiB", "30.9", "ms"),
        *("1,036", "100%,", "1.00×", "12.5", "s"),
    ]
    assert row_of(shown, "128", "Rekindle, 40%") == [
        *("9.68", "GiB", "9.39", "GiB", "9.87", "GiB", "120", "ms"),
        *("1,063", "39%,", "1.08×", "12.5", "s"),
    ]
    assert row_of(shown, "256", "plain") == ["out", "of", "memory"]
    assert row_of(shown, "512", "Rekindle, 60%") == ["no", "plan", "fits"]
    assert row_of(shown, "256", "Rekindle, 60%")[-3:] == ["–", "12.5", "s"]


@pytest.mark.parametrize("width", [60, 80, 100, 130])
def test_no_number_is_cut_off(width: int) -> None:
    shown = text(sweep_table(made_up()), width)
    assert "…" not in shown
    assert "out of memory" in shown
    assert ("forecast" in shown) == (width >= 100)
    assert ("setup" in shown) == (width >= 130)


def test_what_went_wrong_is_told() -> None:
    data = made_up((32,))
    data["cases"].append(failure("plain", 64))
    data["cases"][1] |= {"is_within_budget": False, "budget_bytes": 1 << 30}
    shown = " ".join(text(sweep_table(data), 100).split())
    assert "batch 64, plain failed: the step of mine.py:make raises ValueError" in shown
    assert "batch 32, Rekindle, 60% took 3.88 GiB, over 1.00 GiB" in shown
    assert (len(failed_cases(data)), len(over_budget(data))) == (1, 1)


def test_a_sweep_without_cases() -> None:
    data = made_up(())
    assert text(sweep_table(data)).startswith("resnet152")
    assert series_of(data) == []


def test_the_data_says_where_it_ran() -> None:
    settings: dict[str, Any] = {key: made_up()[key] for key in ("model", "engine", "cap_bytes")}
    settings |= {"precision": None, "device": "cuda", "engine": "inductor", "cap_bytes": None}
    data = sweep_data(settings, made_up((32,))["cases"])
    assert sweep_title(data) == "resnet152: bf16, on NVIDIA H200, engine inductor"
    assert sweep_title(sweep_data(settings, [])) == "resnet152: on cuda, engine inductor"
