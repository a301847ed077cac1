"""Writes docs/results/experiments.md and its figures from collected results.

    python -m experiments.document

The text is in `template.md`, written by hand; each {{name}} in it is replaced by a section made
from results. Nothing is measured here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from experiments import RESULTS, ROOT
from experiments.config import H200, Config
from experiments.page import Page
from experiments.results import Results
from experiments.sections import (
    compiled,
    fits,
    forecasts,
    peers,
    planners,
    schemes,
    shares,
    sources,
    statistics,
    sweep,
)

TEMPLATE = ROOT / "experiments" / "template.md"
DOCUMENT = ROOT / "docs" / "results" / "experiments.md"
FIGURES = ROOT / "docs" / "results" / "figures"
BENCHMARKS = ROOT / "benchmarks" / "results"

SECTIONS: dict[str, Callable[[Page], str]] = {
    "sources": sources.section,
    "statistics": statistics.section,
    "shares": shares.section,
    "activations": statistics.activations,
    "memory": sweep.memory,
    "latency": sweep.latency,
    "planners": planners.section,
    "peers": peers.section,
    "schemes": schemes.section,
    "fits": fits.section,
    "compiled": compiled.section,
    "forecasts": forecasts.section,
}
_PLACE = re.compile(r"^\{\{(\w+)\}\}$", re.MULTILINE)


def document(template: str, page: Page) -> str:
    """The document's text; also writes its figures."""
    asked = _PLACE.findall(template)
    if sorted(asked) != sorted(SECTIONS):
        wrong = sorted(set(asked) ^ set(SECTIONS)) or asked
        raise ValueError(f"the template must name each section once, and does not: {wrong}")
    return _PLACE.sub(lambda place: SECTIONS[place[1]](page), template)


def page_of(
    config: Config = H200,
    results: Path = RESULTS,
    benchmarks: Path = BENCHMARKS,
    figures: Path = FIGURES,
) -> Page:
    """The input of the document."""
    return Page(config, Results(results, benchmarks), figures, "figures")


def main() -> None:
    """Write the document and its figures; figures of earlier documents are removed."""
    for old in FIGURES.glob("*.png"):
        old.unlink()
    DOCUMENT.write_text(document(TEMPLATE.read_text(encoding="utf-8"), page_of()), encoding="utf-8")
    print(f"wrote {DOCUMENT.relative_to(ROOT)} and {len(list(FIGURES.glob('*.png')))} figures")


if __name__ == "__main__":
    main()
