"""The code in the README runs as it stands, block after block, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    scope: dict[str, Any] = {"__name__": "readme"}
    for index, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {index}", "exec"), scope)
    out = capsys.readouterr().out
    assert re.search(r"^loss \d\.\d{3}$", out, flags=re.MULTILINE)
    assert "aten.native_dropout.default" in out or "aten.bernoulli_.float" in out
    assert scope["step"].n_captures == 1


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
