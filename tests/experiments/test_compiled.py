"""Compiled steps under a cap, from records that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.document import page_of
from experiments.page import not_measured
from experiments.sections import compiled

MISSING = not_measured("compiled-16GiB")


def ran(model: str, way: str, batch: int, speed: float) -> dict[str, Any]:
    case = {"model": model, "way": way, "batch": batch}
    return {"case": case, "status": "done", "peak_bytes": batch << 20, "samples_per_s": speed}


def short(model: str, way: str, batch: int, kind: str = "OutOfMemoryError") -> dict[str, Any]:
    case = {"model": model, "way": way, "batch": batch}
    return {"case": case, "status": "out of memory", "kind": kind}


RESNET = [
    ran("resnet152", "compile", 176, 2000.0),
    ran("resnet152", "compile", 192, 1900.0),
    ran("resnet152", "planned", 512, 2100.0),
    ran("resnet152", "planned", 464, 2200.0),
]
BERT = [
    ran("bert-large", "compile", 10, 300.0),
    short("bert-large", "compile", 12),
    ran("bert-large", "planned", 24, 290.0),
    ran("bert-large", "planned", 48, 200.0),
]


def section(folder: Path, records: list[dict[str, Any]]) -> str:
    rows = [{"kind": "case", "found": record, "status": record["status"]} for record in records]
    (folder / "compiled-16GiB.json").write_text(json.dumps({"cases": rows}))
    return compiled.section(page_of(results=folder, benchmarks=folder, figures=folder))


def test_all_that_ran_is_in_the_table(tmp_path: Path) -> None:
    head, _, *rows, _, resnet, bert = section(tmp_path, RESNET + BERT).splitlines()
    assert head.startswith("|  |  | batch | under 16GiB | peak | samples/s | batch, of")
    assert rows == [
        "| ResNet-152 | `torch.compile` | 176 | fits | 176 MiB | 2,000 | 0.92× | 1.00× |",
        "|  |  | 192 | fits | 192 MiB | 1,900 | 1.00× | 0.95× |",
        "|  | planned, compiled | 464 | fits | 464 MiB | 2,200 | 2.42× | 1.10× |",
        "|  |  | 512 | fits | 512 MiB | 2,100 | 2.67× | 1.05× |",
        "| BERT-large | `torch.compile` | 10 | fits | 10.0 MiB | 300 | 1.00× | 1.00× |",
        "|  |  | 12 | out of memory | – | – | – | – |",
        "|  | planned, compiled | 24 | fits | 24.0 MiB | 290 | 2.40× | 0.97× |",
        "|  |  | 48 | fits | 48.0 MiB | 200 | 4.80× | 0.67× |",
    ]
    wanted = "- **ResNet-152**: the aim is 2.5 times the batch at 95% of the speed;"
    assert resnet == f"{wanted} ×512 is 2.67× at 105%."
    assert bert.endswith("2 times the batch at 88% of the speed; ×24 is 2.40× at 97%.")


@pytest.mark.parametrize(
    "planned",
    [
        ran("resnet152", "planned", 464, 2200.0),  # too small
        ran("resnet152", "planned", 512, 1890.0),  # too slow
        short("resnet152", "planned", 512, "InfeasibleBudget"),
    ],
)
def test_less_than_was_wanted_is_said(tmp_path: Path, planned: dict[str, Any]) -> None:
    text = section(tmp_path, [*RESNET[:2], planned, *BERT])
    assert "95% of the speed; no planned batch met both." in text
    assert ("| 512 | no plan fits | – |" in text) == (planned["status"] == "out of memory")
    assert MISSING not in text


def test_nothing_is_compared_with_what_did_not_run(tmp_path: Path) -> None:
    text = section(tmp_path, [short("resnet152", "compile", 176), RESNET[3]])
    assert "| 464 | fits | 464 MiB | 2,200 | – | – |" in text
    assert "there is nothing to compare" in text
    assert "BERT" not in text
    assert text.endswith(MISSING)


def test_half_of_a_comparison_waits_for_the_other(tmp_path: Path) -> None:
    text = section(tmp_path, [*RESNET[:2], *BERT])
    assert "**ResNet-152**" not in text
    assert "**BERT-large**" in text
    assert text.endswith(MISSING)
    assert section(tmp_path, []) == MISSING
