"""The tables as text, at a fixed width."""

from __future__ import annotations

import dataclasses

import pytest
from support.printed import text

from rekindle.core.graph.comparison import Comparison
from rekindle.core.graph.graph import Op, Phase, Role, StepGraph, Storage, Value
from rekindle.report.run_report import run_data, run_summary
from rekindle.report.terminal import graph_summary, model_table

GRAPH = StepGraph(
    ops=(
        Op(0, "mm", "aten.mm.default", Phase.FORWARD, (0, 1), (2,), flops=3_000_000),
        Op(1, "relu", "aten.relu.default", Phase.FORWARD, (2,), (3,)),
        Op(2, "sum", "aten.sum.default", Phase.LOSS, (3,), (4,)),
        Op(3, "mm_1", "aten.mm.default", Phase.BACKWARD, (0, 3), (5,), flops=6_000_000),
        Op(4, "add_", "aten.add_.Tensor", Phase.OPTIMIZER, (1, 5), (), mutates=(1,)),
    ),
    values=tuple(Value(i, f"v{i}", i, (1,), "float32") for i in range(6)),
    storages=(
        Storage(0, 2048, Role.INPUT),
        Storage(1, 4 << 20, Role.PARAM),
        Storage(2, 1536, Role.TEMP),
        Storage(3, 3 << 30, Role.ACTIVATION),
        Storage(4, 4, Role.OUTPUT),
        Storage(5, 4 << 20, Role.GRAD),
    ),
    outputs=(4,),
)
EQUAL = Comparison(
    graph=GRAPH,
    capture_us=1_500_000.0,
    plain_samples_us=(90_000.0, 2_000.0, 3_000.0, 1_000.0),
    captured_samples_us=(80_000.0, 1_500.0, 1_500.0, 1_600.0),
    plain_peak_bytes=5 << 20,
    captured_peak_bytes=3 << 20,
    compared={"result": 4, "parameter": 1, "optimizer": 2, "generator": 1},
    differences=(),
)

SIDE_BY_SIDE = """
 phase       ops   FLOPs      role              bytes in one step
 ───────────────────────      ───────────────────────────────────
 forward       2   3.00M      parameter                  4.00 MiB
 loss          1       0      input                      2.00 KiB
 backward      1   6.00M      activation                 3.00 GiB
 optimizer     1       0      weight gradient            4.00 MiB
                              temporary                  1.50 KiB
 all           5   9.00M      output                          4 B
"""
STACKED = """
 phase       ops   FLOPs
 ───────────────────────
 forward       2   3.00M
 loss          1       0
 backward      1   6.00M
 optimizer     1       0

 all           5   9.00M


 role              bytes in one step
 ───────────────────────────────────
 parameter                  4.00 MiB
 input                      2.00 KiB
 activation                 3.00 GiB
 weight gradient            4.00 MiB
 temporary                  1.50 KiB
 output                          4 B
"""


@pytest.mark.parametrize(("width", "expected"), [(80, SIDE_BY_SIDE), (40, STACKED)])
def test_graph_summary(width: int, expected: str) -> None:
    assert text(graph_summary(GRAPH), width) == expected.strip("\n")


def test_an_equal_comparison_says_what_was_compared_and_times_neither_first_nor_last_step() -> None:
    shown = text(run_summary("tiny", EQUAL))
    assert shown.splitlines()[0] == "tiny"
    assert shown.endswith(
        "  equal  after 4 steps, bit for bit: 4 losses, 1 parameter, 2 optimizer state\n"
        "         tensors, 1 random state\n"
        "  peak   5.00 MiB plain, 3.00 MiB captured\n"
        "  time   captured in 1.50 s; a step takes 2.50 ms plain, 1.50 ms captured"
    )


def test_a_comparison_that_differs_names_the_first_few() -> None:
    differences = tuple(f"parameter {index}" for index in range(10))
    shown = text(run_summary("tiny", dataclasses.replace(EQUAL, differences=differences)))
    assert "different  after 4 steps: parameter 0, parameter 1" in shown
    assert "parameter 7 and 2 more" in " ".join(shown.split())
    assert "bit for bit" not in shown


def test_a_name_with_brackets_is_shown_as_it_is() -> None:
    odd = dataclasses.replace(EQUAL, differences=("parameter [bold]a.weight",))
    assert "parameter [bold]a.weight" in text(run_summary("tiny", odd))


@pytest.mark.parametrize(
    ("budget_bytes", "expected"),
    [
        (4 << 20, "within  the budget of 4.00 MiB, the peak 1.00 MiB below it"),
        (3 << 20, "within  the budget of 3.00 MiB, the peak exactly at it"),
        (2 << 20, "over   the budget of 2.00 MiB, the peak 1.00 MiB above it"),
    ],
)
def test_a_budget_stands_beside_what_was_measured(budget_bytes: int, expected: str) -> None:
    within = dataclasses.replace(EQUAL, budget_bytes=budget_bytes)
    assert within.is_within_budget is expected.startswith("within")
    assert expected in text(run_summary("tiny", within))


def test_a_single_step_is_its_own_median() -> None:
    once = dataclasses.replace(EQUAL, plain_samples_us=(7.0,), captured_samples_us=(9.0,))
    assert (once.steps, once.plain_us, once.captured_us) == (1, 7.0, 9.0)
    assert "after 1 step," in text(run_summary("tiny", once))


def test_model_table() -> None:
    rows = [("mlp", "a perceptron", 64, None), ("vit", "a transformer", 8, "torchvision")]
    assert text(model_table(rows)) == (
        " model   what it is      batch   needs\n"
        " ───────────────────────────────────────────\n"
        " mlp     a perceptron       64\n"
        " vit     a transformer       8   torchvision"
    )


def test_the_data_has_what_the_tables_show() -> None:
    found = run_data(EQUAL)
    data = found["graph"]
    assert data["phases"]["backward"] == {"ops": 1, "flops": 6_000_000}
    assert data["role_bytes"]["activation"] == 3 << 30
    assert data["fingerprint"] == GRAPH.fingerprint
    assert found["equal"] is True
    assert (found["budget_bytes"], found["is_within_budget"]) == (None, True)
    assert found["measured"]["plain"] == {
        "peak_bytes": 5 << 20,
        "step_us": 2_500.0,
        "samples_us": [90_000.0, 2_000.0, 3_000.0, 1_000.0],
    }
    assert found["measured"]["captured"]["step_us"] == 1_500.0
