"""The table, the data and the figure of schemes, from numbers made up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from support.images import pixels, share_of
from support.printed import text

from rekindle.report.figures import DPI
from rekindle.report.schemes_report import (
    COLOURS,
    SCHEMES,
    SCHEMES_INCHES,
    Estimate,
    Measured,
    SizeResult,
    Study,
    schemes_data,
    schemes_table,
    spread_apart,
    write_schemes_png,
)

MIB = 1 << 20
FIRST_MIB = {
    "none": 512,
    "in-place": 300,
    "sharing": 120,
    "in-place-sharing": 120,
    "sqrt": 30,
    "selective": 90,
    "auto": 9,
}


def result(size: int | None, factor: float, is_run: bool = False) -> SizeResult:
    estimates = {
        scheme.name: Estimate(
            int(FIRST_MIB[scheme.name] * factor * MIB), 250.0 if scheme.planner else 0.0
        )
        for scheme in SCHEMES
    }
    taken = {s.name: Measured(1010 * MIB, 1000 * MIB) for s in SCHEMES if s.runs and is_run}
    return SizeResult(size, 700, 1000.0, estimates, taken)


def study(*results: SizeResult, size_name: str = "depth") -> Study:
    return Study("net", "A net", size_name, 8, "bf16", "H200", False, results)


GROWN = study(result(50, 1.0), result(200, 2.0), result(800, 8.0))


def test_the_table() -> None:
    shown = text(schemes_table(GROWN))
    lines = shown.splitlines()
    assert lines[0] == "A net: batch 8, bf16, estimated for H200"
    (head, *_) = [line for line in lines if "depth" in line]
    assert head.split() == ["depth", "50", "200", "800", "growth"]
    (row,) = [line for line in lines if "no optimisation" in line]
    assert row.split()[2:] == ["512", "MiB", "1.00", "GiB", "4.00", "GiB", "n^1.00"]
    assert [line.split()[-3:] for line in lines if "auto" in line][1] == ["25%"] * 3
    assert "measured" not in shown


def test_what_cannot_be_run_is_marked() -> None:
    shown = text(schemes_table(study(result(50, 1.0, is_run=True), result(1001, 2.0))))
    below = shown[shown.index("measured") :].splitlines()
    for scheme in SCHEMES:
        (row,) = [line for line in below if line.strip().startswith(f"{scheme.label}  ")]
        taken = ["0.986", "GiB"] if scheme.runs else ["–"]
        assert row.split()[len(scheme.label.split()) :] == [*taken, "–"]
    assert "the forecast was 0.990 to 0.990 of what was measured" in " ".join(shown.split())


@pytest.mark.parametrize("width", [40, 46, 60, 120])
def test_no_number_is_cut_off(width: int) -> None:
    shown = text(schemes_table(GROWN), width)
    assert "…" not in shown
    assert shown.count("4.00 GiB") == 1
    assert ("growth" in shown) == (width > 46)


def test_a_single_size_has_no_growth() -> None:
    one = study(result(None, 1.0), size_name="")
    assert "growth" not in text(schemes_table(one))
    data = schemes_data(one)
    assert data["growth"] == {}
    assert data["sizes"][0]["size"] is None


def test_the_data() -> None:
    data = schemes_data(study(result(50, 1.0, is_run=True), result(200, 2.0)))
    assert [each["name"] for each in data["schemes"]] == list(FIRST_MIB)
    assert data["growth"]["none"] == pytest.approx(0.5)
    first, second = data["sizes"]
    assert (first["size"], first["ops"], first["step_us"]) == (50, 700, 1000.0)
    assert first["schemes"]["sqrt"] == {
        "feature_bytes": 30 * MIB,
        "added_us": 250.0,
        "measured": {"peak_bytes": 1010 * MIB, "forecast_bytes": 1000 * MIB},
    }
    assert first["schemes"]["none"]["measured"] is None
    assert second["schemes"]["sqrt"]["measured"] is None


@pytest.mark.parametrize(
    "shown",
    [
        GROWN,
        study(result(50, 1.0, is_run=True), result(200, 2.0, is_run=True)),
        study(result(50, 1.0, is_run=True), result(200, 2.0)),
        study(result(None, 1.0), size_name=""),
        study(result(None, 1.0, is_run=True), size_name=""),
    ],
)
def test_the_figure(tmp_path: Path, shown: Study) -> None:
    """Every scheme is there, in its colour."""
    pytest.importorskip("matplotlib")
    write_schemes_png(tmp_path / "schemes.png", shown)
    image = pixels(tmp_path / "schemes.png")
    assert image.shape[:2] == tuple(round(inches * DPI) for inches in SCHEMES_INCHES[::-1])
    for name, colour in COLOURS.items():
        assert share_of(image, colour) > 0.0002, name


def test_labels_that_would_meet_are_movedspread_apart() -> None:
    order, places = spread_apart([100.0, 10.0, 12.0, 11.0, 300.0, 101.0])
    assert order == [1, 3, 2, 0, 5, 4]
    assert all(b - a >= 14 - 1e-9 for a, b in pairwise(places))
    assert places[-1] == 300.0
    assert sum(places[:3]) == pytest.approx(33.0)
