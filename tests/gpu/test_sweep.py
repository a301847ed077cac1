"""Cases of a sweep on a GPU: a cap on memory is kept to, and a plan fits where plain does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.studies.sweep import Case, run_alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CAP_BYTES = 1 << 30


def run(folder: Path, **how: Any) -> Mapping[str, Any]:
    """The record of a case, run in a process of its own, as caps are for good."""
    case = Case(model="resnet-tiny", steps=2, precision="bf16", cap_bytes=CAP_BYTES, **how)
    return run_alone(case, folder / case.file_name)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_case_under_a_cap(device: str, tmp_path: Path) -> None:
    found = run(tmp_path, batch=256, way="plain", device=device)
    assert found["status"] == "done", found["message"]
    assert found["peak_bytes"] <= found["reserved_bytes"] <= CAP_BYTES


def test_plain_does_not_fit_and_planned_does(tmp_path: Path) -> None:
    plain = run(tmp_path, batch=4096, way="plain", device="cuda")
    assert plain["status"] == "out of memory"
    budget = f"{int(0.97 * CAP_BYTES)}"
    planned = run(tmp_path, batch=4096, way="planned", device="cuda", budget=budget)
    assert planned["status"] == "done", planned["message"]
    assert planned["is_within_budget"]
    assert planned["peak_bytes"] <= planned["reserved_bytes"] <= CAP_BYTES
