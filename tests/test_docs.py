"""The documents' code runs as it stands, and their links and images exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["tutorial", "how-it-works", "torch-compile"])
def test_code_blocks_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    scope: dict[str, Any] = {"__name__": name}
    for index, block in enumerate(blocks):
        exec(compile(block, f"{name}.md, block {index}", "exec"), scope)
    out = capsys.readouterr().out
    expected = {
        "tutorial": "True ()",
        "how-it-works": "a peak of",
        "torch-compile": "[(",
    }[name]
    assert expected in out


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_links_and_images_exist(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []
