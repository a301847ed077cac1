"""The figures of a sweep hold the numbers of the JSON that they were drawn from."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.images import pixels, share_of
from support.made_up_sweep import GIB, WAYS, failure, made_up, record

from rekindle.report.figures import DPI
from rekindle.report.palette import SERIES
from rekindle.report.sweep_report import (
    MEMORY_INCHES,
    latency_figure,
    memory_figure,
    throughput_figure,
    trade_off_batch,
    trade_off_figure,
    write_sweep_pngs,
)

pytest.importorskip("matplotlib")

NAMES = {
    "plain": ("plain", None),
    "Rekindle, 60%": ("planned", "60%"),
    "Rekindle, 40%": ("planned", "40%"),
    "checkpoint every block": ("checkpoint", None),
    "torch.compile": ("compile", None),
}


def numbers(data: dict[str, Any], way: tuple[str, Any], key: str) -> dict[int, float]:
    """What the JSON has under a key, by batch size, for the cases that ran."""
    return {
        each["case"]["batch"]: each[key]
        for each in data["cases"]
        if (each["case"]["way"], each["case"]["budget"] or each["case"]["share"]) == way
        and each["status"] == "done"
    }


def lines_of(axes: Any) -> dict[str, dict[float, float]]:
    return {
        line.get_label(): dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axes.lines
    }


def test_memory() -> None:
    data = made_up()
    (axes,) = memory_figure(data).axes
    assert axes.get_ylabel() == "peak memory, GiB"
    assert [tick.get_text() for tick in axes.get_xticklabels()][-1] == "1,024"
    bars = {bar.get_label(): bar for bar in axes.containers if bar.get_label() in NAMES}
    batches = [32, 64, 128, 256, 512, 1024]
    assert set(bars) == set(NAMES)
    for label, way in NAMES.items():
        found = {
            batches[round(bar.get_x() + bar.get_width() / 2)]: bar.get_height()
            for bar in bars[label]
        }
        expected = numbers(data, way, "peak_bytes")
        assert found == pytest.approx({batch: peak / GIB for batch, peak in expected.items()})
    (cap,) = [line for line in axes.lines if line.get_label() == "cap 40.0 GiB"]
    assert set(cap.get_ydata()) == {40.0}
    written = [each.get_text() for each in axes.texts]
    shortages = [record for record in data["cases"] if record["status"] == "out of memory"]
    in_figure = [r for r in shortages if r["case"]["share"] is None]
    plans = [r for r in in_figure if r["kind"] == "InfeasibleBudget"]
    assert written.count("no plan fits") == len(plans) == 3
    assert written.count("out of memory") == len(in_figure) - len(plans)
    assert "38.1" in written
    (forecasts,) = axes.collections
    heights = sorted(segment[0][1] for segment in forecasts.get_segments())
    told = [r["forecast"]["peak_bytes"] for r in data["cases"] if r.get("forecast")]
    assert heights == pytest.approx(sorted(peak / GIB for peak in told))


def test_a_way_that_never_fits_has_its_colour_in_the_legend() -> None:
    figure = memory_figure(made_up((256, 512), list(WAYS)[:3]))
    (legend,) = figure.legends
    hues = {
        text.get_text(): handle.get_facecolor()[:3]
        for text, handle in zip(legend.texts, legend.legend_handles, strict=True)
        if text.get_text() in NAMES
    }
    to_rgb = pytest.importorskip("matplotlib.colors").to_rgb
    assert hues == {
        "plain": to_rgb(SERIES[7]),
        "Rekindle, 60%": to_rgb(SERIES[0]),
        "Rekindle, 40%": to_rgb(SERIES[5]),
    }


def test_bars_stand_beside_each_other() -> None:
    (axes,) = memory_figure(made_up()).axes
    spans = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_latency() -> None:
    data = made_up()
    above, below = latency_figure(data).axes
    assert above.get_ylabel() == "step time, ms"
    assert above.get_xscale() == above.get_yscale() == "log"
    plain = numbers(data, NAMES["plain"], "step_us")
    for label, way in NAMES.items():
        times = numbers(data, way, "step_us")
        expected = {batch: time / 1e3 for batch, time in times.items()}
        assert lines_of(above)[label] == pytest.approx(expected)
        ratios = {b: time / plain[b] for b, time in times.items() if b in plain}
        assert lines_of(below)[label] == pytest.approx(ratios)
    crosses = [text for text in above.texts if text.get_text() == "×"]
    assert len(crosses) == 3 + 2 + 1 + 2 + 3


def test_nothing_is_compared_with_a_plain_step_that_never_ran() -> None:
    data = made_up((1024,))
    assert not numbers(data, NAMES["plain"], "step_us")
    data["cases"] += [record("planned", "40%", 64, None)]
    (axes,) = latency_figure(data).axes
    assert axes.get_xlabel() == "batch size"


def test_shares_of_memory_are_joined_in_their_order() -> None:
    """Also where a smaller share has taken more memory."""
    data = made_up()
    batch = trade_off_batch(data)
    for each in data["cases"]:
        if each["case"]["share"] == 0.2 and each["status"] == "done":
            each["peak_bytes"] *= 3
    (axes,) = trade_off_figure(data).axes
    (line,) = (line for line in axes.lines if str(line.get_label()).startswith("torch.compile"))
    taken = {
        each["case"]["share"] or 1.0: each["peak_bytes"]
        for each in data["cases"]
        if each["case"]["way"] == "compile" and each["case"]["batch"] == batch
    }
    shares = [share for share, _ in sorted(taken.items())]
    assert list(line.get_xdata()).index(max(line.get_xdata())) == shares.index(0.2)


def test_few_batch_sizes_stand_on_a_plain_axis() -> None:
    above, _ = latency_figure(made_up((32, 64, 96), cap_bytes=None)).axes
    assert (above.get_xscale(), above.get_yscale(), above.get_ylim()[0]) == ("linear",) * 2 + (0,)
    assert len(above.texts) == 0


def test_throughput() -> None:
    data = made_up()
    (axes,) = throughput_figure(data).axes
    assert axes.get_ylabel() == "samples a second"
    for label, way in NAMES.items():
        expected = numbers(data, way, "samples_per_s")
        assert lines_of(axes)[label] == pytest.approx(expected)


def test_trade_off() -> None:
    """At the largest batch that all can do, from the least memory to the most."""
    data = made_up()
    assert trade_off_batch(data) == 128
    (axes,) = trade_off_figure(data).axes
    found = lines_of(axes)
    expected = {
        "plain": [WAYS["plain", None]],
        "Rekindle, by budget": [WAYS["planned", "40%"], WAYS["planned", "60%"]],
        "checkpoint every block": [WAYS["checkpoint", None]],
        "torch.compile, by share of activations kept": [
            WAYS["compile", setting] for setting in (0.2, 0.5, 0.8, None)
        ],
    }
    for label, points in expected.items():
        assert [x / 100 for x in found[label]] == pytest.approx([x for x, _ in points])
        assert list(found[label].values()) == pytest.approx([y for _, y in points])
    assert {text.get_text() for text in axes.texts} == {"40%", "60%", "0.2", "0.5", "0.8", "all"}


def test_what_there_is_no_number_for_is_not_drawn(tmp_path: Path) -> None:
    data = made_up((32, 64), [("planned", "60%")])
    (tmp_path / "trade-off.png").touch()
    written = write_sweep_pngs(tmp_path, data)
    assert [path.name for path in written] == ["memory.png", "latency.png", "throughput.png"]
    assert sorted(tmp_path.iterdir()) == sorted(written)
    data["cases"] = [failure("plain", 32)]
    assert write_sweep_pngs(tmp_path, data) == []
    assert write_sweep_pngs(tmp_path, made_up(())) == []


@pytest.mark.parametrize("cap", [40 * GIB, None])
def test_the_pictures(tmp_path: Path, cap: int | None) -> None:
    written = write_sweep_pngs(tmp_path, made_up(cap_bytes=cap))
    assert len(written) == 4
    image = pixels(tmp_path / "memory.png")
    assert image.shape[:2] == tuple(round(inches * DPI) for inches in MEMORY_INCHES[::-1])
    for place in (0, 2, 4, 5, 7):
        assert share_of(image, SERIES[place]) > 0.002, SERIES[place]


def test_no_text_lies_on_another() -> None:
    for data in (made_up(), made_up((8, 16, 32, 64, 128, 256), list(WAYS)[:3])):
        figure = memory_figure(data)
        figure.canvas.draw()
        (axes,) = figure.axes
        boxes = [text.get_window_extent() for text in axes.texts]
        pairs = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i]]
        assert not [pair for pair in pairs if pair[0].overlaps(pair[1])]
