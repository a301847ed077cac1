"""A sweep made up, with numbers like a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

GIB = 1 << 30
SETTINGS: dict[str, Any] = {
    "model": "resnet152",
    "precision": "bf16",
    "device": "cuda",
    "engine": "auto",
    "planner": "auto",
    "steps": 10,
    "cap_bytes": 40 * GIB,
}
# way, setting: peak and time, of the plain step's
WAYS: dict[tuple[str, str | float | None], tuple[float, float]] = {
    ("plain", None): (1.0, 1.0),
    ("planned", "60%"): (0.59, 1.03),
    ("planned", "40%"): (0.39, 1.08),
    ("checkpoint", None): (0.41, 1.64),
    ("compile", None): (0.85, 0.80),
    ("compile", 0.8): (0.72, 0.82),
    ("compile", 0.5): (0.55, 0.90),
    ("compile", 0.2): (0.45, 1.02),
}


def record(
    way: str, setting: str | float | None, batch: int, cap_bytes: int | None
) -> dict[str, Any]:
    """One case: 0.19 GiB and 0.84 ms a sample, and out of memory where that is above the cap."""
    of_peak, of_time = WAYS[way, setting]
    peak, time = int(of_peak * (0.5 + 0.19 * batch) * GIB), of_time * (4000 + 840.0 * batch)
    is_planned = way == "planned"
    case = {
        **{key: SETTINGS[key] for key in ("model", "precision", "device", "steps")},
        "batch": batch,
        "way": way,
        "budget": setting if is_planned else None,
        "share": None if is_planned else setting,
    }
    if cap_bytes is not None and peak > cap_bytes:
        kind = "InfeasibleBudget" if is_planned else "OutOfMemoryError"
        return {"case": case, "status": "out of memory", "kind": kind, "message": "too large"}
    forecast = {"peak_bytes": int(peak * 0.97), "step_us": time * 1.04}
    return {
        "case": case,
        "status": "done",
        "kind": None,
        "message": None,
        "device": "NVIDIA H200",
        "precision": "bf16",
        "peak_bytes": peak,
        "reserved_bytes": int(peak * 1.02),
        "step_us": time,
        "samples_us": [time, time * 1.01, time * 0.99],
        "samples_per_s": batch / time * 1e6,
        "setup_s": 12.5,
        "forecast": forecast if is_planned else None,
        "budget_bytes": peak + 1000 if is_planned else None,
        "is_within_budget": True if is_planned else None,
    }


def failure(way: str, batch: int) -> dict[str, Any]:
    """A case that ended with an error."""
    case = {**record(way, None, batch, None)["case"]}
    message = "the step of mine.py:make raises ValueError: no loss today (mine.py:12)"
    return {"case": case, "status": "failed", "kind": "ValueError", "message": message}


def made_up(
    batches: Sequence[int] = (32, 64, 128, 256, 512, 1024),
    ways: Sequence[tuple[str, str | float | None]] = tuple(WAYS),
    cap_bytes: int | None = 40 * GIB,
) -> dict[str, Any]:
    """All of them."""
    cases = [record(*way, batch, cap_bytes) for batch in batches for way in ways]
    settings = {**SETTINGS, "cap_bytes": cap_bytes, "batches": list(batches)}
    return {"schema": 1, **settings, "device": "NVIDIA H200", "cases": cases}
