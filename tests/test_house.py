"""The rules of the source tree that import-linter does not know."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import rekindle

PACKAGE = Path(rekindle.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
MAX_LINES = 700
EXTRAS = ("matplotlib", "plotly", "torchvision", "transformers")


def test_a_module_can_be_read_in_one_sitting() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_two_modules_share_a_name() -> None:
    counts = Counter(path.stem for path in MODULES)
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_module_can_be_imported_without_optional_packages() -> None:
    names = [
        ".".join(("rekindle", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in MODULES
    ]
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({EXTRAS!r}))\n"  # None: importing it raises
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr[-2000:]) == (0, "")
