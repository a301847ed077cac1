"""The PNG: of the right size, with the colours that it should have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.images import pixels, share_of
from support.tiny_step import ABOUT, tiny_step

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.simulate import simulate
from rekindle.errors import ReportError
from rekindle.report.figures import DPI, SIZE_INCHES, write_png
from rekindle.report.palette import colour
from rekindle.report.summary import summarize

matplotlib = pytest.importorskip("matplotlib")


def test_png(tmp_path: Path) -> None:
    path = tmp_path / "profile.png"
    before = dict(matplotlib.rcParams)
    write_png(path, summarize(*tiny_step(), ABOUT))
    assert dict(matplotlib.rcParams) == before
    image = pixels(path)
    width, height = (round(inches * DPI) for inches in SIZE_INCHES)
    assert image.shape == (height, width, 3)
    assert 0.3 < share_of(image, "#ffffff") < 0.95
    # every role with a visible share is there; the activation has more of the image than any other
    shares = {
        label: share_of(image, colour(label))
        for label in ("parameter", "input", "activation", "activation gradient", "weight gradient")
    }
    assert min(shares.values()) > 0.002
    assert max(shares, key=lambda label: shares[label]) == "activation"


def test_a_step_without_ops_or_times(tmp_path: Path) -> None:
    graph = StepGraph((), (), (), ())
    profile = Profile("cpu", graph.fingerprint, ())
    write_png(tmp_path / "empty.png", summarize(graph, profile, simulate(graph, profile)))
    assert pixels(tmp_path / "empty.png").std() > 0


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("matplotlib", "matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ReportError, match=r'pip install "rekindle\[report\]"'):
        write_png(tmp_path / "profile.png", summarize(*tiny_step()))
    assert not list(tmp_path.iterdir())
