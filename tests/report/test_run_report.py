"""What `rekindle run` shows: measured next to forecast, and whether the promises held."""

from __future__ import annotations

import dataclasses

import pytest
from support.printed import text
from support.tiny_step import MIB, PEAK_BYTES, tiny_plan, tiny_plan_summary, tiny_step

from rekindle.core.graph.comparison import Comparison
from rekindle.report.data import step_data
from rekindle.report.run_report import run_conclusion, run_data, run_summary

GRAPH, PROFILE, _ = tiny_step()
PLAN = tiny_plan(GRAPH)
SUMMARY = tiny_plan_summary(PLAN)
EQUAL = Comparison(
    graph=GRAPH,
    capture_us=250_000.0,
    plain_samples_us=(9_000.0, 500.0, 700.0),
    captured_samples_us=(9_000.0, 750.0, 800.0),
    plain_peak_bytes=8 * MIB,
    captured_peak_bytes=6 * MIB,
    compared={"result": 3, "parameter": 1, "generator": 1},
    differences=(),
    budget_bytes=7 * MIB,
    profile=PROFILE,
    plan=PLAN,
)
SPOILT = dataclasses.replace(EQUAL, differences=("parameter w",))
OVER = dataclasses.replace(EQUAL, captured_peak_bytes=9 * MIB)

TABLE = """
                       plain    planned   of plain
   ───────────────────────────────────────────────
   peak, measured   8.00 MiB   6.00 MiB        75%
   peak, forecast   7.10 MiB   7.10 MiB       100%
   step, measured     500 µs     750 µs       150%
   step, forecast     500 µs     620 µs       124%

  equal   after 3 steps, bit for bit: 3 losses, 1 parameter, 1 random state
  within  the budget of 7.00 MiB, the peak 1.00 MiB below it
  plan    by hand drops 1 of 1 activations, 4.00 MiB in all; 2 ops run again
  setup   250 ms, once, before the first step
"""


def test_measured_and_forecast_stand_side_by_side() -> None:
    shown = text(run_summary("tiny: batch 512", EQUAL, SUMMARY))
    assert shown.splitlines()[0] == "tiny: batch 512"
    assert shown.endswith(TABLE.strip("\n"))


@pytest.mark.parametrize("width", [40, 60, 140])
def test_no_number_is_cut_off_on_a_narrow_terminal(width: int) -> None:
    shown = text(run_summary("tiny", EQUAL, SUMMARY), width)
    assert "…" not in shown
    assert ("150%" in shown) is (width > 40)
    for number in ("8.00 MiB", "6.00 MiB", "7.10 MiB", "500 µs", "750 µs", "620 µs"):
        assert number in shown


def test_a_plan_that_drops_nothing_says_so() -> None:
    plan = dataclasses.replace(PLAN, decisions=())
    summary = tiny_plan_summary(plan)
    assert "plan    by hand drops nothing" in text(run_summary("tiny", EQUAL, summary))


def test_the_data_has_all_that_a_plan_has_and_what_was_measured() -> None:
    data = run_data(OVER, SUMMARY)
    assert data.items() >= {**step_data(SUMMARY), "budget_bytes": 7 * MIB}.items()
    assert data["plain"]["peak_bytes"] == PEAK_BYTES
    plain, planned = data["measured"]["plain"], data["measured"]["planned"]
    assert (plain["peak_bytes"], plain["step_us"]) == (8 * MIB, 500.0)
    assert (planned["peak_bytes"], planned["step_us"]) == (9 * MIB, 750.0)
    assert planned["samples_us"] == [9_000.0, 750.0, 800.0]
    assert (data["steps"], data["equal"], data["is_within_budget"]) == (3, True, False)
    assert data["graph"]["fingerprint"] == GRAPH.fingerprint


def test_without_a_plan_the_data_has_what_was_measured() -> None:
    data = run_data(dataclasses.replace(EQUAL, budget_bytes=None, profile=None, plan=None))
    assert list(data["measured"]) == ["plain", "captured"]
    assert "plain" not in data  # in the data of a plan, that is what was forecast
    assert (data["equal"], data["budget_bytes"], data["is_within_budget"]) == (True, None, True)


def test_the_last_line_names_every_broken_promise() -> None:
    good, spoilt, over = (
        {**run_data(comparison, SUMMARY), "model": name}
        for name, comparison in (("a", EQUAL), ("b", SPOILT), ("c", OVER))
    )
    assert text(run_conclusion([good])) == "The same, bit for bit, and within the budget: a."
    assert text(run_conclusion([good, spoilt])) == "Not the same: b."
    assert text(run_conclusion([good, over])) == "Over the budget: c."
    assert text(run_conclusion([over, spoilt])) == "Not the same: b. Over the budget: c."
    both = {**over, "equal": False}
    assert text(run_conclusion([both])) == "Not the same: c. Over the budget: c."
    replayed = {**good, "budget_bytes": None}
    assert text(run_conclusion([replayed])) == "The same, bit for bit: a."
