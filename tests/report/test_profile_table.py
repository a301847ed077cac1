"""`rekindle profile` as text, at fixed widths; and the rows that all reports share."""

from __future__ import annotations

import dataclasses

import pytest
from support.printed import text
from support.tiny_step import ABOUT, MIB, PEAK_BYTES, tiny_step

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.simulate import simulate
from rekindle.report.summary import Summary, summarize
from rekindle.report.terminal import step_summary
from rekindle.report.words import peak_in_words, peak_place, step_in_words

NARROW = """
tiny, batch 512, fp32, measured on Toy GPU
  peak   7.10 MiB, 56% activations
         at op 4 of 7, threshold_backward, backward: layers.1.act,
         models/net.py:8
  step   500 µs, 7 ops, 9.00M FLOPs, backward/forward 2.00
  times  by hand

   at the peak              bytes   share
   ───────────────────────────────────────────────────────────────
   activation            4.00 MiB     56%   ████████████▍
   activation gradient   1.00 MiB     14%   ███▏
   input                 1.00 MiB     14%   ███▏
   parameter             1.00 MiB     14%   ███▏
   library workspace      100 KiB      1%   ▎
   output                     4 B     <1%   ▏


   phase       ops      time   share   FLOPs      moved   FLOPs/B
   ──────────────────────────────────────────────────────────────
   forward       2    120 µs     24%   3.00M   8.00 MiB     0.358
   loss          2   50.0 µs     10%       0   4.00 MiB
   backward      2    230 µs     46%   6.00M   8.00 MiB     0.715
   optimizer     1    100 µs     20%       0   3.00 MiB

   all           7    500 µs           9.00M   23.0 MiB     0.373

Operators with the most time

   operator             calls      time   share   average   FLOPs/B
   ────────────────────────────────────────────────────────────────
   mm                       2    300 µs     60%    150 µs      1.43
   add_                     1    100 µs     20%    100 µs
   neg                      1   40.0 µs      8%   40.0 µs
   threshold_backward       1   30.0 µs      6%   30.0 µs
   relu                     1   20.0 µs      4%   20.0 µs
   sum                      1   10.0 µs      2%   10.0 µs

Activations with the most bytes × idle time, between forward and backward use

   made by   in module         bytes      idle   source line
   ─────────────────────────────────────────────────────────
   relu      layers.1.act   4.00 MiB   40.0 µs   net.py:8
"""
WIDE = """
   at the peak              bytes   share               phase       ops      time   share   FLOPs      moved   FLOPs/B
   ─────────────────────────────────────────────────    ──────────────────────────────────────────────────────────────
   activation            4.00 MiB     56%   ████▌       forward       2    120 µs     24%   3.00M   8.00 MiB     0.358
   activation gradient   1.00 MiB     14%   █▏          loss          2   50.0 µs     10%       0   4.00 MiB
   input                 1.00 MiB     14%   █▏          backward      2    230 µs     46%   6.00M   8.00 MiB     0.715
   parameter             1.00 MiB     14%   █▏          optimizer     1    100 µs     20%       0   3.00 MiB
   library workspace      100 KiB      1%   ▏
   output                     4 B     <1%   ▏           all           7    500 µs           9.00M   23.0 MiB     0.373
"""  # noqa: E501
WIDE_ACTIVATIONS = """
   made by   in module         bytes      idle   from op → to   source line
   ────────────────────────────────────────────────────────────────────────────
   relu      layers.1.act   4.00 MiB   40.0 µs          2 → 4   models/net.py:8
"""


@pytest.fixture
def summary() -> Summary:
    return summarize(*tiny_step(), ABOUT)


def test_in_80_columns(summary: Summary) -> None:
    assert text(step_summary(summary), 80) == NARROW.strip("\n")


def test_in_120_columns_tables_stand_side_by_side(summary: Summary) -> None:
    shown = text(step_summary(summary), 120)
    assert WIDE.strip("\n") in shown
    assert shown.endswith(WIDE_ACTIVATIONS.strip("\n"))


def test_no_row_wraps_where_names_are_long(summary: Summary) -> None:
    long = "transformer.encoder.layers.11.attention.output.dense"
    row = dataclasses.replace(summary.activations[0], module=long)
    longer = dataclasses.replace(summary, activations=(row,))
    lines = text(step_summary(longer), 70).splitlines()
    assert lines[-1].split() == [
        *("relu", "t.e.l.11.a.o.dense", "4.00", "MiB", "40.0", "µs", "net.py:8")
    ]


def test_words(summary: Summary) -> None:
    assert peak_in_words(summary) == (
        "At its peak the step holds 7.10 MiB, 56% of it activations, results of the forward pass "
        "that wait for the backward pass. Of these, the most bytes are results of relu (4.00 MiB), "
        "and the module with the most is layers.*.act (4.00 MiB, 56%)."
    )
    assert peak_place(summary) == (
        "op 4 of 7, threshold_backward, backward: layers.1.act, models/net.py:8"
    )
    assert step_in_words(summary) == (
        "A step takes 500 µs (measured on Toy GPU), 46% of it in the backward phase."
    )


def test_rows(summary: Summary) -> None:
    peak = summary.peak
    assert (peak.nbytes, peak.start_us) == (PEAK_BYTES, 170.0)
    assert sum(part.nbytes for part in peak.parts) == PEAK_BYTES
    assert sum(part.share for part in peak.parts) == pytest.approx(1.0)
    assert peak.activation_share == 4 * MIB / PEAK_BYTES
    assert [(row.label, row.ops, row.time_us) for row in summary.operators[:2]] == [
        ("mm", 2, 300.0),
        ("add_", 1, 100.0),
    ]
    assert summary.operators[0].intensity == 9_000_000 / (6 * MIB)
    (row,) = summary.activations
    assert (row.last_forward, row.first_backward, row.byte_us) == (2, 4, 4 * MIB * 40.0)


def test_a_step_without_ops() -> None:
    graph = StepGraph((), (), (), ())
    profile = Profile("cpu", graph.fingerprint, ())
    empty = summarize(graph, profile, simulate(graph, profile))
    assert peak_in_words(empty) == "The step has no ops, and holds no memory."
    assert text(step_summary(empty)).startswith("training step, estimated for cpu\n  peak  0 B")
