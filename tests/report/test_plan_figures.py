"""The PNGs of plans and curves: of the right size, with the colours that they should have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.images import is_hue, pixels, share_of
from support.tiny_step import ABOUT, MIB, PEAK_BYTES, tiny_plan_summary, tiny_step

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import simulate
from rekindle.planners.curve import Curve
from rekindle.report.figures import CURVE_INCHES, DPI, PLAN_INCHES, write_curve_png, write_png
from rekindle.report.palette import SERIES, colour
from rekindle.report.summary import summarize

pytest.importorskip("matplotlib")


def test_a_plan(tmp_path: Path) -> None:
    write_png(tmp_path / "plan.png", tiny_plan_summary())
    image = pixels(tmp_path / "plan.png")
    assert image.shape[:2] == tuple(round(inches * DPI) for inches in PLAN_INCHES[::-1])
    assert share_of(image, colour("activation")) > 0.02


def test_a_step_without_ops(tmp_path: Path) -> None:
    graph = StepGraph((), (), (), ())
    profile = Profile("cpu", graph.fingerprint, ())
    plan = Plan("none", graph.fingerprint, 1, (), (), 0, 0.0)
    summary = summarize(graph, profile, simulate(graph, profile, plan), plan=plan)
    write_png(tmp_path / "empty.png", summary)
    assert pixels(tmp_path / "empty.png").std() > 0


def point(peak: float, us: float, bound: float | None) -> Plan:
    return Plan("x", "f", int(peak * MIB), (), (), int(peak * MIB), us, bound)


@pytest.mark.parametrize("far_us", [60.0, 4000.0])
def test_curves(tmp_path: Path, far_us: float) -> None:
    """A point far above the lines does not squeeze them."""
    plain = summarize(*tiny_step(), ABOUT)
    line = (
        point(PEAK_BYTES / MIB, 0.0, 0.0),
        point(6, 20.0, 10.0),
        point(4, 50.0, 40.0),
    )
    curves = [Curve("line", line, 1.0), Curve("far", (point(3, far_us, None),), 1.0)]
    write_curve_png(tmp_path / "curve.png", plain, curves)
    image = pixels(tmp_path / "curve.png")
    assert image.shape[:2] == tuple(round(inches * DPI) for inches in CURVE_INCHES[::-1])
    width = image.shape[1]
    steepest = image[:, width * 45 // 100 : width * 60 // 100]
    rows = np.flatnonzero(is_hue(steepest, SERIES[0]).any(axis=1))
    assert rows.max() - rows.min() > 0.08 * image.shape[0]
    assert share_of(image, SERIES[1]) > 0.00005


def test_one_point_alone(tmp_path: Path) -> None:
    plain = summarize(*tiny_step(), ABOUT)
    write_curve_png(tmp_path / "one.png", plain, [Curve("none", (point(7, 0.0, None),), 0.1)])
    assert pixels(tmp_path / "one.png").std() > 0
