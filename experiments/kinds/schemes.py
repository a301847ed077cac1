"""The schemes of memory optimisation, as `rekindle schemes` compares them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rekindle.cli import schemes_command


def compare_schemes(settings: dict[str, Any], before: object, save: object) -> dict[str, Any]:
    """All schemes on a family of models: estimated, and run where they are to be measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schemes.json"
        schemes_command.compare_schemes(
            settings["family"],
            sizes=",".join(str(size) for size in settings["sizes"]),
            measure=settings["measure"],
            batch=settings["batch"],
            device=settings["device"],
            json=str(path),
        )
        found = json.loads(path.read_text(encoding="utf-8"))
    return {key: value for key, value in found.items() if key not in ("schema", "versions")}
