"""The code in the README runs as it stands, block after block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    scope: dict[str, Any] = {"__name__": "readme"}
    for index, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {index}", "exec"), scope)
    out = capsys.readouterr().out
    assert re.search(r"^loss \d\.\d{3}$", out, flags=re.MULTILINE)
    step = scope["step"]
    assert step.n_captures == 1
    assert step.plan.peak_bytes <= step.budget_bytes
