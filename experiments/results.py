"""Reads the results of the experiments and of the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Found = dict[str, Any]


class Results:
    """The files of two folders: of the experiments, and of the benchmarks."""

    def __init__(self, folder: Path, benchmarks: Path) -> None:
        self.folder = folder
        self.benchmarks = benchmarks

    def piece(self, name: str) -> Found | None:
        """The file of a piece; None if it was not collected."""
        return _read(self.folder / f"{name}.json")

    def benchmark(self, name: str) -> Found | None:
        """The result of a benchmark; None if there is none."""
        return _read(self.benchmarks / f"{name}.json")

    def rows(self, name: str) -> list[Found]:
        """The rows of a piece with results, complete or not."""
        piece = self.piece(name)
        return [row for row in piece["cases"] if "found" in row] if piece else []

    def found(self, name: str) -> list[Found]:
        """The results of the tasks of a piece."""
        return [row["found"] for row in self.rows(name)]

    def failures(self) -> Iterator[tuple[str, Found]]:
        """The rows of failed tasks, each with the name of its piece."""
        for path in sorted(self.folder.glob("*.json")):
            for row in (_read(path) or {}).get("cases", ()):
                if row["status"] == "failed":
                    yield path.stem, row

    def sources(self) -> Iterator[tuple[str, Found]]:
        """Every file of the experiments, by its name."""
        for path in sorted(self.folder.glob("*.json")):
            content = _read(path)
            if content is not None:
                yield path.stem, content


def _read(path: Path) -> Found | None:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
