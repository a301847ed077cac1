"""The kinds of tasks: functions that run in a process of their own and return results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.kinds.cases import run_one_case
from experiments.kinds.forecasts import find_fits, find_shares
from experiments.kinds.planners import compare_planners
from experiments.kinds.schemes import compare_schemes
from experiments.kinds.statistics import gather_statistics

Found = dict[str, Any]
Kind = Callable[[dict[str, Any], Found | None, Callable[[Found], None]], Found]
"""A kind takes its settings, its results when it was stopped, and a function to save a part."""

KINDS: dict[str, Kind] = {
    "case": run_one_case,
    "fits": find_fits,
    "planners": compare_planners,
    "schemes": compare_schemes,
    "shares": find_shares,
    "statistics": gather_statistics,
}
