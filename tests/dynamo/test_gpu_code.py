"""The code that Inductor writes for a GPU takes the memory that was planned: no GPU is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[1] / "support" / "gpu_code.py"

EMULATED_ON = "2.11"  # the emulation replaces functions inside of this torch

pytestmark = [
    pytest.mark.skipif(
        not torch.__version__.startswith(EMULATED_ON), reason="takes torch's place in many places"
    ),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]


COMPILED = ("bert-tiny", "resnet-tiny")  # by Triton, too, which takes its time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "batch", "share", "least"),
    [
        ("gpt2", "transformers", 2, "90%", 0.9),  # the gradient of all scores is not in float32
        ("gpt2-tiny", "transformers", 2048, "60%", 0.85),  # it is written over the scores
        ("bert-tiny", "transformers", 2048, "60%", 0.9),  # no large buffer is held for another
        ("resnet-tiny", "torchvision", 4096, "70%", 0.9),  # what is added goes before its sum
    ],
)
def test_the_forecast_is_what_the_code_takes(
    name: str, package: str, batch: int, share: str, least: float
) -> None:
    pytest.importorskip(package)
    kernels = ["--kernels"] if name in COMPILED else []
    command = [sys.executable, str(PROGRAM), name, str(batch), share, *kernels]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["peak_bytes"] <= 1.003 * found["forecast_bytes"]
    assert found["peak_bytes"] >= least * found["forecast_bytes"]
    assert found["launches"] > 10
    assert not kernels or found["launches"] >= found["kernels"] > 10
