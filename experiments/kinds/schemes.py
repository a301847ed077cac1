"""The schemes of memory optimisation, as `rekindle schemes` compares them."""

from __future__ import annotations

from typing import Any

from rekindle.report.schemes_report import schemes_data
from rekindle.studies import schemes


def compare_schemes(settings: dict[str, Any], before: object, save: object) -> dict[str, Any]:
    """All schemes on a family of models: estimated, and run where they are to be measured."""
    study = schemes.compare_schemes(
        settings["family"],
        settings["sizes"],
        measure=settings["measure"],
        how={"batch": settings["batch"], "device": settings["device"]},
    )
    return schemes_data(study)
