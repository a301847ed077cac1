"""Schemes of memory optimisation: estimated, and run."""

from __future__ import annotations

from typing import Any

from experiments.page import ABSENT, Page, not_measured, paragraphs, shown, table, times
from rekindle.report.schemes_report import growth_in_words, write_schemes_png
from rekindle.report.words import percent
from rekindle.studies.schemes import SCHEMES, Estimate, Measured, SizeResult, Study
from rekindle.units import format_bytes

Found = dict[str, Any]


def section(page: Page) -> str:
    """For each family: figure and table of estimates, and measurements."""
    on_paper = {found["model"]: found for found in page.results.found("schemes-estimated")}
    run = {found["model"]: found for found in page.results.found("schemes")}
    if not on_paper:
        return not_measured("schemes-estimated", "schemes")
    parts = [_estimated(page, found) for found in on_paper.values()]
    parts += [_measured(found) for found in run.values()]
    return paragraphs(*parts, "" if run else not_measured("schemes"))


def study_of(found: Found) -> Study:
    """The study stored as JSON."""
    names = ("model", "title", "size_name", "batch", "precision", "device", "is_measured")
    about = {name: found[name] for name in names}
    return Study(results=tuple(_size(row) for row in found["sizes"]), **about)


def _size(row: Found) -> SizeResult:
    rows = row["schemes"].items()
    return SizeResult(
        size=row["size"],
        n_ops=row["ops"],
        step_us=row["step_us"],
        estimates={name: Estimate(each["feature_bytes"], each["added_us"]) for name, each in rows},
        measured={name: Measured(**each["measured"]) for name, each in rows if each["measured"]},
    )


def _estimated(page: Page, found: Found) -> str:
    study = study_of(found)
    page.figures.mkdir(parents=True, exist_ok=True)
    path = page.figures / f"schemes-{study.model}.png"
    write_schemes_png(path, study)
    picture = shown(
        f"Feature maps of {study.title} under seven schemes", f"{page.link}/{path.name}"
    )
    rows = []
    for scheme in SCHEMES:
        cells = [_estimate(result, scheme.name) for result in study.results]
        growth = study.growths.get(scheme.name)
        rows.append((scheme.label, *cells, "" if growth is None else growth_in_words(growth)))
    sizes = [f"{study.size_name} {result.size:,}" for result in study.results]
    batch = f"batch {study.batch}, {study.precision}, estimated for {study.device}"
    intro = f"**{study.title}**, {batch}: bytes of feature maps (in brackets, the added time)."
    return paragraphs(picture, intro, table(("", *sizes, "growth"), rows))


def _estimate(result: SizeResult, name: str) -> str:
    found = result.estimates[name]
    added = f" (+{percent(found.added_us / (result.step_us or 1.0))})" if found.added_us else ""
    return f"{format_bytes(found.feature_bytes)}{added}"


def _measured(found: Found) -> str:
    study = study_of(found)
    rows = []
    for scheme in SCHEMES:
        if scheme.runs:
            cells = (_taken(result.measured.get(scheme.name)) for result in study.results)
            rows.append((scheme.label, *cells))
    sizes = [f"{study.size_name} {result.size:,}" for result in study.results]
    intro = (
        f"**{study.title}**, run on {study.device}, batch {study.batch}: bytes allocated at "
        "the peak of a step beyond those before it, weight gradients included (in brackets, the "
        "forecast relative to that)."
    )
    return paragraphs(intro, table(("", *sizes), rows))


def _taken(taken: Measured | None) -> str:
    if taken is None:
        return ABSENT
    ratio = times(taken.forecast_bytes / (taken.peak_bytes or 1), 3)
    return f"{format_bytes(taken.peak_bytes)} ({ratio})"
