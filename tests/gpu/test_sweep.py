"""Cases of a sweep on a GPU: a cap on memory is kept to, and a plan fits where plain does not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.studies.sweep_case import Case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CAP_BYTES = 1 << 30
RUN = "from rekindle.studies.sweep_case import main; main()"


def run(folder: Path, **how: Any) -> dict[str, Any]:
    """The record of a case, run in its own process, since memory caps cannot be lifted."""
    case = Case(model="resnet-tiny", steps=2, precision="bf16", cap_bytes=CAP_BYTES, **how)
    path = folder / case.file_name
    command = [sys.executable, "-c", RUN, json.dumps(asdict(case)), str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


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
