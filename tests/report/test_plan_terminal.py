"""`rekindle plan` as text, at fixed widths; the rows behind it, and its JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support.printed import text
from support.tiny_step import ABOUT, MIB, PEAK_BYTES, tiny_plan, tiny_plan_summary, tiny_step

from rekindle.core.graph.schedule import Decision, Plan
from rekindle.planners.curve import Curve
from rekindle.report.data import curve_data, step_data
from rekindle.report.summary import Summary, summarize
from rekindle.report.terminal import curve_table, step_summary
from rekindle.report.words import bound_in_words, peak_place, plan_in_words

NARROW = """
tiny, batch 512, fp32, measured on Toy GPU
  planner  by hand, in 1.50 s
  budget   8.00 MiB, 113% of the plain step's peak
  peak     7.10 MiB, 100% of 7.10 MiB
           at op 1 of 7, relu, forward: layers.1.act, models/net.py:8, computed
           again
  step     620 µs, 24.0% more than 500 µs; 2 ops run again
  bound    at most 4.0% of the plain step from the best possible: no plan within
           the budget adds less than 20.0%
  dropped  1 of 1 activations, 4.00 MiB in all
  times    by hand

   at the peak              plain    planned
   ─────────────────────────────────────────
   activation            4.00 MiB   4.00 MiB
   parameter             1.00 MiB   1.00 MiB
   input                 1.00 MiB   1.00 MiB
   activation gradient   1.00 MiB        0 B
   temporary                  0 B   1.00 MiB
   library workspace      100 KiB    100 KiB
   output                     4 B        4 B

   all                   7.10 MiB   7.10 MiB


   dropped, by operator   tensors      bytes   time added
   ──────────────────────────────────────────────────────
   relu                    1 of 1   4.00 MiB       120 µs


   dropped, by module   tensors      bytes   time added
   ────────────────────────────────────────────────────
   layers.*.act          1 of 1   4.00 MiB       120 µs

The largest activations, and what becomes of them

             bytes   time added   what it is, and why
   ───────────────────────────────────────────────────────────────────────
   drop   4.00 MiB       120 µs   relu in layers.1.act
                                  idle for 40.0 µs; computed again by hand
"""
CURVES = """
tiny, batch 512, fp32, measured on Toy GPU
  plain step: peak 7.10 MiB, 500 µs; below, the time that each planner adds

     budget   of plain   first   one-point   bound
   ───────────────────────────────────────────────
   7.10 MiB       100%      0%       80.0%      0%
   6.00 MiB        85%   10.0%       80.0%    8.0%
   5.00 MiB        70%   20.0%           –   18.0%

  planning took: first 1.50 s, one-point 20.0 ms
"""


def summary_of(plan: Plan) -> Summary:
    return tiny_plan_summary(plan, seconds=1.5)


def kept_plan() -> Plan:
    """Everything stays: the plain order, and everything freed after its last use."""
    from rekindle.planners.registry import PLANNERS

    graph, profile, _ = tiny_step()
    return PLANNERS["none"](graph, profile, 1 << 60)


def test_in_80_columns() -> None:
    assert text(step_summary(summary_of(tiny_plan())), 80) == NARROW.strip("\n")


def test_in_120_columns_tables_stand_side_by_side() -> None:
    shown = text(step_summary(summary_of(tiny_plan())), 120)
    assert "at the peak              plain    planned    dropped, by operator" in shown


def test_a_plan_that_drops_nothing() -> None:
    summary = summary_of(kept_plan())
    shown = text(step_summary(summary), 80)
    assert "step     500 µs, as the plain step" in shown
    assert "dropped  0 of 1 activations\n" in shown
    assert "dropped, by" not in shown
    assert "bound" not in shown
    assert plan_in_words(summary) == "Nothing has to be dropped. The peak stays at 7.10 MiB."
    assert bound_in_words(summary) is None


def test_words() -> None:
    summary = summary_of(tiny_plan())
    assert plan_in_words(summary) == (
        "Of 1 activations, 1 are dropped after their last use in the forward pass (4.00 MiB in "
        "all) and computed again when the backward pass needs them. The peak stays at 7.10 MiB, "
        "and a step takes 620 µs rather than 500 µs: 24.0% more."
    )
    low = dataclasses.replace(summary, peak=dataclasses.replace(summary.peak, nbytes=5 * MIB))
    assert "The peak falls from 7.10 MiB to 5.00 MiB, and" in plan_in_words(low)
    assert peak_place(summary).endswith("models/net.py:8, computed again")


@pytest.mark.parametrize(
    ("bound_us", "words"),
    [
        (119.9, "at most <0.1% of the plain step from the best possible: no plan within the"),
        (120.0, "the best possible: no plan within the budget adds less time"),
        (0.0, "at most 24.0% of the plain step from the best possible: no plan within the"),
        (-3.0, "at most 24.6% of the plain step from the best possible"),
    ],
)
def test_the_bound_in_words(bound_us: float, words: str) -> None:
    summary = summary_of(dataclasses.replace(tiny_plan(), bound_us=bound_us))
    assert (bound_in_words(summary) or "").startswith(words)


def test_rows_are_sorted_and_grouped() -> None:
    decisions = (
        Decision(2, True, 0, 0.0, "small"),
        Decision(3, False, 4 * MIB, 90.0, "large"),
        Decision(4, False, 4, 30.0, "tiny"),
    )
    summary = summary_of(dataclasses.replace(tiny_plan(), decisions=decisions))
    assert [row.reason for row in summary.decisions] == ["large", "small", "tiny"]
    assert [row.nbytes for row in summary.decisions] == [4 * MIB, MIB, 4]
    assert [(g.label, g.dropped, g.activations) for g in summary.dropped_kinds] == [
        ("relu", 1, 1),
        ("sum", 1, 1),
    ]
    assert [group.label for group in summary.dropped_modules] == ["layers.*.act", "(no module)"]
    assert summary.dropped.dropped == 2
    assert summary.dropped.freed_bytes == 4 * MIB + 4
    assert summary.dropped.added_us == 120.0


def test_as_json() -> None:
    data = json.loads(json.dumps(step_data(summary_of(tiny_plan()))))
    assert (data["model"], data["batch"], data["precision"]) == ("tiny", 512, "fp32")
    assert (data["device"], data["planner"], data["budget_bytes"]) == (
        *("Toy GPU", "by hand"),
        8 * MIB,
    )
    assert data["plain"] == {"peak_bytes": PEAK_BYTES, "step_us": 500.0}
    assert data["planned"] == {"peak_bytes": PEAK_BYTES, "step_us": 620.0, "recompute_us": 120.0}
    assert (data["bound_us"], data["plan_seconds"]) == (100.0, 1.5)
    (decision,) = data["decisions"]
    assert decision["reason"] == "idle for 40.0 µs; computed again by hand"
    assert (decision["is_kept"], decision["freed_bytes"], decision["added_us"]) == (
        *(False, 4 * MIB),
        120.0,
    )


def curves() -> list[Curve]:
    def point(planner: str, budget: int, peak: int, us: float, bound: float | None) -> Plan:
        return Plan(planner, "f", budget, (), (), peak, us, bound)

    first = (
        point("first", PEAK_BYTES, PEAK_BYTES, 0.0, 0.0),
        point("first", 6 * MIB, 6 * MIB - 8, 50.0, 40.0),
        point("first", 5 * MIB, 5 * MIB, 100.0, 90.0),
    )
    one = (point("one-point", 5 * MIB + 9, 5 * MIB + 9, 400.0, None),)
    return [Curve("first", first, 1.5), Curve("one-point", one, 0.02)]


def test_curves() -> None:
    plain = summarize(*tiny_step(), ABOUT)
    assert text(curve_table(plain, curves()), 80) == CURVES.strip("\n")


def test_many_curves_become_several_tables() -> None:
    plain = summarize(*tiny_step(), ABOUT)
    many = [dataclasses.replace(curves()[0], planner=f"planner-{n}") for n in range(9)]
    shown = text(curve_table(plain, many), 80)
    assert "…" not in shown
    assert shown.count("of plain") == 3
    heads = [line for line in shown.splitlines() if "of plain" in line]
    assert " ".join(heads).split().count("bound") == 1
    assert all(f"planner-{n}" in " ".join(heads) for n in range(9))


def test_curves_as_json() -> None:
    plain = summarize(*tiny_step(), ABOUT)
    data = json.loads(json.dumps(curve_data(plain, curves())))
    assert data["plain"]["peak_bytes"] == PEAK_BYTES
    assert [curve["planner"] for curve in data["curves"]] == ["first", "one-point"]
    assert data["curves"][0]["plan_seconds"] == 1.5
    assert data["curves"][0]["points"][1] == {
        "budget_bytes": 6 * MIB,
        "peak_bytes": 6 * MIB - 8,
        "step_us": 550.0,
        "recompute_us": 50.0,
        "bound_us": 40.0,
        "dropped": 0,
    }
